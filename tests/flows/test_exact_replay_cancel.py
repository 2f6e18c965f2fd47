"""A run is cancelled from outside, times out or is interrupted: its clean-up runs, whatever happens meanwhile."""

import asyncio

import pytest

from relight import (
    RunCancelledError,
    flow,
    foreach,
    parallel,
    sleep,
    step,
    wait_for,
)
from tests.flows.watching import turns
from tests.flows.ways import Gate, Held, ThreadGate, Ways, cancel_is_heard, replay_to_the_end, two_signals, waits
from tests.flows.world import World, until

# ---- a cancellation that arrives in the wrong moment


@pytest.mark.parametrize("shape", ["plain", "gather", "group", "child", "foreach", "sync", "parallel"])
async def test_cancelled_during_a_sync_step_the_clean_up_runs(world: World, shape: str):
    gate, said = ThreadGate(), list[str]()

    @step
    def block() -> None:
        gate.pass_by()

    @step
    async def release() -> None:
        said.append("released")

    @step
    def release_sync() -> None:
        said.append("released")

    async def leased() -> None:
        try:
            await block()
            said.append("went on")
        finally:
            await release()

    def leased_sync() -> None:
        try:
            block()
            said.append("went on")
        finally:
            release_sync()

    @flow
    async def child() -> None:
        await leased()

    @flow
    async def lease() -> None:
        if shape == "gather":
            await asyncio.gather(leased(), sleep("1h"))
        elif shape == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(leased())
        elif shape == "child":
            await child()
        elif shape == "foreach":
            await foreach([1], lambda n: leased())
        else:
            await leased()

    @flow
    def lease_sync() -> None:
        if shape == "parallel":
            parallel(leased_sync)
        else:
            leased_sync()

    rl = await world.open()
    run = await rl.start(lease_sync if shape in ("sync", "parallel") else lease)
    await asyncio.wait_for(gate.entered.wait(), 60)
    await run.cancel("sold")
    await cancel_is_heard(world, run)
    gate.open()
    with pytest.raises(RunCancelledError, match="sold"):
        await run.result("60s")
    assert said == ["released"]


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
async def test_cancelled_during_a_steps_commit_the_clean_up_runs(world: World, sync: bool, fails: bool):
    gate, thread, said, ways = Gate(), ThreadGate(), list[str](), Ways()

    @step
    async def work() -> None:
        await gate.pass_by()
        if fails:
            raise ValueError("no")

    @step
    def work_sync() -> None:
        thread.pass_by()
        if fails:
            raise ValueError("no")

    @step
    async def release() -> None:
        said.append("released")

    @flow
    async def lease() -> None:
        way = ways.begin()
        try:
            await (work_sync() if sync else work())
            way.append("went on")
        except ValueError:
            way.append("failed")
        finally:
            way.append("cleaning up")
            await release()

    rl = await world.open()
    run = await rl.start(lease)
    await until(lambda: gate.entered or thread.entered.is_set())
    commits = Held(world, "commit")
    await gate.open(after=0)
    thread.open()
    await until(lambda: not rl.orchestrator.live[run.id].inflight)  # its outcome is being committed
    await run.cancel("sold")
    await cancel_is_heard(world, run)
    commits.let_go()
    with pytest.raises(RunCancelledError, match="sold"):
        await run.result("60s")
    assert said == ["released"]
    assert ways.check(at_least=1) == ["cleaning up"]


async def test_cancelled_during_a_steps_commit_and_killed_in_the_clean_up(world: World):
    """The journal has the step's result, but that never reached the flow. Replay has to know that."""
    gate, releasing, ways = Gate(), Gate(), Ways()

    @step
    async def work() -> None:
        await gate.pass_by()

    @step
    async def release() -> None:
        await releasing.pass_by()

    @flow
    async def lease() -> None:
        way = ways.begin()
        try:
            await work()
            way.append("went on")
        finally:
            way.append("cleaning up")
            await release()
            way.append("clean")

    rl = await world.open()
    run = await rl.start(lease)
    await until(lambda: gate.entered)
    commits = Held(world, "commit")
    await gate.open()
    await until(lambda: not rl.orchestrator.live[run.id].inflight)
    await run.cancel("sold")
    await cancel_is_heard(world, run)
    commits.let_go()
    await until(lambda: releasing.entered)
    rl = await world.crash_and_reopen()
    await releasing.open(after=2)
    with pytest.raises(RunCancelledError, match="sold"):
        await (await rl.get(run.id)).result("60s")
    assert ways.check() == ["cleaning up", "clean"]


async def test_cancelled_while_it_is_being_replayed_the_clean_up_runs(world: World):
    """The request arrives while recorded results are still being read. After that the process is killed once more."""
    releasing, ways = Gate(), Ways()

    @step
    async def work(n: int) -> str:
        return "x" * 2000

    @step
    async def release() -> None:
        await releasing.pass_by()

    @flow
    async def lease() -> None:
        way = ways.begin()
        try:
            for n in range(5):
                way.append(str(len(await work(n))))
            await wait_for("go")
            way.append("went on")
        finally:
            way.append("cleaning up")
            await release()
            way.append("clean")

    rl = await world.open(payload_blob_threshold=1000)
    run = await rl.start(lease)
    await until(lambda: waits(world, run))
    world.slow["get_blob"] = 300
    rl = await world.crash_and_reopen()
    reading = Held(world, "get_blob")
    await until(lambda: len(ways) == 2)
    run = await rl.get(run.id)
    await run.cancel("sold")
    await turns()
    assert len(ways[1]) < 5
    reading.let_go()
    await until(lambda: releasing.entered)
    rl = await world.crash_and_reopen()
    await releasing.open(after=2)
    with pytest.raises(RunCancelledError, match="sold"):
        await (await rl.get(run.id)).result("60s")
    assert ways.check(at_least=3) == ["2000"] * 5 + ["cleaning up", "clean"]


async def test_a_branch_cancelled_by_its_group_at_the_end_of_replay_is_cancelled_again(world: World):
    """The run is paused while both branches work. After resume(), one fails and the other is cancelled. Then that is replayed."""
    gates, said, ways = {"slow": Gate(), "fails": Gate()}, list[str](), Ways()

    @step
    async def work(name: str) -> str:
        if name != "enter":
            await gates[name].pass_by()
        if name == "fails":
            raise ValueError("no")
        return name

    @step
    async def tell(what: str) -> None:
        said.append(what)

    @flow
    async def trip() -> str:
        way = ways.begin()

        async def book() -> None:
            way.append(await work("enter"))
            try:
                way.append(await work("slow"))
            finally:
                await tell("left")
                way.append("left")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(book())
                group.create_task(work("fails"))
        except* ValueError:
            way.append("failed")
        await two_signals()
        return "over"

    rl = await world.open(shutdown_grace="10ms")
    run = await rl.start(trip)
    await until(lambda: gates["slow"].entered and gates["fails"].entered)
    await run.pause()
    await world.until_status("paused", run)
    await gates["fails"].open(after=1)
    await run.resume()
    await until(lambda: len(ways) == 2)
    assert await replay_to_the_end(world, run) == "over"
    assert said == ["left"]
    assert ways.check(at_least=3) == ["enter", "left", "failed"]
