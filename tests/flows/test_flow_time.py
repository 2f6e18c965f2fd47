"""Time in flow code: asyncio's own sleeps and timeouts survive crashes and parking. On replay they end as they ended live."""

import asyncio
from typing import Any

import pytest

from relight import flow, sleep, step, wait_for
from tests.flows.watching import turns
from tests.flows.ways import Gate, Ways, park, replay_to_the_end, two_signals, waits
from tests.flows.world import World, until

CRASH = pytest.mark.parametrize("crash", [True, False], ids=["killed", "parked"])


async def comes_back(world: World, run: Any, crash: bool) -> Any:
    """The run leaves memory where it waits: it is parked, or its process dies."""
    if not crash:
        await park(world, run)
        return run
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    return await rl.get(run.id)


# ---- asyncio.sleep


@CRASH
async def test_asyncio_sleep_ends_when_it_would_have_ended(world: World, crash: bool):
    ways = Ways()

    @flow
    async def sleeping() -> str:
        way = ways.begin()
        way.append(await asyncio.sleep(3600, "slept"))
        await two_signals()
        return "over"

    rl = await world.open()
    run = await rl.start(sleeping)
    started = world.clock.now()
    run = await comes_back(world, run, crash)
    row = await world.row(run.id)
    assert row.wake_at == pytest.approx(started + 3600)
    world.clock.advance(started + 3599 - world.clock.now())
    await turns()
    assert not any(ways)
    world.clock.advance("1s")
    await until(lambda: ways[-1])
    assert await replay_to_the_end(world, run) == "over"
    assert ways.check() == ["slept"]


async def test_asyncio_sleep_that_ended_while_no_process_ran(world: World):
    @flow
    async def sleeping() -> str:
        await asyncio.sleep(3600)
        return "over"

    rl = await world.open()
    run = await rl.start(sleeping)
    await world.until_status("waiting", run)
    await world.crash()
    world.clock.advance("2h")
    rl = await world.open()
    assert await (await rl.get(run.id)).result("60s") == "over"


@CRASH
async def test_sleeps_in_branches_end_in_the_order_of_their_times(world: World, crash: bool):
    ways = Ways()

    @step
    async def tell(n: int, before: int) -> int:
        return n

    @flow
    async def sleeping() -> list[str]:
        way = ways.begin()

        async def branch(n: int) -> None:
            await asyncio.sleep(n * 3600)
            way.append(str(await tell(n, len(way))))

        async with asyncio.TaskGroup() as group:
            for n in (3, 1, 2, 1):
                group.create_task(branch(n))
        await two_signals()
        return way

    rl = await world.open()
    run = await rl.start(sleeping)
    run = await comes_back(world, run, crash)
    for count in (2, 3, 4):
        world.clock.advance("1h")
        await until(lambda count=count: len(max(ways, key=len)) == count)
    assert await replay_to_the_end(world, run, crash) == ["1", "1", "2", "3"]
    ways.check()


async def test_asyncio_sleep_of_zero_asks_for_nothing(world: World):
    @flow
    async def yielding() -> str:
        for _ in range(100):
            await asyncio.sleep(0)
        return "over"

    rl = await world.open()
    run = await rl.start(yielding)
    assert await run.result("60s") == "over"
    assert len(await world.events(run.id)) == 2  # created, completed


# ---- timeouts


async def _timeout(seconds: float, waiting: Any) -> str:
    async with asyncio.timeout(seconds):
        return await waiting()


async def _timeout_at(seconds: float, waiting: Any) -> str:
    async with asyncio.timeout_at(asyncio.get_running_loop().time() + seconds):
        return await waiting()


async def _rescheduled(seconds: float, waiting: Any) -> str:
    async with asyncio.timeout(seconds * 10) as limit:
        limit.reschedule(asyncio.get_running_loop().time() + seconds)
        return await waiting()


async def _wait_for(seconds: float, waiting: Any) -> str:
    return await asyncio.wait_for(waiting(), seconds)


async def _wait(seconds: float, waiting: Any) -> str:
    task = asyncio.create_task(waiting())
    done, pending = await asyncio.wait([task], timeout=seconds)
    for one in pending:
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        raise TimeoutError
    return done.pop().result()


async def _as_completed(seconds: float, waiting: Any) -> str:
    task = asyncio.create_task(waiting())
    try:
        for one in asyncio.as_completed([task], timeout=seconds):
            return await one
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return "nothing"


async def _call_later(seconds: float, waiting: Any) -> str:
    task = asyncio.create_task(waiting())
    timer = asyncio.get_running_loop().call_later(seconds, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise TimeoutError from None
    finally:
        timer.cancel()


SHAPES = [_timeout, _timeout_at, _rescheduled, _wait_for, _wait, _as_completed, _call_later]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__.strip("_"))


def limited(ways: Ways, shape: Any, told: list[str], waiting: Any) -> Any:
    @step
    async def tell(what: str) -> str:
        told.append(what)
        return what

    @flow
    async def patient() -> str:
        way = ways.begin()
        try:
            found = await shape(3600, waiting)
        except TimeoutError:
            found = "timed out"
        way.append(await tell(found))
        await two_signals()
        return found

    return patient


@CRASH
@shapes
async def test_a_timeout_that_passed_passes_on_replay(world: World, shape: Any, crash: bool):
    ways, told = Ways(), list[str]()
    rl = await world.open()
    run = await rl.start(limited(ways, shape, told, lambda: wait_for("answer")))
    run = await comes_back(world, run, crash)
    world.clock.advance("1h")
    await until(lambda: told)
    await run.signal("answer", "too late")
    assert await replay_to_the_end(world, run, crash) == "timed out"
    assert told == ["timed out"]
    ways.check()


@CRASH
@shapes
async def test_a_timeout_that_did_not_pass_does_not_on_replay(world: World, shape: Any, crash: bool):
    """The run is replayed long after the timeout's time. By the clock it has passed, but by the journal it was not needed."""
    ways, told = Ways(), list[str]()
    rl = await world.open()
    run = await rl.start(limited(ways, shape, told, lambda: wait_for("answer")))
    run = await comes_back(world, run, crash)
    await run.signal("answer", "in time")
    await until(lambda: told)
    await until(lambda: waits(world, run))
    world.clock.advance("2h")
    assert await replay_to_the_end(world, run, crash) == "in time"
    assert told == ["in time"]
    ways.check()


@shapes
async def test_a_timeout_that_passed_while_no_process_ran(world: World, shape: Any):
    ways, told = Ways(), list[str]()
    rl = await world.open()
    run = await rl.start(limited(ways, shape, told, lambda: wait_for("answer")))
    await world.until_status("waiting", run)
    await world.crash()
    world.clock.advance("2h")
    rl = await world.open()
    run = await rl.get(run.id)
    await until(lambda: told)
    assert await replay_to_the_end(world, run) == "timed out"
    ways.check()


@CRASH
@shapes
@pytest.mark.parametrize("passes", [True, False], ids=["passes", "in time"])
async def test_a_timeout_around_a_step(world: World, shape: Any, crash: bool, passes: bool):
    ways, told, gate = Ways(), list[str](), Gate()

    @step
    async def work() -> str:
        await gate.pass_by()
        return "worked"

    rl = await world.open()
    run = await rl.start(limited(ways, shape, told, lambda: work()))
    await until(lambda: gate.entered)
    if passes:
        world.clock.advance("1h")
    else:
        await gate.open()
    await until(lambda: told)
    if not passes:
        world.clock.advance("2h")
    await gate.open()
    assert await replay_to_the_end(world, run, crash) == ("timed out" if passes else "worked")
    assert len(told) == len(gate.entered) == 1
    ways.check()


@CRASH
async def test_nested_timeouts_keep_apart(world: World, crash: bool):
    ways = Ways()

    @flow
    async def nested() -> list[str]:
        way = ways.begin()
        try:
            async with asyncio.timeout(7200):
                try:
                    async with asyncio.timeout(3600):
                        await wait_for("never")
                except TimeoutError:
                    way.append("inner")
                try:
                    async with asyncio.timeout(36000):
                        await wait_for("never")
                except TimeoutError:
                    way.append("another")
        except TimeoutError:
            way.append("outer")
        await two_signals()
        return way

    rl = await world.open()
    run = await rl.start(nested)
    for count in (1, 2):
        run = await comes_back(world, run, crash)
        world.clock.advance("1h")
        await until(lambda count=count: len(max(ways, key=len)) == count)
    assert await replay_to_the_end(world, run, crash) == ["inner", "outer"]
    ways.check()


# ---- the loop's own clock


@CRASH
async def test_the_loops_time_goes_on_with_its_timers_and_is_the_same_on_replay(world: World, crash: bool):
    ways = Ways()

    @flow
    async def timing() -> list[str]:
        way, loop = ways.begin(), asyncio.get_running_loop()
        begun = loop.time()
        for _ in range(3):
            await asyncio.sleep(600)
            way.append(f"{loop.time() - begun:.0f}")
        await two_signals()
        return way

    rl = await world.open()
    run = await rl.start(timing)
    for count in (1, 2, 3):
        run = await comes_back(world, run, crash)
        world.clock.advance("10m")
        await until(lambda count=count: len(max(ways, key=len)) == count)
    assert await replay_to_the_end(world, run, crash) == ["600", "1200", "1800"]
    ways.check()


async def test_a_loop_until_a_time_of_the_event_loop_ends(world: World):
    """`while loop.time() < deadline` around a durable sleep. If the loop's time stood still, this would not end."""
    rounds = list[int]()

    @flow
    async def polling() -> int:
        loop = asyncio.get_running_loop()
        deadline, count = loop.time() + 3600, 0
        while loop.time() < deadline and count < 100:
            await sleep("20m")
            rounds.append(count)
            count += 1
        return count

    rl = await world.open(park_after="10h")
    run = await rl.start(polling)
    for count in range(1, 6):
        await until(lambda: asleep_or_over(world, run))
        world.clock.advance("20m")
        await until(lambda count=count: len(rounds) >= min(count, 3))
    assert await run.result("60s") == 3


async def asleep_or_over(world: World, run: Any) -> bool:
    return (await run.status()).terminal or await world.asleep(run) is not None


# ---- what it costs


async def test_timers_that_are_cancelled_unfired_cost_no_commit_of_their_own(world: World):
    @step
    async def work() -> None:
        pass

    @flow
    async def plain() -> None:
        for _ in range(20):
            await work()

    @flow
    async def limited() -> None:
        for _ in range(20):
            async with asyncio.timeout(60):
                await work()

    rl = await world.open()
    spent = []
    for one in (plain, limited):
        before = rl.services.recorder.commits
        await rl.run(one)
        spent.append(rl.services.recorder.commits - before)
    assert spent[1] == spent[0]


async def test_a_timer_that_is_never_waited_with_leaves_nothing_in_the_journal(world: World):
    @flow
    async def limited() -> str:
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
        return "over"

    rl = await world.open()
    run = await rl.start(limited)
    assert await run.result("60s") == "over"
    assert len(await world.events(run.id)) == 2  # created, completed


# ---- what is only noted


async def test_a_timeout_around_a_step_that_is_abandoned_at_shutdown_keeps_its_end(world: World):
    """The next commit records the timeout's beginning, and that is the commit that releases the run."""
    begun: list[int] = []

    @step
    async def never() -> None:
        begun.append(1)
        await asyncio.Event().wait()

    @flow
    async def limited() -> str:
        try:
            async with asyncio.timeout(1.5):
                await never()
        except TimeoutError:
            return "timed out"
        return "over"

    rl = await world.open(shutdown_grace="0s")
    run = await rl.start(limited)
    await until(lambda: len(begun) == 1)
    world.clock.advance(0.9)  # a step that takes a second is announced, and that commit would record the beginning, too
    rl = await world.close_and_reopen()
    await until(lambda: len(begun) == 2)
    world.clock.advance(0.7)
    assert await (await rl.get(run.id)).result(timeout="60s") == "timed out"
