"""Restore: runs of ten steps whose process was killed half-way, from opening the store to the last one going on.

A child starts the runs, waits until each is inside its sixth step, and kills itself with SIGKILL. A second child opens the
same file and notes when the last run has executed that step: everything before it was restored, not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Bench, NotMeasuredError, Section, median, number, ratio, say

STEPS = 10
HALF = 5
CRASH_SECONDS = 120.0


# ---- in the children


class Progress:
    """What the steps have seen in this process."""

    blocking = False
    reached: int = 0
    wanted: int = 0
    executed: int = 0
    last_at: float = 0.0
    all_reached: asyncio.Event


def _flow() -> Any:
    from relight import flow, step

    @step
    async def work(i: int) -> int:
        Progress.executed += 1
        if i == HALF:
            Progress.reached += 1
            Progress.last_at = time.perf_counter()
            if Progress.reached == Progress.wanted:
                Progress.all_reached.set()
            if Progress.blocking:
                await asyncio.Event().wait()
        return i

    @flow
    async def restorable(n: int) -> int:
        for i in range(STEPS):
            await work(i)
        return n

    return restorable


def crash(folder: str, runs: int) -> None:
    """Ends with SIGKILL, when all runs are inside their sixth step."""
    from relight import Relight

    flow = _flow()

    async def main() -> None:
        Progress.blocking, Progress.wanted, Progress.all_reached = True, runs, asyncio.Event()
        async with Relight(Path(folder) / "relight.db", max_concurrent_runs=runs + 1) as rl:
            for first in range(0, runs, 1000):
                await asyncio.gather(*(rl.start(flow, n) for n in range(first, min(first + 1000, runs))))
            async with asyncio.timeout(CRASH_SECONDS):
                await Progress.all_reached.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())


def resume(folder: str, runs: int) -> dict[str, Any]:
    """Seconds from open() until the last of the runs has executed its next step, and until all have ended."""
    from relight import Relight

    flow = _flow()

    async def main() -> dict[str, Any]:
        Progress.wanted, Progress.all_reached = runs, asyncio.Event()
        began = time.perf_counter()
        async with Relight(Path(folder) / "relight.db") as rl:
            opened = time.perf_counter()
            async with asyncio.timeout(CRASH_SECONDS):
                await Progress.all_reached.wait()
                unfinished = ("running", "pending", "waiting")
                while (await rl.list(status=unfinished, flow=flow.name, limit=1)).runs:  # noqa: ASYNC110 - seen from outside
                    await asyncio.sleep(0.01)
            ended = time.perf_counter()
        repeated = Progress.executed - runs * (STEPS - HALF)
        assert repeated == 0, f"{repeated} steps ran that were recorded"
        return {"open": opened - began, "resumed": Progress.last_at - began, "ended": ended - began}

    return asyncio.run(main())


def finished(folder: str, runs: int) -> dict[str, Any]:
    """Fill a new store with runs that ended, by SQL: rows and one entry each, as Relight leaves them."""
    import apsw

    from relight import Relight

    path = Path(folder) / "relight.db"

    async def make() -> None:
        async with Relight(path, recovery={"enabled": False}):
            pass

    asyncio.run(make())
    db = apsw.Connection(str(path))
    db.execute("PRAGMA synchronous = OFF; PRAGMA cache_size = -200000")
    db.execute("BEGIN")
    db.execute(
        """
        WITH RECURSIVE numbers (value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM numbers WHERE value < ?)
        INSERT INTO runs (key, id, flow, flow_hash, status, epoch, reason, created_at, updated_at, input, input_blob, output,
            output_blob)
        SELECT value, printf('finished-%09d', value), 'finished', '0123456789abcdef', 'completed', 1, '', 1.7e9 + value,
            1.7e9 + value, CAST('{}' AS BLOB), '', CAST('1' AS BLOB), ''
        FROM numbers
        """,
        (runs,),
    )
    db.execute(
        """
        INSERT INTO journal (run, sequence, event, crc)
        SELECT key, 12, CAST('["completed","",1,"",1700000000.0]' AS BLOB), 0 FROM runs
        """
    )
    db.execute("COMMIT")
    db.close()
    return {"bytes": path.stat().st_size}


# ---- in the parent


def run(bench: Bench) -> Section:
    section = Section(
        "restore",
        "Restore after SIGKILL: seconds from open() until the last run has executed its next step",
        [
            "unfinished runs",
            "finished runs in the file",
            "open() ms",
            "last one resumed s",
            "all ended s",
            "µs per run",
        ],
    )
    many = 100_000 if bench.quick else 1_000_000
    cases = [(100, 0), (1000, 0), (1000, many)] if bench.quick else [(100, 0), (1000, 0), (10_000, 0), (1000, many)]
    for unfinished, ended in cases:
        turns = 1 if bench.quick or unfinished > 1000 else 3
        results = []
        with bench.place() as place:
            if ended:
                say(f"restore: writing {ended:,} finished runs")
                bench.child("benchmarks.restore:finished", folder=str(place), runs=ended)
            for turn in range(turns):
                say(f"restore: {unfinished:,} unfinished, {ended:,} finished, turn {turn + 1} of {turns}")
                results.append(_crash_and_resume(bench, place, unfinished, fresh=not ended))
        middle = {name: median([result[name] for result in results]) for name in results[0]}
        section.data[f"{unfinished}/{ended}"] = middle
        section.rows.append(
            [
                f"{unfinished:,}",
                f"{ended:,}",
                number(middle["open"] * 1e3),
                number(middle["resumed"]),
                number(middle["ended"]),
                number(middle["resumed"] / unfinished * 1e6),
            ]
        )
    base, beside = section.data["1000/0"]["resumed"], section.data[f"1000/{many}"]["resumed"]
    section.target("1,000 crashed runs resumed", "≤ 1 s", base, lambda x: x <= 1, " s")
    section.target(f"the same beside {many:,} finished runs", "≤ 1 s", beside, lambda x: x <= 1, " s")
    section.target(f"{many:,} finished runs make it longer by", "≤ 1.5×", ratio(beside, base), lambda x: x <= 1.5, "×")
    if "10000/0" in section.data:
        growth = ratio(section.data["10000/0"]["resumed"], base)
        section.target("10,000 unfinished against 1,000", "linear: ≤ 12×", growth, lambda x: x <= 12, "×")
    return section


def _crash_and_resume(bench: Bench, place: Path, unfinished: int, *, fresh: bool) -> dict[str, float]:
    if fresh:
        for path in place.iterdir():
            path.unlink()
    try:
        bench.child("benchmarks.restore:crash", folder=str(place), runs=unfinished)
        raise AssertionError("the child outlived its SIGKILL")
    except NotMeasuredError as error:
        if f"exit -{int(signal.SIGKILL)}" not in str(error):
            raise
    with contextlib.suppress(FileNotFoundError):
        assert (place / "relight.db-wal").stat().st_size > 0, "the killed process left nothing behind"
    return bench.child("benchmarks.restore:resume", folder=str(place), runs=unfinished)
