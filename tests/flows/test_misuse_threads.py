"""Operations called where they cannot be journaled: from threads of the user's own, and runs started inside flows."""

import asyncio
import contextvars
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from relight import (
    OutsideRunError,
    Relight,
    RelightError,
    RunFailedError,
    flow,
    foreach,
    now,
    parallel,
    sleep,
    spawn,
    step,
    wait_for,
)
from tests.flows.world import World

# ---- threads of the user's own


def in_pool(fn: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result(20)


def in_thread(fn: Callable[[], Any]) -> Any:
    """A thread that gets no context."""
    found: list[Any] = []

    def body() -> None:
        try:
            found.append(fn())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it hangs"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def in_context(fn: Callable[[], Any]) -> Any:
    """A thread that gets the flow's context, as with asyncio.to_thread."""
    context = contextvars.copy_context()
    return in_thread(lambda: context.run(fn))


WHERE = pytest.mark.parametrize("where", [in_pool, in_thread, in_context], ids=lambda where: where.__name__)


def operations(calls: list[str]) -> dict[str, Callable[[], Any]]:
    @step
    def charge() -> str:
        calls.append("charge")
        return "charged"

    @step
    async def charge_async() -> str:
        calls.append("charge_async")
        return "charged"

    @flow
    def sub() -> str:
        calls.append("sub")
        return "sub"

    def branch() -> str:
        calls.append("branch")
        return "branch"

    return {
        "sync step": charge,
        "async step": charge_async,
        "flow": sub,
        "sleep": lambda: sleep(0),
        "wait_for": lambda: wait_for("go"),
        "foreach": lambda: foreach([1], lambda n: branch()),
        "parallel": lambda: parallel(branch),
        "spawn": lambda: spawn(sub),
        "now": now,
    }


KINDS = ["sync step", "async step", "flow", "sleep", "wait_for", "foreach", "parallel", "spawn", "now"]


@WHERE
@pytest.mark.parametrize("kind", KINDS)
async def test_an_operation_called_from_a_thread_of_a_sync_flow_is_refused(
    world: World, kind: str, where: Callable[[Any], Any]
):
    calls = list[str]()
    operation = operations(calls)[kind]

    @flow
    def threading_flow() -> str:
        try:
            where(operation)
        except OutsideRunError as error:
            return str(error)
        return "it was not refused"

    rl = await world.open()
    run = await rl.start(threading_flow)
    assert "thread" in await run.result("60s")
    assert calls == []
    assert len(await world.events(run.id)) == 2  # created, completed


@WHERE
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "parallel"])
async def test_an_operation_called_from_a_thread_of_an_async_flow_is_refused(
    world: World, kind: str, where: Callable[[Any], Any]
):
    calls = list[str]()
    operation = operations(calls)[kind]

    @flow
    async def threading_flow() -> str:
        def call() -> None:
            found = operation()
            if asyncio.iscoroutine(found):
                asyncio.run(found)

        try:
            where(call)
        except OutsideRunError as error:
            return str(error)
        return "it was not refused"

    rl = await world.open()
    run = await rl.start(threading_flow)
    assert "thread" in await run.result("60s")
    assert calls == []
    assert len(await world.events(run.id)) == 2


async def test_mapping_a_step_over_a_pool_executes_no_step(world: World):
    charged = list[int]()

    @step
    def charge(n: int) -> int:
        charged.append(n)
        return n

    @flow
    def charging() -> list[int]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(charge, range(8)))

    rl = await world.open()
    with pytest.raises(RunFailedError, match=r"'charge'.*thread") as failed:
        await (await rl.start(charging)).result("60s")
    assert isinstance(failed.value.__cause__, OutsideRunError)
    assert charged == []


async def test_mapping_a_step_over_a_pool_made_before_the_flow_executes_no_step(world: World):
    """The pool's threads know nothing of the flow that gives them work, and ThreadPoolExecutor passes no context on."""
    charged = list[int]()

    @step
    def charge(n: int) -> int:
        charged.append(n)
        return n

    @flow
    def charging() -> list[int]:
        return list(pool.map(charge, range(8)))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result(20)  # its thread is running
        rl = await world.open()
        with pytest.raises(RunFailedError, match=r"'charge'.*thread"):
            await (await rl.start(charging)).result("60s")
    assert charged == []


async def test_a_step_may_use_threads_of_its_own_and_call_others_as_plain_functions(world: World):
    """In a step's body, and in a thread that the body makes, a step is a plain function."""

    @step
    def part(n: int) -> int:
        return n * n

    @step
    def whole() -> list[int]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(part, range(4)))

    @flow
    async def squares() -> list[int]:
        return await whole()

    rl = await world.open()
    run = await rl.start(squares)
    assert await run.result("60s") == [0, 1, 4, 9]
    assert await world.recorded(run.id) == ["whole", ""]


async def test_a_thread_beside_the_engine_calls_steps_and_flows_as_plain_functions(world: World):
    """Only threads that a flow's code starts are inside a run: the program's own are not."""

    @step
    def part(n: int) -> int:
        return n * n

    @flow
    def plain() -> int:
        return part(3)

    await world.open()
    assert await asyncio.to_thread(plain) == 9


# ---- runs started inside flows


def says_what_to_do(message: str) -> None:
    assert re.search(r"\bcall\b.*\bspawn\(", message), message


@pytest.mark.parametrize("method", ["start", "run", "start by name"])
async def test_starting_a_run_inside_an_async_flow_is_refused(world: World, method: str):
    calls = list[str]()

    @flow
    async def sub() -> str:
        calls.append("sub")
        return "sub"

    @flow
    async def outer() -> str:
        try:
            await (rl.run(sub) if method == "run" else rl.start(sub if method == "start" else "sub"))
        except RelightError as error:
            return str(error)
        return "it was not refused"

    rl = await world.open()
    says_what_to_do(await (await rl.start(outer)).result("60s"))
    assert calls == []
    assert (await rl.list(flow="sub")).runs == []


async def test_a_flow_that_starts_runs_fails_with_that_error(world: World):
    @flow
    async def sub() -> str:
        return "sub"

    @flow
    async def outer() -> str:
        return await rl.run(sub)

    rl = await world.open()
    with pytest.raises(RunFailedError, match="spawn") as failed:
        await (await rl.start(outer)).result("60s")
    assert isinstance(failed.value.__cause__, RelightError)


@pytest.mark.parametrize("where", ["task", "child", "foreach"])
async def test_starting_a_run_in_a_branch_of_a_flow_is_refused(world: World, where: str):
    @flow
    async def sub() -> str:
        return "sub"

    async def starts(n: int = 0) -> str:
        await rl.start(sub)
        return "started"

    @flow
    async def child() -> str:
        return await starts()

    @flow
    async def outer() -> Any:
        if where == "task":
            return await asyncio.create_task(starts())
        return await (child() if where == "child" else foreach([1], starts))

    rl = await world.open()
    with pytest.raises(RunFailedError, match="spawn"):
        await (await rl.start(outer)).result("60s")
    assert (await rl.list(flow="sub")).runs == []


@pytest.mark.parametrize("method", ["start", "run"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_starting_a_run_inside_a_flow_of_the_blocking_facade_is_refused(method: str, kind: str):
    @flow
    def sub() -> str:
        return "sub"

    def starts() -> str:
        try:
            getattr(rl, method)(sub)
        except RelightError as error:
            return str(error)
        return "it was not refused"

    @flow
    def outer() -> str:
        return starts()

    @flow
    async def outer_async() -> str:
        return starts()

    with Relight("memory:") as rl:
        run = rl.start(outer if kind == "sync" else outer_async)
        says_what_to_do(run.result("60s"))
        assert rl.list(flow="sub").runs == []


async def test_starting_a_run_inside_a_step_is_fine(world: World):
    """A step is executed once per attempt. A run that it starts is a root run like any other."""

    @step
    async def work() -> str:
        return "worked"

    @flow
    async def sub() -> str:
        return await work()

    @step
    async def starts() -> str:
        return await rl.run(sub.with_id("started"))

    @flow
    async def outer() -> str:
        return await starts()

    rl = await world.open()
    assert await (await rl.start(outer)).result("60s") == "worked"
    assert await world.recorded("started") == ["work", ""]


@pytest.mark.parametrize("method", ["result", "signal", "cancel", "status"])
async def test_a_handle_used_inside_a_flow_is_refused_and_never_hangs(world: World, method: str):
    """This run's journal does not have another run's status. The next replay could see another status."""

    @flow
    async def other() -> str:
        return await wait_for("go", str)

    @flow
    async def outer() -> str:
        try:
            await (handle.signal("go", "on") if method == "signal" else getattr(handle, method)())
        except RelightError as error:
            return f"refused: {error}"
        return "it was not refused"

    rl = await world.open()
    handle = await rl.start(other)
    await world.until_status("waiting", handle)
    assert re.match("refused: .*step", await (await rl.start(outer)).result("60s"))
    assert await handle.status() == "waiting"
