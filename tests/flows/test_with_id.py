"""`flow.with_id("…")`: a run's id goes with its flow, so that type checkers see only the flow's own arguments."""

from __future__ import annotations

import pytest

from relight import DefinitionError, Flow, Relight, flow, spawn
from tests.flows.world import World


@pytest.fixture
def add(world: World) -> Flow[..., int]:
    @flow
    async def add(a: int, b: int = 1) -> int:
        return a + b

    return add


async def test_start_run_and_spawn_give_the_run_that_id(world: World, add: Flow[..., int]):
    @flow
    async def spawning(a: int) -> list[str | int]:
        spawned = await spawn(add.with_id("spawned"), a, b=2)
        return [spawned.id, await spawned]

    @flow
    def spawning_sync(a: int) -> list[str | int]:
        spawned = spawn(add.with_id("spawned too"), a, b=3)
        return [spawned.id, spawned.result()]

    rl = await world.open()
    run = await rl.start(add.with_id("one"), 1, b=2)
    assert run.id == "one"
    assert await run.result() == 3
    assert await rl.run(spawning.with_id("two"), 5) == ["spawned", 7]
    assert await rl.run(spawning_sync.with_id("three"), 5) == ["spawned too", 8]
    assert {row.id for row in (await rl.list()).runs} == {"one", "two", "spawned", "three", "spawned too"}


async def test_the_same_id_and_input_are_the_same_run_however_they_are_given(world: World, add: Flow[..., int]):
    rl = await world.open()
    assert await rl.run(add.with_id("r"), 1) == 2
    again = await rl.start("add", a=1, b=1, id="r")
    assert await again.result() == 2
    assert len((await rl.list()).runs) == 1


async def test_without_an_id_each_start_is_a_new_run(world: World, add: Flow[..., int]):
    rl = await world.open()
    first, second = [await rl.start(add.with_id(None), 1) for _ in range(2)]
    assert first.id != second.id


async def test_two_ids_are_refused(world: World, add: Flow[..., int]):
    rl = await world.open()
    with pytest.raises(DefinitionError, match=r"with_id\('a'\) was given another id, 'b': give one"):
        await rl.start(add.with_id("a"), 1, id="b")
    assert not (await rl.list()).runs


async def test_an_id_that_cannot_be_one_is_refused_when_the_run_is_started(world: World, add: Flow[..., int]):
    rl = await world.open()
    with pytest.raises(DefinitionError, match=r"'a/b' cannot be a run id"):
        await rl.start(add.with_id("a/b"), 1)


def test_a_blocking_relight_takes_it_too(add: Flow[..., int]):
    with Relight("memory:") as rl:
        assert rl.run(add.with_id("r"), 1) == 2
        assert rl.start(add.with_id("s"), 1).id == "s"
        assert rl.get("s").result() == 2
