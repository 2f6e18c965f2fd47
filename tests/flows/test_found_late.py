"""What the readers of the change found last: in each case something hung, was lost, or was done without the journal."""

import asyncio
import contextvars

import pytest
from msgspec import Raw

from relight import OutsideRunError, RunFailedError, flow, step, wait_for
from relight.model import journal as j
from tests.flows.watching import parks
from tests.flows.world import World, until
from tests.unit.test_replay import replay


async def test_a_step_called_without_the_flows_context_is_refused(world: World):
    calls: list[int] = []

    @step
    def charge() -> None:
        calls.append(1)

    @flow
    async def losing() -> str:
        with pytest.raises(OutsideRunError, match="without the flow's context variables"):
            contextvars.Context().run(charge)
        return "refused"

    rl = await world.open()
    assert await rl.run(losing) == "refused"
    assert calls == []


async def test_code_that_catches_everything_in_a_loop_leaves_memory_all_the_same(world: World):
    @flow
    async def catching() -> None:
        while True:
            try:
                await wait_for("never")
            except BaseException:
                pass

    rl = await world.open()
    run = await rl.start(catching)
    await until(lambda: parks(world, run))
    await until(lambda: run.id not in rl.orchestrator.live)


async def test_a_child_of_a_sync_flow_that_nothing_can_wake_fails_it(world: World):
    @flow
    async def child() -> None:
        await asyncio.Event().wait()

    @flow
    def parent() -> None:
        child()  # type: ignore[unused-coroutine, unused-awaitable]  # in a sync flow it is called, and has ended

    rl = await world.open()
    with pytest.raises(RunFailedError, match="nothing in its run can bring about"):
        await (await rl.start(parent)).result("60s")


def test_a_signal_whose_wait_a_cancellation_ended_is_for_the_next_wait():
    state = replay(
        j.WaitStarted("$wait.go", "signal", "go", None, 1.0),
        j.SignalReceived("$wait.go", Raw(b'"here"'), "", 7, "go"),
        j.CancelRequested("", "enough", 2.0, ["$wait.go"]),
    )
    assert [(one.message_id, one.name) for one in state.unclaimed] == [(7, "go")]
