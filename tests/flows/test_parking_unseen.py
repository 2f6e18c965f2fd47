"""Leaving memory is invisible to the flow, whatever code is around its waits, and ends no step of another branch."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from relight import (
    Handle,
    Status,
    flow,
    sleep,
    step,
    wait_for,
)
from relight.model.run import Message, MessageKind
from tests.flows.watching import is_parked, parks, turns, waits_for
from tests.flows.world import World, until

SURROUNDINGS: dict[str, Callable[[list[str], Any], Callable[[], Any]]] = {}


def surrounding(make: Callable[[list[str], Any], Callable[[], Any]]) -> Callable[[list[str], Any], Callable[[], Any]]:
    """Code around a wait. It gets a list for events that must not happen, and a durable step to call in its clean-up."""
    SURROUNDINGS[make.__name__] = make
    return make


@surrounding
def except_exception(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        try:
            return await wait_for("go", str)
        except Exception:
            seen.append("except")
            raise

    return body


@surrounding
def except_exception_swallowed(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        while True:
            try:
                return await wait_for("go", str)
            except Exception:
                seen.append("except")

    return body


@surrounding
def finally_with_steps(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        try:
            return await wait_for("go", str)
        finally:
            await note("finally")

    return body


@surrounding
def nested_finally_with_steps_and_waits(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        try:
            try:
                return await wait_for("go", str)
            finally:
                await note("inner")
                await sleep(0)
        finally:
            await note("outer")

    return body


@surrounding
def sync_context_manager(seen: list[str], note: Any) -> Callable[[], Any]:
    @contextlib.contextmanager
    def manager() -> Iterator[None]:
        try:
            yield
        except Exception:
            seen.append("manager")
            raise

    async def body() -> str:
        with manager():
            return await wait_for("go", str)

    return body


@surrounding
def async_context_manager(seen: list[str], note: Any) -> Callable[[], Any]:
    @contextlib.asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        try:
            yield
        except Exception:
            seen.append("manager")
            raise
        finally:
            await note("exit")

    async def body() -> str:
        async with manager():
            return await wait_for("go", str)

    return body


@surrounding
def suppress_exception(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        with contextlib.suppress(Exception):
            return await wait_for("go", str)
        seen.append("suppressed")
        return "suppressed"

    return body


@surrounding
def exit_stacks(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(note, "pushed")
            stack.enter_context(contextlib.suppress(Exception))
            with contextlib.ExitStack() as inner:
                inner.enter_context(contextlib.suppress(Exception))
                return await wait_for("go", str)
        seen.append("suppressed")
        return "suppressed"

    return body


@surrounding
def task_group(seen: list[str], note: Any) -> Callable[[], Any]:
    async def wait() -> str:
        try:
            return await wait_for("go", str)
        except Exception:
            seen.append("task")
            raise

    async def body() -> str:
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(wait())
                group.create_task(note("sibling"))
        except* Exception:
            seen.append("group")
        return task.result()

    return body


@surrounding
def gathered(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        found = await asyncio.gather(wait_for("go", str), note("sibling"), return_exceptions=True)
        if isinstance(found[0], BaseException):
            seen.append("gathered")
        return str(found[0])

    return body


@surrounding
def waited_for_in_a_task(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        task = asyncio.create_task(wait_for("go", str))
        await asyncio.wait([task])
        if task.cancelled() or task.exception() is not None:
            seen.append("task")
        return str(task.result())

    return body


@surrounding
def async_iterator(seen: list[str], note: Any) -> Callable[[], Any]:
    async def numbers() -> AsyncIterator[str]:
        try:
            yield await wait_for("go", str)
        except Exception:
            seen.append("iterator")
            raise

    async def body() -> str:
        async for number in numbers():
            return number
        return "none"

    return body


@pytest.mark.parametrize("leaving", ["parked", "closed", "paused"])
@pytest.mark.parametrize("name", SURROUNDINGS)
async def test_leaving_memory_is_invisible_to_a_flow(world: World, name: str, leaving: str):
    seen: list[str] = []
    notes: list[str] = []

    @step
    async def note(what: str) -> str:
        notes.append(what)
        return what

    body = SURROUNDINGS[name](seen, note)

    @flow
    async def surrounded() -> str:
        await note("begin")
        found = await body()
        await note("end")
        return str(found)

    rl = await world.open()
    run = await rl.start(surrounded.with_id("r"))
    await until(lambda: waits_for(world, run, "go"))
    before = list(notes)
    for _ in range(3):
        if leaving == "parked":
            await until(lambda: parks(world, run))
        elif leaving == "closed":
            rl = await world.close_and_reopen()
            run = await rl.get("r")
            await until(lambda: "r" in rl.orchestrator.live or is_parked(world, run))
        else:
            await run.pause()
            await world.until_status("paused", run)
            await run.resume()
            await until(lambda: _is_not(world, run, Status.PAUSED))
    assert [what for what in notes if what != "sibling"] == [what for what in before if what != "sibling"]
    await run.signal("go", "on")
    assert await run.result() == "on"
    assert seen == []
    assert notes.count("begin") == notes.count("end") == 1
    assert max(notes.count(what) for what in notes) == 1


async def _is_not(world: World, run: Handle[Any], status: Status) -> bool:
    return (await world.row(run.id)).status is not status


@pytest.mark.parametrize("kind", ["except", "finally", "manager", "suppress", "stack", "parallel"])
async def test_leaving_memory_is_invisible_to_a_sync_flow(world: World, kind: str):
    seen: list[str] = []
    notes: list[str] = []

    @step
    def note(what: str) -> str:
        notes.append(what)
        return what

    @contextlib.contextmanager
    def manager() -> Iterator[None]:
        try:
            yield
        except Exception:
            seen.append("manager")
            raise
        finally:
            note("exit")

    def body() -> Any:
        if kind == "except":
            try:
                return wait_for("go")
            except Exception:
                seen.append("except")
        elif kind == "finally":
            try:
                return wait_for("go")
            finally:
                note("finally")
        elif kind == "manager":
            with manager():
                return wait_for("go")
        elif kind == "suppress":
            with contextlib.suppress(Exception):
                return wait_for("go")
        elif kind == "stack":
            with contextlib.ExitStack() as stack:
                stack.callback(note, "pushed")
                return wait_for("go")
        else:
            from relight import parallel

            return parallel(lambda: wait_for("go"), lambda: note("sibling"))[0]
        seen.append("suppressed")
        return None

    @flow
    def surrounded() -> Any:
        note("begin")
        found = body()
        note("end")
        return found

    rl = await world.open()
    run = await rl.start(surrounded)
    await until(lambda: waits_for(world, run, "go"))
    await until(lambda: parks(world, run))
    if kind == "parallel":
        await until(lambda: "sibling" in notes)
    assert notes == ["begin"] + (["sibling"] if kind == "parallel" else [])
    await run.signal("go", "on")
    assert await run.result() == "on"
    assert seen == []
    assert max(notes.count(what) for what in notes) == 1


async def test_plain_clean_up_runs_when_a_run_leaves_memory(world: World):
    """Leaving memory is invisible to the flow's logic, but resources are released: a flow that leaves memory must not
    leak a socket."""
    held: list[str] = []

    @flow
    async def holding() -> str:
        held.append("open")
        try:
            return await wait_for("go", str)
        finally:
            held.append("closed")

    rl = await world.open()
    run = await rl.start(holding)
    await world.park(run)
    assert held == ["open", "closed"]
    await run.signal("go", "on")
    assert await run.result() == "on"
    assert held == ["open", "closed"] * 2


async def test_leaving_memory_lets_a_step_of_another_branch_finish(world: World):
    """Also in a TaskGroup, which would cancel the step because its sibling was interrupted."""
    gate = asyncio.Event()
    calls: list[str] = []

    @step
    async def slow() -> str:
        calls.append("begun")
        await gate.wait()
        calls.append("finished")
        return "slow"

    @flow
    async def grouped() -> list[str]:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(wait_for("go", str))
            working = group.create_task(slow())
        return [waiting.result(), working.result()]

    rl = await world.open()
    run = await rl.start(grouped.with_id("r"))
    await until(lambda: calls)
    await until(lambda: waits_for(world, run, "go"))
    await run.pause()
    await turns()
    gate.set()
    await world.until_status("paused", run)
    assert calls == ["begun", "finished"]
    assert "~slow/slow" in await world.recorded("r")
    await run.resume()
    await run.signal("go", "on")
    assert await run.result() == ["on", "slow"]
    assert calls == ["begun", "finished"]


@pytest.mark.parametrize("operation", ["wait", "step", "sleep"])
async def test_an_operation_that_begins_as_its_run_is_paused_does_not_break_off_a_step_of_another_branch(
    world: World, operation: str
):
    begun, gate = asyncio.Event(), asyncio.Event()
    calls: list[str] = []

    @step
    async def slow() -> str:
        begun.set()
        await gate.wait()
        calls.append("finished")
        return "slow"

    @step
    async def quick() -> str:
        return "quick"

    @step
    async def slow_has_begun() -> None:
        await begun.wait()

    async def told_just_now() -> None:
        await slow_has_begun()
        live = orchestrator.live["r"]
        if not gate.is_set():
            live.deliver(Message(run_id="r", kind=MessageKind.PAUSE, id=1_000_000))
        operations: dict[str, Callable[[], Any]] = {
            "wait": lambda: wait_for("go", timeout=0, default=None),
            "step": quick,
            "sleep": lambda: sleep(0),
        }
        await operations[operation]()

    @flow
    async def grouped() -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(told_just_now())
            working = group.create_task(slow())
        return working.result()

    rl = await world.open()
    orchestrator = rl.orchestrator
    run = await rl.start(grouped.with_id("r"))
    await until(lambda: orchestrator.live["r"].departing)
    gate.set()
    await world.until_status("paused", run)
    assert calls == ["finished"]
    await run.resume()
    assert await run.result(timeout="60s") == "slow"
    assert calls == ["finished"]
