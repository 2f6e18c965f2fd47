"""Steps that may not be repeated are not repeated, and clean-up runs: after a crash, a timeout, or the end of the flow."""

import asyncio
from typing import Any

import pytest

from relight import Retry, RunFailedError, StepInterruptedError, flow, step, wait_for
from tests.flows.watching import turns
from tests.flows.ways import Gate, ThreadGate
from tests.flows.world import World, until

# ---- on_crash="fail"


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("inside", ["root", "child"])
async def test_a_step_that_may_not_be_repeated_is_not_by_a_retried_flow(world: World, kind: str, inside: str):
    coins, gate = list[str](), Gate()
    thread = ThreadGate()

    @step(on_crash="fail")
    async def dispense() -> None:
        coins.append("coins")
        await gate.pass_by()

    @step(on_crash="fail")
    def dispense_sync() -> None:
        coins.append("coins")
        thread.pass_by()

    @flow(retry=Retry(3, delay="1s"))
    async def vend() -> str:
        await (dispense() if kind == "async" else dispense_sync())
        return "over"

    @flow
    async def shop() -> str:
        return await vend()

    rl = await world.open()
    run = await rl.start(vend if inside == "root" else shop)
    await until(lambda: coins)
    await world.crash()
    thread.open()
    rl = await world.open()
    await gate.open(after=0)
    run = await rl.get(run.id)
    await until(lambda: failed(world, run))
    with pytest.raises(RunFailedError) as caught:
        await run.result("60s")
    assert isinstance(caught.value.__cause__, StepInterruptedError)
    assert coins == ["coins"]


async def failed(world: World, run: Any) -> bool:
    """Whether it has failed. If not, let some time pass."""
    world.clock.advance("1s")
    return str(await run.status()) == "failed"


async def test_an_interruption_the_flow_has_answered_is_not_forgotten_by_a_later_retry(world: World):
    coins, calls, gate = list[str](), list[str](), Gate()

    @step(on_crash="fail")
    async def dispense() -> None:
        coins.append("coins")
        await gate.pass_by()

    @step
    async def ask() -> str:
        calls.append("ask")
        if len(calls) < 3:
            raise ConnectionError("not yet")
        return "asked"

    @flow(retry=Retry(5, delay="1s"))
    async def vend() -> str:
        try:
            await dispense()
        except StepInterruptedError:
            return await ask()
        return "dispensed"

    rl = await world.open()
    run = await rl.start(vend)
    await until(lambda: coins)
    rl = await world.crash_and_reopen()
    await gate.open(after=0)
    run = await rl.get(run.id)
    await until(lambda: ended(world, run))
    assert await run.result("60s") == "asked"
    assert coins == ["coins"]


async def ended(world: World, run: Any) -> bool:
    world.clock.advance("1s")
    return (await run.status()).terminal


# ---- a flow's timeout


@pytest.mark.parametrize("passes", ["while dead", "live"])
async def test_of_three_branches_entered_all_are_left_when_the_flows_timeout_has_passed(world: World, passes: str):
    entered, left, never = list[int](), list[int](), Gate()

    @step
    async def enter(n: int) -> None:
        entered.append(n)

    @step
    async def leave(n: int) -> None:
        left.append(n)

    @step
    async def long() -> None:
        await never.pass_by()

    @flow(timeout="1h")
    async def late() -> None:
        async def one(n: int) -> None:
            await enter(n)
            try:
                await long()
            finally:
                await leave(n)

        async with asyncio.TaskGroup() as group:
            for n in range(3):
                group.create_task(one(n))

    rl = await world.open()
    run = await rl.start(late)
    await until(lambda: len(never.entered) == 3)
    if passes == "while dead":
        await world.crash()
        world.clock.advance("2h")
        rl = await world.open()
    else:
        world.clock.advance("2h")
    with pytest.raises(RunFailedError, match="did not finish within its timeout"):
        await (await rl.get(run.id)).result("60s")
    assert sorted(entered) == sorted(left) == [0, 1, 2]


# ---- the end


@pytest.mark.parametrize("how", ["returns", "fails", "is cancelled"])
async def test_a_retrying_step_that_is_not_awaited_makes_no_attempt_after_the_runs_end(world: World, how: str):
    attempts = list[int]()
    kept = list[Any]()

    @step(retry=Retry(10, delay="1m"))
    async def flaky() -> None:
        attempts.append(1)
        raise ConnectionError("not yet")

    @flow
    async def hasty() -> str:
        kept.append(asyncio.create_task(flaky()))
        await wait_for("go")
        if how == "fails":
            raise ValueError("no")
        return "done"

    rl = await world.open(park_after="10h")
    run = await rl.start(hasty)
    await until(lambda: attempts)
    await world.until_status("waiting", run)
    if how == "is cancelled":
        await run.cancel()
    else:
        await run.signal("go")
    await until(lambda: ended(world, run))
    made, rows = len(attempts), world.rows_in("journal")
    for _ in range(20):
        world.clock.advance("1h")
        await turns()
    assert len(attempts) == made
    assert world.rows_in("journal") == rows


@pytest.mark.parametrize("how", ["returns", "fails", "gather fails"])
@pytest.mark.parametrize("where", ["root", "child"])
async def test_branches_left_behind_by_a_flow_that_ends_are_cancelled_and_clean_up(world: World, how: str, where: str):
    """As asyncio.run() does. The process is killed in that clean-up, and the run comes to the same end."""
    entered, leaving, left = Gate(), Gate(), list[str]()

    @step
    async def long() -> None:
        await entered.pass_by()

    @step
    async def leave(name: str) -> None:
        await leaving.pass_by(name)
        left.append(name)

    @step
    async def fails() -> None:
        raise ValueError("no")

    async def branch(name: str) -> None:
        try:
            await long()
        finally:
            await leave(name)

    @flow
    async def hasty() -> str:
        tasks = [asyncio.create_task(branch(name)) for name in "ab"]
        await wait_for("go")
        if how == "gather fails":
            await asyncio.gather(fails(), *tasks)
        if how == "fails":
            raise ValueError("no")
        return "over"

    @flow
    async def outer() -> str:
        return await hasty()

    rl = await world.open()
    run = await rl.start(hasty if where == "root" else outer)
    await until(lambda: len(entered.entered) == 2)
    await run.signal("go")
    await until(lambda: len(leaving.entered) == 2)
    rl = await world.crash_and_reopen()
    await leaving.open(after=4)
    run = await rl.get(run.id)
    if how == "returns":
        assert await run.result("60s") == "over"
    else:
        with pytest.raises(RunFailedError, match="no"):
            await run.result("60s")
    assert sorted(left) == ["a", "b"]
    assert len(entered.entered) == 2  # the flow gave up on it before the crash, so it is not begun again
