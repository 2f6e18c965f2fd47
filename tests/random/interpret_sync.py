"""The interpreter of sync programs: those of the same statements that plain functions can have, and parallel()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relight import Retry, flow, foreach, parallel, sleep, spawn, wait_for
from tests.random.book import Trace, describe, plain
from tests.random.env import Block, Env, Shared, called, is_quiet
from tests.random.interpret import child, child_order, spawn_order, spawned, take_value
from tests.random.plain import outcome
from tests.random.steps import ASYNC, Boom, each_step

Statement = Callable[[Env, dict[str, Any]], None]
STATEMENTS: dict[str, Statement] = {}


def statement(function: Statement) -> Statement:
    STATEMENTS[function.__name__.removeprefix("do_")] = function
    return function


def execute(env: Env, block: Block) -> None:
    for one in block:
        STATEMENTS[one["op"]](env, one)


def in_box(trace: Trace, box: str, path: str, block: Block, last: int) -> list[Any]:
    env = Env(trace, box, box, path, Shared())
    env.last = last
    env.enter()
    try:
        execute(env, block)
    except BaseException as error:
        if not is_quiet(error):
            env.leave(f"raised {describe(error)}")
        raise
    env.leave(f"returned {plain(env.out)}")
    return env.out


def branch(env: Env, block: Block) -> list[Any]:
    try:
        execute(env, block)
    except BaseException as error:
        if not is_quiet(error):
            env.derived(f"ends with {describe(error)}")
        raise
    env.derived("ends")
    return env.out


def observe(env: Env, what: str, ask: Callable[[], Any]) -> Any:
    env.ask(what)
    try:
        return ask()
    except BaseException as error:
        env.raised(what, error)
        raise


def call_step(env: Env, one: dict[str, Any]) -> int:
    spec = one["spec"]
    x = env.argument(one["x"])
    what = f"{one['step']} {spec['id']}({x})"
    step: Any = ASYNC[one["step"]]
    value, nonce = observe(env, what, lambda: outcome(one["step"], spec, x) if env.is_plain else step(spec, x))
    env.told(f"{what} = {value} {nonce}")
    return int(value)


@statement
def do_step(env: Env, one: dict[str, Any]) -> None:
    env.gain(call_step(env, one))


@statement
def do_raise(env: Env, one: dict[str, Any]) -> None:
    raise Boom(one["text"])


@statement
def do_value(env: Env, one: dict[str, Any]) -> None:
    env.gain(take_value(env, one["of"]))


@statement
def do_sleep(env: Env, one: dict[str, Any]) -> None:
    if not env.is_plain:
        observe(env, "sleep", lambda: sleep(one["ms"] / 1000))
        env.told(f"slept {one['ms']}")


@statement
def do_signal(env: Env, one: dict[str, Any]) -> None:
    name, seconds = one["name"], one["ms"] / 1000
    options: dict[str, Any] = {"default": -1} if one["default"] else {}
    try:
        value = observe(env, f"signal {name}", lambda: wait_for(name, int, timeout=seconds, **options))
    except TimeoutError:
        value = -2
    else:
        env.told(f"signal {name} = {value}")
    env.gain(value)


@statement
def do_if(env: Env, one: dict[str, Any]) -> None:
    on = one["on"]
    number = take_value(env, on) if on in ("now", "random", "uuid") else env.argument(on)
    execute(env, one["then"] if number % 2 else one["else"])


@statement
def do_loop(env: Env, one: dict[str, Any]) -> None:
    for _ in range(1 + env.argument(one["times"]) % 3):
        execute(env, one["body"])


@statement
def do_try(env: Env, one: dict[str, Any]) -> None:
    try:
        execute(env, one["body"])
    except Exception as error:
        env.derived(f"caught {describe(error)}")
        env.gain(-3)
        execute(env, one["except"])
    finally:
        execute(env, one["finally"])


@statement
def do_context(env: Env, one: dict[str, Any]) -> None:
    name = env.branch + env.inner("context")
    env.gain(call_step(env, one["enter"]))
    env.derived(f"entered {name}")
    try:
        execute(env, one["body"])
    finally:
        try:
            call_step(env, one["exit"])
        except BaseException as error:
            if not is_quiet(error):
                env.derived(f"broke off leaving {name}")
            raise
        env.derived(f"left {name}")


@statement
def do_note(env: Env, one: dict[str, Any]) -> None:
    env.shared.list.append(one["number"])
    env.shared.count += 1
    env.derived(f"noted, now {env.shared.list}")


@statement
def do_parallel(env: Env, one: dict[str, Any]) -> None:
    whole = env.inner("parallel")
    envs = [env.forked(f"{whole}.{number}") for number in range(len(one["branches"]))]
    works = [
        lambda inner=inner, block=block: branch(inner, block)
        for inner, block in zip(envs, one["branches"], strict=True)
    ]
    found = parallel(*works)
    env.derived(f"parallel gave {plain(found)}")
    env.out.append(found)


@statement
def do_foreach(env: Env, one: dict[str, Any]) -> None:
    name, trace, block = env.inner("item"), env.trace, one["each"]

    def each(item: list[int]) -> list[Any]:
        inner = f"{name}[{item[0]}]"
        return in_box(trace, env.branch + inner, env.path + inner, block, item[1])

    items = [[number, number + env.argument(one["x"])] for number in range(1 + env.argument(one["times"]) % 4)]
    found = observe(env, "items", lambda: foreach(items, each, concurrency=one["concurrency"]))
    env.told(f"foreach gave {plain(found)}")
    env.out.append(found)


@statement
def do_foreach_step(env: Env, one: dict[str, Any]) -> None:
    items = [[spec, env.argument(one["x"])] for spec in one["specs"]]
    if env.is_plain:
        found = [outcome("work", spec, x) for spec, x in items]
    else:
        found = observe(env, "foreach", lambda: foreach(items, each_step, concurrency=one["concurrency"]))
    env.told(f"foreach gave {plain(found)}")
    env.out.append([value for value, _ in found])


@statement
def do_child(env: Env, one: dict[str, Any]) -> None:
    flows: dict[str, Any] = {"async": child, "sync": sync_child}
    order = child_order(env, one["body"])
    try:
        found = observe(env, "child", lambda: flows[one["flow"]](order))
    except Exception:
        if not one["catch"]:
            raise
        env.gain(-8)
    else:
        env.told(f"child gave {plain(found)}")
        env.out.append(found)


@statement
def do_spawn(env: Env, one: dict[str, Any]) -> None:
    order = spawn_order(env, one["body"])
    handle = observe(env, "spawn", lambda: spawn(spawned.with_id(order["run"]), order))
    env.told(f"spawned {handle.id}")
    execute(env, one["between"])
    if one["join"]:
        found = observe(env, "join", handle.result)
        env.told(f"joined {plain(found)}")
        env.out.append(found)


def _flow(order: dict[str, Any]) -> list[Any]:
    trace, box = called(order)
    return in_box(trace, box, order["path"], order["block"], order["last"])


@flow
def sync_program(order: dict[str, Any]) -> list[Any]:
    return _flow(order)


@flow(retry=Retry(attempts=3, delay="1ms"))
def sync_program_retried(order: dict[str, Any]) -> list[Any]:
    return _flow(order)


@flow(name="sync_child_program")
def sync_child(order: dict[str, Any]) -> list[Any]:
    return _flow(order)
