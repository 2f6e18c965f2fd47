"""Several engines on one store: their leases tell them apart and say which are alive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import pytest

from relight import Relight, flow, sleep, step
from relight.model.lease import Orphaned
from relight.model.run import Hold, Message, MessageKind, Status
from relight.orchestrator.orchestrator import Orchestrator
from relight.ports.store import Commit, CommitResult, Fenced
from relight.process import mark_dead
from relight.run.live_run import LiveRun
from tests.flows.world import until
from tests.recovery.engines import TTL, Engines, Work, is_cancelled, owner_is


async def test_the_runs_of_a_living_engine_are_left_alone(engines: Engines):
    work = Work()
    a = await engines.start("a")
    run = await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    b = await engines.start("b", recovery={"check_interval": "0.1s"})
    assert b._recovery is not None
    before = time.monotonic()
    await until(lambda: time.monotonic() - before > 2 * TTL)  # several heartbeats and many checks
    assert (await b.row("r")).owner == a.services.owner
    assert (await b.explain("r")).owner_alive
    work.gate.set()
    assert await run.result(timeout="60s") == 7
    assert work.begun == 1


async def test_a_step_that_blocks_the_loop_for_longer_than_the_ttl_does_not_cost_the_lease(engines: Engines):
    @step
    async def blocking() -> int:
        time.sleep(2 * TTL)  # noqa: ASYNC251 - the block is the point
        return 1

    @flow
    async def work() -> int:
        return await blocking()

    a = await engines.start("a")
    fenced = a.metrics
    assert await a.run(work) == 1
    assert a.services.heartbeats.may_drive
    assert a.services.heartbeats.lapses == 0
    assert fenced.value("relight_leases_lost_total") == 0


async def test_an_engine_that_cannot_renew_its_lease_lets_go_before_the_lapse_and_comes_back(
    engines: Engines, caplog: pytest.LogCaptureFixture
):
    work = Work()
    a = await engines.start("a")
    await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    engines.leases["a"].cut = True
    await until(lambda: "[LEASE_LOST]" in caplog.text)
    (lost,) = [record for record in caplog.records if "[LEASE_LOST]" in record.message]
    ago = time.time() - lost.created
    assert a.services.heartbeats.valid_until > time.monotonic() - ago, "told only after the lapse"
    await until(owner_is(a, "r", None))
    assert (await a.row("r")).status is Status.PENDING
    assert work.cancelled == 1
    late = await a.start(work.flow.with_id("late"))  # accepted, and left to others
    assert (await late.describe()).owner is None
    assert "waits" in (await a.explain("late")).sentence
    assert work.begun == 1
    engines.leases["a"].cut = False
    work.gate.set()
    assert await (await a.get("r")).result(timeout="60s") == 7
    assert await late.result(timeout="60s") == 7
    assert "[LEASE_REGAINED]" in caplog.text
    assert a.metrics.value("relight_leases_lost_total") == 1


async def test_another_takes_over_what_was_let_go(engines: Engines):
    work = Work()
    a = await engines.start("a")
    await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    b = await engines.start("b")
    engines.leases["a"].cut = True
    await until(owner_is(b, "r", "b"))
    work.gate.set()
    assert await (await b.get("r")).result(timeout="60s") == 7
    assert work.begun == 2
    tokens = [line.token for line in await b.services.store.read_log("r", "_server", 0, 10)]
    assert tokens[0] == "RUN_RELEASED"


async def claimed_and_not_read(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, work: Work, gate: asyncio.Event
) -> tuple[Relight, Relight]:
    """Engine b has claimed run "r", which engine a has let go of. It reads the run when the gate is opened."""
    reading = asyncio.Event()
    a = await engines.start("a")
    await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    b = await engines.start("b")
    assert b._recovery is not None
    await b._recovery.caught_up.wait()
    read = engines.store.read

    async def kept_back(*args: Any) -> Any:
        reading.set()
        await gate.wait()
        return await read(*args)

    monkeypatch.setattr(engines.store, "read", kept_back)
    engines.leases["a"].cut = True
    await reading.wait()
    return a, b


async def test_what_is_taken_up_while_the_lease_is_lost_is_let_go(engines: Engines, monkeypatch: pytest.MonkeyPatch):
    """It came into memory after the engine had let go of all runs there. If it were driven, no other engine could ever
    take it up."""
    work, gate = Work(), asyncio.Event()
    a, b = await claimed_and_not_read(engines, monkeypatch, work, gate)
    engines.leases["b"].cut = True
    await until(lambda: not b.services.heartbeats.may_drive)
    gate.set()
    await until(owner_is(a, "r", None))
    assert (await a.row("r")).status is Status.PENDING
    assert work.begun == 1


async def test_what_was_being_started_while_the_lease_was_lost_is_let_go(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
):
    work, gate, creating = Work(), asyncio.Event(), asyncio.Event()
    a = await engines.start("a")
    commit = engines.store.commit

    async def held_back(commits: Sequence[Commit]) -> list[CommitResult]:
        if any(one.create is not None for one in commits):
            creating.set()
            await gate.wait()
        return await commit(commits)

    monkeypatch.setattr(engines.store, "commit", held_back)
    started = asyncio.create_task(a.start(work.flow.with_id("r")))
    await creating.wait()
    engines.leases["a"].cut = True
    await until(lambda: not a.services.heartbeats.may_drive)
    gate.set()
    await started
    await until(owner_is(a, "r", None))
    assert work.begun == 0


class Told:
    """Posts a message to run "r" when it has come into memory, before the engine does anything else with it."""

    def __init__(self, engines: Engines, orchestrator: Orchestrator, kind: MessageKind) -> None:
        self.store, self.orchestrator, self.kind = engines.store, orchestrator, kind
        self.in_time: asyncio.Task[bool] | None = None
        self._drive = orchestrator.drive

    def drive(self, *args: Any) -> None:
        self.in_time = asyncio.create_task(self._tell())
        self._drive(*args)

    async def _tell(self) -> bool:
        await self.store.post([Message(run_id="r", kind=self.kind, name="go", payload=b"1")])
        await self.orchestrator.delivery.deliver_new()
        run = self.orchestrator.live["r"]
        return run.inbox.missed and not run.departing


TOLD = pytest.mark.parametrize("kind", [MessageKind.PAUSE, MessageKind.SIGNAL])
CANCEL = Message(run_id="r", kind=MessageKind.CANCEL, payload=b'"enough"')


@TOLD
async def test_what_a_run_is_told_just_before_its_release_does_not_hide_what_it_was_told_earlier(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, kind: MessageKind
):
    """The run came into memory too late, so it did not get its inbox. If it received a pause now, and left memory
    because of it, the earlier request to cancel would stay unread."""
    work, gate = Work(), asyncio.Event()
    a, b = await claimed_and_not_read(engines, monkeypatch, work, gate)
    await engines.store.post([CANCEL])
    engines.leases["b"].cut = True
    await until(lambda: not b.services.heartbeats.may_drive)
    told = Told(engines, b.orchestrator, kind)
    monkeypatch.setattr(b.orchestrator, "drive", told.drive)
    gate.set()
    await until(lambda: told.in_time is not None and "r" not in b.orchestrator.live)
    assert told.in_time is not None
    assert await told.in_time, "it was heard, or came after the release"
    engines.leases["a"].cut = engines.leases["b"].cut = False
    await until(is_cancelled(a))
    assert work.begun == 1


@TOLD
async def test_what_a_new_run_is_told_while_its_engine_stops_does_not_hide_what_it_was_told_earlier(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, kind: MessageKind
):
    work, gate, created = Work(), asyncio.Event(), asyncio.Event()
    a, b = await engines.start("a"), await engines.start("b")
    commit, orchestrator = engines.store.commit, b.orchestrator

    async def held_back(commits: Sequence[Commit]) -> list[CommitResult]:
        results = await commit(commits)
        if any(one.create is not None for one in commits):
            created.set()
            await gate.wait()
        return results

    monkeypatch.setattr(engines.store, "commit", held_back)
    started = asyncio.create_task(b.start(work.flow.with_id("r")))
    await created.wait()
    closing = asyncio.create_task(engines.open.pop("b").close())
    await until(lambda: orchestrator.stopping)
    await engines.store.post([CANCEL])
    await orchestrator.delivery.deliver_new()
    told = Told(engines, orchestrator, kind)
    monkeypatch.setattr(orchestrator, "drive", told.drive)
    gate.set()
    await started
    assert told.in_time is not None
    assert await told.in_time, "it was heard, or came after the release"
    await closing
    await until(is_cancelled(a))
    assert work.begun == 0


async def test_a_dead_engine_s_runs_are_taken_over_when_its_lease_lapses(engines: Engines):
    work = Work()
    a = await engines.start("a")
    for n in range(30):
        await a.start(work.flow.with_id(f"r{n}"))
    await until(lambda: work.begun == 30)
    b = await engines.start("b")
    a.services.heartbeats.stop_now()  # as if it were dead; its loop goes on, as if frozen just before a commit
    lapses = a.services.heartbeats.valid_until
    # Not the owner in the row: an engine that finds b's lease corrects the row, also before b has claimed the run.
    await until(lambda: b.metrics.value("relight_recovery_claims_total") == 30)
    assert time.monotonic() >= lapses - 0.05, "taken before it lapsed"
    work.gate.set()
    for n in range(30):
        assert await (await b.get(f"r{n}")).result(timeout="60s") == 7
    assert work.begun == 60
    await until(lambda: a.metrics.value("relight_false_deaths_total") == 30)


async def test_an_engine_that_wakes_after_its_lapse_asks_before_the_next_step(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
):
    """The engine was frozen between two steps. It must not execute the second, since another engine may have done that."""
    ran: list[str] = []
    where: list[str] = ["a"]
    advance, held = LiveRun.advance, list[LiveRun]()
    monkeypatch.setattr(LiveRun, "advance", lambda run: None if run in held else advance(run))

    @step
    async def first() -> None:
        ran.append("first")
        if where == ["a"]:
            held.append(frozen)  # the step's end is committed, and the flow does not go on

    @step
    async def second() -> None:
        ran.append(f"second at {where[0]}")

    @flow
    async def work() -> None:
        await first()
        await second()

    a = await engines.start("a")
    await a.start(work.with_id("r"))
    frozen = a.orchestrator.live["r"]
    await until(lambda: ran == ["first"])
    await until(lambda: frozen.writer.idle)
    heartbeats = a.services.heartbeats
    heartbeats.stop_now()
    where[0] = "b"
    b = await engines.start("b")
    await (await b.get("r")).result(timeout="60s")
    assert ran == ["first", "second at b"]
    heartbeats.lapses += 1  # what the heartbeat thread does when it wakes first and renews the lapsed lease
    heartbeats.valid_until = time.monotonic() + 100
    where[0] = "a"
    held.clear()
    frozen.advance()
    await until(lambda: not a.orchestrator.live)
    assert ran == ["first", "second at b"]
    assert a.metrics.value("relight_false_deaths_total") == 1
    assert a.metrics.value("relight_fenced_writes_total") == 0, "it asked, and had nothing to record"


async def test_two_engines_of_one_name_on_two_machines_are_told_apart(
    engines: Engines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    work = Work()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("relight.process._machine", lambda: "another boot of another machine")
        a = await engines.start("same")
    await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    engines.open["first"] = engines.open.pop("same")
    b = await engines.start("same")
    await until(lambda: "[ORCHESTRATOR_ID_SHARED]" in caplog.text)
    assert b.services.owner != a.services.owner
    assert (await b.row("r")).owner == a.services.owner
    work.gate.set()
    assert await (await b.get("r")).result(timeout="60s") == 7
    assert work.begun == 1


async def test_a_restart_on_the_same_machine_need_not_wait_for_the_lapse(engines: Engines):
    work = Work()
    a = await engines.start("a", recovery={"lease_ttl": "1h"})
    await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    a.services.heartbeats.stop_now()
    mark_dead(a.services.owner)  # the process of that session is gone
    engines.open["dead"] = engines.open.pop("a")
    again = await engines.start("a", recovery={"lease_ttl": "1h"})
    await until(lambda: work.begun == 2)
    work.gate.set()
    assert await (await again.get("r")).result(timeout="60s") == 7


async def test_a_stale_timeout_is_waited_for(engines: Engines):
    work = Work()
    a = await engines.start("a")
    await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    beat = time.monotonic()
    a.services.heartbeats.stop_now()
    b = await engines.start("b", recovery={"stale_timeout": f"{3 * TTL}s"})
    await until(owner_is(b, "r", "b"))
    assert time.monotonic() - beat >= 2 * TTL
    work.gate.set()
    assert await (await b.get("r")).result(timeout="60s") == 7


async def test_a_client_starts_runs_and_drives_none(engines: Engines):
    work = Work()
    work.gate.set()
    client = await engines.start("client", drive=False)
    run = await client.start(work.flow.with_id("r"))
    assert (await run.describe()).status is Status.PENDING
    assert "waits" in (await client.explain("r")).sentence
    a = await engines.start("a")
    assert await run.result(timeout="60s") == 7
    assert await (await a.get("r")).status() is Status.COMPLETED
    sessions = await a.services.heartbeats.call(lambda leases: leases.list_orchestrators())
    assert [session.name for session in sessions] == ["a"]


async def test_many_orphans_are_driven_although_few_fit_into_memory(engines: Engines):
    @step
    async def quick() -> int:
        return 1

    @flow
    async def work() -> int:
        await sleep("0ms")
        return await quick()

    client = await engines.start("client", drive=False)
    a = await engines.start("a", max_concurrent_runs=200)
    handles = [await client.start(work) for _ in range(150)]
    a.services.heartbeats.stop_now()
    with contextlib.suppress(Exception):
        a.orchestrator.memory.stopping = True
    await engines.start("b", max_concurrent_runs=7)
    for handle in handles:
        assert await handle.result(timeout="60s") == 1


async def test_a_heartbeat_thread_that_is_stopped_in_the_middle_of_a_heartbeat_ends(engines: Engines):
    """A heartbeat need not let the loop do anything else, as on SQLite. When it was stopped there, it once went on for ever."""
    a = await engines.start("a")
    heartbeats = a.services.heartbeats
    beat = engines.leases["a"].heartbeat

    async def last() -> bool:
        heartbeats._stop.set()
        return await beat()

    engines.leases["a"].heartbeat = last  # type: ignore[method-assign]
    thread = heartbeats._thread
    assert thread is not None
    await until(lambda: not thread.is_alive())


async def test_an_engine_whose_closing_is_broken_off_falls_silent(engines: Engines, monkeypatch: pytest.MonkeyPatch):
    """No engine drives its runs then. If the heartbeats went on, no other engine could take them up."""
    a = await engines.start("a")
    thread = a.services.heartbeats._thread
    assert thread is not None

    async def never(grace_seconds: float, *_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(a.orchestrator, "stop", never)
    closing = asyncio.create_task(a.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await until(lambda: not thread.is_alive())


async def test_a_run_held_because_its_flow_is_unknown_is_passed_on_to_a_process_that_knows_it(engines: Engines):
    work, room = Work(), asyncio.Event()

    @step
    async def stay() -> None:
        await room.wait()

    @flow
    async def in_the_way() -> None:
        await stay()

    stranger = await engines.start("stranger", flows=[])
    knows, client = await engines.start("knows", max_concurrent_runs=1), await engines.start("client", drive=False)
    assert knows._recovery is not None
    await knows._recovery.caught_up.wait()
    await until(lambda: not knows.orchestrator.waker._free_again)  # it has looked, and found no freed run
    await knows.start(in_the_way)  # so that the one that does not know the flow comes first
    await client.start(work.flow.with_id("r"))

    async def held() -> bool:
        return (await stranger.row("r")).hold is Hold.DEFINITION

    await until(held)
    work.gate.set()
    room.set()
    assert await (await knows.get("r")).result(timeout="60s") == 7


async def test_a_run_that_is_fenced_without_a_new_owner_goes_on(engines: Engines, monkeypatch: pytest.MonkeyPatch):
    """The store has refused a commit for whatever reason. The row still names this engine, so no other engine would
    take the run up."""
    work = Work()
    rl = await engines.start("a", max_concurrent_runs=1)
    assert rl._recovery is not None
    await rl._recovery.caught_up.wait()
    run = await rl.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    commit = engines.store.commit

    async def refuse(commits: Sequence[Commit]) -> list[CommitResult]:
        monkeypatch.undo()
        return [Fenced(one.epoch, rl.services.owner) for one in commits]

    monkeypatch.setattr(engines.store, "commit", refuse)
    work.gate.set()
    assert await run.result(timeout="60s") == 7
    assert work.begun == 2
    assert engines.store.commit == commit
    assert await rl.run(work.flow) == 7, "its room is free again"


async def test_an_engine_that_regains_its_lease_looks_for_orphans_at_once(engines: Engines):
    """It was told of the orphans while it could claim no run, and it is not told again."""
    work = Work()
    a = await engines.start("a", recovery={"check_interval": "1h"})
    b = await engines.start("b")
    run = await b.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    recovery = a._recovery
    assert recovery is not None
    told, orphans = list[str](), recovery.orphans

    def telling(orphaned: Orphaned) -> None:
        orphans(orphaned)
        told.append(orphaned.owner)

    recovery.orphans = telling  # type: ignore[method-assign]
    engines.leases["a"].cut = True
    await until(lambda: not a.services.heartbeats.may_drive)
    b.services.heartbeats.stop_now()
    await until(lambda: b.services.owner in told)
    await until(lambda: recovery._ticker.resting)  # and it has looked, and could claim nothing
    assert (await a.row("r")).owner == b.services.owner
    engines.leases["a"].cut = False
    await until(owner_is(a, "r", "a"))
    work.gate.set()
    assert await run.result(timeout="60s") == 7


async def test_an_engine_that_is_not_listed_itself_takes_no_other_for_dead(engines: Engines):
    """As after a restore of the store: the sessions are gone, and all engines are alive."""
    work = Work()
    a, b = await engines.start("a"), await engines.start("b")
    await b.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    assert a._recovery is not None
    await a._recovery.caught_up.wait()
    for leases in engines.leases.values():
        leases.cut = True  # otherwise a heartbeat would list them again
    engines.store.data.sessions.clear()
    assert await a._recovery.round(100) == 0
