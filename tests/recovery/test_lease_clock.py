"""A lease is judged by the monotonic clock as it is now: a loop's own time may stand still while a callback runs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from relight import Relight, flow, step
from relight.model.lease import Process
from tests.flows.world import World, until


class StandsStill(asyncio.SelectorEventLoop):
    """As uvloop once did: it reads the clock once in each of its rounds, and its time stands still in between."""

    read = 0.0

    def time(self) -> float:
        return self.read

    def _run_once(self) -> None:
        self.read = time.monotonic()
        super()._run_once()  # type: ignore[misc]  # asyncio's own, which typeshed does not know


def test_a_lease_that_lapsed_while_a_step_blocked_the_loop_is_doubted_at_once(monkeypatch: pytest.MonkeyPatch):
    found: list[tuple[bool, bool, bool]] = []

    @step
    async def block() -> None:
        run, loop = engine.orchestrator.live["r"], asyncio.get_running_loop()
        before, began = run.lease_has_lapsed, loop.time()
        monkeypatch.setattr(run.heartbeats, "valid_until", time.monotonic() + 0.02)
        time.sleep(0.05)  # noqa: ASYNC251 - on purpose
        found.append((before, run.lease_has_lapsed, loop.time() == began))
        monkeypatch.undo()

    @flow(name="lease_clock.blocking")
    async def blocking() -> None:
        await block()

    async def main() -> None:
        nonlocal engine
        async with Relight("memory:") as engine:
            await engine.run(blocking.with_id("r"))

    engine = Relight("memory:")
    with asyncio.Runner(loop_factory=StandsStill) as runner:
        runner.run(main())
    assert found == [(False, True, True)]


# ---- another process claims a run while this one is frozen


async def lapse(rl: Relight, run_id: str) -> None:
    """As if this process was frozen, its lease lapsed, another process claimed the run, and then the heartbeat thread
    woke up first."""
    rl.services.heartbeats.lapses += 1
    row = await rl.services.store.get_run(run_id)
    assert row is not None
    await rl.services.store.note_session(
        "somebody#else", Process(), 3600.0
    )  # otherwise recovery would claim the run from it
    assert await rl.services.store.claim({run_id: row.epoch}, "somebody#else")


async def test_a_step_asks_whose_its_run_is_if_the_lease_lapsed_while_it_waited_for_a_thread(world: World):
    ran: list[int] = []

    @step
    def work() -> None:
        ran.append(1)

    @flow
    async def works() -> None:
        await work()

    rl = await world.open(max_threads=1)
    slot = await rl.services.threads.slot()
    await rl.start(works.with_id("r"))
    await until(lambda: rl.services.threads.wanted == 1)
    await lapse(rl, "r")
    slot.release()
    await until(lambda: not rl.orchestrator.live)
    assert ran == []


async def test_a_step_asks_whose_its_run_is_if_the_lease_lapsed_while_it_was_taken_up(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is committed between the claim and the first step. What counts is the lease under which the run was claimed."""
    ran: list[int] = []

    @step
    async def work() -> None:
        ran.append(1)
        await asyncio.Event().wait()

    @flow
    async def works() -> None:
        await work()

    rl = await world.open(shutdown_grace="0s")
    run = await rl.start(works.with_id("r"))
    await until(lambda: ran)
    await run.pause()
    await world.until_status("paused", run)
    await until(lambda: not rl.orchestrator.live)
    store = rl.services.store
    read, lapsed = store.read, asyncio.Event()

    async def reading(ids: Any) -> Any:
        monkeypatch.undo()
        found = await read(ids)
        await lapse(rl, "r")
        lapsed.set()
        return found

    monkeypatch.setattr(store, "read", reading, raising=False)
    await run.resume()
    await lapsed.wait()
    await until(lambda: not rl.orchestrator.live and not rl.orchestrator.taking)
    assert ran == [1]
