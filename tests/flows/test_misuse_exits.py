"""Exceptions that end programs (sys.exit, Ctrl-C, argparse, GeneratorExit) end the step or flow that raised them, and
nothing else."""

import argparse
import asyncio
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from relight import Relight, RelightError, Retry, RunFailedError, flow, foreach, parallel, spawn, step, wait_for
from tests.flows.world import World


def exits() -> NoReturn:
    sys.exit(3)


def interrupts() -> NoReturn:
    raise KeyboardInterrupt


def parses() -> NoReturn:
    parser = argparse.ArgumentParser(prog="shop")
    parser.add_argument("--count", type=int)
    parser.parse_args(["--count", "many"])
    raise AssertionError("argparse exits")


def closes() -> NoReturn:
    raise GeneratorExit


def custom() -> NoReturn:
    raise Ending("custom")


class Ending(BaseException):
    """An exception of another library."""


RAISES = pytest.mark.parametrize("raises", [exits, interrupts, parses, closes, custom], ids=lambda one: one.__name__)
NAMES = {
    exits: "SystemExit",
    interrupts: "KeyboardInterrupt",
    parses: "SystemExit",
    closes: "GeneratorExit",
    custom: "Ending",
}


def shapes(raises: Callable[[], NoReturn]) -> dict[str, Any]:
    """Flows that raise it, each in another place."""

    @step
    async def async_step() -> None:
        raises()

    @step
    async def late_step() -> None:
        await asyncio.sleep(0)
        raises()

    @step
    def sync_step() -> None:
        raises()

    @step(retry=Retry(2))
    async def retried_step() -> None:
        raises()

    @step
    async def work() -> None:
        pass

    @flow
    async def in_async_step() -> None:
        await async_step()

    @flow
    async def in_late_step() -> None:
        await late_step()

    @flow
    async def in_sync_step() -> None:
        await sync_step()

    @flow
    async def in_retried_step() -> None:
        await retried_step()

    @flow
    def in_sync_step_of_a_sync_flow() -> None:
        sync_step()

    @flow
    async def in_async_flow() -> None:
        raises()

    @flow
    async def in_async_flow_later() -> None:
        await work()
        raises()

    @flow
    def in_sync_flow() -> None:
        raises()

    @flow
    async def in_child() -> None:
        await in_async_flow_later()

    @flow
    def in_sync_child() -> None:
        in_sync_flow()

    @flow
    async def in_task() -> None:
        async def branch() -> None:
            await work()
            raises()

        await asyncio.gather(branch(), work())

    @flow
    async def in_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(in_async_flow_later())
            group.create_task(work())

    @flow
    def in_parallel() -> None:
        parallel(lambda: raises(), lambda: work())

    @flow
    async def in_foreach() -> None:
        await foreach([1, 2], lambda n: async_step(), concurrency=2)

    @flow
    async def in_foreach_code() -> None:
        await foreach([1, 2], lambda n: raises())

    @flow
    async def in_spawned() -> None:
        await (await spawn(in_async_flow))

    return {name: one for name, one in locals().items() if name.startswith("in_")}


def other() -> Any:
    @step
    async def fine() -> str:
        return "fine"

    @flow
    async def patient() -> str:
        await wait_for("go")
        return await fine()

    return patient


SHAPES = sorted(shapes(exits))


@RAISES
@pytest.mark.parametrize("shape", SHAPES)
async def test_an_exit_fails_its_run_and_the_engine_goes_on(world: World, raises: Any, shape: str):
    flows, patient = shapes(raises), other()
    rl = await world.open()
    beside = await rl.start(patient)
    run = await rl.start(flows[shape])
    with pytest.raises(RunFailedError) as failed:
        await run.result("60s")
    cause = failed.value.__cause__
    named = repr(cause.exceptions) if isinstance(cause, BaseExceptionGroup) else str(failed.value)
    assert NAMES[raises] in named
    await beside.signal("go")
    assert await beside.result("60s") == "fine"
    after = await rl.start(patient)
    await after.signal("go")
    assert await after.result("60s") == "fine"
    await asyncio.wait_for(world.close(), 60)


@pytest.mark.parametrize("retries", [1, 3])
@pytest.mark.parametrize("where", ["thread", "future"])
async def test_generator_exit_ends_no_task_of_the_engine(world: World, where: str, retries: int):
    """With this exception Python closes the coroutines that await a future. That is noticed when the task is garbage."""
    tried = list[int]()

    @step(retry=Retry(retries))
    def in_thread() -> None:
        tried.append(1)
        raise GeneratorExit

    @step
    async def in_future() -> None:
        tried.append(1)
        future = asyncio.get_running_loop().create_future()
        future.get_loop().call_soon(future.set_exception, GeneratorExit())
        await future

    @flow
    async def work() -> None:
        await (in_thread() if where == "thread" else in_future())

    rl = await world.open()
    with pytest.raises(RunFailedError, match="GeneratorExit"):
        await rl.run(work)
    assert len(tried) == (retries if where == "thread" else 1)
    await rl.idle()
    gc.collect()


@RAISES
async def test_a_flow_may_react_to_what_its_step_raised_and_does_so_again_on_replay(world: World, raises: Any):
    seen = list[str]()

    @step
    async def quits() -> None:
        raises()

    @step
    async def instead() -> str:
        return "instead"

    @flow
    async def careful() -> str:
        try:
            await quits()
        except RelightError as error:
            seen.append(f"{type(error).__name__}: {error}")
        except BaseException as error:
            seen.append(f"{type(error).__name__}: {error}")
        found = await instead()
        await wait_for("go")
        return found

    rl = await world.open()
    run = await rl.start(careful)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    await run.signal("go")
    assert await run.result("60s") == "instead"
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert NAMES[raises] in seen[0]


@pytest.mark.parametrize("raises", [exits, interrupts, closes], ids=lambda one: one.__name__)
@pytest.mark.parametrize("shape", ["in_async_step", "in_sync_step_of_a_sync_flow", "in_async_flow", "in_sync_flow"])
def test_the_blocking_facade_goes_on_and_closes_in_order(raises: Any, shape: str):
    """Its loop runs in a thread. If that ended, this caller and the next would wait for ever."""
    flows, patient = shapes(raises), other()
    found = list[Any]()

    def body() -> None:
        try:
            with Relight("memory:") as rl:
                with pytest.raises(RunFailedError, match=NAMES[raises]):
                    rl.run(flows[shape])
                run = rl.start(patient)
                run.signal("go")
                found.append(run.result("60s"))
        except BaseException as error:
            found.append(error)
            raise
        finally:
            found.append("closed")

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(60)
    assert found == ["fine", "closed"]
