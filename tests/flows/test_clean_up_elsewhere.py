"""A cancelled run whose clean-up waits for another run gives it its room, and its thread. Its cancel_grace ends all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relight import Handle, RunCancelledError, flow, sleep, spawn, step, wait_for
from relight.run import parking
from tests.flows.watching import turns
from tests.flows.world import World, until


async def is_cancelled(run: Handle[Any]) -> None:
    with pytest.raises(RunCancelledError, match="sold"):
        await run.result(timeout="60s")


async def at_rest(world: World, run: Handle[Any]) -> bool:
    """Whether it waits, in memory or parked."""
    return await run.status() == "waiting"


@pytest.mark.parametrize("depth", [1, 3])
async def test_a_run_that_a_clean_up_awaits_has_its_room(world: World, depth: int):
    done: list[str] = []

    @step
    async def undo() -> str:
        done.append("undone")
        return "undone"

    @flow
    async def clean(depth: int) -> str:
        if depth > 1:
            return str(await (await spawn(clean, depth - 1)))
        return str(await undo())

    @flow
    async def lease() -> None:
        try:
            await sleep("30d")
        finally:
            done.append(await (await spawn(clean, depth)))

    rl = await world.open(max_concurrent_runs=1)  # and no time passes
    run = await rl.start(lease.with_id("r"))
    await until(lambda: at_rest(world, run))
    await run.cancel("sold")
    await is_cancelled(run)
    assert done == ["undone", "undone"]


async def test_a_run_that_a_clean_up_awaits_has_its_thread(world: World):
    done: list[str] = []

    @step
    def undo() -> str:
        return "undone"

    @flow
    def clean() -> str:
        return str(undo())

    @flow
    def lease() -> None:
        try:
            sleep("30d")
        finally:
            done.append(spawn(clean).result())

    rl = await world.open(max_threads=1)
    run = await rl.start(lease.with_id("r"))
    await until(lambda: at_rest(world, run))
    await run.cancel("sold")
    await is_cancelled(run)
    assert done == ["undone"]


async def test_a_clean_up_gives_way_also_if_memory_is_filled_later(world: World):
    """It has begun to wait while there was room."""
    gate = asyncio.Event()
    done: list[str] = []

    @step
    async def stay() -> None:
        await gate.wait()

    @flow
    async def first() -> None:
        await stay()

    @flow
    async def clean() -> None:
        await wait_for("go")

    @flow
    async def lease() -> None:
        try:
            await sleep("30d")
        finally:
            await (await spawn(clean.with_id("clean")))
            done.append("cleaned")

    rl = await world.open(max_concurrent_runs=30)
    run = await rl.start(lease.with_id("r"))
    await rl.idle()
    await run.cancel("sold")
    await rl.idle()
    world.clock.advance(rl.config.park_after_seconds)
    await rl.idle()
    assert "r" in rl.orchestrator.live
    for _ in range(30):
        await rl.start(first)
    world.clock.advance(parking.CROWDED_SECONDS)
    await until(lambda: "r" not in rl.orchestrator.live)
    gate.set()
    await (await rl.get("clean")).signal("go")
    await is_cancelled(run)
    assert done == ["cleaned"]


# ---- not for ever


async def forced(world: World, run: Handle[Any]) -> None:
    """However often its grace begins anew, it ends."""
    for _ in range(20):
        await world.rl.idle()
        if await run.status() == "cancelled":
            return
        world.clock.advance("1m")
    pytest.fail(f"the clean-up goes on: {await run.status()}")


@pytest.mark.parametrize("rooms", [1, 100])
async def test_a_clean_up_that_waits_for_a_run_without_end_is_cut_off(world: World, rooms: int):
    @flow
    async def never() -> None:
        await wait_for("never")

    @flow
    async def lease() -> None:
        try:
            await sleep("30d")
        finally:
            await (await spawn(never.with_id("never")))

    rl = await world.open(max_concurrent_runs=rooms, cancel_grace="1m")
    run = await rl.start(lease.with_id("r"))
    await rl.idle()
    await run.cancel("sold")
    await forced(world, run)


async def test_a_clean_up_that_spawns_without_end_is_cut_off(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parking, "MOST_CLEAN_UP", 30)

    @flow
    async def nothing() -> None:
        await sleep("10m")

    @flow
    async def lease() -> None:
        try:
            await sleep("30d")
        finally:
            while True:
                await (await spawn(nothing))

    rl = await world.open(max_concurrent_runs=1, cancel_grace="1h")
    run = await rl.start(lease.with_id("r"))
    await rl.idle()
    await run.cancel("sold")
    async with world.clock.advancing(rl):
        await is_cancelled(run)


async def test_a_clean_up_that_an_orderly_shutdown_has_parked_is_cut_off_later(world: World):
    @flow
    async def lease() -> None:
        try:
            await sleep("30d")
        finally:
            await wait_for("never")

    rl = await world.open(cancel_grace="1m")
    run = await rl.start(lease.with_id("r"))
    await rl.idle()
    await run.cancel("sold")
    await rl.idle()
    await turns()
    rl = await world.close_and_reopen()
    await forced(world, await rl.get("r"))
