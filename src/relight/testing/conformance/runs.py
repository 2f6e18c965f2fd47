"""Metadata: listings and their cursors, claims, timers, held runs."""

from __future__ import annotations

import asyncio

import pytest

from relight.errors import StoreError
from relight.model.run import RESUMED_BY_HAND, Hold, Message, MessageKind, Page, Run, RunFilter, Status
from relight.ports.store import Committed, Fenced, Store
from relight.testing.conformance.build import (
    START,
    FixedClock,
    Suite,
    appending,
    but,
    changing,
    child_of,
    commit_one,
    created,
    creation,
    ended,
    ids,
    new_run,
    run_of,
    spawned_by,
)


async def pages(store: Store, where: RunFilter) -> list[list[str]]:
    """The ids of every page, following the cursors."""
    found = []
    while True:
        page = await store.list_runs(where)
        found.append(ids(page.runs))
        if page.next_cursor is None:
            return found
        where = RunFilter(
            status=where.status,
            flow=where.flow,
            since=where.since,
            parent_id=where.parent_id,
            roots_only=where.roots_only,
            limit=where.limit,
            cursor=page.next_cursor,
        )


class RunSuite(Suite):
    """Everything about the rows of runs, except that `commit` writes them."""

    # ---- looking up and listing

    async def test_looking_up_runs(self, store: Store) -> None:
        await created(store, *[new_run(f"run-{n}") for n in range(1200)])
        wanted = [f"run-{n}" for n in range(0, 1200, 2)] + ["nobody"]
        assert sorted(ids(await store.get_runs(wanted))) == sorted(wanted[:-1])
        assert await store.get_runs([]) == []
        assert await store.get_run("nobody") is None

    async def test_a_returned_run_is_the_callers_own(self, store: Store) -> None:
        await created(store, new_run())
        (await run_of(store, "run")).status = Status.FAILED
        assert (await run_of(store, "run")).status is Status.RUNNING

    async def test_newest_first_and_by_id_within_an_instant(self, store: Store) -> None:
        await created(
            store,
            new_run("b", created_at=START),
            new_run("old", created_at=START - 1),
            new_run("a", created_at=START),
            new_run("new", created_at=START + 0.000001),
        )
        assert await pages(store, RunFilter()) == [["new", "b", "a", "old"]]
        assert await pages(store, RunFilter(limit=1)) == [["new"], ["b"], ["a"], ["old"]]
        assert await pages(store, RunFilter(limit=3)) == [["new", "b", "a"], ["old"]]
        assert await pages(store, RunFilter(limit=4)) == [["new", "b", "a", "old"]], "a last page that is full"

    async def test_an_empty_listing(self, store: Store) -> None:
        assert await store.list_runs(RunFilter()) == Page(runs=[])

    async def test_filters(self, store: Store) -> None:
        parent = new_run("parent", flow="f", created_at=START)
        child = child_of(parent, "sub", flow="g", created_at=START + 1)
        spawn = spawned_by(parent, "spawn", flow="g", created_at=START + 2)
        done = new_run("done", flow="g", created_at=START + 3)
        failed = new_run("failed", flow="f", created_at=START + 4)
        await store.commit([creation(parent, runs=[child, spawn]), creation(done), creation(failed)])
        await ended(store, done)
        await ended(store, failed, status=Status.FAILED)

        async def listed(**where: object) -> list[str]:
            (page,) = await pages(store, RunFilter(**where))  # type: ignore[arg-type]  # one test, many filters
            return page

        assert await listed() == ["failed", "done", "spawn", child.id, "parent"]
        assert await listed(status=(Status.COMPLETED,)) == ["done"]
        assert await listed(status=(Status.PENDING, Status.FAILED, Status.RUNNING)) == [
            "failed",
            "spawn",
            child.id,
            "parent",
        ]
        assert await listed(status=(Status.RUNNING, Status.RUNNING)) == [child.id, "parent"]
        assert await listed(flow="g") == ["done", "spawn", child.id]
        assert await listed(flow="g", status=(Status.RUNNING, Status.PENDING)) == ["spawn", child.id]
        assert await listed(since=START + 2) == ["failed", "done", "spawn"]
        assert await listed(since=START + 2, status=(Status.FAILED, Status.PENDING)) == ["failed", "spawn"]
        assert await listed(parent_id="parent") == ["spawn", child.id]
        assert await listed(parent_id="parent", status=(Status.PENDING,), flow="g") == ["spawn"]
        assert await listed(roots_only=True) == ["failed", "done", "spawn", "parent"]
        assert await listed(roots_only=True, flow="g", parent_id="parent") == ["spawn"]
        assert await listed(flow="nothing") == []

    @pytest.mark.parametrize(
        "where",
        [
            RunFilter(limit=4),
            RunFilter(limit=4, status=(Status.RUNNING,)),
            RunFilter(limit=4, status=(Status.RUNNING, Status.COMPLETED)),
            RunFilter(limit=4, flow="checkout"),
            RunFilter(limit=4, parent_id="p"),
        ],
        ids=["all", "status", "statuses", "flow", "parent"],
    )
    async def test_pages_are_stable_while_runs_arrive_and_end(self, store: Store, where: RunFilter) -> None:
        runs = [new_run(f"run-{n:02}", created_at=START + n // 3, parent_id="p") for n in range(20)]
        await created(store, *runs)
        seen: list[str] = []
        cursor: str | None = None
        for turn in range(5):
            page = await store.list_runs(
                RunFilter(limit=4, status=where.status, flow=where.flow, parent_id=where.parent_id, cursor=cursor)
            )
            seen += ids(page.runs)
            cursor = page.next_cursor
            await created(store, new_run(f"late-{turn}", created_at=START + 100 + turn, parent_id="p"))
        assert cursor is None
        assert seen == [run.id for run in reversed(runs)]

    async def test_a_cursor_that_no_listing_gave_is_refused(self, store: Store) -> None:
        with pytest.raises(StoreError, match="cursor"):
            await store.list_runs(RunFilter(cursor="page 2"))

    # ---- claims

    async def test_claiming_raises_the_epoch(self, store: Store, clock: FixedClock) -> None:
        run = new_run()
        await created(store, run)
        clock.time = START + 5.5
        assert await store.claim({"run": 1}, "you") == {"run": 2}
        assert await store.get_run("run") == but(run, owner="you", epoch=2, updated_at=START + 5.5)
        assert await commit_one(store, appending(but(run, epoch=2), 1, b"2")) == Committed(2)

    async def test_only_unfinished_roots_at_that_epoch_are_claimed(self, store: Store) -> None:
        fine, moved, done = new_run("fine"), new_run("moved"), new_run("done")
        child = child_of(fine, "sub")
        await store.commit([creation(fine, runs=[child]), creation(moved), creation(done)])
        await store.claim({"moved": 1}, "someone")
        await ended(store, done)
        claimed = await store.claim({"fine": 1, "moved": 1, "done": 1, "nobody": 1, child.id: 0}, "you")
        assert claimed == {"fine": 2}
        assert (await run_of(store, "moved")).owner == "someone"
        assert (await run_of(store, "done")).owner is None
        assert (await run_of(store, child.id)).owner is None
        assert await store.claim({}, "you") == {}

    async def test_of_two_claimers_one_succeeds(self, store: Store, other: Store) -> None:
        runs = [new_run(f"run-{n}") for n in range(50)]
        await created(store, *runs)
        epochs = {run.id: 1 for run in runs}
        mine, theirs = await asyncio.gather(store.claim(epochs, "me"), other.claim(epochs, "you"))
        assert sorted([*mine, *theirs]) == sorted(epochs), "each run is claimed exactly once"
        for run in await store.get_runs(list(epochs)):
            assert run.epoch == 2
            assert run.owner == ("me" if run.id in mine else "you")

    # ---- holding runs that cannot go on

    async def test_holding_leaves_out_what_moved_on(self, store: Store) -> None:
        fine, moved, done = new_run("fine"), new_run("moved"), new_run("done")
        await created(store, fine, moved, done)
        await store.claim({"moved": 1}, "someone")
        await ended(store, done)
        change = changing(fine, Status.PAUSED, hold=Hold.CORRUPT, reason="row 3")
        await store.hold({"fine": 1, "moved": 1, "done": 1, "nobody": 1}, change)
        assert await store.get_run("fine") == but(
            fine, status=Status.PAUSED, owner=None, hold=Hold.CORRUPT, reason="row 3"
        )
        assert (await run_of(store, "moved")).status is Status.RUNNING
        assert (await run_of(store, "done")).status is Status.COMPLETED

    async def test_a_run_that_is_held_into_its_end_loses_its_inbox(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        await store.post([Message(run_id="run", kind=MessageKind.SIGNAL)])
        await store.hold({"run": 1}, changing(run, Status.FAILED, reason="too old"))
        assert await store.messages_after(0, 10) == []

    async def test_a_run_that_is_held_into_its_end_takes_no_more_commits(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        await store.hold({"run": 1}, changing(run, Status.FAILED, reason="too old"))
        assert await commit_one(store, appending(run, 1, b"late")) == Fenced(1, None)
        assert await store.latest_sequence("run") == 1

    async def test_held_runs_are_found_by_hold_and_flow(self, store: Store) -> None:
        def paused(run_id: str, hold: Hold, flow: str) -> Run:
            return new_run(run_id, status=Status.PAUSED, hold=hold, flow=flow, owner=None)

        await created(
            store,
            paused("a", Hold.DEFINITION, "f"),
            paused("b", Hold.DEFINITION, "g"),
            paused("c", Hold.DEFINITION, "h"),
            paused("d", Hold.USER, "f"),
            new_run("going on", status=Status.PAUSED, hold=Hold.DEFINITION, flow="f"),
            new_run("running", flow="f"),
        )
        assert sorted(ids(await store.list_held(Hold.DEFINITION, ["f", "h", "x"], 10))) == ["a", "c"]
        assert len(await store.list_held(Hold.DEFINITION, ["f", "g", "h"], 2)) == 2
        assert await store.list_held(Hold.DEFINITION, [], 10) == []
        assert ids(await store.list_held(Hold.USER, ["f"], 10)) == ["d"]

    # ---- timers

    async def test_due_runs_come_earliest_first(self, store: Store) -> None:
        def parked(run_id: str, wake_at: float | None, **fields: object) -> Run:
            return new_run(run_id, **({"status": Status.WAITING, "owner": None, "wake_at": wake_at} | fields))

        await created(
            store,
            parked("third", START + 3),
            parked("first", START + 1),
            parked("spawned", START + 2, status=Status.PENDING),
            parked("in memory", START, owner="me"),
            parked("paused", START, status=Status.PAUSED),
            parked("signal", None),
            new_run("running", wake_at=START),
        )
        assert await store.next_due() == START + 1
        assert await store.due(START + 0.5, 10) == []
        assert ids(await store.due(START + 2, 10)) == ["first", "spawned"]
        assert ids(await store.due(START + 100, 2)) == ["first", "spawned"]
        assert ids(await store.due(START + 100, 10)) == ["first", "spawned", "third"]
        await store.claim({"first": 1}, "me")
        assert await store.next_due() == START + 2
        assert ids(await store.due(START + 100, 1)) == ["spawned"]

    async def test_due_runs_that_a_person_has_freed(self, store: Store) -> None:
        kinds = [MessageKind.CANCEL, MessageKind.RESUME, MessageKind.SIGNAL, MessageKind.JOIN]
        await created(
            store,
            *(new_run(f"due-{number}", owner=None, status=Status.PENDING, wake_at=START) for number in range(5)),
            *(new_run(kind.value, owner=None, status=Status.WAITING) for kind in kinds),
            new_run("resumed", owner=None, status=Status.PENDING, wake_at=START + 9, reason=RESUMED_BY_HAND),
            new_run("another's", owner="b#1", status=Status.PENDING, wake_at=START, reason=RESUMED_BY_HAND),
            new_run("later", owner=None, status=Status.PENDING, wake_at=START + 20, reason=RESUMED_BY_HAND),
        )
        await store.post([Message(run_id=kind.value, kind=kind, name="due-1", at=START + 8) for kind in kinds])
        assert ids(await store.due(START + 10, 10, freed=True)) == ["cancel", "resume", "resumed"]
        assert len(await store.due(START + 10, 2, freed=True)) == 2
        assert await store.due(START + 7, 10, freed=True) == []

    async def test_nothing_is_due_in_an_empty_store(self, store: Store) -> None:
        assert await store.next_due() is None
        assert await store.due(START, 10) == []

    async def test_a_parked_run_becomes_due(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        assert await store.next_due() is None
        parking = changing(run, Status.WAITING, wake_at=START + 60)
        assert await commit_one(store, appending(run, 1, b"wait", changes=[parking])) == Committed(2)
        assert await store.next_due() == START + 60
        (due,) = await store.due(START + 60, 10)
        assert await store.claim({"run": due.epoch}, "me") == {"run": 2}
        assert await store.due(START + 60, 10) == []
