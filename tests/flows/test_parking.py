"""Parking: a run that only waits leaves memory, unless something else keeps it there."""

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from relight import (
    Status,
    flow,
    sleep,
    step,
    wait_for,
)
from relight.testing.clock import START
from tests.flows.watching import is_parked, parks, turns, waits_for
from tests.flows.world import World, until


class Anchor:
    """An object that only the flow's own frame refers to."""


async def test_a_parked_run_is_no_longer_in_memory(world: World):
    anchors: list[weakref.ref[Anchor]] = []

    @flow
    async def waiting() -> str:
        anchor = Anchor()
        anchors.append(weakref.ref(anchor))
        found = await wait_for("go", str)
        assert anchor is not None
        return found

    rl = await world.open()
    runs = [await rl.start(waiting) for _ in range(5)]
    lives = [weakref.ref(rl.orchestrator.live[run.id]) for run in runs]
    for run in runs:
        row = await world.park(run)
        assert (row.status, row.owner) == (Status.WAITING, None)
    assert rl.orchestrator.live == {}
    gc.collect()
    assert [anchor() for anchor in anchors] == [None] * 5
    assert [live() for live in lives] == [None] * 5
    assert [task.get_name() for task in asyncio.all_tasks() if "run" in task.get_name()] == []
    assert world.clock.pending == []  # no timer is kept for any of them
    for run in runs:
        await run.signal("go", "on")
        assert await run.result() == "on"


async def test_a_parked_sync_flow_holds_no_thread(world: World):
    @flow
    def waiting(n: int) -> str:
        wait_for("go")
        return f"{n} went on in {threading.current_thread().name}"

    rl = await world.open(max_threads=2)
    before = threading.active_count()
    runs = [await rl.start(waiting, n) for n in range(20)]
    for run in runs:
        await until(lambda run=run: is_parked(world, run))
    assert threading.active_count() <= before + 2 + 1  # and the thread that watches for flow code that blocks
    await until(lambda: rl.services.threads.in_use == 0)  # a thread gives its slot back after its work has ended
    for n, run in enumerate(runs):
        await run.signal("go")
        assert (await run.result()).startswith(f"{n} went on")


async def test_a_sync_flow_leaves_its_thread_without_waiting_for_park_after(world: World):
    @flow
    def waiting() -> None:
        wait_for("go")

    rl = await world.open(park_after="1h")
    run = await rl.start(waiting)
    await until(lambda: is_parked(world, run))
    assert world.clock.now() == START


async def test_a_parked_run_comes_back_again_and_again(world: World):
    calls: list[int] = []

    @step
    async def note(n: int) -> int:
        calls.append(n)
        return n

    @flow
    async def loop() -> list[int]:
        found = []
        for n in range(5):
            found.append(await note(n))
            await (sleep("1h") if n % 2 else wait_for("next"))
        return found

    rl = await world.open()
    run = await rl.start(loop)
    for n in range(5):
        await until(lambda n=n: len(calls) == n + 1)
        await world.park(run)
        if n % 2:
            world.clock.advance("1h")
        else:
            await run.signal("next")
    assert await run.result() == [0, 1, 2, 3, 4]
    assert calls == [0, 1, 2, 3, 4]


async def test_park_after_decides_when(world: World):
    @flow
    async def waiting() -> None:
        await wait_for("go")

    rl = await world.open(park_after="10m")
    run = await rl.start(waiting)
    await world.until_status("waiting", run)
    await until(lambda: world.clock.pending)
    world.clock.advance("9m59s")
    await turns()
    assert run.id in rl.orchestrator.live
    world.clock.advance("1s")
    await until(lambda: run.id not in rl.orchestrator.live)


# ---- what keeps a run in memory


async def plain_sleep() -> None:
    await asyncio.sleep(3600)


async def plain_event() -> None:
    await asyncio.Event().wait()


async def under_a_lock() -> None:
    lock = asyncio.Lock()
    await lock.acquire()
    async with lock:
        pass


async def under_a_timeout() -> None:
    async with asyncio.timeout(3600):
        await wait_for("never")


async def wait_for_with_a_timeout() -> None:
    await asyncio.wait_for(wait_for("never"), 3600)


async def waiting_with_a_timeout() -> None:
    await asyncio.wait([asyncio.create_task(wait_for("never"))], timeout=3600)


async def in_a_queue() -> None:
    await asyncio.Queue[int]().get()


@pytest.mark.parametrize(
    "branch",
    [
        plain_sleep,
        plain_event,
        under_a_lock,
        under_a_timeout,
        wait_for_with_a_timeout,
        waiting_with_a_timeout,
        in_a_queue,
    ],
)
async def test_a_run_leaves_memory_whatever_its_branches_wait_for(world: World, branch: Any):
    begun: list[int] = []

    @flow
    async def mixed() -> str:
        async def other() -> None:
            begun.append(1)
            await branch()

        task = asyncio.create_task(other())
        found = await wait_for("go", str)
        task.cancel()
        await asyncio.wait([task])
        return found

    rl = await world.open()
    run = await rl.start(mixed)
    await until(lambda: waits_for(world, run, "go"))
    await until(lambda: parks(world, run))
    await until(lambda: run.id not in rl.orchestrator.live)
    await run.signal("go", "on")
    assert await run.result() == "on"
    assert len(begun) == 2


async def test_a_step_in_flight_keeps_the_run_in_memory(world: World):
    gate = asyncio.Event()
    calls: list[int] = []

    @step
    async def slow() -> str:
        calls.append(1)
        await gate.wait()
        return "slow"

    @step
    def slow_in_a_thread() -> str:
        calls.append(2)
        release.wait(60)
        return "thread"

    release = threading.Event()

    @flow
    async def mixed() -> list[str]:
        return list(await asyncio.gather(wait_for("go", str), slow(), slow_in_a_thread()))

    rl = await world.open()
    run = await rl.start(mixed)
    await until(lambda: len(calls) == 2)
    await until(lambda: waits_for(world, run, "go"))
    for _ in range(10):
        world.clock.advance("10m")
        await turns(10)
    gate.set()
    for _ in range(10):
        world.clock.advance("10m")
        await turns(10)
    assert run.id in rl.orchestrator.live
    release.set()
    await until(lambda: parks(world, run))
    await run.signal("go", "on")
    assert await run.result() == ["on", "slow", "thread"]
    assert sorted(calls) == [1, 2]


@pytest.mark.parametrize("structure", ["gather", "nested gather", "group", "wait", "task", "shield-free chain"])
async def test_structure_around_durable_waits_does_not_keep_a_run_in_memory(world: World, structure: str):
    async def wait(name: str) -> str:
        return await wait_for(name, str)

    @flow
    async def structured() -> list[str]:
        names = ["a", "b"]
        if structure == "gather":
            return list(await asyncio.gather(*map(wait, names)))
        if structure == "nested gather":
            inner = asyncio.gather(wait("a"))
            return [one for (one,) in await asyncio.gather(inner, asyncio.gather(wait("b")))]
        if structure == "group":
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(wait(name)) for name in names]
            return [task.result() for task in tasks]
        if structure == "wait":
            tasks = [asyncio.create_task(wait(name)) for name in names]
            await asyncio.wait(tasks)
            return [task.result() for task in tasks]
        task = asyncio.create_task(wait("a"))
        return [await task, await wait("b")]

    rl = await world.open()
    run = await rl.start(structured)
    await until(lambda: waits_for(world, run, "a"))
    await until(lambda: parks(world, run))
    await run.signal("b", "2")
    await run.signal("a", "1")
    assert await run.result() == ["1", "2"]
