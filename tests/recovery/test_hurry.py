"""The lease is lost while a run is leaving memory already, for another reason and with a longer grace: the time until the lease
lapses counts, and not that grace. After that, another process may execute the run's steps."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from relight import Relight, flow, step
from relight.backends.memory import MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.model.run import Message, MessageKind
from relight.run import leaving
from tests.flows.world import until
from tests.recovery.engines import Work


def engine() -> Relight:
    """With an hour for the steps of a run that is paused, and half a second for those of one that loses its lease."""
    return Relight(store=MemoryStore(clock=SYSTEM_CLOCK), shutdown_grace="1h", recovery={"lease_ttl": "3s"})


@pytest.mark.parametrize("leaves", ["paused", "stops"])
async def test_a_lease_that_is_lost_in_the_turn_in_which_a_departure_begins_shortens_its_grace(leaves: str):
    work = Work()
    rl = engine()
    await rl.open()
    await rl.start(work.flow.with_id("r"))
    await until(lambda: work.begun)
    orchestrator = rl.orchestrator
    live: Any = orchestrator.live["r"]
    if leaves == "paused":
        (number,) = await rl.services.store.post([Message(run_id="r", kind=MessageKind.PAUSE, at=0.0)])
        assert number is not None
        live.deliver(Message(id=number, run_id="r", kind=MessageKind.PAUSE))
        assert live.departing
    else:  # its departure has begun, and its task has not
        assert leaving._begin_departure(live, "its orchestrator stops")
        rl.services.background.start(
            leaving._depart(live, "its orchestrator stops", 3600.0, None), "depart", live.broke
        )
    assert live.departure.calm is None
    orchestrator.let_go_of_all()
    try:
        await until(lambda: work.cancelled)
        await until(lambda: "r" not in orchestrator.live)
    finally:
        work.gate.set()  # closing would wait for it
        await rl.close()


async def test_a_lease_that_is_lost_while_threads_unwind_shortens_their_grace():
    entered, gate, unwinds, late = threading.Event(), threading.Event(), threading.Event(), threading.Event()

    @step
    def work() -> None:
        entered.set()
        gate.wait()

    @flow
    def slow_to_go() -> None:
        try:
            work()
        finally:
            unwinds.set()
            late.wait()

    async with engine() as rl:
        run = await rl.start(slow_to_go.with_id("r"))
        await until(entered.is_set)
        await run.pause()
        await until(lambda: rl.orchestrator.live["r"].departing)
        gate.set()
        await until(unwinds.is_set)
        live = rl.orchestrator.live["r"]
        await until(lambda: live.turns.gone is not None)
        rl.orchestrator.let_go_of_all()
        try:
            await until(lambda: "r" not in rl.orchestrator.live)
            assert (await rl.row("r")).status == "paused"
        finally:
            late.set()
