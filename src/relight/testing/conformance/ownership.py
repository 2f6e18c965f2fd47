"""Owners: the roots of an owner, all owners, an owner column that is corrected."""

from __future__ import annotations

import pytest

from relight.model.lease import Process
from relight.model.run import Hold, RunChange, Status
from relight.ports.store import Committed, Store
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
)


class OwnershipSuite(Suite):
    """`list_active_roots`, `owners`, `correct_owner`, `now`."""

    async def test_active_roots_are_the_unfinished_ones_with_an_owner(self, store: Store) -> None:
        root = new_run("running", created_at=START + 3)
        await store.commit(
            [
                creation(root, runs=[child_of(root, "sub", owner="me")]),
                creation(new_run("waiting", created_at=START + 2, status=Status.WAITING)),
                creation(new_run("pending", created_at=START + 1, status=Status.PENDING)),
                creation(new_run("parked", status=Status.WAITING, owner=None)),
                creation(new_run("spawned", status=Status.PENDING, owner=None)),
                creation(new_run("going on", created_at=START + 4, status=Status.PAUSED)),
                creation(new_run("paused", status=Status.PAUSED, owner=None)),
                creation(new_run("yours", owner="you")),
                creation(new_run("done")),
            ]
        )
        await ended(store, new_run("done"))
        assert ids(await store.list_active_roots("me", None, 10)) == ["pending", "waiting", "running", "going on"]
        assert ids(await store.list_active_roots("you", None, 10)) == ["yours"]
        assert await store.list_active_roots("nobody", None, 10) == []
        assert await store.owners() == ["me", "you"]

    async def test_active_roots_in_pages(self, store: Store) -> None:
        runs = [new_run(f"run-{n:02}", created_at=START + n // 4) for n in range(25)]
        others = [new_run(f"other-{n:02}", created_at=START + n // 4, owner="you") for n in range(25)]
        await created(store, *runs, *others)
        found: list[str] = []
        after: str | None = None
        while page := await store.list_active_roots("me", after, 10):
            found += ids(page)
            after = page[-1].id
            # A run that ends while the pages are read neither hides nor repeats another run.
            await ended(store, page[-1])
        assert found == [run.id for run in runs]
        assert len(await store.list_active_roots("you", None, 100)) == 25

    async def test_a_page_after_a_run_that_is_anothers_by_now(self, store: Store) -> None:
        """Another owner claims the last run of a page before the next page is read."""
        await created(store, *[new_run(f"run-{n}", created_at=START + n) for n in range(4)])
        page = await store.list_active_roots("me", None, 2)
        await store.claim({page[-1].id: 1}, "you")
        assert ids(await store.list_active_roots("me", page[-1].id, 10)) == ["run-2", "run-3"]

    async def test_the_owners_are_those_with_active_roots(self, store: Store) -> None:
        assert await store.owners() == []
        done = new_run("done", owner="finished")
        parked = new_run("parked", owner="parker")
        many = [new_run(f"{owner}-{n}", owner=owner) for owner in ("b#1", "a#2", "c#3") for n in range(20)]
        await created(store, done, parked, *many, new_run("paused", owner=None, status=Status.PAUSED))
        await ended(store, done)
        await commit_one(store, appending(parked, 1, changes=[changing(parked, Status.WAITING)]))
        assert sorted(await store.owners()) == ["a#2", "b#1", "c#3"]
        await store.claim({run.id: 1 for run in many if run.owner == "b#1"}, "d#4")
        assert sorted(await store.owners()) == ["a#2", "c#3", "d#4"]

    async def test_correcting_the_owner_touches_nothing_else(self, store: Store, clock: FixedClock) -> None:
        run = new_run()
        await created(store, run)
        clock.time = START + 5
        assert await store.correct_owner("run", 1, "you")
        assert await store.get_run("run") == but(run, owner="you")
        assert ids(await store.list_active_roots("you", None, 10)) == ["run"]
        assert await commit_one(store, appending(run, 1, b"2")) == Committed(2), "the epoch decides, not the owner"

    async def test_only_an_owned_unfinished_root_at_that_epoch_is_corrected(self, store: Store) -> None:
        fine, moved, done, free = (
            new_run("fine"),
            new_run("moved"),
            new_run("done"),
            new_run("free", owner=None, status=Status.WAITING, wake_at=START),
        )
        child = child_of(fine, "sub", owner="me", epoch=1)
        await store.commit([creation(fine, runs=[child]), creation(moved), creation(done), creation(free)])
        await store.claim({"moved": 1}, "someone")
        await commit_one(
            store, appending(done, 1, b"end", changes=[RunChange(run_id="done", status=Status.FAILED, owner="me")])
        )
        for run_id in ("moved", "done", "free", "nobody", child.id):
            assert not await store.correct_owner(run_id, 1, "you"), run_id
        assert (await run_of(store, "moved")).owner == "someone"
        assert (await run_of(store, "done")).owner == "me"
        assert (await run_of(store, "free")).owner is None
        assert (await run_of(store, child.id)).owner == "me"
        assert await store.correct_owner("moved", 2, "you")

    async def test_noted_sessions_are_remembered_until_they_are_forgotten(self, store: Store) -> None:
        assert await store.sessions() == []
        here = Process(machine="here", pid=7, started=8, session="a#1")
        await store.note_session("a#1", here, 60.0)
        await store.note_session("b#1", Process(), -1.0)  # this session has lapsed already
        (first, lapsed) = await store.sessions()
        assert (first.owner, first.process, first.fresh) == ("a#1", here, True)
        assert (lapsed.owner, lapsed.fresh) == ("b#1", False)
        assert first.expires_at - first.heartbeat_at == pytest.approx(60.0)
        await store.note_session("a#1", here, 60.0)
        again = (await store.sessions())[0]
        assert (again.started_at, again.heartbeat_at >= first.heartbeat_at) == (first.started_at, True)
        for owner in ("a#1", "b#1", "nobody#1"):
            await store.forget_session(owner)
        assert [session.owner for session in await store.sessions()] == ["a#1"], "one that is alive is not forgotten"

    async def test_the_lease_manager_is_remembered_and_changed_only_from_what_it_was(self, store: Store) -> None:
        assert await store.lease_manager() is None
        assert not await store.set_lease_manager("store", "none") or await store.lease_manager() == "store"
        assert await store.set_lease_manager("store", await store.lease_manager())
        assert await store.lease_manager() == "store"
        assert not await store.set_lease_manager("etcd://host:2379/relight/", None)
        assert not await store.set_lease_manager("etcd://host:2379/relight/", "none")
        assert await store.lease_manager() == "store"
        assert await store.set_lease_manager("etcd://host:2379/relight/", "store")
        assert await store.lease_manager() == "etcd://host:2379/relight/"

    async def test_the_servers_time_or_none(self, store: Store) -> None:
        first, second = await store.now(), await store.now()
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert START < first <= second

    # ---- a root that recovery gave up on

    async def test_a_root_that_recovery_gave_up_on_is_no_active_one(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        await store.hold({"run": 1}, changing(run, Status.CANCELLED, hold=Hold.RECOVERY, reason="too old", owner="me"))
        assert await store.list_active_roots("me", None, 10) == []
        assert await store.owners() == []
        assert await store.claim({"run": 1}, "you") == {}
        back = changing(run, Status.PENDING, owner="me")
        assert await commit_one(store, appending(run, 1, b"back", changes=[back], reopen=True)) == Committed(2)
        assert ids(await store.list_active_roots("me", None, 10)) == ["run"]
        assert await store.owners() == ["me"]
