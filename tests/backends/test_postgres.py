"""What only PostgreSQL has: many processes, keys in blocks, notifications. Faults are in test_postgres_faults.py."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from relight.backends.postgres import pool
from relight.model.run import Hold, LogLine, Message, MessageKind, News, Run, Status
from relight.ports.store import Committed, Exists, Fenced
from relight.testing.conformance.build import (
    START,
    appending,
    changing,
    commit_one,
    created,
    creation,
    entries_of,
    ids,
    new_run,
    run_of,
    spawned_by,
)
from relight.testing.conformance.lease_build import DEADLINE_SECONDS, pause

# ---- several processes on the same roots


async def test_batches_of_several_stores_on_the_same_roots_never_deadlock(open_postgres, postgres_admin):
    """Exactly one of them writes each sequence of each root, whatever the order of their batches."""
    stores = [await open_postgres() for _ in range(3)]
    runs = [new_run(f"run-{n:02}") for n in range(40)]
    await created(stores[0], *runs)
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'"
    before = await postgres_admin.fetchval(deadlocks)

    async def write(number, store):
        won = 0
        for turn in range(1, 9):
            order = runs[number * 13 :] + runs[: number * 13]
            if number % 2:
                order.reverse()
            # Both kinds of commits: one takes the fast path, the other does not.
            entries = [[b"%d.%d" % (number, turn)] * (1 + turn % 2) for _ in order]
            results = await store.commit(
                [appending(run, turn, *some) for run, some in zip(order, entries, strict=True)]
            )
            won += sum(isinstance(result, Committed) for result in results)
            assert {type(result) for result in results} <= {Committed, Fenced}
        return won

    won = await asyncio.gather(*(write(number, store) for number, store in enumerate(stores)))
    journals = [await entries_of(stores[0], run.id) for run in runs]
    assert sum(won) == sum(len(set(journal[1:])) for journal in journals)
    await pause(0.05)
    assert await postgres_admin.fetchval(deadlocks) == before


async def test_commits_that_tell_end_park_and_log_never_deadlock(open_postgres, monkeypatch):
    """They need the inbox's lock, exclusively or shared, and the log's: all take them in one order."""
    monkeypatch.setattr(pool, "ATTEMPTS", 1)  # after a deadlock the store would try again, and lose only a second
    stores = [await open_postgres() for _ in range(3)]
    await created(stores[0], new_run("listener"))
    told = Message(run_id="listener", kind=MessageKind.SIGNAL, name="go", at=START)
    kinds: list[Callable[[Run], dict[str, Any]]] = [
        lambda run: {"messages": [told]},
        lambda run: {"changes": [changing(run, Status.FAILED)]},
        lambda run: {"changes": [changing(run, Status.WAITING, heard=0)]},
    ]

    async def write(store, name, parts):
        for n in range(30):
            run = new_run(f"{name}-{n}")
            await created(store, run)
            line = LogLine(run_id=run.id, at=START, text="seen")
            assert await commit_one(store, appending(run, 1, b"2", log=[line], **parts(run))) == Committed(2)

    writers = itertools.product(enumerate(stores), enumerate(kinds), range(2))
    await asyncio.gather(*(write(store, f"{a}{b}{c}", parts) for (a, store), (b, parts), c in writers))


async def test_nothing_is_written_under_the_old_epoch_once_a_claim_has_returned(open_postgres):
    owner, claimer = await open_postgres(), await open_postgres()
    runs = [new_run(f"run-{n}") for n in range(10)]
    await created(owner, *runs)

    async def drive() -> None:
        sequence = 1
        while True:
            results = await owner.commit([appending(run, sequence, b"old") for run in runs])
            sequence += 1
            if all(isinstance(result, Fenced) for result in results):
                return

    driving = asyncio.create_task(drive())
    await pause(0.05)
    epochs = await claimer.claim({run.id: 1 for run in runs}, "you")
    seen = [len(await entries_of(claimer, run.id)) for run in runs]
    assert epochs == {run.id: 2 for run in runs}
    await asyncio.wait_for(driving, DEADLINE_SECONDS)
    assert [len(await entries_of(claimer, run.id)) for run in runs] == seen


async def test_ids_of_messages_rise_in_the_order_of_commits(open_postgres):
    """A reader that goes on after the last id that it has seen misses no message, however many transactions write at
    once."""
    stores = [await open_postgres() for _ in range(4)]
    teller = new_run("teller")
    await created(stores[0], new_run("a"), teller)

    def message(n: object) -> Message:
        return Message(run_id="a", kind=MessageKind.SIGNAL, name=str(n))

    async def post(number, store):
        for turn in range(25):
            await store.post([message(f"{number}.{turn}.{n}") for n in range(2)])

    async def tell(store):
        for turn in range(25):
            assert await commit_one(store, appending(teller, 1 + turn, b"x", messages=[message(turn)])) == Committed(
                2 + turn
            )

    seen: list[Message] = []
    writing = asyncio.gather(*(post(n, store) for n, store in enumerate(stores[:3])), tell(stores[3]))
    reader = await open_postgres()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while len(seen) < 3 * 25 * 2 + 25:
            seen += await reader.messages_after(seen[-1].id if seen else 0, 7)
            assert not writing.done() or len(seen) <= 175
            await pause(0)
        await writing
    assert seen == await reader.inbox(["a"])


async def test_no_message_outlives_its_run(open_postgres, postgres_admin):
    """Messages are posted to runs that end at the same moment. Each message is there before the end, and deleted, or it
    is refused."""
    owner, poster = await open_postgres(), await open_postgres()
    runs = [new_run(f"run-{n}") for n in range(60)]
    await created(owner, *runs)

    async def end():
        for start in range(0, 60, 3):
            await owner.commit(
                [
                    appending(run, 1, b"end", changes=[changing(run, Status.COMPLETED)])
                    for run in runs[start : start + 3]
                ]
            )

    async def post():
        for run in runs:
            await poster.post([Message(run_id=run.id, kind=MessageKind.SIGNAL)])

    await asyncio.gather(end(), post(), post())
    assert await postgres_admin.fetchval(f"SELECT count(*) FROM {owner.schema}.inbox") == 0
    assert await owner.messages_after(0, 10) == []


async def test_a_run_that_was_deleted_and_made_again_is_another_one(open_postgres, postgres_admin):
    """The store remembers keys of roots. It looks up a key again that is no longer right."""
    store = await open_postgres()
    run = new_run()
    await created(store, run)
    await postgres_admin.execute(
        f"DELETE FROM {store.schema}.runs; DELETE FROM {store.schema}.heads; DELETE FROM {store.schema}.journal"
    )
    assert await commit_one(store, appending(run, 1, b"2")) == Fenced(None, None)
    await created(await open_postgres(), run)
    assert await commit_one(store, appending(run, 1, b"2")) == Committed(2)


async def test_many_new_runs_and_duplicates_in_one_batch(open_postgres):
    """Keys come in blocks of 1000. A creation whose id exists already has no effect on the others."""
    store = await open_postgres()
    runs = [new_run(f"run-{n:04}") for n in range(1300)]
    await created(store, *runs[::2])
    children = {run.id: spawned_by(run, f"of-{run.id}", wake_at=START) for run in runs}
    batch = [
        creation(run, b"late", runs=[children[run.id]], spawned=[(children[run.id].id, b"born")], blobs={run.id: b"x"})
        for run in runs
    ]
    results = await store.commit(batch)
    assert results == [Exists(run) if n % 2 == 0 else Committed(1) for n, run in enumerate(runs)]
    assert sorted(ids(await store.due(START, 2000))) == [children[run.id].id for run in runs[1::2]]
    assert await store.get_blob(runs[0].id) is None
    assert await store.get_blob(runs[1].id) == b"x"


async def test_text_that_postgres_does_not_take_fails_no_commit(open_postgres):
    store = await open_postgres()
    run = new_run(reason="a\0b")
    await created(store, run)
    assert (await run_of(store, "run")).reason == "a\N{REPLACEMENT CHARACTER}b"


# ---- notifications


async def hear(store):
    """The news of other stores that a store hears, from the moment when it listens."""
    heard: asyncio.Queue[News] = asyncio.Queue()
    store.watch(heard.put_nowait)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await heard.get() is News.ANYTHING
    return heard


async def test_news_of_others_and_never_of_oneself(open_postgres):
    store, other = await open_postgres(), await open_postgres()
    mine, theirs = await hear(store), await hear(other)
    run = new_run("a")
    paused = new_run("paused", status=Status.PAUSED, hold=Hold.USER, owner=None)

    async def is_told(work, *news):
        await work
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert [await theirs.get() for _ in news] == list(news)

    message = Message(run_id="a", kind=MessageKind.SIGNAL)
    await created(store, run, paused)
    await commit_one(store, appending(run, 1, b"2"))
    await is_told(store.post([message]), News.MAIL)
    waiting = changing(run, Status.WAITING, wake_at=START)
    await is_told(commit_one(store, appending(run, 2, b"3", changes=[waiting])), News.DUE)
    await is_told(
        commit_one(store, appending(paused, 1, b"2", changes=[changing(paused, Status.RUNNING, owner="me")])), News.RUNS
    )
    spawn = spawned_by(run, "spawn", wake_at=START)
    both = appending(run, 3, b"4", runs=[spawn], messages=[message, message])
    await is_told(commit_one(store, both), News.DUE | News.MAIL)
    await is_told(store.hold({"spawn": 0}, changing(spawn, Status.PAUSED, hold=Hold.POISON)), News.RUNS)
    missing = changing(spawn, Status.PAUSED, hold=Hold.DEFINITION)
    await is_told(store.hold({"spawn": 0}, missing), News.RUNS | News.HELD)
    await is_told(commit_one(store, appending(run, 4, b"5", cancel_spawned="enough")), News.MAIL)
    await is_told(commit_one(store, appending(run, 5, b"6", changes=[changing(run, Status.FAILED)])), News.RUNS)
    # Only the expected news: anything else would come before this one.
    await is_told(store.commit([creation(new_run("last", owner=None, status=Status.PENDING, wake_at=START))]), News.DUE)
    assert theirs.empty()
    assert mine.empty()
