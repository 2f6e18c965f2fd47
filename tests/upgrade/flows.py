"""Flows that two versions of Relight drive in turn."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from relight import flow, step, wait_for


def _write_down(line: str) -> None:
    with Path(os.environ["LEDGER"]).open("a") as ledger:
        ledger.write(line)


@step
async def work(name: str, n: int, seconds: float) -> int:
    _write_down(f"{name} {n} {os.environ['VERSION']}\n")
    await asyncio.sleep(seconds)
    return n


@flow
async def upgrade_job(name: str, steps: int, seconds: float) -> int:
    return sum([await work(name, n, seconds) for n in range(steps)])


@flow
async def upgrade_told(name: str) -> str:
    await work(name, 0, 0.0)
    said = await wait_for("go", str)
    await work(name, 1, 0.0)
    return said
