"""Starting no-op flows: how many per second are accepted (durable), and how many are carried to their result."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Bench, Section, median, number, ratio, say

STARTERS = (1, 50, 500)


# ---- in the child


def relight(folder: str, starters: int, runs: int, rounds: int, await_result: bool) -> dict[str, Any]:
    """Seconds of each round in which `starters` tasks start `runs` runs between them."""
    from benchmarks import flows
    from relight import Relight

    async def main() -> dict[str, Any]:
        async with Relight(Path(folder) / "relight.db") as rl:

            async def starter(share: int) -> list[Any]:
                handles = []
                for i in range(share):
                    handle = await rl.start(flows.empty, i)
                    if await_result:
                        assert await handle.result() == i
                    handles.append(handle)
                return handles

            times = []
            for _ in range(rounds + 1):
                began = time.perf_counter()
                started = await asyncio.gather(*(starter(runs // starters) for _ in range(starters)))
                times.append(time.perf_counter() - began)
                if not await_result:  # they end outside the measured time
                    await asyncio.gather(*(handle.result() for handles in started for handle in handles))
        return {"seconds": times[1:]}

    return asyncio.run(main())


# ---- in the parent


def run(bench: Bench) -> Section:
    section = Section(
        "starting",
        "Starting no-op flows, per second",
        ["starters at once", "who", "start() per s", "Relight is", "start() and result per s", "Relight is"],
    )
    for starters in STARTERS[-1:] if bench.quick else STARTERS:
        found = _rates(bench, section, starters)
        ours = found["relight"]
        for who, rates in found.items():
            section.rows.append([str(starters), who, *_cells(rates, ours, who)])
        section.data[str(starters)] = found
        if starters == 1:
            continue  # one synced commit per start for everybody: the disk decides, and no engine can be 50 times faster
        for what, name in (("start", "start()"), ("result", "start() and result")):
            for who in ("dbos",) if bench.quick else ("dbos", "dbos-wal"):
                theirs = found.get(who, {}).get(what)
                section.target(
                    f"{name}, {starters} starters, to {who}",
                    "≥ 50×",
                    ratio(ours[what], theirs),
                    lambda x: x >= 50,
                    "×",
                )
    section.notes.append(
        "With one starter each start() is one synced commit for everybody: the disk sets the pace, not the engine."
    )
    return section


def _rates(bench: Bench, section: Section, starters: int) -> dict[str, dict[str, float]]:
    """Turns of everybody, alternating."""
    turns, rounds = (1, 3) if bench.quick else (3, 7)
    ours = {1: 200, 50: 2500, 500: 5000}[starters]
    theirs = {1: 20, 50: 100, 500: 500}[starters] if bench.quick else {1: 50, 50: 200, 500: 500}[starters]
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(turns):
        for what in ("start", "result"):
            say(f"starting: {starters} starters, {what}, turn {turn + 1} of {turns}")
            how: dict[str, Any] = {"starters": starters, "await_result": what == "result"}
            times = bench.alone("benchmarks.starting:relight", runs=ours, rounds=rounds, **how)["seconds"]
            found.setdefault("relight", {}).setdefault(what, []).append(ours / median(times))
            for who, wal in (("dbos", False), ("dbos-wal", True)):
                if wal and bench.quick:
                    continue
                peer = bench.peer(section, who, "benchmarks.peers.dbos_peer:starting", runs=theirs, wal=wal, **how)
                if peer is not None:
                    found.setdefault(who, {}).setdefault(what, []).append(theirs / peer["seconds"])
    return {who: {what: median(rates) for what, rates in whats.items()} for who, whats in found.items()}


def _cells(rates: dict[str, float], ours: dict[str, float], who: str) -> list[str]:
    cells = []
    for what in ("start", "result"):
        rate = rates.get(what)
        times = ratio(ours[what], rate)
        cells += [number(rate), "" if who == "relight" or times is None else f"{number(times)}×"]
    return cells
