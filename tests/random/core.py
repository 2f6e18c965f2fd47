"""The core of the async interpreter. A program is a block of statements, and each statement is a function that is registered
under its name. What a statement is told is written to the trace at once.

The statements are in `interpret` (steps, waiting, plain code, boxes) and `branches` (everything with several tasks).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from tests.random.book import Trace, describe, plain
from tests.random.env import Block, Env, Shared, is_quiet

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
    """Coroutines, one for each block."""
    whole = env.inner(name)
    return [branch(env.forked(f"{whole}.{number}"), block) for number, block in enumerate(blocks)]


def tasks_of(env: Env, blocks: list[Block], name: str) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(one, name=f"{name}{number}") for number, one in enumerate(branches(env, blocks, name))]


async def reap(env: Env, tasks: list[asyncio.Task[Any]]) -> list[str]:
    """Wait for all tasks, however they end, and return how they ended."""
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    texts = [describe(end) if isinstance(end, BaseException) else plain(end) for end in ends]
    env.derived(f"reaped {texts}")
    return texts


@contextlib.asynccontextmanager
async def reaped(env: Env, tasks: list[asyncio.Task[Any]], cancel: bool = True) -> AsyncIterator[None]:
    """The tasks of the body end before it, however it ends."""
    try:
        yield
    finally:
        if cancel:
            for task in tasks:
                task.cancel()
        await reap(env, tasks)


async def observe(env: Env, what: str, awaited: Awaitable[Any]) -> Any:
    """Ask for a durable operation, and write down its outcome."""
    env.ask(what)
    try:
        return await awaited
    except BaseException as error:
        env.raised(what, error)
        raise
