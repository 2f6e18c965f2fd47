"""`recovery.enabled: false`: no orphan is resumed by itself, explain and plan say so, and a run that a person resumes goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from relight import Relight, flow, sleep, step, wait_for
from relight.errors import RunCancelledError, RunStateError, StoreUnavailableError
from relight.model.decisions import Action
from relight.model.run import Status
from relight.ports.store import Commit, CommitResult
from relight.run.live_run import LiveRun
from tests.flows.world import World, until
from tests.recovery.engines import Engines
from tests.recovery.engines import Work as Blocking

OFF: dict[str, Any] = {"recovery": {"enabled": False}, "park_after": "10ms"}


class Work:
    """A run whose process dies in its second step."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.blocked = asyncio.Event()
        self.gate = asyncio.Event()

        @step
        async def first() -> int:
            self.calls.append("first")
            return 1

        @step
        async def second() -> int:
            self.calls.append("second")
            self.blocked.set()
            await self.gate.wait()
            return 2

        @flow
        async def work() -> int:
            return await first() + await second()

        self.flow = work

    async def die(self, world: World) -> None:
        rl = await world.open()
        await rl.start(self.flow.with_id("r"))
        await self.blocked.wait()
        self.gate.set()
        await world.crash()


async def client_beside(world: World) -> tuple[Relight, Relight]:
    """An orchestrator whose recovery is off, and a client, such as the command line."""
    driver = await world.open(**OFF)
    return driver, await world.open(**OFF, drive=False)


async def test_an_orphan_stays_and_plan_and_explain_say_so(world: World):
    work = Work()
    await work.die(world)
    driver, client = await client_beside(world)
    for rl in (driver, client):
        (planned,) = await rl.plan()
        assert (planned.action, planned.verdict, planned.stuck) == (Action.LEAVE, Action.LEAVE, True)
        explained = await rl.explain("r")
        assert "recovery leaves it alone: recovery is off" in explained.sentence
        assert "will resume" not in explained.sentence
    assert await (await client.get("r")).status() is Status.RUNNING
    assert work.calls == ["first", "second"]


async def test_an_orphan_that_a_person_resumes_elsewhere_is_taken_up(world: World):
    work = Work()
    await work.die(world)
    _, client = await client_beside(world)
    await client.resume("r")
    assert await (await client.get("r")).result(timeout="60s") == 3
    assert work.calls == ["first", "second", "second"]


@pytest.mark.parametrize("how", ["engine", "handle"])
async def test_a_paused_run_of_a_dead_process_is_taken_up_when_a_person_resumes_it(world: World, how: str):
    @flow
    async def waits() -> Any:
        return await wait_for("go")

    rl = await world.open()
    run = await rl.start(waits.with_id("r"))
    await run.pause()
    await world.until_status("paused", run)
    await world.crash()
    _, client = await client_beside(world)
    run = await client.get("r")
    await (client.resume("r") if how == "engine" else run.resume())
    await until(lambda: drives(world, run.id))
    await run.signal("go", 7)
    assert await run.result(timeout="60s") == 7


async def drives(world: World, run_id: str) -> bool:
    return any(run_id in engine.orchestrator.live for engine in world._engines)


async def test_a_parked_run_of_a_dead_process_is_cancelled_when_a_person_asks_for_it(world: World):
    @flow
    async def waits() -> Any:
        return await wait_for("go")

    rl = await world.open()
    run = await rl.start(waits.with_id("r"))
    await world.park(run)
    await world.crash()
    _, client = await client_beside(world)
    run = await client.get("r")
    await run.cancel("no longer wanted")
    with pytest.raises(RunCancelledError, match="no longer wanted"):
        await run.result(timeout="60s")


async def test_a_parked_run_of_a_dead_process_can_be_resumed(world: World):
    """With recovery on, the run goes on by itself, and resuming it is refused. With recovery off, no process would wake it."""

    @flow
    async def waits() -> Any:
        return await wait_for("go")

    rl = await world.open()
    run = await rl.start(waits.with_id("r"))
    await world.park(run)
    with pytest.raises(RunStateError, match="waits, out of memory, for signal 'go'"):
        await rl.resume("r")
    await world.crash()
    _, client = await client_beside(world)
    run = await client.get("r")
    await run.signal("go", 7)
    (planned,) = await client.plan()
    assert planned.action is Action.LEAVE
    assert "recovery is off" in planned.reason
    await client.resume("r")
    assert await run.result(timeout="60s") == 7


async def test_a_pending_run_is_refused_for_the_right_reason(world: World, registry: Any):
    @flow
    async def waits() -> Any:
        return await wait_for("go")

    rl = await world.open(drive=False)
    await rl.start(waits.with_id("r"))
    registry.remove("waits")
    with pytest.raises(RunStateError) as refused:
        await rl.resume("r")
    assert "was accepted and waits" in str(refused.value)
    assert "for an orchestrator with room, and with its flow 'waits', to take it up" in str(refused.value)
    assert "not registered in this process" not in str(refused.value)


# ---- messages that a run has not received


async def test_explain_shows_unread_messages(world: World):
    @flow
    async def waits() -> Any:
        return await wait_for("go")

    rl = await world.open()
    run = await rl.start(waits.with_id("r"))
    await run.pause()
    await world.until_status("paused", run)
    for name in ("go", "other"):
        await run.signal(name)
    explained = await rl.explain("r")
    assert [text.partition(" of ")[0] for text in explained.unread] == ["signal 'go'", "signal 'other'"]
    assert "; unread in its inbox: signal 'go' of " in explained.sentence
    await run.resume()
    assert await run.result(timeout="60s") is None
    explained = await rl.explain("r")
    assert explained.unread == []
    assert "unread" not in explained.sentence


async def test_explain_has_the_newest_lines_of_the_log(world: World, monkeypatch: pytest.MonkeyPatch):
    from relight.model.run import LogLine
    from relight.recovery import explain

    monkeypatch.setattr(explain, "LOG_LINES", 10)

    @flow
    async def waits() -> Any:
        return await wait_for("go")

    rl = await world.open()
    await rl.start(waits.with_id("r"))
    await rl.services.store.append_log([LogLine(run_id="r", at=float(n), text=f"line {n}") for n in range(25)])
    explained = await rl.explain("r")
    assert [line.text for line in explained.events] == [f"line {n}" for n in range(15, 25)]


async def test_a_plan_can_be_limited(world: World):
    @flow
    async def waits() -> Any:
        return await wait_for("go")

    rl = await world.open()
    for n in range(7):
        await rl.start(waits.with_id(f"r{n}"))
        world.clock.advance(0.001)
    assert [planned.run_id for planned in await rl.plan(3)] == ["r6", "r5", "r4"]
    assert [row.id for row in await rl.incomplete(3)] == ["r6", "r5", "r4"]
    assert len(await rl.plan()) == len(await rl.incomplete()) == len(await rl.plan(100)) == 7
    for wrong in (0, -1, True, "3"):
        with pytest.raises(ValueError, match="limit="):
            await rl.plan(wrong)  # type: ignore[arg-type]


# ---- several engines whose recovery is off


ALONE = {"recovery": {"enabled": False}}


async def left_behind(engines: Engines, work: Blocking, *run_ids: str) -> None:
    """Leave runs that a closed engine has released."""
    a = await engines.start("a", **ALONE)
    for run_id in run_ids:
        await a.start(work.flow.with_id(run_id))
    await until(lambda: work.begun == len(run_ids))
    await engines.open.pop("a").close()
    work.gate.set()


@pytest.mark.parametrize("by", ["resume", "cancel"])
async def test_what_a_person_frees_is_found_behind_others(engines: Engines, by: str):
    """There is room for one run in memory, and others are due before it."""
    work = Blocking()
    await left_behind(engines, work, "r1", "r2", "r3")
    await engines.start("b", **ALONE, max_concurrent_runs=1)
    client = await engines.start("c", **ALONE, drive=False)
    if by == "resume":
        await client.resume("r3")
    else:
        await (await client.get("r3")).cancel()
    wanted = Status.COMPLETED if by == "resume" else Status.CANCELLED
    await until(lambda: engines.store.runs["r3"].status is wanted)
    assert [engines.store.runs[run_id].status for run_id in ("r1", "r2")] == [Status.PENDING] * 2


@pytest.mark.parametrize("how", ["lost", "closed"])
async def test_what_a_person_freed_goes_on_elsewhere_if_its_code_was_not_called(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, how: str
):
    work, gate, reading = Blocking(), asyncio.Event(), asyncio.Event()
    await left_behind(engines, work, "r")
    client = await engines.start("c", **ALONE, drive=False)
    b = await engines.start("b", **ALONE)
    await b.idle()
    read = engines.store.read

    async def kept_back(*args: Any) -> Any:
        if not reading.is_set() and (engines.store.runs["r"].owner or "").startswith("b#"):
            reading.set()
            await gate.wait()
        return await read(*args)

    monkeypatch.setattr(engines.store, "read", kept_back)
    await client.resume("r")
    await reading.wait()
    await engines.start("d", **ALONE)
    if how == "lost":
        engines.leases["b"].cut = True
        await until(lambda: not b.services.heartbeats.may_drive)
        gate.set()
    else:
        await engines.open.pop("b").close()
    await until(lambda: engines.store.runs["r"].status is Status.COMPLETED)
    assert work.begun == 2


@pytest.mark.parametrize("again", [True, False])
async def test_a_run_whose_accepted_start_was_not_answered_wakes_up(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, again: bool
):
    woken = asyncio.Event()

    @flow
    async def sleeper() -> None:
        await sleep("1s")
        woken.set()

    a = await engines.start("a", **ALONE, park_after="10ms")
    commit, lost = engines.store.commit, False

    async def losing(commits: Sequence[Commit]) -> list[CommitResult]:
        nonlocal lost
        results = await commit(commits)
        if not lost and any(one.create is not None for one in commits):
            lost = True
            raise StoreUnavailableError("the answer was lost")
        return results

    monkeypatch.setattr(engines.store, "commit", losing)
    with pytest.raises(StoreUnavailableError):
        await a.start(sleeper.with_id("r"))
    if again:
        await (await a.start(sleeper.with_id("r"))).result("60s")
    await asyncio.wait_for(woken.wait(), 60)


async def test_a_run_that_is_started_again_after_a_restart_goes_on(engines: Engines):
    work = Blocking()
    await left_behind(engines, work, "r")
    b = await engines.start("b", **ALONE)
    assert await (await b.start(work.flow.with_id("r"))).result("60s") == 7
    assert work.begun == 2


async def test_own_runs_take_no_more_room_than_there_is(engines: Engines):
    begun, gate, most = list[int](), asyncio.Event(), 0

    @step
    async def hard(number: int) -> int:
        begun.append(number)
        await gate.wait()
        return number

    @flow
    async def one(number: int) -> int:
        return await hard(number)

    a = await engines.start("a", **ALONE, max_concurrent_runs=2)
    runs = [await a.start(one.with_id(f"r{number}"), number) for number in range(8)]
    enter = a.orchestrator.memory.enter

    def entered(run: LiveRun) -> None:
        nonlocal most
        enter(run)
        most = max(most, len(a.orchestrator.live))

    a.orchestrator.memory.enter = entered  # type: ignore[method-assign]
    gate.set()
    assert [await run.result("60s") for run in runs] == list(range(8))
    assert most == 2


@pytest.mark.parametrize("knows", ["first", "last"])
async def test_what_a_person_frees_is_left_to_a_process_that_knows_its_flow(engines: Engines, knows: str):
    work = Blocking()
    await left_behind(engines, work, "r")

    @flow
    async def other() -> None: ...

    kinds = {"first": [work.flow], "other": [other]}
    for name in ("first", "other") if knows == "first" else ("other", "first"):
        await engines.start(name, **ALONE, flows=kinds[name])
    client = await engines.start("c", **ALONE, drive=False, flows=[work.flow])
    await client.resume("r")
    assert await (await client.get("r")).result("60s") == 7
