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
    for starters in STARTERS:
        found = _rates(bench, section, starters)
        ours = found["relight"]
        for who, rates in found.items():
            section.rows.append([str(starters), who, *_cells(rates, ours, who)])
        section.data[str(starters)] = found
        if starters == 1:
            continue  # one synced commit per start for everybody: the disk decides, and no engine can be 50 times faster
        for what in ("start", "result"):
            best = max((rates[what] for who, rates in found.items() if who != "relight"), default=None)
            name = {"start": "start()", "result": "start() and result"}[what]
            section.target(
                f"{name}, {starters} starters, to dbos at its best",
                "≥ 50×",
                ratio(ours[what], best),
                lambda x: x >= 50,
                "×",
            )
    section.notes.append(
        "With one starter each start() is one synced commit for everybody: the disk sets the pace, not the engine."
    )
    return section


def _rates(bench: Bench, section: Section, starters: int) -> dict[str, dict[str, float]]:
    runs = {1: 200, 50: 2500, 500: 5000}[starters]
    children, rounds = (1, 3) if bench.quick else (3, 7)
    ways = {"start": False, "result": True}
    found: dict[str, dict[str, float]] = {"relight": {}}
    for what, await_result in ways.items():
        say(f"starting: {starters} starters, {what}")
        arguments = {"starters": starters, "runs": runs, "rounds": rounds, "await_result": await_result}
        times = [median(bench.alone("benchmarks.starting:relight", **arguments)["seconds"]) for _ in range(children)]
        found["relight"][what] = runs / median(times)
    theirs = {1: 20, 50: 100, 500: 500}[starters] if bench.quick else {1: 100, 50: 500, 500: 1000}[starters]
    for label, wal in (("dbos", False), ("dbos-wal", True)):
        if bench.quick and wal:
            continue
        for what, await_result in ways.items():
            if bench.quick and (starters == 500) == (what == "result"):
                continue  # --quick: one figure of each suffices to see that nothing is off
            say(f"starting: {starters} starters, {label}, {what}")
            peer = bench.peer(
                section,
                label,
                "benchmarks.peers.dbos_peer:starting",
                starters=starters,
                runs=theirs,
                wal=wal,
                await_result=await_result,
            )
            if peer is not None:
                found.setdefault(label, {})[what] = theirs / peer["seconds"]
    return found


def _cells(rates: dict[str, float], ours: dict[str, float], who: str) -> list[str]:
    cells = []
    for what in ("start", "result"):
        rate = rates.get(what)
        times = ratio(ours[what], rate)
        cells += [number(rate), "" if who == "relight" or times is None else f"{number(times)}×"]
    return cells
