"""A bug that one run brings out harms that run only, and not the runs that are handled together with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from relight import Relight, flow, step, wait_for
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.backends.sqlite.store import SqliteStore
from relight.clock import SYSTEM_CLOCK
from relight.model.lease import Acquired, OwnedBy
from relight.model.run import Run, Status
from relight.recovery import orphans, plan, take_up, unreadable
from relight.recovery.facts import facts_of
from relight.run import inbox, leaving
from relight.run.live_run import LiveRun
from relight.run.phase import Phase
from relight.testing.conformance.build import created, new_run
from tests.flows.world import World, until

FAST = {"lease_ttl": "1s", "check_interval": "0.2s"}


class BugError(Exception):
    """An error that no part of the engine should raise."""


class Waiting:
    """Runs that wait for a signal. The second run brings out a bug."""

    names = ("first", "bad", "last")

    def __init__(self) -> None:
        @flow
        async def listens() -> Any:
            return await wait_for("go")

        self.flow = listens

    async def start(self, rl: Relight) -> None:
        for name in self.names:
            await rl.start(self.flow.with_id(name))
        for name in self.names:
            await until(lambda name=name: _is(rl, name, "waiting"))

    async def heard(self, rl: Relight, *names: str) -> None:
        """These runs go on."""
        for name in names:
            handle = await rl.get(name)
            await handle.signal("go", name)
            assert await handle.result(timeout="60s") == name


async def _is(rl: Relight, name: str, status: str) -> bool:
    return (await rl.row(name)).status == status


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def breaking(real: Callable[..., Any], run_id: Callable[..., str], times: int = 1) -> Callable[..., Any]:
    """Raises for the bad run, so often."""
    left = [times]

    def call(*args: Any, **kwargs: Any) -> Any:
        if run_id(*args, **kwargs) == "bad" and left[0]:
            left[0] -= 1
            raise BugError("brought out by one run")
        return real(*args, **kwargs)

    return call


def said(caplog: pytest.LogCaptureFixture) -> bool:
    return any("[INTERNAL_ERROR]" in record.getMessage() for record in caplog.records)


async def test_a_message_that_breaks_its_run_reaches_the_others(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The run that broke receives the message when it is back."""
    caplog.set_level(logging.CRITICAL, logger="relight")
    path = tmp_path / "relight.db"
    async with Relight(path, park_after="1h") as rl, Relight(path, drive=False) as client:
        await waiting.start(rl)
        monkeypatch.setattr(inbox, "_hear", breaking(inbox._hear, lambda run, _: str(run.id)))
        for name in waiting.names:
            await (await client.get(name)).signal("go", name)
        for name in waiting.names:
            assert await (await rl.get(name)).result(timeout="60s") == name
        assert [part.failures for part in rl.health().parts if part.name == "waker"] == [0]
        assert said(caplog)


async def test_a_run_that_cannot_be_let_go_of_does_not_keep_the_engine_from_closing(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "relight.db"
    rl = Relight(path, park_after="1h")
    await rl.open()
    await waiting.start(rl)
    monkeypatch.setattr(leaving, "park", breaking(leaving.park, lambda run: str(run.id)))
    store = rl.services.store
    await rl.close()
    assert said(caplog)
    assert isinstance(store, SqliteStore)
    assert store._writer is None  # it is closed
    async with Relight(path) as rl:
        for name in waiting.names:
            assert (await rl.row(name)).owner in (None, rl.services.owner)
        await waiting.heard(rl, *waiting.names)


async def test_a_lost_lease_is_let_go_of_run_by_run(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with Relight(tmp_path / "relight.db", park_after="1h") as rl:
        await waiting.start(rl)
        monkeypatch.setattr(leaving, "park", breaking(leaving.park, lambda run: str(run.id)))
        rl.orchestrator.let_go_of_all()
        rl.orchestrator.lease_regained(lapsed=True)
        await waiting.heard(rl, *waiting.names)


async def test_a_watcher_that_breaks_hides_nothing_from_the_other_watchers(
    waiting: Waiting, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async with Relight(tmp_path / "relight.db", park_after="1h") as rl:
        await waiting.start(rl)
        told: list[Run | None] = []

        def breaks(row: Run | None) -> None:
            raise BugError("a watcher")

        for watcher in (breaks, told.append):
            rl.orchestrator.watch("first", watcher)
            rl.orchestrator.watch("last", watcher)
        await waiting.heard(rl, *waiting.names)
        ended = [row.id for row in told if row is not None and row.status is Status.COMPLETED]
        assert sorted(ended) == ["first", "last"]
        assert said(caplog)
        rl.orchestrator.watchers._watchers.clear()


# ---- taking up


class Crashed:
    """Runs whose process has died. The second run brings out a bug."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gate = asyncio.Event()
        begun: list[str] = []

        @step
        async def hang(name: str) -> str:
            begun.append(name)
            await self.gate.wait()
            return name

        @flow
        async def hanging(name: str) -> str:
            return await hang(name)

        self.flow, self.begun = hanging, begun

    async def crash(self) -> None:
        rl = await self.world.open()
        for name in Waiting.names:
            await rl.start(self.flow.with_id(name), name)
        await until(lambda: len(self.begun) == 3)
        await self.world.crash()
        self.gate.set()

    async def recovered(self, rl: Relight, *names: str) -> None:
        for name in names:
            assert await (await rl.get(name)).result(timeout="60s") == name


async def test_a_run_that_cannot_be_decided_on_is_held_and_the_others_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = Crashed(world)
    await crashed.crash()
    record = take_up._record_recovery
    monkeypatch.setattr(take_up, "_record_recovery", breaking(record, lambda run, *_: str(run.id)))
    rl = await world.open()
    await crashed.recovered(rl, "first", "last")
    row = await world.until_status("paused", await rl.get("bad"))
    assert "BugError" in row.reason
    await (await rl.get("bad")).resume()
    await crashed.recovered(rl, "bad")


async def test_a_run_that_cannot_even_be_held_is_looked_at_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crashed = Crashed(world)
    await crashed.crash()
    record = take_up._record_recovery
    monkeypatch.setattr(take_up, "_record_recovery", breaking(record, lambda run, *_: str(run.id)))
    monkeypatch.setattr("relight.orchestrator.waking.LOST_SECONDS", 0.2)
    monkeypatch.setattr("relight.orchestrator.waking.CHECK_SECONDS", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(unreadable, "hold", breaking(unreadable.hold, lambda _, row, *__: str(row.id)))
        rl = await world.open()
        await crashed.recovered(rl, *Waiting.names)
    assert said(caplog)
    assert all(part.failures == 0 for part in rl.health().parts)


@pytest.mark.parametrize("owners", [1, 3])
async def test_an_orphan_that_breaks_recovery_does_not_strand_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch, owners: int
) -> None:
    """The others are of the same dead owner, or of another."""
    crashed = Crashed(world)
    if owners == 1:
        await crashed.crash()
    else:
        engines = [await world.open(recovery={"enabled": False}) for _ in range(owners)]
        for rl, name in zip(engines, Waiting.names, strict=True):
            await rl.start(crashed.flow.with_id(name), name)
        await until(lambda: len(crashed.begun) == 3)
        for rl in engines:
            await world.crash(rl)
        crashed.gate.set()
    monkeypatch.setattr(orphans, "facts_of", breaking(facts_of, lambda _, row, **__: str(row.id), times=10**9))
    rl = await world.open(recovery={"check_interval": "1h"})
    await crashed.recovered(rl, "first", "last")
    monkeypatch.undo()
    assert rl._recovery is not None
    await rl._recovery.round(100, starting=True)
    await crashed.recovered(rl, "bad")


async def test_a_run_that_cannot_be_decided_on_is_in_the_plan_with_the_others(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with Relight(tmp_path / "relight.db", park_after="1h") as rl:
        await waiting.start(rl)
        monkeypatch.setattr(plan, "facts_of", breaking(facts_of, lambda _, row, **__: str(row.id), times=10**9))
        found = {one.run_id: one for one in await rl.plan()}
        assert set(found) == set(waiting.names)
        assert "BugError" in found["bad"].reason
        assert [name for name, one in found.items() if one.stuck] == ["bad"]
        assert "BugError" in (await rl.explain("bad")).plan.trouble


async def test_uncertain_runs_that_break_do_not_hide_others(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Runs that have crashed are taken up, although the look at runs that have not crashed breaks every time."""
    async with Relight(tmp_path / "relight.db", park_after="1h") as rl:
        await waiting.start(rl)
        left: dict[str, LiveRun] = {name: rl.orchestrator.live.pop(name) for name in ("bad", "last")}

        async def breaks(rows: list[Run], *, crashed: bool) -> int:
            if not crashed:
                raise BugError("taking up")
            return await take_up.take_up(rl.orchestrator, rows, crashed=crashed)

        original = rl.orchestrator.uncertain._take_up
        monkeypatch.setattr(rl.orchestrator.uncertain, "_take_up", breaks)
        rl.orchestrator.check_ownership(["bad"], crashed=False)
        rl.orchestrator.check_ownership(["last"], crashed=True)
        await until(lambda: "last" in rl.orchestrator.live)
        monkeypatch.setattr(rl.orchestrator.uncertain, "_take_up", original)
        await until(lambda: "bad" in rl.orchestrator.live)
        for run in left.values():
            run.stopping, run.phase = "lost", Phase.LEFT
            run.loop.unwind("lost")
        await waiting.heard(rl, *waiting.names)


class Apart(MemoryLeases):
    """Leases that are kept apart from the store. They say of every run that another owner has its lease."""

    in_store = False

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        return {run_id: OwnedBy("holder#1", SYSTEM_CLOCK.now() + 60) for run_id in run_ids}


class Uncorrectable(MemoryStore):
    async def correct_owner(self, run_id: str, epoch: int, owner: str) -> bool:
        if run_id == "bad":
            raise BugError("correcting")
        return await super().correct_owner(run_id, epoch, owner)


async def test_an_owner_that_cannot_be_corrected_costs_its_run_only(caplog: pytest.LogCaptureFixture) -> None:
    store = Uncorrectable(clock=SYSTEM_CLOCK)
    await created(store, *(new_run(name, owner="gone#1") for name in Waiting.names))
    async with Relight(store=store, lease_manager=Apart(store, SYSTEM_CLOCK), recovery=FAST) as rl:
        for name in ("first", "last"):
            await until(lambda name=name: _owner_is(rl, name, "holder#1"))
        assert (await rl.row("bad")).owner == "gone#1"
        assert said(caplog)
        assert [part.failures for part in rl.health().parts if part.name == "recovery"] == [0]


async def _owner_is(rl: Relight, name: str, owner: str) -> bool:
    return (await rl.row(name)).owner == owner


async def test_a_run_whose_fencing_breaks_does_not_strand_the_batch(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "relight.db"
    async with Relight(path, park_after="1h") as rl:
        await waiting.start(rl)
        bad = rl.orchestrator.live["bad"]
        bad.writer.epoch -= 1  # as if another had claimed it
        monkeypatch.setattr(leaving, "fenced", breaking(leaving.fenced, lambda run, _: str(run.id)))
        runs = [rl.orchestrator.live[name] for name in waiting.names]
        for run in runs:
            run.writer.confirm_ownership()
        await asyncio.gather(*(run.writer.committed() for run in runs))
        assert said(caplog)
        assert [part.failures for part in rl.health().parts if part.name.startswith("recorder")] == [0]
        await waiting.heard(rl, *waiting.names)
