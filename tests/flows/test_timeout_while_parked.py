"""A flow's timeout may expire while the run is parked. The flow comes back to where it was, and times out there."""

from __future__ import annotations

import pytest

from relight import Relight, RunFailedError, StepTimeoutError, flow, sleep, step


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_the_flow_cleans_up_where_it_waited(kind):
    cleaned = []

    @step
    def clean_up() -> None:
        cleaned.append(kind)

    if kind == "async":

        @flow(name="sleeper", timeout="200ms")
        async def sleeper() -> None:
            try:
                await sleep("1h")
            finally:
                await clean_up()

    else:

        @flow(name="sleeper", timeout="200ms")
        def sleeper() -> None:
            try:
                sleep("1h")
            finally:
                clean_up()

    async with Relight("memory:", park_after="20ms") as rl:
        run = await rl.start("sleeper")
        with pytest.raises(RunFailedError) as failed:
            await run.result(timeout="60s")
    assert isinstance(failed.value.__cause__, StepTimeoutError)
    assert cleaned == [kind]
