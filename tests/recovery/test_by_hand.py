"""What is shown of runs that a person resumes, and of steps that recovery would not repeat."""

from __future__ import annotations

import asyncio

import pytest

from relight import Handle, Relight, flow, step, wait_for
from relight.backends.memory import MemoryStore
from relight.clock import SYSTEM_CLOCK
from tests.flows.world import until


@pytest.mark.parametrize("through", ["its handle", "the engine"])
async def test_a_paused_run_that_is_resumed_says_so_in_its_log(through: str):
    @flow
    async def waiting() -> str:
        return str(await wait_for("go"))

    async with Relight("memory:") as rl:
        run = await rl.start(waiting.with_id("r"))
        await run.pause()

        async def is_paused() -> bool:
            return await run.status() == "paused"

        await until(is_paused)
        await (run.resume() if through == "its handle" else rl.resume("r"))
        await run.signal("go", "on")
        assert await run.result(timeout="60s") == "on"
        said = [event for event in (await rl.explain("r")).events if event.text.startswith("resumed by hand")]
        assert [event.token for event in said] == ["RUN_RESUMED"]


async def test_a_step_is_repeated_only_if_its_run_goes_on():
    started: list[str] = []

    @step(timeout="1h")  # its start is journaled
    async def slow(name: str) -> None:
        started.append(name)
        await asyncio.Event().wait()

    @flow
    async def durable() -> None:
        await slow("durable")

    @flow(resumable=False)
    async def fragile() -> None:
        await slow("fragile")

    store = MemoryStore(clock=SYSTEM_CLOCK)
    dead = Relight(store=store)
    await dead.open()
    runs: list[Handle[None]] = [await dead.start(one.with_id(one.name)) for one in (durable, fragile)]
    await until(lambda: len(started) == len(runs))
    # An engine without leases takes the first for dead.
    async with Relight(store=store, drive=False) as rl:
        found = {one.run_id: (one.action, one.repeats) for one in await rl.plan()}
    assert found == {"durable": ("resume", ["slow"]), "fragile": ("fail", [])}
    await dead.close()
