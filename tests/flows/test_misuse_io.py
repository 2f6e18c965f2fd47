"""Calls of flow code that reach outside the run are refused where they stand. The error says to put them into a step."""

import asyncio
import concurrent.futures
import contextlib
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from relight import RelightError, RunFailedError, flow, foreach, step, wait_for
from relight.errors import FlowCodeError
from tests.flows.watching import turns
from tests.flows.world import World, until


def nothing(*_: Any) -> None:
    pass


class Outside:
    """Objects of the program that flow code finds in its closure."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[str] = self.loop.create_future()
        self.task = self.loop.create_task(asyncio.Event().wait())
        self.pool = ThreadPoolExecutor(1)
        self.sockets = socket.socketpair()

    def close(self) -> None:
        self.task.cancel()
        self.pool.shutdown(wait=False)
        for one in self.sockets:
            one.close()


CALLS: dict[str, Any] = {
    "open_connection": lambda outside: asyncio.open_connection("127.0.0.1", 1),
    "start_server": lambda outside: asyncio.start_server(nothing, "127.0.0.1", 0),
    "create_subprocess_exec": lambda outside: asyncio.create_subprocess_exec(sys.executable, "-c", "0"),
    "create_subprocess_shell": lambda outside: asyncio.create_subprocess_shell("true"),
    "to_thread": lambda outside: asyncio.to_thread(nothing),
    "run_in_executor": lambda outside: asyncio.get_running_loop().run_in_executor(None, nothing),
    "run_in_executor of its own": lambda outside: asyncio.get_running_loop().run_in_executor(outside.pool, nothing),
    "getaddrinfo": lambda outside: asyncio.get_running_loop().getaddrinfo("localhost", 1),
    "sock_recv": lambda outside: asyncio.get_running_loop().sock_recv(outside.sockets[0], 1),
    "add_reader": lambda outside: asyncio.get_running_loop().add_reader(outside.sockets[0], nothing),
    "add_writer": lambda outside: asyncio.get_running_loop().add_writer(outside.sockets[0], nothing),
    "add_signal_handler": lambda outside: asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, nothing),
    "call_soon_threadsafe": lambda outside: asyncio.get_running_loop().call_soon_threadsafe(nothing),
    "run_until_complete": lambda outside: asyncio.get_running_loop().run_until_complete(outside.future),
    "stop": lambda outside: asyncio.get_running_loop().stop(),
    "close": lambda outside: asyncio.get_running_loop().close(),
    "a future of another loop": lambda outside: outside.future,
    "a task of another loop": lambda outside: outside.task,
    "gather of another loop's futures": lambda outside: asyncio.gather(outside.future),
    "wait for another loop's task": lambda outside: asyncio.wait([outside.task]),
    "wrap_future": lambda outside: asyncio.wrap_future(outside.pool.submit(nothing)),
    "wrap_future, not done": lambda outside: asyncio.wrap_future(concurrent.futures.Future()),
    "run_coroutine_threadsafe": lambda outside: asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), outside.loop)
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # made by asyncio before the flow
async def test_io_is_refused_where_it_is_called_and_fails_the_run(world: World, name: str):
    outside = Outside()

    @step
    async def work() -> None:
        pass

    @flow
    async def reaching_out() -> str:
        await work()
        try:
            found = CALLS[name](outside)
            if found is not None:
                await found
        finally:
            await work()
        return "it was not refused"

    rl = await world.open()
    try:
        run = await rl.start(reaching_out)
        with pytest.raises(RunFailedError, match="step") as failed:
            await run.result("60s")
        assert isinstance(failed.value.__cause__, FlowCodeError)
    finally:
        outside.close()


@pytest.mark.parametrize("where", ["task", "child", "foreach"])
async def test_io_is_refused_in_every_branch(world: World, where: str):
    async def branch(n: int = 0) -> None:
        await asyncio.to_thread(nothing)

    @flow
    async def child() -> None:
        await branch()

    @flow
    async def reaching_out() -> None:
        if where == "task":
            async with asyncio.TaskGroup() as group:
                group.create_task(branch())
        else:
            await (child() if where == "child" else foreach([1], branch))

    rl = await world.open()
    with pytest.raises(RunFailedError) as failed:
        await (await rl.start(reaching_out)).result("60s")
    cause = failed.value.__cause__
    assert isinstance(cause.exceptions[0] if isinstance(cause, ExceptionGroup) else cause, FlowCodeError)


async def test_a_flow_may_catch_the_refusal_of_io_and_go_on_also_on_replay(world: World):
    seen = list[str]()

    @flow
    async def careful() -> str:
        try:
            await asyncio.to_thread(nothing)
        except FlowCodeError as error:
            seen.append(str(error))
        await wait_for("go")
        return "over"

    rl = await world.open()
    run = await rl.start(careful)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    await run.signal("go")
    assert await run.result("60s") == "over"
    assert len(seen) == 2
    assert seen[0] == seen[1]


async def test_io_is_allowed_in_steps(world: World):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    @step
    async def talk() -> str:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello\n")
            found = (await reader.readline()).decode().strip()
            writer.close()
            await writer.wait_closed()
        return found

    @step
    async def compute() -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "print(6 * 7)", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        return int(out) + await asyncio.to_thread(lambda: 0)

    @flow
    async def reaching_out() -> str:
        return f"{await talk()} {await compute()}"

    rl = await world.open()
    assert await (await rl.start(reaching_out)).result("60s") == "hello 42"


# ---- flows that wait for something outside the journal


async def ends_loudly(run: Any) -> None:
    """Check that the run fails or is held with a clear error, and does not wait for ever in silence."""
    with pytest.raises(RelightError):
        await run.result("60s")


async def test_an_event_that_the_program_sets_does_not_leave_the_flow_hanging(world: World):
    event, waits = asyncio.Event(), list[int]()

    @flow
    async def waiting() -> str:
        waits.append(1)
        await event.wait()
        return "woken by nobody who is in the journal"

    rl = await world.open()
    run = await rl.start(waiting)
    await until(lambda: waits)
    await turns()
    try:
        event.set()
    except FlowCodeError:
        pass  # an error for the code that sets the event is fine, too; but the run must not go on waiting
    await ends_loudly(run)


async def test_a_lock_that_two_runs_share_does_not_leave_one_hanging(world: World):
    lock, begun = asyncio.Lock(), list[str]()

    @flow
    async def guarded(name: str) -> str:
        begun.append(name)
        async with lock:
            await wait_for("go")
        return name

    rl = await world.open(park_after="10h")
    first = await rl.start(guarded, "first")
    await world.until_status("waiting", first)
    second = await rl.start(guarded, "second")
    await until(lambda: len(begun) == 2)
    await turns()
    for run in (first, second):  # it does not matter which run gets the error: neither waits for ever
        with contextlib.suppress(RelightError):
            await run.signal("go")
        with contextlib.suppress(RelightError):
            assert await run.result("60s") in ("first", "second")


async def test_a_flow_that_waits_for_what_can_never_happen_says_so(world: World):
    """The flow is at rest, no operation is under way, and it waits for none. Neither a time nor a message can let it go on."""

    @flow
    async def lost() -> None:
        await asyncio.Event().wait()

    rl = await world.open()
    run = await rl.start(lost)
    await ends_loudly(run)
