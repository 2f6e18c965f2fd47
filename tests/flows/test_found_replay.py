"""What readers and random programs found: flows that went another way on replay, were held without a reason, or hung."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from relight import Retry, RunFailedError, flow, foreach, random, sleep, step, uuid, wait_for
from relight.model import journal as j
from tests.flows.ways import Gate, Ways, park, replay_to_the_end, two_signals, waits
from tests.flows.world import World, until

CRASH = pytest.mark.parametrize("crash", [True, False], ids=["killed", "parked"])


# ---- given up on when its end was recorded and not told


@CRASH
async def test_a_foreach_that_is_given_up_on_when_its_items_end_is_recorded(world: World, crash: bool):
    gate, ways = Gate(), Ways()

    @step
    async def work(number: int) -> int:
        await gate.pass_by()
        return number

    @flow
    async def race() -> str:
        way = ways.begin()
        one, many = asyncio.create_task(work(0)), asyncio.create_task(foreach([1], work))
        await asyncio.wait({one, many}, return_when=asyncio.FIRST_COMPLETED)
        many.cancel()
        await asyncio.wait({one, many})
        way.append("cancelled" if many.cancelled() else "ended")
        await two_signals()
        return way[0]

    rl = await world.open()
    run = await rl.start(race)
    await gate.open(after=2)
    assert await replay_to_the_end(world, run, crash) == "cancelled"
    ways.check()


async def test_no_step_begins_before_a_give_up_that_led_to_it_is_durable(world: World):
    """The process is killed in the body of that step. The next life goes the same way, to the same step."""
    gate, reached, ways = Gate(), list[str](), Ways()

    @step
    async def work(number: int) -> int:
        await gate.pass_by()
        return number

    @step
    async def tell(what: str) -> None:
        reached.append(what)
        await asyncio.Event().wait()

    @flow
    async def race() -> None:
        way = ways.begin()
        one, other = (asyncio.create_task(work(number)) for number in range(2))
        await one
        other.cancel()
        await asyncio.wait([other])
        way.append("cancelled" if other.cancelled() else "ended")
        await tell(way[0])

    rl = await world.open()
    await rl.start(race)
    await gate.open(after=2)
    await until(lambda: reached)
    await world.crash_and_reopen()
    await until(lambda: len(reached) == 2)
    await world.crash()  # otherwise its body would delay closing
    assert ways.check() == ["cancelled"]
    assert reached == ["cancelled"] * 2


@CRASH
async def test_given_up_on_twice_the_second_time_when_its_end_was_recorded(world: World, crash: bool):
    gate, ways, cleaning = Gate(), Ways(), list[asyncio.Future[None]]()

    @step
    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cleaning.append(asyncio.get_running_loop().create_future())
            await cleaning[0]
            raise

    @step
    async def tick() -> None:
        await gate.pass_by()
        cleaning[0].set_result(None)  # the end of its clean-up is recorded after this step's end, and told later

    @flow
    async def twice() -> list[str]:
        way = ways.begin()

        async def branch() -> None:
            await slow()

        task = asyncio.create_task(branch())
        await asyncio.sleep(1)
        for number in range(2):
            if number:
                await tick()
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            way.append(f"{number}: {task.done()}")
        await asyncio.wait([task])
        await two_signals()
        return way

    rl = await world.open()
    run = await rl.start(twice)
    await until(lambda: rl.orchestrator.live[run.id].timers.due)
    world.clock.advance(1)
    await until(lambda: cleaning)
    await gate.open()
    assert await replay_to_the_end(world, run, crash) == ["0: False", "1: True"]
    ways.check()


async def test_a_step_that_may_not_be_repeated_is_not_when_it_was_given_up_on_and_the_flow_is_retried(world: World):
    executed, cleaning, failures = list[str](), Gate(), [1]

    @step(on_crash="fail")
    async def charge() -> None:
        executed.append("charged")
        try:
            await asyncio.Event().wait()
        finally:
            await cleaning.pass_by()

    @step
    async def sibling() -> None:
        await until(lambda: executed)
        if failures:
            failures.pop()
            raise ValueError("once")

    @flow(retry=Retry(3))
    async def order() -> str:
        task = asyncio.create_task(charge())
        try:
            await sibling()
        except ValueError:
            task.cancel()
            await asyncio.wait([task])
            raise
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        return type(ended).__name__

    rl = await world.open()
    run = await rl.start(order)
    await until(lambda: cleaning.entered)
    rl = await world.crash_and_reopen()
    assert await (await rl.get(run.id)).result("60s") == "StepInterruptedError"
    assert executed == ["charged"]


# ---- values


@pytest.mark.parametrize("sibling", ["step", "wait"])
async def test_no_step_acts_on_a_value_that_is_not_durable(world: World, sibling: str):
    seen = list[float]()

    @step
    async def other(value: float) -> None: ...

    @step
    async def act(value: float) -> None:
        seen.append(value)
        await asyncio.Event().wait()

    @flow
    async def acting() -> None:
        value = random()
        first: Any = other(value) if sibling == "step" else wait_for("never")
        await asyncio.gather(first, act(value))

    world.entropy.number = 0.25
    rl = await world.open()
    await rl.start(acting)
    await until(lambda: seen)
    world.entropy.number = 0.75
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 2)
    await world.crash()
    assert seen == [0.25, 0.25]


async def test_values_and_steps_in_several_branches_come_to_an_end(world: World):
    @step
    async def work(number: int) -> int:
        await asyncio.sleep(0)
        return number

    @flow
    async def drawing() -> str:
        async def branch(number: int) -> None:
            uuid()
            await work(number)
            await work(number)

        await asyncio.gather(*(branch(number) for number in range(3)))
        return "over"

    rl = await world.open()
    runs = [await rl.start(drawing) for _ in range(20)]
    assert [await run.result("60s") for run in runs] == ["over"] * 20


# ---- much happens before it rests


@pytest.mark.parametrize("world", ["memory"], indirect=True)  # the store is not asked meanwhile
@pytest.mark.parametrize("kind", ["turns", "tasks"])
async def test_more_than_ten_thousand_callbacks_before_a_flow_rests(world: World, kind: str):
    @flow
    async def busy() -> str:
        for _ in range(11_000 if kind == "turns" else 0):
            await asyncio.sleep(0)
        if kind == "tasks":
            await asyncio.gather(*(asyncio.sleep(0) for _ in range(11_000)))
        await two_signals()
        return "over"

    rl = await world.open()
    run = await rl.start(busy)
    assert await replay_to_the_end(world, run, crash=False) == "over"


@pytest.mark.parametrize("world", ["sqlite"], indirect=True)  # one commit has all of them
async def test_more_than_ten_thousand_operations_before_a_flow_rests(world: World):
    @flow
    async def many() -> str:
        await asyncio.gather(*(sleep("1h") for _ in range(10_500)))
        return "over"

    rl = await world.open()
    run = await rl.start(many)
    await park(world, run)
    world.clock.advance("2h")
    assert await run.result("60s") == "over"


# ---- waiting for nothing


@pytest.mark.parametrize("kind", ["nothing", "step"])
async def test_a_flow_that_waits_for_nothing_and_swallows_being_told_so_fails(world: World, kind: str):
    @step
    async def quick() -> None: ...

    @flow
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if kind == "step":
                    await quick()

    rl = await world.open()
    run = await rl.start(stubborn)
    with pytest.raises(RunFailedError, match="nothing in its run can bring about"):
        await run.result("60s")
    assert len(await world.events(run.id)) < 20


# ---- what is left behind


async def test_cancelling_a_task_that_a_body_has_kept_harms_no_step(world: World):
    kept = list[asyncio.Task[Any]]()

    @step
    async def quick() -> int:
        task = asyncio.current_task()
        assert task is not None
        kept.append(task)
        return len(kept)

    @flow
    async def two() -> int:
        await quick()
        return await quick()

    rl = await world.open()
    for _ in range(3):
        assert await (await rl.start(two)).result("60s") == len(kept)
        for task in kept:
            task.cancel()


async def test_a_generator_of_one_run_that_is_collected_in_the_code_of_another(world: World):
    async def lines() -> AsyncIterator[int]:
        for number in range(10):
            yield number
            await asyncio.sleep(0)

    @flow
    async def reading() -> str:
        cycle: list[Any] = [lines()]
        cycle.append(cycle)
        async for _ in cycle[0]:
            break
        del cycle
        await two_signals()
        return "read"

    @flow
    async def collecting() -> str:
        gc.collect()
        await two_signals()
        return "collected"

    gc.disable()  # it comes when the test wants it
    try:
        rl = await world.open()
        first = await rl.start(reading)
        await until(lambda: waits(world, first))
        second = await rl.start(collecting)
        await until(lambda: waits(world, second))
        assert await replay_to_the_end(world, first, crash=False) == "read"
        assert await replay_to_the_end(world, second, crash=False) == "collected"
    finally:
        gc.enable()


async def test_a_call_that_a_failed_attempt_left_unawaited_does_not_fail_the_next(world: World):
    calls = list[int]()

    @step
    async def charge(number: int) -> int:
        return number

    def flaky() -> int:
        calls.append(1)
        return 2 // (len(calls) - 1)  # fails the first time

    @flow(retry=Retry(2))
    async def order() -> Any:
        return await asyncio.gather(charge(1), charge(flaky()))

    rl = await world.open()
    assert await (await rl.start(order)).result("60s") == [1, 2]


async def test_a_timer_that_a_failed_attempt_left_behind_does_not_go_off(world: World):
    calls, gone_off = list[int](), list[int]()

    @flow(retry=Retry(2, delay=1))
    async def order() -> str:
        calls.append(1)
        attempt, event = min(len(calls), 2), asyncio.Event()
        asyncio.get_running_loop().call_later(10, lambda: (gone_off.append(attempt), event.set()))
        await asyncio.sleep(5)
        if attempt == 1:
            raise ValueError("first")
        await event.wait()
        await two_signals()
        return "over"

    rl = await world.open(park_after="1h")
    run = await rl.start(order)
    await until(lambda: gone_off or world.clock.advance("1s"))
    assert await replay_to_the_end(world, run) == "over"
    assert set(gone_off) == {2}


async def test_a_child_run_that_was_given_up_on_is_not_created_again(world: World):
    @flow
    async def child() -> None:
        await wait_for("never")

    @flow
    async def parent() -> str:
        try:
            async with asyncio.timeout(1):
                await child()
        except TimeoutError:
            pass
        await two_signals()
        return "over"

    rl = await world.open(checkpoint_every=10**9)
    run = await rl.start(parent)
    await until(lambda: world.asleep(run))
    world.clock.advance(1)
    assert await replay_to_the_end(world, run) == "over"
    assert sum(isinstance(event, j.RunCreated) and bool(event.key) for event in await world.events(run.id)) == 1
    assert not (await world.state(run.id)).open
