"""Statements with several tasks: asyncio's ways to run tasks at once and to wait for them, and the objects that tasks share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.random.book import describe, plain
from tests.random.core import branches, execute, reaped, statement, tasks_of
from tests.random.env import Env


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
async def do_forget(env: Env, one: dict[str, Any]) -> None:
    """Tasks that are not awaited. They end with the flow, wherever they are."""
    env.shared.forgotten += tasks_of(env, one["branches"], "forgotten")


@statement
async def do_wait(env: Env, one: dict[str, Any]) -> None:
    """asyncio.wait: the order of its sets decides what the flow asks for."""
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
    """The flow gives up on it, but it is not stopped."""
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
    """No branch waits for ever."""
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
