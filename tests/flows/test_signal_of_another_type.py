"""If the payload of a signal does not fit, the flow gets an error that it may catch, live and on replay."""

from __future__ import annotations

import asyncio

import pytest

from relight import PayloadError, Relight, flow, step, wait_for
from relight.backends.memory import MemoryStore
from relight.clock import SYSTEM_CLOCK


@pytest.mark.parametrize("early", [True, False], ids=["before the flow waits", "while it waits"])
async def test_a_caught_payload_error_is_replayed(early):
    store = MemoryStore(clock=SYSTEM_CLOCK)

    @step
    async def after() -> int:
        return 1

    @flow
    async def counting() -> list[str]:
        seen = []
        await wait_for("begin")
        for _ in range(2):
            try:
                seen.append(f"got {await wait_for('number', int)}")
            except PayloadError as error:
                assert "; the sender gave it a value of another type" in str(error)
                assert "was it changed" not in str(error)
                seen.append("no number")
            await after()
        await wait_for("end")
        return seen

    async with Relight(store=store) as rl:
        run = await rl.start(counting.with_id("r"))
        for name, payload in [("number", "many"), ("begin", None)] if early else [("begin", None), ("number", "many")]:
            await run.signal(name, payload)
            await asyncio.sleep(0.02)
        await run.signal("number", 7)
        await asyncio.sleep(0.05)
    async with Relight(store=store) as rl:
        run = await rl.get("r")
        await run.signal("end")
        assert await run.result(timeout="60s") == ["no number", "got 7"]
