"""The interpreter of async programs: flows that do what their argument, a program, says.

`execute` goes through a block of statements; each statement is a function below, registered under its name. What a statement
is told goes into the trace at once. `generate.py` says what a statement may contain.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from relight import Retry, flow, foreach, now, random, sleep, spawn, uuid, wait_for
from tests.random.book import Trace, describe, plain
from tests.random.env import PLAIN, Block, Env, Shared, called, is_quiet
from tests.random.plain import plain_step
from tests.random.steps import ASYNC, Boom, each_step

Statement = Callable[[Env, dict[str, Any]], Awaitable[None]]
STATEMENTS: dict[str, Statement] = {}


def statement(function: Statement) -> Statement:
    STATEMENTS[function.__name__.removeprefix("do_")] = function
    return function


async def execute(env: Env, block: Block) -> None:
    for one in block:
        await STATEMENTS[one["op"]](env, one)


async def in_box(trace: Trace, box: str, path: str, block: Block, last: int) -> list[Any]:
    """The body of a flow call, or of an item."""
    env = Env(trace, box, box, path, Shared())
    env.last = last
    env.enter()
    try:
        await execute(env, block)
    except BaseException as error:
        if not is_quiet(error):
            env.leave(f"raised {describe(error)}")
        raise
    env.leave(f"returned {plain(env.out)}")
    return env.out


async def branch(env: Env, block: Block) -> list[Any]:
    """A task of a flow call."""
    try:
        await execute(env, block)
    except BaseException as error:
        if not is_quiet(error):
            env.derived(f"ends with {describe(error)}")
        raise
    env.derived("ends")
    return env.out


def branches(env: Env, blocks: list[Block], name: str) -> list[Any]:
    """Coroutines, one for each."""
    whole = env.inner(name)
    return [branch(env.forked(f"{whole}.{number}"), block) for number, block in enumerate(blocks)]


def tasks_of(env: Env, blocks: list[Block], name: str) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(one, name=f"{name}{number}") for number, one in enumerate(branches(env, blocks, name))]


async def reap(env: Env, tasks: list[asyncio.Task[Any]]) -> list[str]:
    """Wait for all, whatever becomes of them, and say what that is."""
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    texts = [describe(end) if isinstance(end, BaseException) else plain(end) for end in ends]
    env.derived(f"reaped {texts}")
    return texts


@contextlib.asynccontextmanager
async def reaped(env: Env, tasks: list[asyncio.Task[Any]], cancel: bool = True) -> AsyncIterator[None]:
    """However the body ends, its tasks end before it."""
    try:
        yield
    finally:
        if cancel:
            for task in tasks:
                task.cancel()
        await reap(env, tasks)


async def observe(env: Env, what: str, awaited: Awaitable[Any]) -> Any:
    """Something durable is asked for, and told."""
    env.ask(what)
    try:
        return await awaited
    except BaseException as error:
        env.raised(what, error)
        raise


# ---- steps, values, waiting


async def call_step(env: Env, one: dict[str, Any]) -> int:
    spec = one["spec"]
    x = env.argument(one["x"])
    what = f"{one['step']} {spec['id']}({x})"
    asked = plain_step(one["step"], spec, x) if env.is_plain else ASYNC[one["step"]](spec, x)
    value, nonce = await observe(env, what, asked)
    env.told(f"{what} = {value} {nonce}")
    return int(value)


@statement
async def do_step(env: Env, one: dict[str, Any]) -> None:
    env.gain(await call_step(env, one))


@statement
async def do_raise(env: Env, one: dict[str, Any]) -> None:
    raise Boom(one["text"])


@statement
async def do_value(env: Env, one: dict[str, Any]) -> None:
    env.gain(take_value(env, one["of"]))


def take_value(env: Env, of: str) -> int:
    found = {"now": lambda: now().microsecond, "random": lambda: int(random() * 1000), "uuid": lambda: uuid().int % 97}
    value = found[of]()
    env.value(f"{of} {value}")
    return value


@statement
async def do_sleep(env: Env, one: dict[str, Any]) -> None:
    if env.is_plain:
        return
    how, seconds = one["how"], one["ms"] / 1000
    if not seconds:
        await asyncio.sleep(0)
        return
    await observe(env, f"{how} sleep", asyncio.sleep(seconds) if how == "asyncio" else sleep(seconds))
    env.told(f"slept {one['ms']} {how}")


@statement
async def do_signal(env: Env, one: dict[str, Any]) -> None:
    name, seconds = one["name"], one["ms"] / 1000
    waiting = wait_for(name, int, timeout=seconds, **({"default": -1} if one["default"] else {}))
    try:
        value = await observe(env, f"signal {name}", waiting)
    except TimeoutError:
        value = -2
    else:
        env.told(f"signal {name} = {value}")
    env.gain(value)


# ---- what plain code does


@statement
async def do_if(env: Env, one: dict[str, Any]) -> None:
    on = one["on"]
    number = take_value(env, on) if on in ("now", "random", "uuid") else env.argument(on)
    await execute(env, one["then"] if number % 2 else one["else"])


@statement
async def do_loop(env: Env, one: dict[str, Any]) -> None:
    """As often as a result says."""
    for _ in range(1 + env.argument(one["times"]) % 3):
        await execute(env, one["body"])


@statement
async def do_try(env: Env, one: dict[str, Any]) -> None:
    try:
        await execute(env, one["body"])
    except Exception as error:
        env.derived(f"caught {describe(error)}")
        env.gain(-3)
        await execute(env, one["except"])
    finally:
        await execute(env, one["finally"])


@statement
async def do_context(env: Env, one: dict[str, Any]) -> None:
    """Something is entered and left, durably. See check.left."""
    name = env.branch + env.inner("context")
    env.gain(await call_step(env, one["enter"]))
    env.derived(f"entered {name}")
    try:
        await execute(env, one["body"])
    finally:
        try:
            await call_step(env, one["exit"])
        except BaseException as error:
            if not is_quiet(error):
                env.derived(f"broke off leaving {name}")
            raise
        env.derived(f"left {name}")


# ---- branches


@statement
async def do_gather(env: Env, one: dict[str, Any]) -> None:
    tasks = tasks_of(env, one["branches"], "gather")
    async with reaped(env, tasks, one["cancel"]):
        ends = await asyncio.gather(*tasks, return_exceptions=one["returns"])
        texts = [describe(end) if isinstance(end, BaseException) else plain(end) for end in ends]
        env.derived(f"gathered {texts}")
        env.out.append([-4 if isinstance(end, BaseException) else end for end in ends])


@statement
async def do_group(env: Env, one: dict[str, Any]) -> None:
    made: list[asyncio.Task[Any]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in branches(env, one["branches"], "group"):
                made.append(group.create_task(coroutine))
            await execute(env, one["body"])
    except Exception as error:
        env.derived(f"group raised {describe(error)}")
        if not one["catch"]:
            raise
        env.gain(-5)
    else:
        env.out.append([task.result() for task in made])


@statement
async def do_later(env: Env, one: dict[str, Any]) -> None:
    """Tasks that are awaited later, or cancelled."""
    tasks = tasks_of(env, one["branches"], "later")
    async with reaped(env, tasks, one["cancel"]):
        await execute(env, one["between"])
    env.gain(sum(task.done() and not task.cancelled() and task.exception() is None for task in tasks))


@statement
async def do_wait(env: Env, one: dict[str, Any]) -> None:
    """asyncio.wait: the order of its sets decides what is asked for."""
    tasks = tasks_of(env, one["branches"], "wait")
    async with reaped(env, tasks, one["cancel"]):
        seconds = None if one["ms"] is None else one["ms"] / 1000
        done, pending = await asyncio.wait(tasks, return_when=one["when"], timeout=seconds)
        names = [task.get_name() for task in done]
        env.derived(f"done {names}, pending {[task.get_name() for task in pending]}")
        for task in done:
            env.shared.list.append(tasks.index(task))
        await execute(env, one["then"])
    env.gain(len(names))


@statement
async def do_as_completed(env: Env, one: dict[str, Any]) -> None:
    tasks = tasks_of(env, one["branches"], "completed")
    async with reaped(env, tasks):
        for number, next_one in enumerate(asyncio.as_completed(tasks)):
            try:
                env.derived(f"completed {await next_one}")
            except Exception as error:
                env.derived(f"completed with {describe(error)}")
            if number < len(one["then"]):
                await execute(env, one["then"][number])


@statement
async def do_timeout(env: Env, one: dict[str, Any]) -> None:
    try:
        async with asyncio.timeout(one["ms"] / 1000):
            await execute(env, one["body"])
    except TimeoutError as error:
        env.derived(f"timeout: {describe(error)}")
        env.gain(-6)


@statement
async def do_wait_for(env: Env, one: dict[str, Any]) -> None:
    (coroutine,) = branches(env, [one["body"]], "limited")
    try:
        value = await asyncio.wait_for(coroutine, one["ms"] / 1000)
        env.derived(f"in time: {plain(value)}")
    except TimeoutError as error:
        env.derived(f"not in time: {describe(error)}")
        env.gain(-7)


@statement
async def do_shield(env: Env, one: dict[str, Any]) -> None:
    """Given up on, but not stopped."""
    (task,) = tasks = tasks_of(env, [one["body"]], "shielded")
    async with reaped(env, tasks, cancel=False):
        try:
            async with asyncio.timeout(one["ms"] / 1000):
                await asyncio.shield(task)
        except TimeoutError as error:
            env.derived(f"shielded: {describe(error)}")
        await execute(env, one["then"])


# ---- what branches share


@statement
async def do_note(env: Env, one: dict[str, Any]) -> None:
    env.shared.list.append(one["number"])
    env.shared.count += 1
    env.derived(f"noted, now {env.shared.list}")


@statement
async def do_put(env: Env, one: dict[str, Any]) -> None:
    await _limited(env, one, "put", lambda: env.shared.queue.put(env.last))


@statement
async def do_get(env: Env, one: dict[str, Any]) -> None:
    await _limited(env, one, "get", lambda: env.shared.queue.get())


@statement
async def do_set(env: Env, one: dict[str, Any]) -> None:
    env.shared.event.set()
    env.derived("set")


@statement
async def do_await_event(env: Env, one: dict[str, Any]) -> None:
    await _limited(env, one, "event", lambda: env.shared.event.wait())


async def _limited(env: Env, one: dict[str, Any], what: str, begin: Callable[[], Awaitable[Any]]) -> bool:
    """Nothing waits for ever."""
    try:
        async with asyncio.timeout(one["ms"] / 1000):
            value = await begin()
    except TimeoutError as error:
        env.derived(f"{what}: {describe(error)}")
        return False
    env.derived(f"{what}: {value}")
    if isinstance(value, int):
        env.gain(int(value))
    return True


@statement
async def do_lock(env: Env, one: dict[str, Any]) -> None:
    lock = env.shared.lock if one["which"] == "lock" else env.shared.semaphore
    if await _limited(env, one, one["which"], lock.acquire):
        try:
            await execute(env, one["body"])
        finally:
            lock.release()


# ---- boxes


@statement
async def do_foreach(env: Env, one: dict[str, Any]) -> None:
    """Items with a body of their own, each a box."""
    name, trace, block = env.inner("item"), env.trace, one["each"]

    async def each(item: list[int]) -> list[Any]:
        inner = f"{name}[{item[0]}]"
        return await in_box(trace, env.branch + inner, env.path + inner, block, item[1])

    items = [[number, number + env.argument(one["x"])] for number in range(1 + env.argument(one["times"]) % 4)]
    found = await observe(env, "foreach", foreach(items, each, concurrency=one["concurrency"]))
    env.told(f"foreach gave {plain(found)}")
    env.out.append(found)


@statement
async def do_foreach_step(env: Env, one: dict[str, Any]) -> None:
    items = [[spec, env.argument(one["x"])] for spec in one["specs"]]
    if env.is_plain:
        found = [await plain_step("work", spec, x) for spec, x in items]
    else:
        found = await observe(env, "foreach", foreach(items, each_step, concurrency=one["concurrency"]))
    env.told(f"foreach gave {plain(found)}")
    env.out.append([value for value, _ in found])


def child_order(env: Env, block: Block) -> dict[str, Any]:
    """What a child run is told."""
    name = env.inner("child")
    env.trace.boxes[env.path + name] = env.branch + name
    return {"run": env.trace.run, "path": env.path + name, "block": block, "last": env.last}


def spawn_order(env: Env, block: Block) -> dict[str, Any]:
    """What a spawned run is told. It has a trace of its own."""
    run = PLAIN if env.is_plain else f"{env.trace.run}{env.path}{env.inner('spawn')}".replace("/", ".")
    return {"run": run, "path": "", "block": block, "last": env.last}


@statement
async def do_child(env: Env, one: dict[str, Any]) -> None:
    from tests.random.interpret_sync import sync_child

    flows: dict[str, Any] = {"async": child, "retried": child_retried, "timed": child_timed, "sync": sync_child}
    called_flow = flows[one["flow"]]
    asked = called_flow(child_order(env, one["body"]))
    try:
        found = await observe(env, "child", asked)
    except Exception:
        if not one["catch"]:
            raise
        env.gain(-8)
    else:
        env.told(f"child gave {plain(found)}")
        env.out.append(found)


@statement
async def do_spawn(env: Env, one: dict[str, Any]) -> None:
    order = spawn_order(env, one["body"])
    if env.is_plain:
        env.out.append(await spawned(order))
        return
    handle = await observe(env, "spawn", spawn(spawned, order, id=order["run"]))
    env.told(f"spawned {handle.id}")
    await execute(env, one["between"])
    if one["join"]:
        found = await observe(env, "join", handle)
        env.told(f"joined {plain(found)}")
        env.out.append(found)


# ---- the flows


async def _flow(order: dict[str, Any]) -> list[Any]:
    trace, box = called(order)
    return await in_box(trace, box, order["path"], order["block"], order["last"])


@flow
async def program(order: dict[str, Any]) -> list[Any]:
    return await _flow(order)


@flow(retry=Retry(attempts=3, delay="1ms"))
async def program_retried(order: dict[str, Any]) -> list[Any]:
    return await _flow(order)


@flow
async def child(order: dict[str, Any]) -> list[Any]:
    return await _flow(order)


@flow(retry=Retry(attempts=3, delay="2ms"))
async def child_retried(order: dict[str, Any]) -> list[Any]:
    return await _flow(order)


@flow(timeout="20ms")
async def child_timed(order: dict[str, Any]) -> list[Any]:
    return await _flow(order)


@flow
async def spawned(order: dict[str, Any]) -> list[Any]:
    return await _flow(order)
