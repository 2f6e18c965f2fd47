"""A request may arrive while the beginning of a wait is being committed. Then there is no wait yet to interrupt."""

from __future__ import annotations

import asyncio

import pytest

from relight import Relight, RunCancelledError, flow, sleep, step
from tests.flows.world import until

# Turns of the event loop between start() and the request. With some of them, the request comes during the wait's first commit.
TURNS = range(8)


@pytest.mark.parametrize("turns", TURNS)
async def test_cancel_is_heard_and_the_flow_cleans_up(turns):
    cleaned = []

    @step
    async def clean_up() -> None:
        cleaned.append(turns)

    @flow
    async def sleeper() -> None:
        try:
            await sleep("1h")
        finally:
            await clean_up()

    async with Relight("memory:", cancel_grace="1h") as rl:
        run = await rl.start(sleeper)
        for _ in range(turns):
            await asyncio.sleep(0)
        await run.cancel()
        with pytest.raises(RunCancelledError):
            await run.result(timeout="60s")
    assert cleaned == [turns]


@pytest.mark.parametrize("turns", TURNS)
async def test_pause_takes_effect_at_once(turns):
    @flow
    async def sleeper() -> None:
        await sleep("1h")

    async with Relight("memory:", shutdown_grace="1h") as rl:
        run = await rl.start(sleeper)
        for _ in range(turns):
            await asyncio.sleep(0)
        await run.pause()

        async def paused() -> bool:
            return await run.status() == "paused"

        await until(paused)
