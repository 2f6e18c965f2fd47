"""A run that goes on for ever, on a real file and a real clock. It measures how large the run is after
many generations, and how long it takes to wake up."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from relight import Relight, continue_as, flow, step, wait_for
from tests.flows.world import until

POINTS = 5  # how often it is measured


class Size(NamedTuple):
    generation: int
    memory: int  # the most bytes of memory that the process has had
    file: int  # bytes of the file, with its WAL
    wake: float  # seconds from a signal to the step behind it


async def go_on_for(generations: int, folder: Path) -> list[Size]:
    """One run with a step per generation, parked and woken at each of the points."""
    marked = asyncio.Event()
    every = generations // POINTS

    @step
    async def turn(n: int) -> int:
        return n + 1

    @step
    async def woken() -> None:
        marked.set()

    @flow
    async def endless(n: int) -> int:
        n = await turn(n)
        if n % every == 0:
            await wait_for("go")
            await woken()
        return n if n == generations else continue_as(n)

    path = folder / "endless.db"
    sizes: list[Size] = []
    async with Relight(f"sqlite:///{path}", park_after="1ms") as rl:
        run = await rl.start(endless.with_id("endless"), 0)
        for point in range(1, POINTS + 1):
            seconds = max(60.0, every / 50)
            await until(lambda: "endless" not in rl.orchestrator.live, seconds)
            files = (path, path.with_name(path.name + "-wal"))
            size = sum(one.stat().st_size for one in files if one.exists())
            gc.collect()
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            marked.clear()
            began = time.perf_counter()
            await run.signal("go")
            await marked.wait()
            sizes.append(Size(point * every, memory, size, time.perf_counter() - began))
            logging.getLogger("endless").warning("%s", sizes[-1])
        assert await run.result() == generations
    return sizes


@pytest.mark.parametrize(
    "generations",
    [
        pytest.param(20_000, marks=[pytest.mark.soak_ci, pytest.mark.timeout(600)]),
        pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(0)]),
    ],
)
async def test_a_run_of_many_generations_does_not_grow(generations: int, tmp_path: Path):
    sizes = await go_on_for(generations, tmp_path)
    first, last = sizes[0], sizes[-1]
    assert last.file <= first.file + 2**20, sizes
    assert last.memory <= first.memory + 20 * 2**20, sizes
    assert min(size.wake for size in sizes[2:]) <= 20 * min(size.wake for size in sizes[:2]), sizes
