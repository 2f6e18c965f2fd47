"""100,000 parked runs: what they cost in memory and, while nothing happens, in store operations and CPU. And an idle engine."""

from __future__ import annotations

import asyncio
import collections
import gc
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Bench, Section, number, say

STARTERS = 200
PARKING_SECONDS = 200.0
MEGABYTE = 1e6


# ---- in the child


def _rss() -> int:
    """Resident bytes of this process, after collecting garbage."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS: this benchmark reads Linux's /proc")


class Jobs:
    """Counts every job that the store's threads do, idle polls included."""

    def __init__(self) -> None:
        from relight.backends.sqlite.thread import ConnectionThread

        self.count: collections.Counter[str] = collections.Counter()
        perform = ConnectionThread._perform

        def counted(thread: Any, job: Any) -> Any:
            self.count[job.__qualname__.removeprefix("SqliteStore.").partition(".")[0]] += 1
            return perform(thread, job)

        setattr(ConnectionThread, "_perform", counted)  # noqa: B010 - mypy has no words for a patched generic method


async def _watch_idle(seconds: float, jobs: Jobs) -> dict[str, Any]:
    """CPU and store operations while nobody asks for anything."""
    await asyncio.sleep(1.0)
    jobs.count.clear()
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    return {
        "cpu_share": (time.process_time() - cpu) / (time.perf_counter() - wall),
        "jobs": dict(jobs.count),
        "jobs_per_second": jobs.count.total() / seconds,
    }


def park(folder: str, runs: int, idle: float) -> dict[str, Any]:
    """Half of the runs sleep for a day, half wait for a signal; then nothing happens for `idle` seconds."""
    from benchmarks import flows
    from relight import Relight

    async def main() -> dict[str, Any]:
        jobs = Jobs()
        path = Path(folder) / "relight.db"
        async with Relight(path, park_after="10ms") as rl:
            # Warm: what the first runs allocate once (codecs, statements, page caches) is the engine's, not theirs.
            await asyncio.gather(*(rl.run(flows.empty, i) for i in range(1000)))
            await asyncio.sleep(0.1)
            empty = _rss()

            async def starter(first: int) -> None:
                for i in range(first, runs, STARTERS):
                    await rl.start(flows.sleeper if i % 2 else flows.listener, i)

            began = time.perf_counter()
            await asyncio.gather(*(starter(first) for first in range(STARTERS)))
            async with asyncio.timeout(PARKING_SECONDS):
                while rl.orchestrator.live or await _unparked(rl):  # noqa: ASYNC110 - seen from outside
                    await asyncio.sleep(0.1)
            parking = time.perf_counter() - began
            await asyncio.sleep(0.5)
            return {"empty": empty, "parked": _rss(), "seconds": parking} | await _watch_idle(idle, jobs)

    return asyncio.run(main())


async def _unparked(rl: Any) -> bool:
    return bool((await rl.list(status=("pending", "running"), limit=1)).runs)


def open_again(folder: str, idle: float) -> dict[str, Any]:
    """A fresh engine: on the file with the parked runs, if there is one, else on an empty one."""
    from benchmarks import flows
    from relight import Relight

    async def main() -> dict[str, Any]:
        jobs = Jobs()
        async with Relight(Path(folder) / "relight.db") as rl:
            await rl.run(flows.empty, 1)
            await asyncio.sleep(1.0)
            rss = _rss()
            return {"rss": rss} | await _watch_idle(idle, jobs)

    return asyncio.run(main())


# ---- in the parent


def run(bench: Bench) -> Section:
    section = Section(
        "parked",
        "Parked runs and idle engines",
        ["engine", "RSS MB", "over an empty engine MB", "CPU of one core", "store operations per s"],
    )
    runs, idle = (10_000, 3.0) if bench.quick else (100_000, 10.0)
    say("parked: an idle engine on an empty file")
    empty = bench.alone("benchmarks.parked:open_again", idle=idle)
    with bench.place() as place:
        say(f"parked: parking {runs:,} runs")
        parked = bench.child("benchmarks.parked:park", folder=str(place), runs=runs, idle=idle)
        say(f"parked: a fresh engine on the file with {runs:,} parked runs")
        again = bench.child("benchmarks.parked:open_again", folder=str(place), idle=idle)
    over, over_again = (parked["parked"] - parked["empty"]) / MEGABYTE, (again["rss"] - empty["rss"]) / MEGABYTE
    for who, found, rss, more in (
        ("empty", empty, empty["rss"], 0.0),
        (f"that parked {runs:,} runs", parked, parked["parked"], over),
        (f"opened on {runs:,} parked runs", again, again["rss"], over_again),
    ):
        kinds = ", ".join(f"{count}× {job}" for job, count in found["jobs"].items())
        operations = f"{number(found['jobs_per_second'])} (in {idle:.0f} s: {kinds})"
        section.rows.append([who, number(rss / MEGABYTE), f"{more:.1f}", f"{found['cpu_share']:.2%}", operations])
    section.data = {"runs": runs, "empty": empty, "parked": parked, "again": again}
    section.notes.append(f"Parking {runs:,} runs, each accepted durably, took {number(parked['seconds'])} s.")
    section.target(f"{runs:,} parked runs, in the process that parked them", "≤ 50 MB", over, lambda x: x <= 50, " MB")
    section.target(f"{runs:,} parked runs, in a fresh engine", "≤ 50 MB", over_again, lambda x: x <= 50, " MB")
    polls = parked["jobs_per_second"] - empty["jobs_per_second"]
    section.target("store operations per s more than an empty engine", "≤ 1", polls, lambda x: x <= 1)
    section.target("idle CPU, empty engine", "< 1 %", empty["cpu_share"] * 100, lambda x: x < 1, " %")
    section.target(f"idle CPU beside {runs:,} parked runs", "< 1 %", parked["cpu_share"] * 100, lambda x: x < 1, " %")
    return section
