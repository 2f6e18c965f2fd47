"""The interpreter of async programs. Its flows do what their argument, a program, says. See `core`.

`generate.py` says what a statement may contain; `branches` has those with several tasks.
"""

from __future__ import annotations

import asyncio
from typing import Any

from relight import Retry, flow, foreach, now, random, sleep, spawn, uuid, wait_for
from tests.random import branches
from tests.random.book import describe, plain
from tests.random.core import execute, in_box, observe, statement
from tests.random.env import PLAIN, Block, Env, called, is_quiet
from tests.random.plain import plain_step
from tests.random.steps import ASYNC, Boom, each_step

__all__ = ["branches"]  # imported because it registers statements

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
    """Repeat the block as often as a result says."""
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
    """Enter something and leave it, by steps. See check._left."""
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


# ---- boxes


@statement
async def do_foreach(env: Env, one: dict[str, Any]) -> None:
    """Items that have bodies. Each item is a box."""
    name, trace, block = env.inner("item"), env.trace, one["each"]

    async def each(item: list[int]) -> list[Any]:
        inner = f"{name}[{item[0]}]"
        return await in_box(trace, env.branch + inner, env.path + inner, block, item[1])

    items = [[number, number + env.argument(one["x"])] for number in range(1 + env.argument(one["times"]) % 4)]
    found = await observe(env, "items", foreach(items, each, concurrency=one["concurrency"]))
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
    """The argument of a child run."""
    name = env.inner("child")
    env.trace.boxes[env.path + name] = env.branch + name
    return {"run": env.trace.run, "path": env.path + name, "block": block, "last": env.last}


def spawn_order(env: Env, block: Block) -> dict[str, Any]:
    """The argument of a spawned run. That run has a trace of its own."""
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
    handle = await observe(env, "spawn", spawn(spawned.with_id(order["run"]), order))
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


@flow(name="spawned_program")
async def spawned(order: dict[str, Any]) -> list[Any]:
    return await _flow(order)
