"""A lease is judged by the monotonic clock as it is now: a loop's own time may stand still while a callback runs."""

from __future__ import annotations

import asyncio
import time

import pytest

from relight import Relight, flow, step


def test_a_lease_that_lapsed_while_a_step_blocked_the_loop_is_doubted_at_once(monkeypatch: pytest.MonkeyPatch):
    uvloop = pytest.importorskip("uvloop")
    found: list[tuple[bool, bool]] = []

    @step
    async def block() -> None:
        run = engine.orchestrator.live["r"]
        before = run.doubtful
        monkeypatch.setattr(run.keeper, "valid_until", time.monotonic() + 0.02)
        time.sleep(0.05)  # noqa: ASYNC251 - on purpose
        found.append((before, run.doubtful))
        monkeypatch.undo()

    @flow(name="lease_clock.blocking")
    async def blocking() -> None:
        await block()

    async def main() -> None:
        nonlocal engine
        async with Relight("memory:") as engine:
            await engine.run(blocking, id="r")

    engine = Relight("memory:")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert found == [(False, True)]
