"""What readers found: times and messages reach a flow in the order of time, also those from a time when it was not in memory."""

import asyncio
from typing import Any

import pytest

from relight import Handle, Retry, flow, sleep, step, wait_for
from relight.model import journal as j
from tests.flows.watching import turns
from tests.flows.ways import Gate, Held, Ways, park, replay_to_the_end, two_signals, waits
from tests.flows.world import World, until

AWAY = pytest.mark.parametrize("away", ["killed", "paused"])


async def leave(world: World, run: Handle[Any], away: str) -> Handle[Any]:
    """Take the run out of memory. Signals may be sent to the handle that this returns."""
    if away == "paused":
        await run.pause()
        await world.until_status("paused", run)
        return run
    await world.crash()
    rl = await world.open(drive=False)
    return await rl.get(run.id)


async def come_back(world: World, run: Handle[Any], away: str) -> Handle[Any]:
    if away == "paused":
        await run.resume()
        await until(lambda: _resumed(world, run))
        return run
    await world.close()
    rl = await world.open(drive=True)
    return await rl.get(run.id)


async def _resumed(world: World, run: Handle[Any]) -> bool:
    return not await world.is_("paused", run)


async def begun(world: World, run: Handle[Any], count: int) -> None:
    """Wait until so many waits of the run are durable."""
    await until(lambda: _begun(world, run, count))
    await until(lambda: world.is_("waiting", run))


async def _begun(world: World, run: Handle[Any], count: int) -> bool:
    return sum(isinstance(event, j.WaitStarted) for event in await world.events(run.id)) >= count


# ---- a signal that was sent in time, and a deadline that passed


async def _own_timeout() -> str:
    return await wait_for("ok", str, timeout="1h", default="timed out")


async def _asyncio_timeout() -> str:
    try:
        async with asyncio.timeout(3600):
            return await wait_for("ok", str)
    except TimeoutError:
        return "timed out"


async def _asyncio_wait_for() -> str:
    try:
        return await asyncio.wait_for(wait_for("ok", str), 3600)
    except TimeoutError:
        return "timed out"


async def _first(*waiting: Any) -> str:
    tasks = [asyncio.create_task(one) for one in waiting]
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    return "+".join(task.result() for task in done)


async def _signal_then_timer() -> str:
    return await _first(wait_for("ok", str), asyncio.sleep(3600, "timed out"))


async def _timer_then_signal() -> str:
    return await _first(asyncio.sleep(3600, "timed out"), wait_for("ok", str))


SHAPES = [_own_timeout, _asyncio_timeout, _asyncio_wait_for, _signal_then_timer, _timer_then_signal, None]


@AWAY
@pytest.mark.parametrize("late", [False, True], ids=["in_time", "too_late"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__ if shape else "sync")
async def test_a_signal_sent_while_the_run_was_away_counts_from_when_it_was_sent(
    world: World, away: str, late: bool, shape: Any
):
    @flow
    async def approve() -> str:
        return str(await shape())

    @flow
    def approve_sync() -> str:
        return wait_for("ok", str, timeout="1h", default="timed out")

    rl = await world.open()
    run = await rl.start(approve_sync if shape is None else approve)
    await begun(world, run, 1 if shape in (None, _own_timeout) else 2)
    run = await leave(world, run, away)
    world.clock.advance("2h" if late else "30m")
    await run.signal("ok", "yes")
    world.clock.advance("2h")
    run = await come_back(world, run, away)
    assert await run.result("60s") == ("timed out" if late else "yes")


@AWAY
async def test_signals_go_to_those_whose_time_had_not_passed_when_they_came(world: World, away: str):
    """Two branches wait for the same name, the first with the shorter deadline. The signal came when only the second
    still waited."""

    @flow
    async def two() -> list[str]:
        found = await asyncio.gather(
            wait_for("ok", str, timeout="10m", default="timed out"),
            wait_for("ok", str, timeout="1h", default="timed out"),
        )
        return list(found)

    rl = await world.open()
    run = await rl.start(two)
    await begun(world, run, 2)
    run = await leave(world, run, away)
    world.clock.advance("30m")
    await run.signal("ok", "yes")
    world.clock.advance("2h")
    run = await come_back(world, run, away)
    assert await run.result("60s") == ["timed out", "yes"]


# ---- several times that have passed


@AWAY
async def test_a_timeout_that_is_shorter_than_what_it_waits_for(world: World, away: str):
    """The flow asked for the sleep first. The timeout was due first."""

    @step
    async def nothing() -> None: ...

    @flow
    async def race() -> str:
        async def slow() -> str:
            await sleep(20)
            return "slept"

        task = asyncio.create_task(slow())
        await nothing()
        try:
            async with asyncio.timeout(10):
                return await task
        except TimeoutError:
            return "timed out"

    rl = await world.open()
    run = await rl.start(race)
    await begun(world, run, 2)
    run = await leave(world, run, away)
    world.clock.advance("60s")
    run = await come_back(world, run, away)
    assert await run.result("60s") == "timed out"


@AWAY
@pytest.mark.parametrize("kind", ["sleep", "asyncio", "signal", "mixed"])
async def test_what_was_due_meanwhile_goes_off_in_the_order_of_time(world: World, away: str, kind: str):
    ways = Ways()
    kinds = {
        "sleep": sleep,
        "asyncio": asyncio.sleep,
        "signal": lambda seconds: wait_for("never", timeout=seconds, default=None),
    }

    @flow
    async def naps() -> list[str]:
        way = ways.begin()

        async def nap(number: int, seconds: float) -> None:
            one: Any = [*kinds.values()][number % 3] if kind == "mixed" else kinds[kind]
            await one(seconds)
            way.append(f"{seconds:.0f}")

        await asyncio.gather(*(nap(number, seconds) for number, seconds in enumerate((9, 5, 7, 6, 8))))
        await two_signals()
        return way

    rl = await world.open()
    run = await rl.start(naps)
    await begun(world, run, 5)
    run = await leave(world, run, away)
    world.clock.advance("60s")
    run = await come_back(world, run, away)
    assert await replay_to_the_end(world, run) == ["5", "6", "7", "8", "9"]
    ways.check()


@AWAY
async def test_what_ended_in_time_beats_the_timeout_around_it(world: World, away: str):
    @step
    async def note(way: str) -> str:
        return way

    @flow
    async def patient() -> list[str]:
        way = list[str]()
        try:
            async with asyncio.timeout(9):
                try:
                    async with asyncio.timeout(5):
                        await asyncio.sleep(3)
                        way.append("slept")
                        await asyncio.sleep(50)
                except TimeoutError:
                    way.append(await note("inner"))
                await asyncio.sleep(50)
        except TimeoutError:
            way.append("outer")
        return way

    rl = await world.open()
    run = await rl.start(patient)
    await begun(world, run, 3)
    run = await leave(world, run, away)
    world.clock.advance("4s")  # after the first sleep
    run = await come_back(world, run, away)
    await begun(world, run, 4)
    run = await leave(world, run, away)
    world.clock.advance("2s")  # after the inner timeout
    run = await come_back(world, run, away)
    await begun(world, run, 5)
    world.clock.advance("60s")
    assert await run.result("60s") == ["slept", "inner", "outer"]


@AWAY
async def test_a_back_off_has_its_place_among_the_times_that_have_passed(world: World, away: str):
    """A child's back-off of 5 s was begun before a sleep of 1 s."""
    ways, failures = Ways(), [1]

    @step
    async def flaky() -> None:
        if failures:
            failures.pop()
            raise ValueError("once")

    @flow(retry=Retry(3, delay=5))
    async def child() -> None:
        await flaky()
        ways[-1].append("child")

    @flow
    async def parent() -> list[str]:
        way = ways.begin()

        async def sibling() -> None:
            await sleep(1)
            way.append("sibling")

        await asyncio.gather(child(), sibling())
        return way

    rl = await world.open()
    run = await rl.start(parent)
    await until(lambda: not failures)
    await until(lambda: world.asleep(run))
    await until(lambda: _retrying(world, run))
    run = await leave(world, run, away)
    world.clock.advance("60s")
    run = await come_back(world, run, away)
    assert await run.result("60s") == ["sibling", "child"]


async def _retrying(world: World, run: Handle[Any]) -> bool:
    return any(isinstance(event, j.RunRetrying) for event in await world.events(run.id))


# ---- the loop's own time


async def test_a_wait_that_is_answered_early_does_not_move_the_loops_time(world: World):
    ways = Ways()

    @flow
    async def deadlines() -> list[Any]:
        way, loop = ways.begin(), asyncio.get_running_loop()
        deadline = loop.time() + 3600
        first = await wait_for("a", timeout="7d")
        way.append(f"{deadline - loop.time():.0f} left")
        try:
            async with asyncio.timeout_at(deadline):
                second = await wait_for("go")
        except TimeoutError:
            second = "timed out"
        await wait_for("go")
        return [first, second]

    rl = await world.open()
    run = await rl.start(deadlines)
    await run.signal("a", 1)
    await until(lambda: waits(world, run))
    await park(world, run)
    await run.signal("go", 2)
    await until(lambda: len(ways) >= 2)
    await run.signal("go")
    assert await run.result("60s") == [1, 2]
    assert ways.check() == ["3600 left"]


# ---- signals that are taken back


@pytest.mark.parametrize("crash", [False, True], ids=["live", "killed"])
async def test_signals_that_are_taken_back_come_in_the_order_in_which_they_were_sent(world: World, crash: bool):
    gate = Gate()

    @step
    async def trigger() -> None:
        await gate.pass_by()

    @flow
    async def receiving() -> list[str]:
        tasks = [asyncio.create_task(wait_for("m", str)) for _ in range(2)]
        await trigger()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if crash:
            await wait_for("go")
        return [await wait_for("m", str), await wait_for("m", str)]

    rl = await world.open()
    run = await rl.start(receiving)
    await until(lambda: _begun(world, run, 2))
    await until(lambda: gate.entered)
    commits = Held(world, "commit")
    await gate.open()
    await until(lambda: not rl.orchestrator.live[run.id].inflight)
    for name in ("first", "second"):
        await run.signal("m", name)
    await until(lambda: rl.orchestrator.live[run.id].inbox.heard == 2)
    await turns()
    commits.let_go()
    if crash:
        await until(lambda: waits(world, run))
        rl = await world.crash_and_reopen()
        run = await rl.get(run.id)
        await run.signal("go")
    assert await run.result("60s") == ["first", "second"]
