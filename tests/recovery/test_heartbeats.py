"""Heartbeats: from when a lease counts, which run keys the thread keeps, and how it ends without leaving a caller waiting."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence

import pytest

from relight import Relight
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import LeasesUnavailableError
from relight.model.lease import Acquired, Lease, NotOwner, OwnedBy, Process, Released
from relight.ownership.heartbeats import Heartbeats
from relight.ownership.lease_listener import Nobody
from relight.supervisor import Supervisor
from tests.flows.world import until


class Slow(MemoryLeases):
    """A lease manager that never answers one kind of call."""

    async def get_lease(self, run_id: str) -> Lease | None:
        await asyncio.Event().wait()
        return None


async def test_a_question_that_the_end_overtakes_is_answered_with_an_error():
    """It is not answered with a cancellation: the caller was not cancelled, and would end without an error."""
    store = MemoryStore(clock=SYSTEM_CLOCK)
    rl = Relight(store=store, lease_manager=Slow(store, clock=SYSTEM_CLOCK))
    await rl.open()
    heartbeats = rl.services.heartbeats
    asking = asyncio.create_task(heartbeats.call(lambda leases: leases.get_lease("r1")))
    await asyncio.sleep(0)
    await rl.close()
    async with asyncio.timeout(60):
        with pytest.raises(LeasesUnavailableError, match="has stopped"):
            await asking
    with pytest.raises(LeasesUnavailableError, match="not running"):
        await heartbeats.call(lambda leases: leases.get_lease("r1"))


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_an_opening_that_is_broken_off_leaves_no_heartbeats_behind(tmp_path, turns):
    """Such heartbeats would say that a process is alive that drives nothing."""
    before = set(threading.enumerate())
    rl = Relight(tmp_path / "relight.db")
    opening = asyncio.create_task(rl.open())

    def heartbeat_threads() -> list[threading.Thread]:
        return [one for one in set(threading.enumerate()) - before if one.name == "relight-heartbeats"]

    while not heartbeat_threads():  # noqa: ASYNC110 - the turn of the loop counts
        await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await opening
        await rl.close()  # it was too late
    await until(lambda: not heartbeat_threads())


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again():
    async def stubborn(_: object) -> None:
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await asyncio.Event().wait()

    part = Supervisor().keep("stubborn", stubborn)
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await part.stop()
    assert part.task is not None
    assert part.task.cancelled()


# ---- how long a lease counts


class Late(MemoryLeases):
    """A lease manager whose answers to heartbeats come late."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(clock=SYSTEM_CLOCK), clock=SYSTEM_CLOCK)
        self.arrived: list[float] = []

    async def heartbeat(self) -> bool:
        begun = await super().heartbeat()
        self.arrived.append(time.monotonic())
        while time.monotonic() < self.arrived[-1] + 0.1:  # noqa: ASYNC110 - the time that an answer takes is the point
            await asyncio.sleep(0.01)
        return begun


async def test_a_lease_counts_from_when_its_heartbeat_was_sent():
    """By the manager's clock a lease counts from the arrival of the heartbeat. If the engine counted from the answer,
    it would trust its lease for longer than other engines wait."""
    leases = Late()
    heartbeats = Heartbeats(leases, "a#1", Process(), 1.5)
    await heartbeats.start(Nobody())
    first = heartbeats.valid_until
    await until(lambda: heartbeats.valid_until > first)  # as the first heartbeat and as every other one
    arrived, until_when = list(leases.arrived), heartbeats.valid_until
    await heartbeats.stop()
    assert first <= arrived[0] + 1.5
    assert until_when <= arrived[-1] + 1.5


# ---- run keys, where leases are not the store's


class Elsewhere(MemoryLeases):
    """A lease manager that keeps run keys apart from the store, and is slow."""

    in_store = False

    def __init__(self) -> None:
        super().__init__(MemoryStore(clock=SYSTEM_CLOCK), clock=SYSTEM_CLOCK)
        self.done: list[str] = []
        self.asked, self.answer = threading.Event(), threading.Event()

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        self.asked.set()
        while not self.answer.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.001)
        self.done += [f"acquired {run_id}" for run_id in run_ids]
        return {run_id: Acquired() for run_id in run_ids}

    async def release_lease(self, run_id: str) -> Released | NotOwner:
        self.done.append(f"released {run_id}")
        return Released()


async def test_a_run_that_is_let_go_while_its_key_is_being_acquired_is_released():
    """Otherwise its key would stay with this session, and keep other owners from the run for as long as this process lives."""
    leases = Elsewhere()
    heartbeats = Heartbeats(leases, "a#1", Process(), 30.0)
    await heartbeats.start(Nobody())
    heartbeats.attach("r1")
    await until(leases.asked.is_set)
    heartbeats.detach("r1")
    leases.answer.set()
    await until(lambda: len(leases.done) == 2)
    assert leases.done == ["acquired r1", "released r1"]
    await heartbeats.stop()


class Cut(MemoryLeases):
    """A lease manager from which a test can cut its engine off."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(clock=SYSTEM_CLOCK), clock=SYSTEM_CLOCK)
        self.cut = False

    async def heartbeat(self) -> bool:
        if self.cut:
            raise LeasesUnavailableError("cut off")
        return await super().heartbeat()


async def test_a_lease_that_had_lapsed_is_another_one():
    """Another process may own the runs that were claimed under the old lease. So the engine asks the store before such
    a run goes on."""
    leases = Cut()
    heartbeats = Heartbeats(leases, "a#1", Process(), 1.0)
    await heartbeats.start(Nobody())
    assert heartbeats.lapses == 0
    leases.cut = True
    await until(lambda: time.monotonic() > heartbeats.valid_until)
    leases.cut = False
    await until(lambda: heartbeats.may_drive)
    assert heartbeats.lapses == 1
    await heartbeats.stop()
