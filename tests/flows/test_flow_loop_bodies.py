"""Bodies of steps live on the program's loop, and have everything that plain asyncio would give them."""

import asyncio
import contextvars
import sys
import threading
from typing import Any

import pytest

from relight import OutsideRunError, Retry, RunFailedError, current_step, flow, foreach, step, wait_for
from tests.flows.ways import Gate
from tests.flows.world import World, until

color: contextvars.ContextVar[str] = contextvars.ContextVar("color", default="none")


async def result(world: World, one: Any, *args: Any) -> Any:
    rl = await world.open()
    return await (await rl.start(one, *args)).result("60s")


async def test_a_body_runs_on_the_programs_loop_in_a_task(world: World):
    seen = list[bool]()

    @step
    async def look() -> None:
        before = asyncio.current_task()
        seen.append(asyncio.get_running_loop() is program)
        await asyncio.sleep(0)
        seen.append(before is not None and before is asyncio.current_task())
        seen.append(before is not None and before.get_loop() is program)
        seen.append(before in asyncio.all_tasks())

    @step
    async def look_at_once() -> None:
        seen.append(asyncio.current_task() is not None)

    @flow
    async def looking() -> None:
        await asyncio.gather(look(), look_at_once(), look())
        await look_at_once()

    program = asyncio.get_running_loop()
    await result(world, looking)
    assert seen == [True] * 10


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks begin eagerly from Python 3.12 on")
async def test_a_body_runs_there_also_where_tasks_begin_at_once(world: World):
    seen = list[bool]()

    @step
    async def look(number: int) -> int:
        before = asyncio.current_task()
        await asyncio.sleep(0.001)
        seen.append(asyncio.get_running_loop() is program and before is asyncio.current_task())
        return number

    @flow
    async def looking() -> int:
        return await look(1) + sum(await asyncio.gather(look(2), look(3)))

    program = asyncio.get_running_loop()
    program.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    try:
        assert await result(world, looking) == 6
    finally:
        program.set_task_factory(None)
    assert seen == [True] * 3


async def test_a_body_makes_tasks_timeouts_and_groups_of_its_own(world: World):
    @step
    async def body() -> list[str]:
        async def branch(name: str) -> str:
            await asyncio.sleep(0.001)
            return name

        found = [await asyncio.create_task(branch("task"))]
        found += await asyncio.gather(branch("gather"), branch("gathered"))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(branch("group"))
        found.append(task.result())
        try:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        except TimeoutError:
            found.append("timeout")
        found.append(await asyncio.wait_for(branch("wait_for"), 10))
        return found

    @flow
    async def one() -> list[str]:
        return await body()

    assert await result(world, one) == ["task", "gather", "gathered", "group", "timeout", "wait_for"]


async def test_a_task_that_a_body_leaves_behind_goes_on(world: World):
    """As in any program, because it lives on the program's loop."""
    kept, done = list[asyncio.Task[None]](), asyncio.Event()
    gate = asyncio.Event()

    async def later() -> None:
        await gate.wait()
        done.set()

    @step
    async def body() -> str:
        kept.append(asyncio.create_task(later()))
        return "begun"

    @flow
    async def one() -> str:
        return await body()

    assert await result(world, one) == "begun"
    gate.set()
    await asyncio.wait_for(done.wait(), 60)


@pytest.mark.parametrize("kind", ["async", "async later", "sync", "sync flow"])
async def test_a_body_sees_what_the_flow_has_set_and_keeps_what_it_sets(world: World, kind: str):
    seen = list[str]()

    @step
    async def paint(to: str) -> None:
        if kind == "async later":
            await asyncio.sleep(0)
        seen.append(color.get())
        color.set(to)
        await asyncio.sleep(0)
        assert color.get() == to

    @step
    def paint_sync(to: str) -> None:
        seen.append(color.get())
        color.set(to)

    @flow
    async def painting() -> list[str]:
        own = list[str]()
        for name in ("red", "blue"):
            color.set(name)
            await (paint_sync("black") if kind == "sync" else paint("black"))
            own.append(color.get())
        return own

    @flow
    def painting_sync() -> list[str]:
        own = list[str]()
        for name in ("red", "blue"):
            color.set(name)
            paint_sync("black")
            own.append(color.get())
        return own

    found = await result(world, painting_sync if kind == "sync flow" else painting)
    assert seen == found == ["red", "blue"]
    assert color.get() == "none"


async def test_retries_and_items_see_the_flows_variables_as_well(world: World):
    seen = list[str]()

    @step(retry=Retry(3), timeout="1h")
    async def flaky(n: int) -> None:
        seen.append(color.get())
        color.set("black")
        if len(seen) < 3:
            raise ConnectionError("not yet")

    @flow
    async def painting() -> str:
        color.set("red")
        await foreach([1, 2], flaky)
        return color.get()

    assert await result(world, painting) == "red"
    assert seen[0] == "red"
    assert seen[-1] == "red"  # of the second item


async def test_two_flows_do_not_see_each_others_variables(world: World):
    @step
    async def look() -> str:
        return color.get()

    @flow
    async def painting(name: str | None) -> str:
        if name is not None:
            color.set(name)
        await wait_for("go")
        return await look()

    rl = await world.open(park_after="10h")
    runs = [await rl.start(painting, name) for name in ("red", None, "blue")]
    for run in runs:
        await run.signal("go")
    assert [await run.result("60s") for run in runs] == ["red", "none", "blue"]


async def test_a_body_that_cancels_its_own_task_fails_and_hits_no_other(world: World):
    @step
    async def suicidal() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "ended without waiting"

    @step
    async def suicidal_later() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    @step
    async def fine(n: int) -> int:
        await asyncio.sleep(0)
        return n

    @flow
    async def beside() -> list[Any]:
        found = await asyncio.gather(
            suicidal(), fine(1), suicidal_later(), fine(2), suicidal(), fine(3), return_exceptions=True
        )
        return [one if isinstance(one, int | str) else type(one).__name__ for one in found]

    found = await result(world, beside)
    assert [found[n] for n in (1, 3, 5)] == [1, 2, 3]
    assert found[0] == found[4] == "ended without waiting"
    assert isinstance(found[2], str)
    assert found[2] != "ended without waiting"


async def test_current_step_is_known_in_a_bodys_tasks_and_threads(world: World):
    @step
    async def body() -> list[str]:
        async def branch() -> str:
            return current_step().step

        return [
            current_step().step,
            await asyncio.create_task(branch()),
            await asyncio.to_thread(lambda: current_step().step),
        ]

    @flow
    async def one() -> list[str]:
        return await body()

    assert await result(world, one) == ["body"] * 3


async def test_operations_of_flows_are_refused_in_a_bodys_tasks(world: World):
    @step
    async def body() -> None:
        await asyncio.create_task(wait_for("go"))

    @flow
    async def one() -> None:
        await body()

    with pytest.raises(RunFailedError) as failed:
        await result(world, one)
    assert isinstance(failed.value.__cause__, OutsideRunError)


async def test_many_bodies_at_once_each_have_their_own_task(world: World):
    gate, tasks = Gate(), list[Any]()

    @step
    async def body(n: int) -> int:
        tasks.append(asyncio.current_task())
        await gate.pass_by()
        tasks.append(asyncio.current_task())
        return n

    @flow
    async def many() -> list[int]:
        return list(await asyncio.gather(*(body(n) for n in range(20))))

    rl = await world.open()
    run = await rl.start(many)
    await until(lambda: len(gate.entered) == 20)
    assert len(set(tasks)) == 20
    await gate.open()
    assert await run.result("60s") == list(range(20))
    assert len(set(tasks)) == 20


async def test_sync_bodies_run_in_threads_and_leave_the_loop_free(world: World):
    main, seen, gate = threading.get_ident(), list[int](), threading.Event()

    @step
    def body() -> None:
        seen.append(threading.get_ident())
        assert gate.wait(60)

    @flow
    async def one() -> str:
        await body()
        return "over"

    rl = await world.open()
    run = await rl.start(one)
    await until(lambda: seen)
    gate.set()
    assert await run.result("60s") == "over"
    assert seen[0] != main
