"""One run at a time: what a step costs when nothing shares its commit, beside SQLite's own one-row commit."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Bench, Section, median, number, ratios, say

RAW = "raw one-row commit"
PEERS: list[tuple[str, str, dict[str, Any]]] = [
    ("dbos", "benchmarks.peers.dbos_peer:latency", {"wal": False}),
    ("dbos-wal", "benchmarks.peers.dbos_peer:latency", {"wal": True}),
    ("duroxide", "benchmarks.peers.duroxide_peer:latency", {}),
]

# As Relight journals a no-op step.
EVENT = '["step","noop:1",1,"","0123456789abcdef","0123456789abcdef",1]'


def relight(folder: str, steps: int) -> dict[str, Any]:
    """Seconds of each step of one run, seen from inside the flow."""
    from relight import Relight, flow, step

    times: list[float] = []

    @step
    async def noop(i: int) -> int:
        return i

    @flow
    async def timed(count: int) -> int:
        for i in range(count):
            began = time.perf_counter()
            await noop(i)
            times.append(time.perf_counter() - began)
        return count

    async def main() -> dict[str, Any]:
        async with Relight(Path(folder) / "relight.db", checkpoint={"every": 1_000_000}) as rl:
            await rl.run(timed, 100)
            times.clear()
            await rl.run(timed, steps)
        return {"seconds": times}

    return asyncio.run(main())


def run(bench: Bench) -> Section:
    section = Section(
        "latency",
        "One run at a time: microseconds per step, every step its own synced commit",
        ["who", "median µs", "mean µs", "of raw (median)"],
    )
    turns, commits = (3, 500) if bench.quick else (7, 1500)
    found: dict[str, list[list[float]]] = {"relight": [], RAW: []}
    for turn in range(turns):
        say(f"latency: turn {turn + 1} of {turns}")
        found["relight"].append(bench.alone("benchmarks.latency:relight", steps=commits)["seconds"])
        found[RAW].append(bench.alone("benchmarks.peers.raw:one_row_commits", commits=commits, event=EVENT)["seconds"])
    for label, target, more in PEERS:
        say(f"latency: {label}")
        peer = bench.peer(section, label, target, runs=5 if bench.quick else 20, steps=10, **more)
        if peer is not None:
            found[label] = [peer["seconds"]]
    medians = {who: median([median(times) * 1e6 for times in turns_]) for who, turns_ in found.items()}
    means = {who: median([sum(times) / len(times) * 1e6 for times in turns_]) for who, turns_ in found.items()}
    raw = medians[RAW]
    by_turn = median(ratios([median(turn) for turn in found["relight"]], [median(turn) for turn in found[RAW]]))
    for who, value in medians.items():
        times = by_turn if who == "relight" else value / raw
        section.rows.append([who, number(value), number(means[who]), f"{times:.2f}×"])
    section.data = {"median_us": medians, "mean_us": means, "relight_to_raw": by_turn}
    section.target("step to raw one-row commit", "≤ 2×", by_turn, lambda x: x <= 2, "×")
    return section
