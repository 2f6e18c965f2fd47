"""A forgotten `await` fails the run, and the error names the place. Calls that other code awaits later are fine."""

import asyncio
import inspect
import linecache
import re
from typing import Any

import pytest

from relight import Retry, RunFailedError, flow, foreach, sleep, spawn, step, wait_for
from relight.errors import FlowCodeError
from tests.flows.world import World

calls: list[int] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def charging() -> Any:
    @step
    async def charge(cents: int) -> str:
        calls.append(cents)
        return f"charged {cents}"

    return charge


def names_the_line(error: BaseException, call: str) -> None:
    """The error's message names the file and the line of `call`."""
    place = re.search(r"(\S+\.py):(\d+)", str(error))
    assert place is not None, str(error)
    assert place[1] == inspect.getsourcefile(names_the_line)
    assert call in linecache.getline(place[1], int(place[2]))


async def fails_with_flow_code_error(world: World, one: Any, name: str, call: str) -> None:
    rl = await world.open()
    with pytest.raises(RunFailedError, match=rf"'?{name}'?.*never awaited") as failed:
        await (await rl.start(one)).result("60s")
    assert isinstance(failed.value.__cause__, FlowCodeError)
    names_the_line(failed.value, call)
    assert calls == []


async def test_a_forgotten_await_fails_the_run_and_names_the_step_and_the_line(world: World):
    charge = charging()

    @flow
    async def pay() -> str:
        charge(100)
        return "paid"

    await fails_with_flow_code_error(world, pay, "charge", "charge(100)")


async def test_a_forgotten_await_of_a_sync_step(world: World):
    @step
    def charge(cents: int) -> None:
        calls.append(cents)

    @flow
    async def pay() -> str:
        charge(100)
        return "paid"

    await fails_with_flow_code_error(world, pay, "charge", "charge(100)")


async def test_a_forgotten_await_whose_call_is_kept_or_tested(world: World):
    charge = charging()

    @flow
    async def pay() -> str:
        receipt = charge(100)
        if receipt:
            return "paid"
        return "refused"

    await fails_with_flow_code_error(world, pay, "charge", "charge(100)")


async def test_a_forgotten_await_in_the_return_statement(world: World):
    """`return charge(100)`: the error is about the forgotten await, not about a result that cannot be journaled."""
    charge = charging()

    @flow
    async def pay() -> str:
        return charge(100)

    await fails_with_flow_code_error(world, pay, "charge", "charge(100)")


@flow
async def ship() -> None:
    calls.append(1)


@pytest.mark.parametrize("kind", ["sleep", "wait_for", "ship", "foreach", "spawn"])
async def test_a_forgotten_await_of_everything_else_a_flow_can_ask_for(world: World, kind: str, registry: Any):
    registry.add(ship)
    charge = charging()

    @flow
    async def forgetful() -> str:
        if kind == "sleep":
            sleep("1h")
        elif kind == "wait_for":
            wait_for("go")
        elif kind == "ship":
            ship()  # type: ignore[unused-coroutine]  # that is the mistake
        elif kind == "foreach":
            foreach([1, 2], charge)
        else:
            spawn(ship)
        return "over"

    await fails_with_flow_code_error(world, forgetful, kind, f"{kind}(")


async def test_a_forgotten_await_in_a_child_run_fails_that(world: World):
    charge = charging()

    @flow
    async def pay() -> str:
        charge(100)
        return "paid"

    @flow
    async def order() -> str:
        try:
            return await pay()
        except FlowCodeError as error:
            names_the_line(error, "charge(100)")
            return "not paid"

    rl = await world.open()
    run = await rl.start(order.with_id("o"))
    assert await run.result("60s") == "not paid"
    assert (await world.row("o/pay")).status == "failed"
    assert calls == []


@pytest.mark.parametrize("shape", ["task", "group", "gather", "foreach", "helper"])
async def test_a_forgotten_await_in_a_branch_fails_the_run(world: World, shape: str):
    charge = charging()

    async def branch(n: int = 0) -> str:
        charge(100)
        return "paid"

    @flow
    async def pay() -> str:
        if shape == "task":
            await asyncio.create_task(branch())
        elif shape == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(branch())
        elif shape == "gather":
            await asyncio.gather(branch(), sleep(0))
        elif shape == "foreach":
            await foreach([1], branch)
        else:
            await branch()
        return "paid"

    await fails_with_flow_code_error(world, pay, "charge", "charge(100)")


async def test_a_forgotten_await_fails_every_attempt_of_a_flow_and_after_a_crash(world: World):
    charge, seen = charging(), list[str]()

    @flow(retry=Retry(2))
    async def pay() -> str:
        charge(100)
        await wait_for("go")
        seen.append("told")
        return "paid"

    rl = await world.open()
    run = await rl.start(pay)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    await run.signal("go")
    await run.signal("go")
    with pytest.raises(RunFailedError, match=r"'charge'.*never awaited") as failed:
        await run.result("60s")
    names_the_line(failed.value, "charge(100)")
    assert calls == []


async def test_the_flows_own_error_outweighs_what_it_forgot(world: World):
    charge = charging()

    @flow
    async def pay() -> str:
        charge(100)
        raise ValueError("the card is blocked")

    rl = await world.open()
    with pytest.raises(RunFailedError, match="the card is blocked") as failed:
        await (await rl.start(pay)).result("60s")
    assert isinstance(failed.value.__cause__, ValueError)


async def _later(charge: Any) -> list[str]:
    first, second = charge(1), charge(2)
    return [await first, await second]


async def _gather(charge: Any) -> list[str]:
    return list(await asyncio.gather(*[charge(n) for n in (1, 2)]))


async def _create_task(charge: Any) -> list[str]:
    tasks = [asyncio.create_task(charge(n)) for n in (1, 2)]
    return [await task for task in tasks]


async def _ensure_future(charge: Any) -> list[str]:
    futures = [asyncio.ensure_future(charge(n)) for n in (1, 2)]
    return [await one for one in futures]


async def _wait(charge: Any) -> list[str]:
    done, _ = await asyncio.wait([asyncio.create_task(charge(n)) for n in (1, 2)])
    return [task.result() for task in done]


async def _as_completed(charge: Any) -> list[str]:
    return [await one for one in asyncio.as_completed([charge(n) for n in (1, 2)])]


async def _group(charge: Any) -> list[str]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(charge(n)) for n in (1, 2)]
    return [task.result() for task in tasks]


async def _wait_for(charge: Any) -> list[str]:
    return [await asyncio.wait_for(charge(n), 60) for n in (1, 2)]


async def _shield(charge: Any) -> list[str]:
    return [await asyncio.shield(charge(n)) for n in (1, 2)]


async def _foreach(charge: Any) -> list[str]:
    return await foreach([1, 2], lambda n: charge(n), concurrency=2)


SHAPES = [_later, _gather, _create_task, _ensure_future, _wait, _as_completed, _group, _wait_for, _shield, _foreach]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__.strip("_"))
async def test_a_call_that_is_awaited_later_is_fine(world: World, shape: Any):
    charge = charging()

    @flow
    async def pay() -> list[str]:
        return await shape(charge)

    rl = await world.open()
    assert sorted(await (await rl.start(pay)).result("60s")) == ["charged 1", "charged 2"]
    assert sorted(calls) == [1, 2]


async def test_calls_in_a_task_that_was_cancelled_before_it_began_are_not_forgotten(world: World):
    charge = charging()

    @flow
    async def pay() -> str:
        task = asyncio.create_task(charge(1))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return "given up"

    rl = await world.open()
    assert await (await rl.start(pay)).result("60s") == "given up"
    assert calls == []


async def test_a_call_that_is_closed_is_not_forgotten(world: World):
    charge = charging()

    @flow
    async def pay() -> str:
        unused = charge(1)
        unused.close()
        return "thought better of it"

    rl = await world.open()
    assert await (await rl.start(pay)).result("60s") == "thought better of it"


async def test_awaiting_a_call_twice_is_refused_as_for_a_coroutine(world: World):
    charge = charging()

    @flow
    async def pay() -> str:
        call = charge(1)
        await call
        try:
            return await call
        except RuntimeError as error:
            return str(error)

    rl = await world.open()
    assert "await" in await (await rl.start(pay)).result("60s")
    assert calls == [1]


async def test_a_task_whose_step_has_not_begun_when_the_flow_returns_is_forgotten_as_well(world: World):
    """The flow returns before the task has had a turn. The flow never asked for the step, and nothing was charged."""
    charge = charging()
    kept = list[Any]()

    @flow
    async def pay() -> str:
        kept.append(asyncio.create_task(charge(100)))
        return "paid"

    await fails_with_flow_code_error(world, pay, "charge", "charge(100)")


async def test_a_task_whose_step_has_begun_may_be_left_behind(world: World):
    charge = charging()
    kept = list[Any]()

    @flow
    async def pay() -> str:
        kept.append(asyncio.create_task(charge(100)))
        await asyncio.sleep(0)
        return "on its way"

    rl = await world.open()
    assert await (await rl.start(pay)).result("60s") == "on its way"
