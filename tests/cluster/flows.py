"""The flows of the cluster tests. Every step writes down what it does, and every flow what it got: see tests/harness/killing.py.

A run's result follows from its arguments alone, so that a wrong result is noticed. The flows have names of their own, because
other tests of the same process have flows called `steps`, too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from relight import Retry, current_step, flow, foreach, sleep, spawn, step, wait_for
from tests.harness.deeds import Receipt, deed, got

GATES = Path()  # `held` waits for a file here; set by the node


_waiting: dict[str, list[asyncio.Future[None]]] = {}


async def _opened(gate: str) -> None:
    """Wait until that file exists. One check serves all steps that wait, of which there may be hundreds."""
    if (GATES / gate).exists():
        return
    if not _waiting:
        _look_soon()
    opened = asyncio.get_running_loop().create_future()
    _waiting.setdefault(gate, []).append(opened)
    await opened


def _look_soon() -> None:
    asyncio.get_running_loop().call_later(0.01, _look)


def _look() -> None:
    for gate in [gate for gate in _waiting if (GATES / gate).exists()]:
        for opened in _waiting.pop(gate):
            if not opened.done():
                opened.set_result(None)
    if _waiting:
        _look_soon()


@step
async def work(n: int, seconds: float = 0.005) -> Receipt:
    with deed(n) as receipt:
        await asyncio.sleep(seconds)
    return receipt


@step
def compute(n: int, seconds: float = 0.005) -> Receipt:
    """A sync step, which runs in a thread."""
    with deed(n) as receipt:
        time.sleep(seconds)
    return receipt


@step(retry=Retry(attempts=4, delay="30ms"))
async def stubborn(n: int) -> Receipt:
    """A step that succeeds at the third attempt."""
    with deed(n) as receipt:
        if current_step().attempt < 3:
            raise ConnectionError("not yet")
    return receipt


@step
async def held(n: int, gate: str) -> Receipt:
    """A step that lasts until a test opens the gate."""
    with deed(n) as receipt:
        await _opened(gate)
    return receipt


@step
async def hog(n: int, seconds: float) -> Receipt:
    """A step that blocks the event loop, which a step should not do."""
    with deed(n) as receipt:
        time.sleep(seconds)  # noqa: ASYNC251 - on purpose
    return receipt


@step
async def kill(n: int, seconds: float) -> Receipt:
    """A step that kills its process."""
    with deed(n) as receipt:
        await asyncio.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    return receipt


@flow(name="cluster.steps")
async def steps(count: int, seconds: float = 0.005) -> int:
    total = 0
    for n in range(count):
        total += got(await work(n, seconds))
    return total


@flow(name="cluster.gated")
async def gated(gate: str) -> int:
    """A step, a step that lasts until its gate is opened, a step."""
    return got(await work(1)) + got(await held(2, gate)) + got(await work(3))


@flow(name="cluster.hogging")
async def hogging(seconds: float) -> int:
    return got(await work(1)) + got(await hog(2, seconds)) + got(await work(3))


@flow(name="cluster.killing")
async def killing(seconds: float) -> int:
    return got(await kill(1, seconds))


@flow(name="cluster.each")
async def each(count: int, concurrency: int = 3, seconds: float = 0.005) -> int:
    async def one(n: int) -> int:
        return got(await work(n, seconds)) + got(await work(n, seconds))

    return sum(await foreach(range(count), one, concurrency=concurrency))


@flow(name="cluster.tree")
async def tree(depth: int, width: int, seconds: float = 0.005, gate: str = "") -> int:
    """Child flows of child flows, all branches at once. Returns the number of steps. With a gate, the flows that call the
    innermost ones end only when it is opened."""
    total = got(await work(1, seconds))
    if depth:
        total += sum(await asyncio.gather(*(tree(depth - 1, width, seconds, gate) for _ in range(width))))
    if gate and depth == 1:
        return total + got(await held(1, gate))
    return total + got(await work(1, seconds))


@flow(name="cluster.spawning")
async def spawning(count: int, seconds: float = 0.005) -> int:
    """Spawns root runs, which any orchestrator may take up."""
    spawned = [await spawn(steps, 3, seconds) for _ in range(count)]
    total = got(await work(1, seconds))
    for one in spawned:
        total += await one
    return total


@flow(name="cluster.napping")
async def napping(seconds: float) -> int:
    """Sleeps, and leaves memory meanwhile."""
    total = got(await work(1))
    await sleep(seconds)
    return total + got(await work(2))


@flow(name="cluster.asking")
async def asking() -> int:
    """Waits for two signals."""
    total = got(await work(1))
    total += await wait_for("first", int)
    total += got(await work(2))
    total += await wait_for("second", int)
    return total + got(await work(3))


@flow(name="cluster.threaded")
async def threaded(count: int) -> int:
    return sum([got(await compute(n)) for n in range(count)])


@flow(name="cluster.plain")
def plain(count: int) -> int:
    """A sync flow, in a thread."""
    return sum(got(compute(n)) for n in range(count))


@flow(name="cluster.retrying")
async def retrying() -> int:
    return got(await work(1)) + got(await stubborn(2)) + got(await work(3))
