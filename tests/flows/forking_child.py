"""A process of test_misuse_fork: `python forking_child.py PATH async|blocking ACTION`. It opens Relight, forks, and prints in
lines of JSON what the child saw ("child") and what happened to the parent ("parent")."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from relight import Relight, flow, step, wait_for

PATH, KIND, ACTION = sys.argv[1:4]


@step
async def work(n: int) -> int:
    return n * 2


@flow
async def doubling(n: int) -> int:
    return await work(n)


@flow
async def waiting() -> str:
    found: str = await wait_for("go", str)
    return found


def tell(who: str, what: Any) -> None:
    print(json.dumps({who: what}), flush=True)


def in_child(error: BaseException) -> None:
    tell("child", f"{type(error).__name__}: {error}")


async def use_async(rl: Relight, handle: Any) -> Any:
    if ACTION == "start":
        return str(await rl.start(doubling, 1))
    if ACTION == "run":
        return await rl.run(doubling, 1)
    if ACTION == "result":
        return await handle.result()
    if ACTION == "signal":
        return await handle.signal("go", "from the child")
    if ACTION == "list":
        return str(await rl.list())
    if ACTION == "open another":  # a process that has just been forked has no running loop
        asyncio.run(open_another())
    return None  # "leave"


async def open_another() -> None:
    async with Relight(PATH) as mine:
        tell("child", await mine.run(doubling, 4))
    os._exit(0)


def use_blocking(rl: Any, handle: Any) -> Any:
    if ACTION == "start":
        return str(rl.start(doubling, 1))
    if ACTION == "run":
        return rl.run(doubling, 1)
    if ACTION == "result":
        return handle.result()
    if ACTION == "signal":
        return handle.signal("go", "from the child")
    if ACTION == "list":
        return str(rl.list())
    if ACTION == "open another":
        with Relight(PATH) as mine:
            tell("child", mine.run(doubling, 4))
        os._exit(0)
    return None


async def main() -> None:
    child = False
    try:
        async with Relight(PATH) as rl:
            handle = await rl.start(waiting.with_id("w"))
            child = os.fork() == 0
            if child:
                tell("child", await use_async(rl, handle))
            else:
                await asyncio.to_thread(os.wait)
                await handle.signal("go", "from the parent")
                tell("parent", [await rl.run(doubling, 3), await handle.result("60s")])
    except BaseException as error:
        if not child:
            raise
        in_child(error)
    finally:
        if child:
            os._exit(0)


def main_blocking() -> None:
    child = False
    try:
        with Relight(PATH) as rl:
            handle = rl.start(waiting.with_id("w"))
            child = os.fork() == 0
            if child:
                tell("child", use_blocking(rl, handle))
            else:
                os.wait()
                handle.signal("go", "from the parent")
                tell("parent", [rl.run(doubling, 3), handle.result("60s")])
    except BaseException as error:
        if not child:
            raise
        in_child(error)
    finally:
        if child:
            os._exit(0)


if __name__ == "__main__":
    if KIND == "async":
        asyncio.run(main())
    else:
        main_blocking()
