"""A blocked run is parked and comes back, whatever it waits for, also if that is one of asyncio's own primitives."""

import asyncio
from typing import Any

import pytest

from relight import flow, step, wait_for
from tests.flows.ways import park
from tests.flows.world import World

CRASH = pytest.mark.parametrize("crash", [True, False], ids=["killed", "parked"])


async def _event(go: Any) -> str:
    event = asyncio.Event()

    async def setter() -> None:
        await go()
        event.set()

    task = asyncio.create_task(setter())
    await event.wait()
    await task
    return "event"


async def _queue(go: Any) -> str:
    queue: asyncio.Queue[str] = asyncio.Queue()

    async def putter() -> None:
        await go()
        await queue.put("queue")

    async with asyncio.TaskGroup() as group:
        group.create_task(putter())
        return await queue.get()


async def _queue_join(go: Any) -> str:
    queue: asyncio.Queue[str] = asyncio.Queue()
    queue.put_nowait("joined")

    async def getter() -> None:
        await go()
        await queue.get()
        queue.task_done()

    task = asyncio.create_task(getter())
    await queue.join()
    await task
    return "joined"


async def _lock(go: Any) -> str:
    lock = asyncio.Lock()

    async def holder() -> None:
        async with lock:
            await go()

    task = asyncio.create_task(holder())
    await asyncio.sleep(0)
    async with lock:
        await task
        return "lock"


async def _semaphore(go: Any) -> str:
    semaphore = asyncio.Semaphore(2)

    async def holder() -> None:
        async with semaphore:
            await go()

    tasks = [asyncio.create_task(holder()) for _ in range(2)]
    await asyncio.sleep(0)
    async with semaphore:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return "semaphore"


async def _as_completed(go: Any) -> str:
    tasks = [asyncio.create_task(go())]
    for done in asyncio.as_completed(tasks):
        await done
    return "as_completed"


async def _wait(go: Any) -> str:
    await asyncio.wait([asyncio.create_task(go())])
    return "wait"


async def _timeout(go: Any) -> str:
    async with asyncio.timeout(36000):
        await go()
    return "timeout"


async def _wait_for(go: Any) -> str:
    await asyncio.wait_for(go(), 36000)
    return "wait_for"


async def _shield(go: Any) -> str:
    await asyncio.shield(go())
    return "shield"


async def _future(go: Any) -> str:
    future = asyncio.get_running_loop().create_future()

    async def setter() -> None:
        await go()
        future.set_result("future")

    task = asyncio.create_task(setter())
    found = await future
    await task
    return found


async def _barrier(go: Any) -> str:
    barrier = asyncio.Barrier(2)

    async def other() -> None:
        await go()
        await barrier.wait()

    task = asyncio.create_task(other())
    await barrier.wait()
    await task
    return "barrier"


SHAPES = [
    _event,
    _queue,
    _queue_join,
    _lock,
    _semaphore,
    _as_completed,
    _wait,
    _timeout,
    _wait_for,
    _shield,
    _future,
    _barrier,
]


@CRASH
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__.strip("_"))
async def test_a_run_that_is_blocked_in_asyncio_is_parked_and_comes_back(world: World, shape: Any, crash: bool):
    begun = list[int]()

    @step
    async def work() -> None:
        begun.append(1)

    @flow
    async def blocked() -> str:
        await work()
        found = await shape(lambda: wait_for("on"))
        await work()
        return str(found)

    rl = await world.open()
    run = await rl.start(blocked)
    await park(world, run)
    assert rl.orchestrator.live == {}
    if crash:
        rl = await world.crash_and_reopen()
        run = await rl.get(run.id)
    await run.signal("on")
    assert await run.result("60s") == shape.__name__.strip("_").replace("queue_join", "joined")
    assert len(begun) == 2
