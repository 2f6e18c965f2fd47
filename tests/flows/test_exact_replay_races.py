"""Races: on replay, foreach, child runs and operations that were given up on keep their place in the order."""

import asyncio
from typing import Any

import pytest

from relight import flow, foreach, sleep, step, wait_for
from tests.flows.ways import Gate, Ways, replay_to_the_end, two_signals, waits
from tests.flows.world import World, until

CRASH = pytest.mark.parametrize("crash", [True, False], ids=["killed", "parked"])


def first_of(done: set[asyncio.Task[Any]]) -> str:
    return "+".join(sorted(task.get_name() for task in done))


# ---- foreach


@CRASH
@pytest.mark.parametrize("winner", ["one", "many"])
@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("kind", ["step", "flow", "function"])
async def test_foreach_that_races_a_step_has_the_same_winner_on_replay(
    world: World, crash: bool, winner: str, concurrency: int, kind: str
):
    gates = {"one": Gate(), "many": Gate()}
    said, ways = list[str](), Ways()

    @step
    async def work(name: str) -> str:
        await gates[name].pass_by()
        return name

    @step
    async def tell(what: str) -> str:
        said.append(what)
        return what

    @step
    async def item_step(n: int) -> str:
        await gates["many"].pass_by()
        return str(n)

    @flow
    async def item_flow(n: int) -> str:
        return await work("many")

    async def item_function(n: int) -> str:
        return await work("many")

    each: Any = {"step": item_step, "flow": item_flow, "function": item_function}[kind]

    @flow
    async def race() -> str:
        way = ways.begin()
        many = asyncio.create_task(foreach([1, 2, 3], each, concurrency=concurrency), name="many")
        one = asyncio.create_task(work("one"), name="one")
        first = first_of((await asyncio.wait({many, one}, return_when=asyncio.FIRST_COMPLETED))[0])
        way.append(await tell(first))
        await asyncio.gather(many, one)
        await two_signals()
        return first

    rl = await world.open()
    run = await rl.start(race)
    await gates[winner].open(after=concurrency if winner == "many" else 1)
    await until(lambda: said)
    await gates["many" if winner == "one" else "one"].open()
    assert await replay_to_the_end(world, run, crash) == winner
    assert said == [winner]
    ways.check()


async def test_items_of_a_concurrent_foreach_end_in_the_same_order_on_replay(world: World):
    gates, ways = [Gate() for _ in range(4)], Ways()

    @step
    async def work(n: int) -> int:
        await gates[n].pass_by()
        return n

    @flow
    async def fan() -> list[str]:
        way = ways.begin()

        async def each(n: int) -> int:
            found = await work(n)
            way.append(str(n))
            return found

        await foreach(range(4), each, concurrency=4)
        await two_signals()
        return way

    rl = await world.open()
    run = await rl.start(fan)
    for count, n in enumerate((2, 0, 3, 1), start=1):
        await gates[n].open()
        await until(lambda count=count: len(ways[0]) == count)
    await replay_to_the_end(world, run)
    assert ways[0] == ["2", "0", "3", "1"]
    assert all(way == [] for way in ways[1:])  # items that have ended are not executed again


# ---- child runs


@CRASH
@pytest.mark.parametrize("levels", [1, 2, 3])
async def test_a_child_run_in_a_branch_that_was_not_over_is_replayed_in_order(world: World, crash: bool, levels: int):
    gates = {"a": Gate(), "b": Gate()}
    said, ways = list[str](), Ways()

    @step
    async def work(name: str) -> str:
        await gates[name].pass_by()
        return name

    @step
    async def tell(what: str) -> str:
        said.append(what)
        return what

    @flow
    async def race(level: int) -> str:
        if level < levels:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(race(level + 1))
            return task.result()
        way = ways.begin()
        tasks = [asyncio.create_task(work(name), name=name) for name in "ab"]
        first = first_of((await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0])
        way.append(await tell(first))
        await asyncio.gather(*tasks)
        await two_signals()
        return first

    rl = await world.open()
    run = await rl.start(race, 0)
    await gates["b"].open()
    await until(lambda: said)
    await gates["a"].open()
    assert await replay_to_the_end(world, run, crash) == "b"
    assert said == ["b"]
    ways.check()


async def test_two_child_runs_unfinished_at_the_crash_share_one_order(world: World):
    """Outcomes for the two child runs are told in the journal's order, not child by child."""
    gates, order = {f"{c}{n}": Gate() for c in "ab" for n in range(2)}, Ways()

    @step
    async def work(name: str) -> str:
        await gates[name].pass_by()
        return name

    @flow
    async def child(name: str, seen: str) -> None:
        for n in range(2):
            order[-1].append(await work(f"{name}{n}"))
        await wait_for("go")

    @flow
    async def both() -> str:
        order.begin()
        await asyncio.gather(child("a", ""), child("b", ""))
        return "over"

    rl = await world.open()
    run = await rl.start(both)
    for count, name in enumerate(("b0", "a0", "b1", "a1"), start=1):
        await gates[name].open()
        await until(lambda count=count: len(order[0]) == count)
    await until(lambda: two(world, run))
    rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    await run.signal("go")
    await run.signal("go")
    assert await run.result("60s") == "over"
    assert order.check() == ["b0", "a0", "b1", "a1"]


async def two(world: World, run: Any) -> bool:
    return await waits(world, run) == 2


# ---- operations that were given up on


@CRASH
async def test_a_child_run_that_was_given_up_on_takes_its_time_to_clean_up_on_replay_too(world: World, crash: bool):
    cleaning, said, ways = Gate(), list[str](), Ways()

    @step
    async def work(name: str) -> str:
        if name == "clean-up":
            await cleaning.pass_by()
        return name

    @step
    async def tell(what: str) -> str:
        said.append(what)
        return what

    @flow
    async def cleans() -> None:
        try:
            await sleep("1h")
        finally:
            await work("clean-up")

    @flow
    async def race() -> str:
        way = ways.begin()
        slow = asyncio.create_task(cleans(), name="slow")
        await work("x")
        slow.cancel()
        quick = asyncio.create_task(work("quick"), name="quick")
        first = first_of((await asyncio.wait({slow, quick}, return_when=asyncio.FIRST_COMPLETED))[0])
        way.append(await tell(first))
        await asyncio.gather(slow, quick, return_exceptions=True)
        way.append(str(slow.cancelled()))
        await two_signals()
        return first

    rl = await world.open()
    run = await rl.start(race)
    await until(lambda: said)
    await cleaning.open()
    assert await replay_to_the_end(world, run, crash) == "quick"
    assert said == ["quick"]
    assert ways.check() == ["quick", "True"]


@CRASH
@pytest.mark.parametrize("winner", ["slow", "quick"])
async def test_a_step_that_was_given_up_on_takes_its_time_to_clean_up_on_replay_too(
    world: World, crash: bool, winner: str
):
    entered, gates = Gate(), {"slow": Gate(), "quick": Gate()}
    said, ways = list[str](), Ways()

    @step
    async def slow_step() -> None:
        try:
            await entered.pass_by()
        finally:
            await gates["slow"].pass_by()

    @step
    async def work() -> None:
        await gates["quick"].pass_by()

    @step
    async def tell(what: str) -> str:
        said.append(what)
        return what

    @flow
    async def race() -> str:
        way = ways.begin()
        slow = asyncio.create_task(slow_step(), name="slow")
        await wait_for("begun")
        slow.cancel()
        quick = asyncio.create_task(work(), name="quick")
        first = first_of((await asyncio.wait({slow, quick}, return_when=asyncio.FIRST_COMPLETED))[0])
        way.append(await tell(first))
        await asyncio.gather(slow, quick, return_exceptions=True)
        way.append(str(slow.cancelled()))
        await two_signals()
        return first

    rl = await world.open()
    run = await rl.start(race)
    await until(lambda: entered.entered)
    await run.signal("begun")
    await gates[winner].open()
    await until(lambda: said)
    await gates["quick" if winner == "slow" else "slow"].open()
    assert await replay_to_the_end(world, run, crash) == winner
    assert said == [winner]
    assert ways.check() == [winner, "True"]


async def test_a_step_that_outlives_being_given_up_on_gives_its_result_live_and_on_replay(world: World):
    """As in plain asyncio: a body that swallows its cancellation returns, and the code that awaits it gets the result."""
    entered, ways = Gate(), Ways()

    @step
    async def stubborn() -> str:
        try:
            await entered.pass_by()
        except asyncio.CancelledError:
            return "all the same"
        return "undisturbed"

    @flow
    async def giving_up() -> str:
        way = ways.begin()
        task = asyncio.create_task(stubborn())
        await wait_for("begun")
        task.cancel()
        way.append(await task)
        await two_signals()
        return way[-1]

    rl = await world.open()
    run = await rl.start(giving_up)
    await until(lambda: entered.entered)
    await run.signal("begun")
    assert await replay_to_the_end(world, run) == "all the same"
    assert ways.check() == ["all the same"]


async def test_a_crash_while_something_given_up_on_cleans_up_comes_to_the_same_end(world: World):
    """The body that was cleaning up died with its process, and is not begun again. The task was cancelled in any case."""
    entered, cleaning, ways = Gate(), Gate(), Ways()

    @step
    async def slow_step() -> None:
        try:
            await entered.pass_by()
        finally:
            await cleaning.pass_by()

    @flow
    async def giving_up() -> str:
        way = ways.begin()
        slow = asyncio.create_task(slow_step())
        await wait_for("begun")
        slow.cancel()
        await asyncio.wait([slow])
        way.append(f"cancelled: {slow.cancelled()}")
        await two_signals()
        return way[-1]

    rl = await world.open()
    run = await rl.start(giving_up)
    await until(lambda: entered.entered)
    await run.signal("begun")
    await until(lambda: cleaning.entered)
    rl = await world.crash_and_reopen()
    assert await replay_to_the_end(world, await rl.get(run.id)) == "cancelled: True"
    assert len(entered.entered) <= 2  # once more at most: the journal did not have yet that the flow had given up on it
    ways.check()
