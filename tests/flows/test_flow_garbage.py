"""Flow code that the garbage collector runs belongs to no run: it asks for nothing in the run that it interrupts by chance."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from relight import flow, now, sleep, spawn, step, wait_for
from tests.flows.watching import parks
from tests.flows.world import World, until

# Python warns that each such coroutine "ignored GeneratorExit".
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CALLS: list[str] = []


@step
async def charge() -> None:
    CALLS.append("charged")


@step
def charge_in_thread() -> None:
    CALLS.append("charged")


@step
async def ship() -> str:
    return "shipped"


@flow
async def sub() -> None:
    CALLS.append("called")


class Turn:
    """Let the loop run once, on any kind of loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def read_the_clock() -> None:
    now()
    await ship()


async def make_a_task() -> None:
    await asyncio.create_task(asyncio.sleep(1))


CLEAN_UPS: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
    "step": charge,
    "sync step": charge_in_thread,
    "child run": sub,
    "sleep": lambda: sleep(1),
    "asyncio.sleep": lambda: asyncio.sleep(1),
    "wait": lambda: wait_for("never"),
    "spawn": lambda: spawn(sub),
    "value": read_the_clock,
    "task": make_a_task,
}


def lose(clean_up: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Leave a coroutine that has begun. Only the garbage collector can find it."""

    async def lost(holder: list[Any]) -> None:
        try:
            await Turn()
        finally:
            await clean_up()

    holder: list[Any] = []
    coro = lost(holder)
    holder.append(coro)
    coro.send(None)


@pytest.mark.parametrize("clean_up", CLEAN_UPS.values(), ids=CLEAN_UPS)
async def test_collected_code_asks_for_no_operation_in_the_run_that_it_interrupts(
    world: World, clean_up: Callable[[], Coroutine[Any, Any, Any]]
):
    @flow
    async def innocent() -> str:
        lose(clean_up)
        gc.collect()
        return await ship()

    CALLS.clear()
    rl = await world.open()
    run = await rl.start(innocent)
    assert await run.result("60s") == "shipped"
    assert CALLS == []
    assert [one.key for one in await world.events(run.id)] == ["", "ship", ""]


async def test_collected_code_executes_no_step_outside_a_run(world: World):
    CALLS.clear()
    await world.open()
    lose(charge)
    gc.collect()
    assert CALLS == []


async def test_an_async_generator_that_the_collector_finds_begins_no_branch(world: World):
    async def numbers(holder: list[Any]) -> Any:
        try:
            yield 1
        finally:
            await charge()

    @flow
    async def reading() -> str:
        holder: list[Any] = []
        generator = numbers(holder)
        holder.append(generator)
        async for _ in generator:
            break
        del generator, holder
        gc.collect()
        return await ship()

    CALLS.clear()
    rl = await world.open()
    assert await rl.run(reading) == "shipped"
    assert CALLS == []


async def test_code_that_catches_everything_in_a_loop_is_never_run_again(world: World):
    @flow
    async def catching() -> None:
        while True:
            try:
                await wait_for("never")
            except BaseException:
                pass
            await charge()

    @flow
    async def innocent() -> str:
        gc.collect()
        return await ship()

    CALLS.clear()
    rl = await world.open()
    run = await rl.start(catching)
    await until(lambda: parks(world, run))
    await until(lambda: run.id not in rl.orchestrator.live)
    gc.collect()
    assert await rl.run(innocent) == "shipped"
    assert CALLS == []


async def test_a_run_that_has_ended_is_freed_at_once(world: World):
    """Nothing is left for the collector. With hundreds of short runs a second it would be at work all the time."""

    @flow
    async def child() -> str:
        return await ship()

    @flow
    async def several() -> list[str]:
        return [await child(), *await asyncio.gather(ship(), ship())]

    @flow
    def in_a_thread() -> str:
        return ship()  # type: ignore[return-value]  # in a sync flow, its result

    rl = await world.open()
    gc.disable()
    try:
        for shape in (several, in_a_thread):
            run = await rl.start(shape)  # type: ignore[arg-type]
            live = weakref.ref(rl.orchestrator.live[run.id])
            await run.result("60s")
            await until(lambda live=live: live() is None)
    finally:
        gc.enable()


async def test_collected_code_begins_no_operation_that_it_had_called_before(world: World):
    @flow
    async def innocent() -> str:
        call = charge()
        lose(lambda: call)
        gc.collect()
        call.close()
        return await ship()

    CALLS.clear()
    rl = await world.open()
    run = await rl.start(innocent)
    assert await run.result("60s") == "shipped"
    assert [one.key for one in await world.events(run.id)] == ["", "ship", ""]
    assert CALLS == []
