"""Tests of the clock that tests advance, and of the simulated crash."""

import asyncio

import pytest

from relight import flow, step
from relight.errors import DurationError
from relight.testing.clock import START, FakeClock
from tests.flows.world import World, until


def test_the_clock_stands_still_until_it_is_advanced():
    clock = FakeClock()
    assert (clock.now(), clock.monotonic()) == (START, 0.0)
    clock.advance("1h30m")
    assert (clock.now(), clock.monotonic()) == (START + 5400, 5400.0)


def test_callbacks_fire_in_order_each_at_its_own_time():
    clock = FakeClock(now=100.0)
    fired: list[tuple[str, float]] = []
    for name, delay in (("late", 3.0), ("first", 1.0), ("second", 1.0), ("never", 9.0)):
        clock.call_later(delay, lambda name=name: fired.append((name, clock.now())))
    clock.advance(3)
    assert fired == [("first", 101.0), ("second", 101.0), ("late", 103.0)]
    assert [timer.at for timer in clock.pending] == [109.0]


def test_a_cancelled_callback_does_not_fire():
    clock = FakeClock()
    fired: list[str] = []
    clock.call_later(1, lambda: fired.append("cancelled")).cancel()
    clock.call_later(1, lambda: fired.append("kept"))
    clock.advance(2)
    assert fired == ["kept"]


def test_what_a_callback_asks_for_falls_into_the_same_advance():
    clock = FakeClock(now=0.0)
    at: list[float] = []

    def again() -> None:
        at.append(clock.now())
        clock.call_later(10, again)

    clock.call_later(10, again)
    clock.advance(35)
    assert at == [10.0, 20.0, 30.0]


def test_advancing_in_small_parts_loses_nothing_to_rounding():
    clock = FakeClock()
    fired: list[float] = []
    clock.call_later(1.1, lambda: fired.append(clock.now()))
    for _ in range(11):
        clock.advance(0.1)
    assert fired == [START + 1.1]


def test_setting_the_wall_clock_moves_no_timer():
    clock = FakeClock(now=1000.0)
    fired: list[float] = []
    clock.call_later(5, lambda: fired.append(clock.now()))
    clock.set(0.0)
    clock.advance(4)
    assert fired == []
    clock.advance(1)
    assert fired == [5.0]


def test_time_does_not_go_backwards():
    with pytest.raises(DurationError, match=r"FakeClock.advance"):
        FakeClock().advance(-1)


async def test_what_is_due_at_once_needs_no_advance():
    clock = FakeClock()
    fired: list[str] = []
    clock.call_later(0, lambda: fired.append("now"))
    clock.call_later(-3, lambda: fired.append("cancelled")).cancel()
    assert fired == []  # later, not inside the call
    await until(lambda: fired)
    clock.advance(1)
    assert fired == ["now"]


async def test_callbacks_of_another_loop_are_handed_to_it():
    clock = FakeClock()
    loop = asyncio.get_running_loop()
    fired: list[asyncio.AbstractEventLoop] = []
    clock.call_later(1, lambda: fired.append(asyncio.get_running_loop()))
    await loop.run_in_executor(None, clock.advance, 1)
    await until(lambda: fired)
    assert fired == [loop]


async def test_a_crashed_engine_writes_nothing_more(world: World):
    gate = asyncio.Event()
    entered: list[int] = []

    @step
    async def hang() -> str:
        entered.append(1)
        await gate.wait()
        return "done"

    @flow
    async def hanging() -> str:
        return await hang()

    rl = await world.open()
    run = await rl.start(hanging.with_id("r"))
    await until(lambda: entered)
    await world.crash()
    gate.set()
    rl = await world.open(recovery_enabled=False)
    assert (await rl.row("r")).status == "running"
    assert await world.recorded("r") == []
    rl = await world.close_and_reopen(recovery_enabled=True)
    assert await (await rl.get(run.id)).result() == "done"
    assert len(entered) == 2
