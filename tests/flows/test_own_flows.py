"""An engine may know flows of its own: two engines in one process need not know the same ones."""

import pytest

from relight import Handle, Relight, UnknownFlowError, flow
from relight.backends.memory import MemoryStore
from relight.clock import SYSTEM_CLOCK
from tests.flows.world import until


async def test_an_engine_starts_and_recovers_only_the_flows_it_was_given():
    @flow
    async def bill() -> str:
        return "billed"

    @flow
    async def ship() -> str:
        return "shipped"

    store = MemoryStore(clock=SYSTEM_CLOCK)
    async with Relight(store=store, flows=[bill]) as billing:
        assert await billing.run(bill) == "billed"
        with pytest.raises(UnknownFlowError, match=r"no flow named 'ship' .*registered: bill\)"):
            await billing.start(ship)
        async with Relight(store=store, flows=[ship], drive=False) as client:
            run = await client.start(ship.with_id("s"))
        held = await billing.get("s")
        await until(lambda: _is_held(held))
    async with Relight(store=store, flows=[bill, ship]) as both:
        assert await (await both.get(run.id)).result(timeout="60s") == "shipped"


async def _is_held(run: Handle[str]) -> bool:
    return (await run.describe()).hold == "definition"
