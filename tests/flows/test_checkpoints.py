"""Checkpoints: a long journal is folded into one snapshot and a tail. Neither the flow nor a caller sees a difference."""

import asyncio
import logging
import random as random_module
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from relight import (
    Handle,
    Relight,
    StoreError,
    StoreUnavailableError,
    flow,
    foreach,
    now,
    parallel,
    random,
    sleep,
    step,
    uuid,
    wait_for,
)
from relight.model.journal import Journal
from relight.model.replay import restore
from relight.model.run import Status
from tests.flows.calls import Calls, marking
from tests.flows.world import World, until


class Counting:
    """A flow of n steps that then waits. It counts how often each step ran.

    With a world, its steps wait for checkpoints, so that the length of the tail does not depend on luck.
    """

    def __init__(self, world: World | None = None) -> None:
        self.calls: dict[int, int] = {}

        @step
        async def count(n: int) -> int:
            self.calls[n] = self.calls.get(n, 0) + 1
            if world is not None:
                await until(lambda: not world.rl.services.background._tasks)
            return n

        @flow
        async def counting(steps: int) -> int:
            total = 0
            for n in range(steps):
                total += await count(n)
            return total + await wait_for("go", int)  # type: ignore[no-any-return]

        self.flow = counting


async def checkpoint_of(world: World, run_id: str) -> int:
    found: int | None = await world.rl.services.store.get_checkpoint(run_id)
    return found or 0


async def test_a_run_is_restored_from_one_checkpoint_and_a_tail(world: World):
    counting = Counting(world)
    rl = await world.open(checkpoint_every=10)
    run = await rl.start(counting.flow, 100)
    await world.until_status("waiting", run)
    await until(lambda: checkpoint_of(world, run.id))
    last = await rl.services.store.latest_sequence(run.id)
    assert last >= 101
    rl = await world.crash_and_reopen()
    journal = await world.journal(run.id)
    assert journal.checkpoint is not None
    assert journal.checkpoint.sequence + len(journal.entries) >= last
    tail = [entry.sequence for entry in journal.entries]
    assert tail == [journal.checkpoint.sequence + 1 + n for n in range(len(tail))]
    assert len(journal.entries) < 40
    run = await rl.get(run.id)
    await run.signal("go", 1)
    assert await run.result(timeout="60s") == 4951
    assert set(counting.calls.values()) == {1}
    assert len(counting.calls) == 100


async def test_compacted_entries_are_gone(world: World):
    counting = Counting(world)
    rl = await world.open(checkpoint_every=10)
    run = await rl.start(counting.flow, 100)
    await world.until_status("waiting", run)
    await until(lambda: checkpoint_of(world, run.id))
    await until(lambda: not world.rl.services.background._tasks)  # no checkpoint is under way
    last = await rl.services.store.latest_sequence(run.id)
    assert world.rows_in("journal") == last - await checkpoint_of(world, run.id) < 40


async def test_a_short_journal_is_left_alone(world: World):
    counting = Counting()
    rl = await world.open(checkpoint_every=1000)
    run = await rl.start(counting.flow, 50)
    await world.until_status("waiting", run)
    assert await checkpoint_of(world, run.id) == 0
    assert world.rows_in("journal") >= 51


@step
async def add(a: int, b: int) -> int:
    return a + b


@step
async def refuse(a: int) -> int:
    raise ValueError(f"no {a}")


@flow
async def tree(depth: int) -> int:
    total = await add(depth, 1)
    if depth:
        total += await tree(depth - 1)
    return total


@flow
async def everything() -> list[Any]:
    """A flow with every operation that leaves entries in a journal."""
    seen: list[Any] = [await add(1, n) for n in range(5)]
    seen += await asyncio.gather(*(add(2, n) for n in range(5)))
    seen += await foreach([1, 2, 3], lambda n: add(n, n))
    seen += await foreach([1, 2, 3], lambda n: add(n, 1), concurrency=3)
    try:
        await refuse(1)
    except ValueError as error:
        seen.append(str(error))
    seen += [str(now()), random(), isinstance(uuid(), object)]
    seen.append(await tree(2))
    await sleep(0)
    seen.append(await wait_for("first", int))
    seen += [await add(3, n) for n in range(5)]
    seen.append(await wait_for("second", int))
    return seen


@pytest.fixture
def flows(registry: Any) -> None:
    registry.add(tree)
    registry.add(everything)


@pytest.mark.usefixtures("flows")
@pytest.mark.parametrize("every", [1, 2, 7])
async def test_a_compacted_run_is_the_same_as_one_that_is_not(world: World, every: int):
    results, states = [], []
    for run_id, size in (("compacted", every), ("whole", 10**6)):
        rl = await world.open(checkpoint_every=size)
        run = await rl.start(everything.with_id(run_id))
        await world.until_status("waiting", run)
        await run.signal("first", 10)
        await until(partial(_has, world, run_id, "add:9"))
        if run_id == "compacted":
            # A checkpoint is made in the background, and dies with the process.
            await until(partial(checkpoint_of, world, run_id))
        rl = await world.crash_and_reopen()
        run = await rl.get(run_id)
        await run.signal("second", 20)
        results.append(await run.result(timeout="60s"))
        await until(lambda: not world.rl.services.background._tasks)
        assert bool(await checkpoint_of(world, run_id)) == (run_id == "compacted")
        state = await world.state(run_id)
        states.append({key: _comparable(outcome) for key, outcome in state.outcomes.items()})
        await world.close()
    assert results[0] == results[1]
    assert states[0] == states[1]
    assert list(states[0]) == list(states[1])


async def _has(world: World, run_id: str, key: str) -> bool:
    return key in await world.recorded(run_id)


def _comparable(outcome: Any) -> Any:
    """An outcome without the parts that are different in two runs of one flow: uuids, sequence numbers."""
    return (
        outcome.ending,
        bytes(outcome.output) if len(outcome.output) < 30 else "",
        outcome.fingerprint,
        outcome.digest,
    )


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_checkpoints_while_branches_run(world: World, kind: str):
    calls: dict[str, int] = {}
    delays = random_module.Random(7)

    @step
    async def work(branch: int, n: int) -> str:
        await asyncio.sleep(delays.random() / 2000)
        key = f"{branch}.{n}"
        calls[key] = calls.get(key, 0) + 1
        return key

    @step
    async def hold(branch: int) -> None:
        await gate.wait()

    async def branch_async(branch: int) -> list[str]:
        done = [await work(branch, n) for n in range(20)]
        await hold(branch)
        return done + [await work(branch, n) for n in range(20, 30)]

    def branch_sync(branch: int) -> list[Any]:
        done = [work(branch, n) for n in range(20)]
        wait_at: Any = hold
        wait_at(branch)
        return done + [work(branch, n) for n in range(20, 30)]

    if kind == "async":

        @flow(name="branching")
        async def branching_async() -> list[list[str]]:
            return list(await asyncio.gather(*(branch_async(n) for n in range(5))))
    else:

        @flow(name="branching")
        def branching_sync() -> list[list[str]]:
            return parallel(*(lambda n=n: branch_sync(n) for n in range(5)))

    gate = asyncio.Event()
    rl = await world.open(checkpoint_every=3)
    run = await rl.start("branching")
    await until(lambda: len(calls) == 100)
    await until(lambda: checkpoint_of(world, run.id))
    await until(lambda: _recorded(world, run.id, 100))
    await world.crash()
    gate.set()
    rl = await world.open(checkpoint_every=3)
    result = await (await rl.get(run.id)).result(timeout="60s")
    assert result == [[f"{branch}.{n}" for n in range(30)] for branch in range(5)]
    assert set(calls.values()) == {1}


async def _recorded(world: World, run_id: str, count: int) -> bool:
    return len([key for key in await world.recorded(run_id) if "/work" in key]) >= count


async def test_a_checkpoint_keeps_what_is_open(world: World):
    """A sleep under way is not an outcome, but its end survives, too."""

    @step
    async def quick(n: int) -> int:
        return n

    @flow
    async def open_things() -> list[Any]:
        async def many() -> int:
            return sum([await quick(n) for n in range(50)])

        async def slow() -> str:
            await sleep("1h")
            return "slept"

        return list(await asyncio.gather(slow(), many(), wait_for("go")))

    rl = await world.open(checkpoint_every=5)
    run = await rl.start(open_things)
    await run.signal("go", "signalled")
    await until(lambda: checkpoint_of(world, run.id))
    begun = world.clock.now()
    await until(lambda: world._parked(run))
    rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    assert (await world.row(run.id)).wake_at == begun + 3600
    world.clock.advance("1h")
    assert await run.result(timeout="60s") == ["slept", 1225, "signalled"]


async def test_a_checkpoint_that_fails_is_harmless(world: World, caplog: pytest.LogCaptureFixture):
    counting = Counting(world)
    rl = await world.open(checkpoint_every=10)
    store = rl.services.store.inner  # type: ignore[attr-defined]
    real, failures = store.checkpoint, 0

    async def failing(*args: Any) -> bool:
        nonlocal failures
        failures += 1
        if failures < 3:
            raise StoreError("the disk is full")
        return await real(*args)  # type: ignore[no-any-return]

    store.checkpoint = failing
    try:
        with caplog.at_level(logging.WARNING, "relight"):
            run = await rl.start(counting.flow, 200)
            await world.until_status("waiting", run)
            await until(lambda: checkpoint_of(world, run.id))
    finally:
        store.checkpoint = real
    assert caplog.text.count(f"[CHECKPOINT_FAILED] run {run.id}: the disk is full") == 2
    await run.signal("go", 0)
    assert await run.result(timeout="60s") == 19900
    assert failures >= 3


async def test_a_crash_while_a_checkpoint_is_written_loses_nothing(world: World):
    counting = Counting()
    rl = await world.open(checkpoint_every=10)
    store = rl.services.store.inner  # type: ignore[attr-defined]
    real, begun = store.checkpoint, asyncio.Event()

    async def hanging(*args: Any) -> bool:
        begun.set()
        await asyncio.Event().wait()
        return True

    store.checkpoint = hanging
    try:
        run = await rl.start(counting.flow, 50)
        await asyncio.wait_for(begun.wait(), 60)
        await world.until_status("waiting", run)
        await world.crash()
    finally:
        store.checkpoint = real
    rl = await world.open()
    run = await rl.get(run.id)
    await run.signal("go", 0)
    assert await run.result(timeout="60s") == 1225
    assert set(counting.calls.values()) == {1}


async def has_status(run: Handle[Any], status: Status) -> bool:
    return await run.status() is status


async def long_run(path: Path, steps: int) -> None:
    """A run of that many steps whose process has died is restored from one checkpoint and a short tail."""
    counting = Counting()
    async with Relight(path) as rl:
        run = await rl.start(counting.flow.with_id("long"), steps)
        await until(lambda: has_status(run, Status.WAITING), 300)
        await until(lambda: not rl.services.background._tasks)
        (journal,) = await rl.services.store.read(["long"])
    assert isinstance(journal, Journal)
    assert journal.checkpoint is not None
    assert journal.checkpoint.sequence > steps * 0.6
    assert len(journal.entries) < max(1300, steps * 0.3)  # checkpoint.every, or a quarter of what the checkpoint has
    assert len(restore(journal).outcomes) >= steps
    async with Relight(path) as rl:
        run = await rl.get("long")
        await run.signal("go", 0)
        assert await run.result(timeout="5m") == steps * (steps - 1) // 2
    assert len(counting.calls) == steps
    assert set(counting.calls.values()) == {1}


async def test_a_run_of_3_000_steps_is_restored_from_one_checkpoint_and_a_tail(tmp_path: Path):
    await long_run(tmp_path / "relight.db", 3_000)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_run_of_100_000_steps_is_restored_from_one_checkpoint_and_a_tail(tmp_path: Path):
    await long_run(tmp_path / "relight.db", 100_000)


async def test_a_commit_whose_answer_is_lost_is_recognised_beside_a_checkpoint(world: World, caplog: Any):
    """The checkpoint is made while the commit is under way. It must leave the commit's entries there, because they show that the
    commit was written."""
    calls = Calls()
    mark = marking(calls)

    @flow
    async def twelve() -> int:
        for n in range(12):
            await mark(f"{n}")
        return len(calls)

    rl = await world.open(checkpoint={"every": 5})
    store: Any = rl.services.store
    commit, checkpoint = store.inner.commit, store.inner.checkpoint
    written, taken = asyncio.Event(), asyncio.Event()
    lost = 0

    async def answer_lost(commits: Any) -> Any:
        nonlocal lost
        results = await commit(commits)
        if not lost and any(one.after == 6 for one in commits):
            lost += 1
            written.set()
            await taken.wait()
            raise StoreUnavailableError("the answer was lost")
        return results

    async def after_that(*args: Any) -> Any:
        result = await checkpoint(*args)
        taken.set()
        return result

    async def read_late(ids: Any) -> Any:
        await written.wait()
        return await read(ids)

    read = store.inner.read
    store.inner.commit, store.inner.checkpoint, store.inner.read = answer_lost, after_that, read_late
    run = await rl.start(twelve.with_id("t"))
    assert await run.result() == 12
    assert lost == 1
    assert calls == [f"{n}" for n in range(12)]
    assert "RUN_FENCED" not in caplog.text
