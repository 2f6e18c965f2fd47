"""Sync flows and sync steps, which cost thread hops, and the time that `import relight` takes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Bench, Section, median, number, say

STEPS = 10
AT_ONCE = (1, 50, 500)
KINDS = {
    "steps": "async flow, async steps",
    "sync_steps_in_async_flow": "async flow, sync steps",
    "sync_steps": "sync flow, sync steps",
}


# ---- in the child


def relight(folder: str, kind: str, runs: int, rounds: int) -> dict[str, Any]:
    from benchmarks import flows
    from relight import Relight

    async def main() -> dict[str, Any]:
        times = []
        async with Relight(Path(folder) / "relight.db") as rl:
            for _ in range(rounds + 1):
                began = time.perf_counter()
                await asyncio.gather(*(rl.run(getattr(flows, kind), STEPS) for _ in range(runs)))
                times.append(time.perf_counter() - began)
        return {"seconds": times[1:]}

    return asyncio.run(main())


# In an interpreter that has imported nothing else; only `sys` and `time`, which are built in.
IMPORTING = """
import sys, time
before, began = len(sys.modules), time.perf_counter()
import relight
seconds = time.perf_counter() - began
print('{"seconds": %f, "modules": %d}' % (seconds, len(sys.modules) - before))
"""


# ---- in the parent


def run(bench: Bench) -> Section:
    section = Section("sync", "Sync code, and importing", ["what", *(f"{runs} at once" for runs in AT_ONCE), "unit"])
    children, rounds = (1, 3) if bench.quick else (3, 5)
    for kind, name in KINDS.items():
        rates = {}
        for runs in AT_ONCE:
            say(f"sync: {name}, {runs} at once")
            times = [
                median(
                    bench.alone(
                        "benchmarks.sync_code:relight", kind=kind, runs=runs, rounds=rounds * (10 if runs == 1 else 1)
                    )["seconds"]
                )
                for _ in range(children)
            ]
            rates[runs] = runs * STEPS / median(times)
        section.data[kind] = rates
        section.rows.append([name, *(number(rate) for rate in rates.values()), "steps/s"])
    turns = 5 if bench.quick else 11
    bench.python("-c", IMPORTING)  # writes the .pyc files
    found = [bench.python("-c", IMPORTING) for _ in range(turns)]
    milliseconds = median([one["seconds"] * 1e3 for one in found])
    section.data["import"] = {"milliseconds": milliseconds, "modules": found[0]["modules"]}
    section.rows.append(["import relight", number(milliseconds), "", "", f"ms, {found[0]['modules']} modules"])
    section.target("import relight", "≤ 150 ms", milliseconds, lambda x: x <= 150, " ms")
    return section
