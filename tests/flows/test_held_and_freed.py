"""A run that cannot go on is held, not failed. A caller that has freed it may wait for its result at once."""

from __future__ import annotations

from typing import Any

import pytest

from relight import (
    Handle,
    NonDeterminismError,
    Relight,
    UnknownFlowError,
    VersionMismatchError,
    flow,
    now,
    random,
    step,
    wait_for,
)
from relight.backends.memory import MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.model import replay
from relight.model.run import Hold, Message, MessageKind, RunChange, Status
from relight.recovery import take_up, upgrades
from tests.flows.world import World, until


@pytest.fixture
def store():
    """A store that keeps its data from one engine to the next."""
    return MemoryStore(clock=SYSTEM_CLOCK)


async def has_status(run: Handle[Any], status: Status) -> None:
    async def reached() -> bool:
        return await run.status() == status

    await until(reached)


async def test_another_kind_of_value_than_recorded_holds_the_run(store, registry, caplog):
    def define(value):
        @flow
        async def valued() -> str:
            seen = value()
            await wait_for("go")
            return str(seen)

        return valued

    async with Relight(store=store) as rl:
        run = await rl.start(define(now).with_id("r"))
        await has_status(run, Status.WAITING)
    registry.remove("valued")
    define(random)
    async with Relight(store=store) as rl:
        run = await rl.get("r")
        await run.signal("go")  # a parked run is taken up when it gets a message
        with pytest.raises(NonDeterminismError, match=r"'\$random' where its journal holds '\$now'"):
            await run.result(timeout="60s")
        assert (await run.describe()).hold is Hold.NONDETERMINISM
    assert "[NONDETERMINISM] run r: the flow asks for" in caplog.text


async def test_the_result_of_a_run_can_be_awaited_as_soon_as_its_flow_is_registered(store, registry):
    @flow
    async def vanishing() -> str:
        return str(await wait_for("go"))

    async with Relight(store=store) as rl:
        run = await rl.start(vanishing.with_id("r"))
        await has_status(run, Status.WAITING)
    registry.remove("vanishing")
    async with Relight(store=store) as rl:
        run = await rl.get("r")
        await run.signal("go", "gone")
        with pytest.raises(UnknownFlowError):
            await run.result(timeout="60s")
    registry.add(vanishing)
    async with Relight(store=store) as rl:
        run = await rl.get("r")
        assert await run.result(timeout="60s") == "gone"


async def test_the_result_of_a_held_run_can_be_awaited_as_soon_as_it_is_resumed(store, registry):
    def define(number):
        source = f"""
@step
async def changing() -> int:
    return {number}
"""
        names: dict[str, Any] = {"step": step}
        exec(source, names)

        @flow
        async def held() -> int:
            found: int = await names["changing"]()
            await wait_for("go")
            return found

    define(1)
    async with Relight(store=store) as rl:
        run = await rl.start("held", id="r")
        await has_status(run, Status.WAITING)
    registry.remove("held")
    define(2)
    async with Relight(store=store, recovery={"version_mismatch": "fail"}) as rl:
        run = await rl.get("r")
        await run.signal("go")
        with pytest.raises(VersionMismatchError):
            await run.result(timeout="60s")
    async with Relight(store=store, recovery={"version_mismatch": "warn"}) as rl:
        run = await rl.get("r")
        await run.resume()
        assert await run.result(timeout="60s") == 1


async def test_a_run_held_for_an_upgrade_that_cannot_be_read_is_held_as_what_it_is(store, monkeypatch, caplog):
    """The code that checks whether this version understands the run breaks on it, every time. Then no run would be
    woken any more."""

    def restore(journal):
        if journal.root_id == "bad":
            raise KeyError("a bug that this run's journal brings out")
        return replay.restore(journal)

    @flow
    async def listens() -> str:
        return str(await wait_for("go"))

    async with Relight(store=store, park_after="1ms") as rl:
        runs = {name: await rl.start(listens.with_id(name)) for name in ("bad", "good")}
        for name, run in runs.items():
            await until(lambda run=run: parked(run))
            held = RunChange(run_id=name, status=Status.PAUSED, hold=Hold.UPGRADE, reason="newer", heard=0)
            await store.hold({name: (await run.describe()).epoch}, held)
    monkeypatch.setattr(upgrades, "restore", restore)
    monkeypatch.setattr(take_up, "restore", restore)
    async with Relight(store=store, park_after="1ms") as rl:
        await (await rl.get("good")).signal("go", "on")
        assert await (await rl.get("good")).result(timeout="60s") == "on"
        await until(lambda: held_as(rl, "bad", Hold.CORRUPT))
        row = await rl.row("bad")
        assert (row.status, row.owner) == (Status.PAUSED, None)
        assert "a bug that this run's journal brings out" in row.reason
        assert all(part.failures == 0 for part in rl.health().parts)
        # When the cause is gone, it goes on like any corrupt run.
        monkeypatch.undo()
        bad = await rl.get("bad")
        await bad.resume()
        await bad.signal("go", "at last")
        assert await bad.result(timeout="60s") == "at last"


async def parked(run: Handle[Any]) -> bool:
    row = await run.describe()
    return row.status is Status.WAITING and row.owner is None


async def held_as(rl: Relight, run_id: str, hold: Hold) -> bool:
    return (await rl.row(run_id)).hold is hold


async def test_a_run_that_was_told_something_of_a_newer_kind_is_left_to_a_newer_version(world: World):
    """The run is read, and not claimed. Otherwise two old versions would take it from each other for ever."""

    @flow
    async def waits() -> None:
        await wait_for("go")

    rl = await world.open()
    run = await rl.start(waits.with_id("r"))
    await world.until_status("waiting", run)
    await rl.services.store.post([Message(run_id="r", kind=MessageKind.NEWER, name="2:poke", at=0.0)])
    rl.orchestrator.waker.look_for_messages()
    row = await world.until_status("paused", run)
    assert row.hold is Hold.UPGRADE
    await until(lambda: not rl.orchestrator.live)
    for _ in range(3):
        rl.orchestrator.waker.look_for_held()
        await rl.orchestrator.waker.run_once()
    assert (await world.row("r")).epoch == row.epoch
