"""Values that replay sees again: `now`, `random`, `uuid`."""

import asyncio
import datetime as dt
import uuid as uuid_module
from typing import Any

import pytest

from relight import (
    flow,
    now,
    random,
    step,
    uuid,
    wait_for,
)
from relight.model import journal as j
from relight.testing.clock import START
from tests.flows.watching import turns
from tests.flows.world import World, until


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_recorded_values_replay_as_they_were(world: World, kind: str):
    seen: list[list[Any]] = []

    def draw() -> list[Any]:
        return [now(), random(), uuid(), random(), now()]

    if kind == "async":

        @flow(name="drawing")
        async def drawing() -> None:
            seen.append(draw())
            await wait_for("go")

    else:

        @flow(name="drawing")
        def drawing() -> None:  # type: ignore[misc]  # the other kind of the same flow
            seen.append(draw())
            wait_for("go")

    world.entropy.number = 0.125
    rl = await world.open()
    run = await rl.start("drawing")
    await world.until_status("waiting", run)
    world.entropy.number = 0.875
    world.clock.advance("1h")
    rl = await world.crash_and_reopen()
    await (await rl.get(run.id)).signal("go")
    await (await rl.get(run.id)).result()
    assert seen[0] == seen[1]
    first = seen[0]
    assert first[0] == dt.datetime.fromtimestamp(START, dt.UTC)
    assert first[0].tzinfo is dt.UTC
    assert first[1] == first[3] == 0.125
    assert isinstance(first[2], uuid_module.UUID)


async def test_a_value_is_durable_before_a_step_acts_on_it(world: World):
    """After a crash right after the step, the flow must see the value that the step got."""
    acted: list[str] = []
    gate = asyncio.Event()

    @step
    async def act(key: str) -> str:
        acted.append(key)
        await gate.wait()
        return key

    @flow
    async def acting() -> list[str]:
        key = str(uuid())
        return [key, await act(key)]

    rl = await world.open()
    run = await rl.start(acting)
    await until(lambda: acted)
    rl = await world.crash_and_reopen()
    gate.set()
    result = await (await rl.get(run.id)).result()
    assert acted == [result[0]] * 2
    assert result[0] == result[1]


async def test_a_step_waits_for_the_values_it_may_act_on_to_be_durable(world: World):
    acted: list[str] = []
    gate = asyncio.Event()

    @step
    async def act(key: str) -> str:
        acted.append(key)
        return key

    @flow
    async def acting() -> str:
        await wait_for("begin")
        return await act(str(uuid()))

    rl = await world.open()
    run = await rl.start(acting)
    await world.until_status("waiting", run)
    store: Any = rl.services.store
    commit, batches = store.commit, 0

    async def slow_commit(batch: Any) -> Any:
        nonlocal batches
        batches += 1
        if batches == 2:  # the first commit is that of the signal
            await gate.wait()
        return await commit(batch)

    store.commit = slow_commit
    await run.signal("begin")
    await until(lambda: batches == 2)
    await turns()
    assert acted == []
    gate.set()
    assert await run.result() == acted[0]


async def test_values_in_a_step_are_plain(world: World):
    @step
    async def inside() -> list[str]:
        return [str(now()), str(random()), str(uuid())]

    @flow
    async def drawing() -> list[str]:
        return await inside()

    rl = await world.open()
    run = await rl.start(drawing)
    assert len(await run.result()) == 3
    assert not any(isinstance(event, j.ValueRecorded) for event in await world.events(run.id))
