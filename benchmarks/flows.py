"""The flows that are measured: they do nothing, so that what is left is the engine."""

from __future__ import annotations

from relight import flow, sleep, step, wait_for


@step
async def noop(i: int) -> int:
    return i


@flow
async def steps(count: int) -> int:
    for i in range(count):
        await noop(i)
    return count


@flow
async def empty(i: int) -> int:
    return i


@step
def sync_noop(i: int) -> int:
    return i


@flow
def sync_steps(count: int) -> int:
    for i in range(count):
        sync_noop(i)
    return count


@flow
async def sync_steps_in_async_flow(count: int) -> int:
    for i in range(count):
        await sync_noop(i)
    return count


@flow
async def sleeper(i: int) -> int:
    await sleep("1d")
    return i


@flow
async def listener(i: int) -> int:
    signalled: int = await wait_for("go", int)
    return signalled + i
