"""An engine may know flows of its own: two engines in one process need not know the same ones."""

import asyncio

import pytest

from relight import DefinitionError, Flow, Handle, Relight, UnknownFlowError, continue_as, flow, step
from relight.backends.memory import MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.flow.registry import Registry
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
        with pytest.raises(UnknownFlowError, match=r"'ship' is imported, but .*registered: bill\); add it to flows="):
            await billing.start(ship)
        with pytest.raises(UnknownFlowError, match=r"'shop' is not registered .*bill\); import or register it"):
            await billing.start("shop")
        async with Relight(store=store, flows=[ship], drive=False) as client:
            run = await client.start(ship.with_id("s"))
        held = await billing.get("s")
        await until(lambda: _is_held(held))
        assert "'ship' is imported, but Relight(flows=[...]) does not list it" in (await held.describe()).reason
    async with Relight(store=store, flows=[bill, ship]) as both:
        assert await (await both.get(run.id)).result(timeout="60s") == "shipped"


async def test_two_engines_may_know_different_flows_of_one_name():
    def define(result: str) -> Flow[[], str]:
        if result == "old":

            @flow(name="bill")
            async def old() -> str:
                return "old"

            return old

        @flow(name="bill")
        async def new() -> str:
            return "new"

        return new

    flows = {result: define(result) for result in ("old", "new")}
    for result, bill in flows.items():
        async with Relight("memory:", flows=[bill]) as rl:
            assert await rl.run(bill) == result
            assert await rl.run("bill") == result
            with pytest.raises(DefinitionError, match="is not the flow registered as 'bill'"):
                await rl.start(flows["old" if result == "new" else "new"])


async def test_a_run_whose_flow_has_a_shared_name_is_held_until_one_is_left():
    """Neither of the two is called for it: recovery would have to guess."""
    registry = Registry()
    store = MemoryStore(clock=SYSTEM_CLOCK)

    @flow(name="bill")
    async def first() -> str:
        return "first"

    @flow(name="bill")
    async def second() -> str:
        return "second"

    registry.add(first)
    async with Relight(store=store, flows=[first], drive=False) as client:
        run = await client.start(first.with_id("b"))
    registry.add(second)
    both = Relight(store=store)
    both.registry = registry
    async with both:
        held = await both.get(run.id)
        await until(lambda: _is_held(held))
        assert "flow name 'bill' means 2 flows" in (await held.describe()).reason
        assert "means 2 flows" in (await both.explain(run.id)).sentence
    async with Relight(store=store, flows=[first]) as one:
        assert await (await one.get(run.id)).result(timeout="60s") == "first"


async def test_a_flow_of_the_same_name_does_not_disturb_a_run_that_is_under_way():
    store = MemoryStore(clock=SYSTEM_CLOCK)
    gate = asyncio.Event()

    @step
    async def wait() -> None:
        await gate.wait()

    @flow(name="bill")
    async def first(turn: int) -> str:
        if turn == 1:
            await wait()
            return continue_as(2)
        return "first"

    engine = Relight(store=store)
    engine.registry = Registry([first])
    async with engine as rl:
        run = await rl.start(first, 1)
        await rl.start(first.with_id("other"), 2)

        @flow(name="bill")
        async def second(turn: int) -> str:
            return "second"

        engine.registry.add(second)
        gate.set()
        await until(lambda: _is_held(run))  # its next generation would have to be called by name
    async with Relight(store=store, flows=[first]) as one:
        assert await (await one.get(run.id)).result(timeout="60s") == "first"


async def _is_held(run: Handle[str]) -> bool:
    return (await run.describe()).hold == "definition"
