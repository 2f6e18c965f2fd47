"""leases="none": every other owner is dead, from the moment of opening on. Whose runs are not stale yet then is not forgotten."""

import asyncio
from typing import Any

import pytest

from relight import Relight, flow, step
from relight.backends.memory import MemoryStore
from relight.testing.clock import FakeClock
from tests.flows.world import until


@pytest.mark.parametrize("late", [False, True])
async def test_a_run_that_is_not_stale_yet_is_resumed_when_it_is(late: bool):
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @step
    async def long() -> str:
        begun.set()
        await go_on.wait()
        return "done"

    @flow
    async def working() -> str:
        return await long()

    recovery = {"stale_timeout": "10s"}
    options: dict[str, Any] = {
        "store": store,
        "leases": "none",
        "clock": clock,
        "recovery": recovery,
        "flows": [working],
    }
    first = Relight(**options)
    await first.open()
    await first.start(working.with_id("w"))
    await begun.wait()
    # It dies: nobody lets go of anything. Its object goes on, fenced in a moment, as a frozen process would.
    clock.advance("9s" if late else "1s")
    async with Relight(**options) as second:
        await until(second._recovery.caught_up.is_set)  # type: ignore[union-attr]
        row = await second.row("w")
        assert row.owner == first.services.owner, "too early"
        clock.advance("10s")
        await until(lambda: _owned_by(second, "w"))
        go_on.set()
        assert await (await second.get("w")).result() == "done"
    await first.close()


async def _owned_by(rl: Relight, run_id: str) -> bool:
    return (await rl.row(run_id)).owner == rl.services.owner
