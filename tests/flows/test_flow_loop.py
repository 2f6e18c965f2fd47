"""The event loop of a run, as flow code sees it, and the program's loop, as step bodies see it."""

import asyncio
import contextvars
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from relight import RunFailedError, flow, step, wait_for
from relight.errors import FlowCodeError
from tests.flows.ways import Gate, Ways, park, replay_to_the_end, two_signals
from tests.flows.world import World, until

color: contextvars.ContextVar[str] = contextvars.ContextVar("color", default="none")


# ---- flow code


async def test_flow_code_has_a_running_loop_and_a_current_task_of_its_own(world: World):
    @flow
    async def looking() -> dict[str, bool]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        other = asyncio.create_task(asyncio.sleep(0))
        found = {
            "running": loop.is_running(),
            "closed": loop.is_closed(),
            "the program's": loop is program,
            "the same": loop is asyncio.get_event_loop() and task.get_loop() is loop,
            "its tasks": asyncio.all_tasks() == {task, other},
        }
        await other
        return found

    program = asyncio.get_running_loop()
    rl = await world.open()
    assert await (await rl.start(looking)).result("60s") == {
        "running": True,
        "closed": False,
        "the program's": False,
        "the same": True,
        "its tasks": True,
    }
    assert asyncio.get_running_loop() is program


async def test_nothing_is_put_onto_the_programs_loop(world: World):
    seen = list[Any]()

    @step
    async def look() -> None:
        seen.append(asyncio.get_running_loop().get_task_factory())

    @flow
    async def looking() -> None:
        await asyncio.gather(look(), look())

    loop = asyncio.get_running_loop()
    rl = await world.open()
    await (await rl.start(looking)).result("60s")
    assert [*seen, loop.get_task_factory()] == [None] * 3


async def test_context_variables_reach_the_tasks_of_a_flow_as_in_plain_asyncio(world: World):
    ways = Ways()

    @step
    async def look() -> str:
        return color.get()

    @flow
    async def coloring() -> list[str]:
        way = ways.begin()

        async def branch(own: str | None) -> None:
            way.append(color.get())
            if own is not None:
                color.set(own)
            way.append(await look())

        color.set("red")
        await asyncio.gather(branch("blue"), branch(None), branch("green"))
        way.append(color.get())
        await two_signals()
        return way

    rl = await world.open()
    run = await rl.start(coloring)
    assert await replay_to_the_end(world, run) == ["red", "red", "red", "blue", "red", "green", "red"]
    ways.check()
    assert color.get() == "none"


async def test_a_task_that_only_asyncio_refers_to_is_not_collected(world: World):
    said = list[str]()

    @step
    async def tell(what: str) -> None:
        said.append(what)

    async def branch() -> None:
        await wait_for("go")
        await tell("branch")

    @flow
    async def forgetting() -> str:
        # The test is about a task that no variable keeps.
        asyncio.create_task(branch())  # type: ignore[unused-awaitable]  # noqa: RUF006
        await wait_for("on")
        return "over"

    rl = await world.open(park_after="10h")
    run = await rl.start(forgetting)
    await world.until_status("waiting", run)
    gc.collect()
    await run.signal("go")
    await until(lambda: said)
    await run.signal("on")
    assert await run.result("60s") == "over"


@pytest.mark.parametrize("leaves", ["parked", "killed", "over"])
async def test_tasks_that_are_pending_when_the_run_leaves_memory_make_no_noise(
    world: World, leaves: str, caplog: pytest.LogCaptureFixture
):
    """asyncio logs an error for tasks that are destroyed while they are pending. Here that is intended."""

    async def branch() -> None:
        await asyncio.Event().wait()

    @flow
    async def leaving() -> str:
        kept = [asyncio.create_task(branch()) for _ in range(3)]
        await asyncio.sleep(0)
        if leaves != "over":
            await wait_for("go")
        return f"over, {len(kept)} left"

    rl = await world.open()
    run = await rl.start(leaving)
    if leaves == "parked":
        await park(world, run)
        await run.signal("go")
    elif leaves == "killed":
        await world.until_status("waiting", run)
        rl = await world.crash_and_reopen()
        run = await rl.get(run.id)
        await run.signal("go")
    assert await run.result("60s") == "over, 3 left"
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_shield_protects_on_replay_what_it_protected_live(world: World):
    gate, ways, said = Gate(), Ways(), list[str]()

    @step
    async def work() -> str:
        await gate.pass_by()
        said.append("worked")
        return "worked"

    @flow
    async def shielding() -> list[str]:
        way = ways.begin()
        inner = asyncio.create_task(work())

        async def outer() -> None:
            try:
                await asyncio.shield(inner)
            except asyncio.CancelledError:
                way.append("outer cancelled")
                raise

        task = asyncio.create_task(outer())
        await wait_for("cancel")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        way.append(await inner)
        await two_signals()
        return way

    rl = await world.open()
    run = await rl.start(shielding)
    await until(lambda: gate.entered)
    await run.signal("cancel")
    await until(lambda: ways[0])
    await gate.open()
    assert await replay_to_the_end(world, run) == ["outer cancelled", "worked"]
    assert said == ["worked"]
    ways.check()


async def test_a_deep_nest_that_is_cancelled_is_left_from_the_inside_out(world: World):
    ways, said = Ways(), list[str]()

    @step
    async def tell(what: str) -> str:
        said.append(what)
        return what

    @flow
    async def nest() -> list[str]:
        way = ways.begin()

        async def guarded(name: str, inner: Any) -> None:
            try:
                await inner
            finally:
                way.append(await tell(name))

        async def group(*inner: Any) -> None:
            async with asyncio.TaskGroup() as tasks:
                for one in inner:
                    tasks.create_task(one)

        async def limited(inner: Any) -> None:
            async with asyncio.timeout(36000):
                await inner

        leaves = [guarded(f"leaf {n}", wait_for("never")) for n in range(3)]
        tree = guarded("root", limited(group(guarded("left", asyncio.gather(*leaves[:2])), leaves[2])))
        task = asyncio.create_task(tree)
        await wait_for("cancel")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        way.append(f"cancelled: {task.cancelled()}")
        await two_signals()
        return way

    rl = await world.open()
    run = await rl.start(nest)
    await run.signal("cancel")
    found = await replay_to_the_end(world, run)
    assert sorted(said) == ["leaf 0", "leaf 1", "leaf 2", "left", "root"]
    assert found[-2:] == ["root", "cancelled: True"]
    assert found.index("left") > max(found.index("leaf 0"), found.index("leaf 1"))
    ways.check()


async def test_coroutines_handed_to_as_completed_are_refused(world: World):
    """as_completed puts them into a set, in the order of their addresses. The branches would have other names in every
    process."""

    @step
    async def work(n: int) -> int:
        return n

    async def helper(n: int) -> int:
        return await work(n)

    @flow
    async def collecting() -> list[int]:
        made.extend(helper(n) for n in range(3))
        return [await one for one in asyncio.as_completed(made)]

    made = list[Any]()
    rl = await world.open()
    with pytest.raises(RunFailedError, match="create_task") as failed:
        await (await rl.start(collecting)).result("60s")
    for one in made:
        one.close()  # they were not awaited
    assert isinstance(failed.value.__cause__, FlowCodeError)


# ---- async generators


async def test_an_async_generator_asks_for_operations_and_is_replayed(world: World):
    ways, done = Ways(), list[int]()

    @step
    async def fetch(n: int) -> int:
        done.append(n)
        return n

    async def pages() -> AsyncIterator[int]:
        for n in range(3):
            yield await fetch(n)
            await wait_for("go")

    @flow
    async def reading() -> list[int]:
        way, found = ways.begin(), list[int]()
        async for page in pages():
            found.append(page)
            way.append(str(page))
        return found

    rl = await world.open()
    run = await rl.start(reading)
    for count in (1, 2, 3):
        await until(lambda count=count: len(done) == count)
        await park(world, run)
        await run.signal("go")
    assert await run.result("60s") == [0, 1, 2]
    assert ways.check(at_least=4) == ["0", "1", "2"]
    assert done == [0, 1, 2]


@pytest.mark.parametrize("how", ["aclose", "dropped"])
async def test_an_async_generator_that_is_broken_off_cleans_up_the_same_way_on_replay(world: World, how: str):
    ways, said = Ways(), list[str]()

    @step
    async def tell(what: str) -> str:
        said.append(what)
        return what

    @flow
    async def reading() -> str:
        way = ways.begin()

        async def pages() -> AsyncIterator[str]:
            try:
                for n in range(3):
                    yield await tell(f"page {n}")
            finally:
                way.append(await tell("closed"))

        if how == "aclose":
            found = pages()
            way.append(await anext(found))
            await found.aclose()  # type: ignore[attr-defined]  # an async generator, whatever its annotation says
        else:
            async for page in pages():
                way.append(page)
                break
        way.append(await tell("next"))
        await two_signals()
        return "over"

    rl = await world.open()
    run = await rl.start(reading)
    assert await replay_to_the_end(world, run) == "over"
    assert sorted(said) == ["closed", "next", "page 0"]
    assert sorted(ways.check()) == sorted(said)
