"""The process of test_flow_loop_uvloop: `python uvloop_child.py PATH live|replay`, results as a line of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import uvloop

from relight import Relight, RunCancelledError, flow, foreach, sleep, step, wait_for

said: list[str] = []


@step
async def work(name: str) -> str:
    assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    assert asyncio.current_task() is not None
    await asyncio.sleep(0.001)
    if name == "fails":
        raise ValueError("no")
    return name


@step
def block(name: str) -> str:
    return name


@step
async def tell(what: str) -> str:
    said.append(what)
    return what


@flow
async def saga() -> list[str]:
    done: list[str] = []

    async def book(name: str) -> None:
        done.append(await work(name))

    try:
        async with asyncio.TaskGroup() as group:
            for name in ("hotel", "fails", "car"):
                group.create_task(book(name))
    except* ValueError:
        for name in done:
            await tell(f"undo {name}")
    await wait_for("go")
    return done


@flow
async def race() -> str:
    many = asyncio.create_task(foreach(["a", "b"], work, concurrency=2), name="many")
    one = asyncio.create_task(block("one"), name="one")
    done, _ = await asyncio.wait({many, one}, return_when=asyncio.FIRST_COMPLETED)
    first = await tell("+".join(sorted(task.get_name() for task in done)))
    await asyncio.gather(many, one)
    await wait_for("go")
    return first


@flow
async def timing() -> str:
    try:
        async with asyncio.timeout(0.02):
            await asyncio.Event().wait()
    except TimeoutError:
        await tell("timed out")
    await asyncio.sleep(0.01)
    await sleep("10ms")
    queue: asyncio.Queue[str] = asyncio.Queue()

    async def put() -> None:
        await queue.put(await wait_for("go", str))

    async with asyncio.TaskGroup() as group:
        group.create_task(put())
        return await queue.get()


@flow
def plain() -> str:
    found = block("first")
    wait_for("go")
    return found + block("second")


@flow
async def leased() -> None:
    try:
        await sleep("1h")
    finally:
        await tell("released")


FLOWS: list[Any] = [saga, race, timing, plain]


async def main(path: str, part: str) -> Any:
    loop = asyncio.get_running_loop()
    async with Relight(path, park_after="10ms", recovery={"version_mismatch": "fail"}) as rl:
        runs = {one.name: await rl.start(one.with_id(one.name)) for one in FLOWS}
        lease = await rl.start(leased.with_id("leased"))
        if part == "live":
            for run in runs.values():
                row = await run.describe()
                while row.status != "waiting" or row.owner is not None or row.wake_at is not None:
                    await asyncio.sleep(0.005)  # until it is parked, and waits for the signal
                    row = await run.describe()
            print(json.dumps(said), flush=True)
            os._exit(0)  # like a crash
        for run in runs.values():
            await run.signal("go", "gone")
        found: dict[str, Any] = {name: await run.result("60s") for name, run in runs.items()}
        await lease.cancel("enough")
        try:
            await lease.result("60s")
        except RunCancelledError as error:
            found["leased"] = error.reason
        found["said"] = said
        found["task factory"] = str(loop.get_task_factory())
        return found


if __name__ == "__main__":
    print(json.dumps(uvloop.run(main(*sys.argv[1:3]))))
