"""The keeper's end: nobody waits for it in vain, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from relight import Relight
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import LeasesUnavailableError
from relight.model.lease import Lease
from relight.supervisor import Supervisor
from tests.flows.world import until


class Slow(MemoryLeases):
    """A manager that never answers one of its questions."""

    async def get_lease(self, run_id: str) -> Lease | None:
        await asyncio.Event().wait()
        return None


async def test_a_question_that_the_end_overtakes_is_answered_with_an_error():
    """Not with a cancellation: whoever asked was not cancelled, and would end in silence."""
    store = MemoryStore(clock=SYSTEM_CLOCK)
    rl = Relight(store=store, lease_manager=Slow(store, clock=SYSTEM_CLOCK))
    await rl.open()
    keeper = rl.services.keeper
    asking = asyncio.create_task(keeper.ask(lambda leases: leases.get_lease("r1")))
    await asyncio.sleep(0)
    await rl.close()
    async with asyncio.timeout(60):
        with pytest.raises(LeasesUnavailableError, match="has stopped"):
            await asking
    with pytest.raises(LeasesUnavailableError, match="not running"):
        await keeper.ask(lambda leases: leases.get_lease("r1"))


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_an_opening_that_is_broken_off_leaves_no_heartbeats_behind(tmp_path, turns):
    """They would say of a process that drives nothing that it is alive."""
    before = set(threading.enumerate())
    rl = Relight(tmp_path / "relight.db")
    opening = asyncio.create_task(rl.open())

    def keepers() -> list[threading.Thread]:
        return [one for one in set(threading.enumerate()) - before if one.name == "relight-keeper"]

    while not keepers():  # noqa: ASYNC110 - the turn of the loop counts
        await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await opening
        await rl.close()  # it was too late
    await until(lambda: not keepers())


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
