"""A run that can be woken does not wait for a poll. Polls make up for lost hints. Here they come once an hour, so that a test
fails if the code forgets a wake-up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from relight import Relight, RunCancelledError, flow, spawn, wait_for
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import StoreUnavailableError
from relight.model import journal as j
from relight.model.journal import Journal
from relight.model.run import Run, Status
from relight.orchestrator import waking
from relight.ports.store import Commit, CommitResult
from tests.flows.world import until


@pytest.fixture(autouse=True)
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "CHECK_SECONDS", 3600.0)
    monkeypatch.setattr(waking, "LOST_SECONDS", 3600.0)


class Unreliable(MemoryStore):
    """A store that fails once: the answer to a creation is lost, or a read is refused."""

    def __init__(self) -> None:
        super().__init__(clock=SYSTEM_CLOCK)
        self.loses_creation = self.refuses_read = False

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        results = await super().commit(commits)
        if self.loses_creation and any(commit.create is not None for commit in commits):
            self.loses_creation = False
            raise StoreUnavailableError("the answer was lost")
        return results

    async def read(self, root_ids: Sequence[str]) -> list[Journal | Exception]:
        if self.refuses_read:
            self.refuses_read = False
            raise StoreUnavailableError("the server is down")
        return list(await super().read(root_ids))


def engine(store: MemoryStore, **config: Any) -> Relight:
    recovery = {"check_interval": "1h"}
    return Relight(store=store, lease_manager=MemoryLeases(store, clock=SYSTEM_CLOCK), recovery=recovery, **config)


def waiting(rl: Relight, run_id: str, *, parked: bool = False) -> Any:
    async def look() -> bool:
        row = await rl.services.store.get_run(run_id)
        return row is not None and row.status == "waiting" and (row.owner is None) == parked

    return look


async def test_a_message_of_another_process_reaches_a_run_in_memory() -> None:
    @flow
    async def answers() -> Any:
        return await wait_for("question")

    store = MemoryStore(clock=SYSTEM_CLOCK)
    async with engine(store, park_after="1h") as driver, engine(store, drive=False) as client:
        run = await driver.start(answers.with_id("r"))
        await until(waiting(driver, "r"))
        await (await client.get("r")).signal("question", 42)
        assert await run.result(timeout="60s") == 42


async def test_cancelling_a_run_reaches_in_memory_what_it_has_spawned() -> None:
    @flow
    async def below() -> None:
        await wait_for("never")

    @flow
    async def above() -> None:
        await spawn(below.with_id("below"))
        await wait_for("never")

    async with engine(MemoryStore(clock=SYSTEM_CLOCK), park_after="1h") as rl:
        run = await rl.start(above.with_id("above"))
        await until(waiting(rl, "below"))
        await until(waiting(rl, "above"))
        await run.cancel("sold")
        with pytest.raises(RunCancelledError, match="sold"):
            await (await rl.get("below")).result(timeout="60s")


async def test_a_run_whose_acceptance_was_not_answered_is_driven() -> None:
    """The run is in the store, and a living process owns it. No other process would take it up."""

    @flow
    async def works() -> str:
        return "done"

    store = Unreliable()
    async with engine(store) as rl:
        assert rl._recovery is not None
        await rl._recovery.caught_up.wait()
        await until(lambda: not rl.orchestrator.waker._lost_again)  # the look of an engine that opens is over
        store.loses_creation = True
        with pytest.raises(StoreUnavailableError, match="the answer was lost"):
            await rl.start(works.with_id("r"))
        assert await (await rl.get("r")).result(timeout="60s") == "done"


async def test_a_run_that_was_claimed_and_could_not_be_read_is_taken_up_and_no_crash_is_counted() -> None:
    @flow
    async def answers() -> Any:
        return await wait_for("question")

    store = Unreliable()
    async with engine(store, park_after="1ms") as rl:
        run = await rl.start(answers.with_id("r"))
        await until(waiting(rl, "r", parked=True))
        store.refuses_read = True
        await run.signal("question", 42)
        assert await run.result(timeout="60s") == 42
        assert not store.refuses_read
        (journal,) = await store.read(["r"])
        assert isinstance(journal, Journal)
        events = [j.decode_event(entry.event) for entry in journal.entries]
        assert not [event for event in events if isinstance(event, j.RunRecovered)], "nobody has died"


async def test_one_pass_takes_up_what_is_due_and_hands_over_what_was_posted() -> None:
    """By itself, without the task that makes the passes."""

    @flow
    async def answers() -> Any:
        return await wait_for("question")

    store = MemoryStore(clock=SYSTEM_CLOCK)
    async with engine(store, park_after="1h") as driver, engine(store, drive=False) as client:
        waker = driver.orchestrator.waker
        await waker.stop(0.0)
        run = await client.start(answers.with_id("r"))
        assert not driver.orchestrator.live
        waker.look_for_due()
        await waker.run_once()
        assert list(driver.orchestrator.live) == ["r"]
        await until(waiting(driver, "r"))
        await run.signal("question", 42)
        waker.look_for_messages()
        await waker.run_once()
        assert await run.result(timeout="60s") == 42


class ClaimedMeanwhile(MemoryStore):
    """While one run is being claimed, another process claims it."""

    def __init__(self, run_id: str) -> None:
        super().__init__(clock=SYSTEM_CLOCK)
        self.run_id = run_id
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
        if self.run_id not in epochs:
            return await super().claim(epochs, owner)
        self.asked.set()
        await self.answer.wait()
        await super().claim(epochs, "another#1")
        return await super().claim(epochs, owner)

    async def put(self, run_id: str, owner: str) -> None:
        """A run of the flow `works` that this process drives."""
        row = Run(
            id=run_id,
            root_id=run_id,
            flow="works",
            status=Status.RUNNING,
            created_at=1.0,
            updated_at=1.0,
            owner=owner,
            epoch=1,
            input=b"{}",
        )
        event = j.RunCreated("", "works", "", msgspec.Raw(b"{}"), "", 1.0)
        await self.commit([Commit(root_id=run_id, epoch=1, create=row, entries=[j.encode_event(event)])])


async def test_recovery_that_waits_for_room_goes_on_when_a_claim_comes_too_late() -> None:
    """The run never was in memory, so nothing leaves it: the claim itself says that its room is free again."""

    @flow(name="works")
    async def works() -> str:
        return "done"

    store = ClaimedMeanwhile("late")
    async with engine(store, max_concurrent_runs=1) as rl:
        assert rl._recovery is not None
        await rl._recovery.caught_up.wait()
        await store.put("late", rl.services.owner)
        await store.put("orphan", "gone#1")
        rl.orchestrator.check_ownership(["late"], crashed=False)
        await store.asked.wait()
        rl._recovery._ticker.wake()
        await until(lambda: rl._recovery is not None and rl._recovery.wants_room)
        store.answer.set()
        assert await (await rl.get("orphan")).result(timeout="60s") == "done"
