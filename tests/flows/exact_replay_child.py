"""A process of test_exact_replay_sets: `python exact_replay_child.py PATH SHAPE live|replay SEED`, JSON at the end."""

from __future__ import annotations

import asyncio
import json
import os
import random as random_module
import sys
from typing import Any

from relight import Relight, RelightError, flow, step, wait_for

BRANCHES = 8
waiting: list[asyncio.Future[None]] = []


@step
async def meet(n: int) -> int:
    """Steps that all end in one turn of the loop, and so in one commit."""
    mine = asyncio.get_running_loop().create_future()
    waiting.append(mine)
    if len(waiting) == BRANCHES:
        for one in waiting:
            one.set_result(None)
    await mine
    return n


@step
async def tell(names: list[str]) -> list[str]:
    return names


def tasks() -> list[asyncio.Task[int]]:
    return [asyncio.create_task(meet(n), name=str(n)) for n in range(BRANCHES)]


def names(found: Any) -> list[str]:
    return [task.get_name() for task in found]


async def wait_all() -> list[str]:
    """The set that asyncio.wait returns."""
    done, _ = await asyncio.wait(tasks())
    return names(done)


async def wait_first() -> list[str]:
    """Both sets that asyncio.wait returns, again and again."""
    pending: set[asyncio.Task[int]] = set(tasks())
    seen: list[str] = []
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        seen += ["done", *names(done), "pending", *names(pending)]
    return seen


async def own_set() -> list[str]:
    """A set of tasks that the flow makes itself, in which each task asks for a step when it is taken out."""
    mine = set(tasks())
    await asyncio.gather(*mine)
    return names(mine)


async def as_completed_calls() -> list[str]:
    """as_completed gets calls of steps. It puts them into a set before it makes tasks of them."""
    return [str(await one) for one in asyncio.as_completed([meet(n) for n in range(BRANCHES)])]


async def as_completed_tasks() -> list[str]:
    return [str(await one) for one in asyncio.as_completed(tasks())]


async def wait_futures() -> list[str]:
    """A set of futures that are no tasks: what asyncio.shield gives."""
    shields = {asyncio.shield(task): task.get_name() for task in tasks()}
    done, _ = await asyncio.wait(shields)
    return [shields[one] for one in done]


SHAPES = {
    one.__name__: one
    for one in (
        wait_all,
        wait_first,
        own_set,
        as_completed_calls,
        as_completed_tasks,
        wait_futures,
    )
}


@flow
async def sets(shape: str) -> list[str]:
    found = await SHAPES[shape]()
    said: list[str] = []
    for name in found:  # a step for each: in another order, it gets other arguments
        said += await tell([name])
    await wait_for("go")
    return said


async def main(path: str, shape: str, part: str) -> Any:
    async with Relight(path, recovery={"version_mismatch": "fail"}) as rl:
        run = await rl.start(sets.with_id("r"), shape)
        if part == "live":
            while await run.status() != "waiting":  # noqa: ASYNC110 - the test's deadline bounds it
                await asyncio.sleep(0.002)
            os._exit(0)  # like a crash
        await run.signal("go")
        try:
            return await run.result("60s")
        except RelightError as error:
            return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    source = random_module.Random(int(sys.argv[4]))
    ballast = [bytearray(source.randrange(1, 600)) for _ in range(source.randrange(20_000))]  # for other addresses
    del ballast[:: source.randrange(2, 5)]
    print(json.dumps(asyncio.run(main(*sys.argv[1:4]))))
