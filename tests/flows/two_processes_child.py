"""The other process of test_two_processes: `python two_processes_child.py ROLE PATH LEDGER …`, one line per fact."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from relight import Relight, RunCancelledError, flow, step, wait_for
from relight.model.run import Status

LEDGER = Path()  # both processes write a line for everything that a step does: set before anything runs
GATE = Path()  # steps of `guarded` finish once this file exists


def note(what: str) -> None:
    with LEDGER.open("a") as ledger:  # O_APPEND: lines of two processes do not mix
        ledger.write(f"{what} {os.getpid()}\n")


def say(*words: object) -> None:
    print(*words, flush=True)


@step
async def work(name: str, n: int) -> int:
    note(f"{name}.{n}")
    return n


@step
async def hang(name: str) -> str:
    note(f"{name}.hang")
    while not GATE.exists():  # noqa: ASYNC110 - the other process opens it
        await asyncio.sleep(0.005)
    note(f"{name}.hung")
    return "hung"


@flow
async def asking(name: str) -> int:
    """A step, a signal, a step."""
    total = await work(name, 1)
    total += await wait_for("go", int)
    return total + await work(name, 2)  # type: ignore[no-any-return]


@flow
async def guarded(name: str) -> str:
    """A step, a step that lasts, a step."""
    await work(name, 1)
    found = await hang(name)
    await work(name, 2)
    return found


@flow
async def busy(name: str, steps: int) -> int:
    return sum([await work(name, n) for n in range(steps)])


async def drive(rl: Relight, *run_ids: str) -> None:
    """Start one run per id and drive it until it has ended, or another process has taken it over."""
    flows: dict[str, Any] = {"asking": asking, "guarded": guarded}
    runs = [await rl.start(flows[run_id.partition("-")[0]].with_id(run_id), run_id) for run_id in run_ids]
    say("started")
    for run in runs:
        try:
            say("result", run.id, await run.result())
        except RunCancelledError as error:
            say("cancelled", run.id, error.reason)


async def hammer(rl: Relight, name: str, runs: str, steps: str) -> None:
    """Many runs at once."""
    handles = [await rl.start(busy.with_id(f"{name}{n}"), f"{name}{n}", int(steps)) for n in range(int(runs))]
    results = await asyncio.gather(*(run.result(timeout="1m") for run in handles))
    assert set(results) == {sum(range(int(steps)))}
    assert all([await run.status() is Status.COMPLETED for run in handles])
    say("done", len(results))


async def main(role: str, path: str, *arguments: str) -> None:
    roles: dict[str, Callable[..., Awaitable[None]]] = {"drive": drive, "hammer": hammer}
    async with Relight(path, recovery_enabled=role == "drive", park_after="1h") as rl:
        await roles[role](rl, *arguments)


if __name__ == "__main__":
    role, path, *arguments = sys.argv[1:]
    LEDGER, GATE = Path(path).with_name("ledger"), Path(path).with_name("gate")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    asyncio.run(main(role, path, *arguments))
