"""Every run can be explained in one sentence, in each of its states."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relight import Relight, Retry, flow, sleep, spawn, step, wait_for
from relight.flow.registry import Registry
from relight.model.decisions import Action, Decision
from relight.model.lease import Session
from relight.model.replay import TreeState
from relight.model.run import Hold, Run, Status
from relight.recovery.explain import sentence
from relight.recovery.plan import Known
from tests.flows.world import World, until

NOW = 1000.0


def known(status: Status, session: Session | None = None, state: TreeState | None = None, **fields: Any) -> Known:
    row = Run(id="r", root_id="r", flow="f", status=status, created_at=900.0, updated_at=990.0, **fields)
    alive = session is not None and session.fresh
    decision = Decision(Action.RESUME, "its owner died")
    return Known(row, session, alive, state or TreeState(), "", decision, decision, [], {"a#1": ""})


ALIVE = Session(owner="a#1", started_at=0.0, heartbeat_at=995.0, expires_at=1005.0, fresh=True)
LAPSED = Session(owner="a#1", started_at=0.0, heartbeat_at=960.0, expires_at=990.0, fresh=False)

SENTENCES: list[tuple[Known, str]] = [
    (known(Status.PENDING, wake_at=990.0), "was accepted and waits, for 10.0s now, for an orchestrator with room"),
    (known(Status.PENDING, wake_at=990.0, reason="released"), "was released by its last orchestrator and waits"),
    (known(Status.PENDING, owner="a#1"), "was accepted and was driven by a#1, whose session is gone"),
    (known(Status.RUNNING, ALIVE, owner="a#1"), "is running and is driven by a#1, which is alive"),
    (known(Status.RUNNING, LAPSED, owner="a#1"), "silent for 40.0s; recovery will resume it: its owner died"),
    (known(Status.RUNNING, owner="a#1"), "whose session is gone; recovery will resume it"),
    (known(Status.RUNNING), "is about to be taken up again"),
    (
        known(Status.WAITING, wake_at=1060.0),
        "waits, out of memory, for a time or a message; due at 1970-01-01 00:17:40",
    ),
    (known(Status.WAITING, wake_at=960.0), "due for 40.0s, as soon as an orchestrator has room"),
    (known(Status.WAITING), "waits, out of memory, for a time or a message."),
    (known(Status.WAITING, ALIVE, owner="a#1"), "and is driven by a#1, which is alive"),
    *((known(Status.PAUSED, hold=hold, reason="because"), ": because.") for hold in Hold),
    (known(Status.PAUSED), "is paused."),
    (known(Status.PAUSED, hold=Hold.USER, reason="paused by request; ask"), "Run r was paused by request; ask."),
    (
        known(Status.PAUSED, owner="a#1"),
        "was about to go on after a pause, and was driven by a#1, whose session is gone",
    ),
    (known(Status.COMPLETED), "completed at 1970-01-01 00:16:30 UTC."),
    (
        known(Status.FAILED, error=b'{"type":"m:Oops","message":"no"}'),
        "failed at 1970-01-01 00:16:30 UTC with Oops: no.",
    ),
    (known(Status.FAILED, reason="not resumable"), "failed at 1970-01-01 00:16:30 UTC: not resumable."),
    (known(Status.CANCELLED, reason="enough"), "was cancelled at 1970-01-01 00:16:30 UTC: enough."),
    (known(Status.CANCELLED, hold=Hold.RECOVERY, reason="old"), "`relight recovery resume` brings it back."),
]


@pytest.mark.parametrize(("about", "said"), SENTENCES)
def test_sentences(about: Known, said: str):
    told = sentence(about, NOW)
    assert said in told
    assert told.startswith("Run r ")
    assert told.endswith(".")
    assert "\n" not in told


def test_there_is_a_sentence_for_every_status_and_hold():
    told = {(about.row.status, about.row.hold) for about, _ in SENTENCES}
    assert {status for status, _ in told} == set(Status)
    assert {hold for status, hold in told if status is Status.PAUSED} == {*Hold, None}


async def test_a_walk_through_the_states_of_real_runs(world: World, registry: Registry):
    gate = asyncio.Event()

    @step
    async def slow() -> None:
        await gate.wait()

    @step(retry=Retry(attempts=3, delay="1h"))
    async def failing() -> None:
        raise ValueError("no")

    @step(timeout="1h")
    async def timed() -> None:
        await gate.wait()

    @flow
    async def running() -> None:
        await slow()

    @flow
    async def in_a_timed_step() -> None:
        await timed()

    @flow
    async def sleeping() -> None:
        await sleep("1h")

    @flow
    async def signalled() -> None:
        await wait_for("go", timeout="2h")

    @flow
    async def retrying() -> None:
        await failing()

    @flow
    async def joining() -> None:
        await (await spawn(sleeping.with_id("spawned")))

    @flow
    async def short() -> int:
        return 1

    rl = await world.open()
    for one in (running, in_a_timed_step, sleeping, signalled, retrying, joining, short):
        await rl.start(one.with_id(one.name))

    async def says(run_id: str, words: str, engine: Relight | None = None) -> bool:
        return words in (await (engine or world.rl).explain(run_id)).sentence

    await until(lambda: says("running", "is running and is driven by"))
    await until(lambda: says("in_a_timed_step", "it is at step timed"))
    await until(lambda: says("sleeping", "a timer until"))
    await until(lambda: says("signalled", "signal 'go' until"))
    await until(lambda: says("retrying", "attempt 2 of failing until"))
    (backing_off,) = (await rl.explain("retrying")).steps
    assert (backing_off.key, backing_off.state, backing_off.attempt) == ("failing", "backing off", 2)
    assert (backing_off.until, backing_off.last_error) == (world.clock.now() + 3600.0, "ValueError: no")
    await until(lambda: says("joining", "run 'spawned' to end"))
    await until(lambda: says("short", "completed at"))
    await (await rl.get("running")).pause()
    gate.set()
    await until(lambda: says("running", "Run running was paused by request; resume() frees it."))
    assert (await rl.explain("running")).plan.reason == "it is paused by request; resume() frees it"
    await world.park(await rl.get("signalled"))
    assert await says("signalled", "waits, out of memory, for signal 'go'")
    explained = await rl.explain("signalled")
    assert explained.waits_for
    assert (explained.owner, explained.epoch) == (None, 1)
    gate.clear()
    await rl.start(running.with_id("orphan"))
    await until(lambda: says("orphan", "is driven by"))
    registry.remove("running")
    rl = await world.crash_and_reopen(drive=False)
    assert await says("orphan", "whose session is gone; recovery will hold it: flow 'running' is not registered")
    (planned,) = [one for one in await rl.plan() if one.run_id == "orphan"]
    assert planned.stuck
    assert (await rl.explain("orphan")).plan == planned
