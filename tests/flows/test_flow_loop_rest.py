"""When a flow is at rest, when it is blocked, and what happens when it does not let go."""

import asyncio
import logging
import threading
import time

import pytest

from relight import RunCancelledError, flow, parallel, sleep, step, wait_for
from tests.flows.watching import turns
from tests.flows.ways import Gate, park
from tests.flows.world import World, until


async def test_a_flow_that_spins_starves_no_other_run_and_can_be_cancelled(world: World):
    spinning = list[int]()

    @step
    async def work() -> str:
        await asyncio.sleep(0)
        return "worked"

    @flow
    async def spin() -> None:
        spinning.append(1)
        while True:  # noqa: ASYNC110 - that it spins is what is tested
            await asyncio.sleep(0)

    @flow
    async def working() -> list[str]:
        return [await work() for _ in range(5)]

    rl = await world.open()
    spinner = await rl.start(spin)
    await until(lambda: spinning)
    assert await (await rl.start(working)).result("60s") == ["worked"] * 5
    await spinner.cancel("enough")
    with pytest.raises(RunCancelledError, match="enough"):
        await spinner.result("60s")


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_flow_code_that_blocks_is_reported_with_its_place(
    world: World, kind: str, caplog: pytest.LogCaptureFixture
):
    def reported() -> bool:
        return any("[FLOW_BLOCKS]" in record.getMessage() for record in caplog.records)

    def block() -> None:
        deadline = time.monotonic() + 60
        while not reported() and time.monotonic() < deadline:
            time.sleep(0.01)  # the flow blocks here

    @flow
    async def blocking() -> None:
        block()

    @flow
    def blocking_sync() -> None:
        parallel(lambda: block(), lambda: None)

    caplog.set_level(logging.WARNING)
    rl = await world.open()
    run = await rl.start(blocking if kind == "async" else blocking_sync)
    await run.result("60s")
    (said,) = [one.getMessage() for one in caplog.records if "[FLOW_BLOCKS]" in one.getMessage()]
    assert run.id in said
    assert f"{__file__}:" in said


@pytest.mark.parametrize("shape", ["at once", "after a step", "then a step", "branch", "child"])
async def test_a_sync_flow_that_computes_for_long_comes_to_its_end(
    world: World, shape: str, caplog: pytest.LogCaptureFixture
):
    """The other branches do not wait for it any more. Still this is flow code that has not come to rest, so the run is
    not parked."""
    calls = list[str]()

    @step
    def work() -> str:
        calls.append("work")
        return "worked"

    def compute() -> str:
        deadline = time.monotonic() + 60
        while "[FLOW_BLOCKS]" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # so that the code that gives up on it has done so
        calls.append("computed")
        return "computed"

    @flow
    def child() -> str:
        return compute()

    @flow
    def computing() -> list[str]:
        if shape == "branch":
            return parallel(compute, work)
        if shape == "child":
            return [child()]
        found: list[str] = [work()] if shape == "after a step" else []
        found.append(compute())
        return [*found, work()] if shape == "then a step" else found

    rl = await world.open()
    run = await rl.start(computing)
    assert "computed" in await run.result("60s")
    assert calls.count("computed") == 1


async def test_steps_that_take_long_are_no_flow_code_that_blocks(world: World, caplog: pytest.LogCaptureFixture):
    """A step of a sync flow runs in the flow's own thread, which is there for that."""

    @step
    def long() -> None:
        threading.Event().wait(2.2)

    @flow
    def patient() -> None:
        long()

    rl = await world.open()
    await (await rl.start(patient)).result("60s")
    assert "[FLOW_BLOCKS]" not in caplog.text


# ---- at rest, and blocked


async def test_a_program_that_is_busy_does_not_keep_a_run_from_being_parked(world: World):
    """Whether a flow is at rest depends on its own loop only. Callbacks of the program's loop have no effect on that."""
    stop = asyncio.Event()

    async def busy() -> None:
        while not stop.is_set():  # noqa: ASYNC110 - it is meant to be busy
            await asyncio.sleep(0)

    @step
    async def work(n: int) -> int:
        return n

    @flow
    async def waiting() -> list[int]:
        event = asyncio.Event()

        async def branch() -> None:
            await wait_for("go")
            event.set()

        task = asyncio.create_task(branch())
        found = list(await asyncio.gather(*(work(n) for n in range(5))))
        await event.wait()
        await task
        return found

    spinners = [asyncio.create_task(busy()) for _ in range(50)]
    rl = await world.open()
    run = await rl.start(waiting)
    await park(world, run)
    await run.signal("go")
    assert await run.result("60s") == list(range(5))
    stop.set()
    await asyncio.gather(*spinners)


async def test_a_run_is_blocked_only_when_no_step_of_it_is_under_way(world: World):
    gate = Gate()

    @step
    async def work() -> None:
        await gate.pass_by()

    @flow
    async def both() -> None:
        await asyncio.gather(work(), sleep("1h"))

    rl = await world.open(park_after="1ms")
    run = await rl.start(both)
    await until(lambda: gate.entered)
    await turns()
    world.clock.advance("1m")
    await turns()
    assert await run.status() == "running"
    assert run.id in rl.orchestrator.live
    await gate.open()
    await park(world, run)
    world.clock.advance("1h")
    await run.result("60s")
