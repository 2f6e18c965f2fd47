"""Cancelling a run reaches all its descendants, however their ids were given."""

from __future__ import annotations

import pytest

from relight import flow, spawn, wait_for
from tests.flows.world import World, until


@pytest.mark.parametrize("by_hand", [False, True], ids=["derived ids", "ids by hand"])
async def test_a_grandchild_is_cancelled_whose_parent_has_ended(world: World, by_hand: bool):
    @flow
    async def below() -> None:
        await wait_for("never")

    @flow
    async def between() -> None:
        await spawn(below.with_id("c" if by_hand else None))

    @flow
    async def above() -> None:
        await spawn(between.with_id("b" if by_hand else None))
        await wait_for("never")

    middle = "b" if by_hand else "a/$spawn.between"
    last = "c" if by_hand else f"{middle}/$spawn.below"
    rl = await world.open()
    run = await rl.start(above.with_id("a"))

    async def ready() -> bool:
        rows = {row.id: row.status for row in await rl.services.store.get_runs([middle, last])}
        return rows == {middle: "completed", last: "waiting"}

    await until(ready)
    await run.cancel("sold")
    await world.until_status("cancelled", await rl.get(last))
