"""Runs that fall due together: claimed by one statement, and shared between the live orchestrators."""

from __future__ import annotations

import asyncio

import pytest

from relight.model.lease import Process
from relight.model.run import Run, Status
from relight.ports.store import Committed, Fenced, Store
from relight.testing.conformance.build import START, Suite, appending, but, commit_one, created, ids, new_run, run_of

LATER = START + 100.0  # when the runs are claimed
RECENT = LATER - 0.25  # runs that fell due before this are not shared: any owner may claim them
ALIVE_SECONDS = 600.0


class SharingSuite(Suite):
    """`claim_due`."""

    async def _due(self, store: Store, count: int, wake_at: float = LATER, name: str = "run") -> list[Run]:
        runs = [
            new_run(f"{name}-{n:03}", owner=None, status=Status.PENDING, wake_at=wake_at + n * 0.0001)
            for n in range(count)
        ]
        await created(store, *runs)
        return runs

    async def _claim(self, store: Store, owner: str, limit: int = 100, but: list[str] | None = None) -> list[Run]:
        return await store.claim_due(owner, LATER + 1, RECENT, limit, but or [])

    async def test_claimed_runs_are_the_owners_at_a_raised_epoch(self, store: Store) -> None:
        (run,) = await self._due(store, 1)
        (claimed,) = await self._claim(store, "a#1")
        assert (claimed.id, claimed.owner, claimed.epoch) == (run.id, "a#1", run.epoch + 1)
        assert claimed == await run_of(store, run.id)
        assert isinstance(await commit_one(store, appending(run, 1, b"late")), Fenced)
        now = but(run, epoch=claimed.epoch)
        assert await commit_one(store, appending(now, 1, b"2")) == Committed(2)
        assert await self._claim(store, "b#1") == []

    async def test_only_what_is_due_earliest_first_and_not_what_was_excepted(self, store: Store) -> None:
        late = new_run("late", owner=None, status=Status.WAITING, wake_at=LATER + 2)
        never = new_run("never", owner=None, status=Status.WAITING)
        held = new_run("held", owner="b#1", status=Status.RUNNING, wake_at=START)
        paused = new_run("paused", owner=None, status=Status.PAUSED, wake_at=START)
        await created(store, late, never, held, paused)
        runs = await self._due(store, 6)
        assert ids(await self._claim(store, "a#1", 2, [runs[0].id])) == [runs[1].id, runs[2].id]
        assert ids(await self._claim(store, "a#1")) == [runs[0].id, *ids(runs[3:])]

    async def test_whoever_is_alone_takes_all(self, store: Store) -> None:
        await store.note_session("a#1", Process(), ALIVE_SECONDS)
        await store.note_session("dead#1", Process(), -1.0)
        await self._due(store, 30)
        assert len(await self._claim(store, "a#1")) == 30

    @pytest.mark.parametrize("living", [2, 3])
    async def test_what_falls_due_together_is_shared(self, store: Store, living: int) -> None:
        """Each owner claims its share, one after the other; none is left without runs."""
        names = [f"{n}#1" for n in range(living)]
        for name in names:
            await store.note_session(name, Process(), ALIVE_SECONDS)
        await self._due(store, 60)
        assert [len(await self._claim(store, name)) for name in names] == [60 // living] * living

    async def test_whoever_holds_more_takes_less(self, store: Store) -> None:
        for name in ("busy#1", "idle#1"):
            await store.note_session(name, Process(), ALIVE_SECONDS)
        await created(store, *[new_run(f"held-{n:02}", owner="busy#1") for n in range(20)])
        await self._due(store, 10)
        assert await self._claim(store, "busy#1") == []
        assert len(await self._claim(store, "idle#1")) == 10

    async def test_a_single_run_is_taken_by_whoever_sees_it_first(self, store: Store) -> None:
        for name in ("a#1", "b#1"):
            await store.note_session(name, Process(), ALIVE_SECONDS)
        await created(store, new_run("held", owner="a#1"))
        await self._due(store, 1)
        assert len(await self._claim(store, "a#1")) == 1

    async def test_what_nobody_took_in_a_moment_is_anybodys(self, store: Store) -> None:
        """Owners that count as alive may have no room, or may have died less than a ttl ago."""
        for name in ("a#1", "b#1"):
            await store.note_session(name, Process(), ALIVE_SECONDS)
        await self._due(store, 20, RECENT - 1, "old")
        await self._due(store, 20, LATER, "recent")
        claimed = await self._claim(store, "a#1")
        assert len([run for run in claimed if run.id.startswith("old")]) == 20
        assert len(claimed) == 30
        assert len(await store.claim_due("a#1", LATER + 9, LATER + 8, 100, [])) == 10

    async def test_no_two_claim_the_same_run(self, store: Store) -> None:
        await self._due(store, 90)
        claimed = await asyncio.gather(*(self._claim(store, f"{n}#1", 40) for n in range(3)))
        found = [run_id for runs in claimed for run_id in ids(runs)]
        assert len(found) == len(set(found))
        while rest := await self._claim(store, "last#1"):  # runs that another claim had locked were skipped
            found += ids(rest)
        assert len(set(found)) == len(found) == 90
