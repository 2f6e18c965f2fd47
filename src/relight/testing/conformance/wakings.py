"""A message makes its run due, in the same transaction, so that no process has to remember which runs to wake."""

from __future__ import annotations

import pytest

from relight.model.run import ENDS_PAUSE, Hold, Message, MessageKind, Run, Status
from relight.ports.store import Committed, Store
from relight.testing.conformance.build import (
    START,
    Suite,
    appending,
    changing,
    commit_one,
    created,
    ended,
    ids,
    new_run,
    run_of,
)
from relight.testing.conformance.inboxes import joining, signal


class WakingSuite(Suite):
    """What `post`, and the messages of a commit, do to the rows of the runs that receive them."""

    async def _parked(self, store: Store, wake_at: float | None = None) -> Run:
        run = new_run()
        await created(store, run)
        parked = changing(run, Status.WAITING, wake_at=wake_at, heard=0)
        assert await commit_one(store, appending(run, 1, b"w", changes=[parked])) == Committed(2)
        return run

    @pytest.mark.parametrize("kind", [kind for kind in MessageKind if kind is not MessageKind.JOIN])
    @pytest.mark.parametrize("wake_at", [None, START + 3600])
    async def test_a_posted_message_makes_a_waiting_run_due(
        self, store: Store, kind: MessageKind, wake_at: float | None
    ) -> None:
        """Otherwise every process that knows of the message would have to remember it, when it loses its lease, has no
        room for more runs, or restarts."""
        await self._parked(store, wake_at)
        await store.post([Message(run_id="run", kind=kind, at=START + 5)])
        row = await run_of(store, "run")
        assert (row.status, row.wake_at) == (Status.WAITING, START + 5)
        assert ids(await store.due(START + 5, 10)) == ["run"]

    async def test_a_run_that_is_due_earlier_stays_so(self, store: Store) -> None:
        await self._parked(store, START + 1)
        await store.post([Message(run_id="run", kind=MessageKind.SIGNAL, at=START + 5)])
        assert (await run_of(store, "run")).wake_at == START + 1

    async def test_joining_a_waiting_run_does_not_wake_it(self, store: Store) -> None:
        await self._parked(store)
        await created(store, new_run("other"))
        await store.post([joining("run", "other")])
        assert (await run_of(store, "run")).wake_at is None

    async def test_a_repeated_message_does_not_wake_again(self, store: Store) -> None:
        run = await self._parked(store)
        (first,) = await store.post([signal("run", dedup="once")])
        assert first is not None
        parked = changing(run, Status.WAITING, heard=first)
        assert await commit_one(store, appending(run, 2, b"w", changes=[parked])) == Committed(3)
        assert (await run_of(store, "run")).wake_at is None
        assert await store.post([signal("run", dedup="once")]) == [first]
        assert (await run_of(store, "run")).wake_at is None

    @pytest.mark.parametrize("kind", sorted(MessageKind))
    async def test_what_ends_a_pause_makes_a_paused_run_pending_and_due(self, store: Store, kind: MessageKind) -> None:
        run = new_run()
        await created(store, run)
        paused = changing(run, Status.PAUSED, hold=Hold.USER, reason="paused", heard=0)
        assert await commit_one(store, appending(run, 1, b"w", changes=[paused])) == Committed(2)
        await store.post([Message(run_id="run", kind=kind, name="other", at=START + 5)])
        row = await run_of(store, "run")
        if kind in ENDS_PAUSE:
            assert (row.status, row.hold, row.reason, row.wake_at) == (Status.PENDING, None, "", START + 5)
            assert ids(await store.due(START + 5, 10)) == ["run"]
        else:
            assert (row.status, row.hold, row.reason, row.wake_at) == (Status.PAUSED, Hold.USER, "paused", None)

    async def test_a_run_that_somebody_holds_is_told_by_its_owner(self, store: Store) -> None:
        await created(store, new_run())
        await store.post([signal("run")])
        row = await run_of(store, "run")
        assert (row.status, row.owner, row.wake_at) == (Status.RUNNING, "me", None)

    async def test_a_message_of_a_commit_wakes_as_a_posted_one(self, store: Store) -> None:
        await self._parked(store)
        teller = new_run("teller")
        await created(store, teller)
        message = Message(run_id="run", kind=MessageKind.ENDED, name="teller", at=START + 5)
        assert await commit_one(store, appending(teller, 1, b"m", messages=[message])) == Committed(2)
        assert (await run_of(store, "run")).wake_at == START + 5

    async def test_who_has_joined_a_run_that_ends_is_due(self, store: Store) -> None:
        await self._parked(store)
        over = new_run("over")
        await created(store, over)
        await store.post([joining("over", "run")])
        await ended(store, over)
        assert (await run_of(store, "run")).wake_at is not None

    async def test_a_pending_run_that_is_not_due_yet_is_due_at_once(self, store: Store) -> None:
        """Such a run is left by an owner that could only end its session: its row was released unchanged."""
        run = new_run(owner=None, status=Status.PENDING, wake_at=START + 3600)
        await created(store, run)
        await store.post([signal("run")])
        assert (await run_of(store, "run")).wake_at == START
