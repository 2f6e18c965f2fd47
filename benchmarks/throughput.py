"""Ten no-op steps per run, 500 and 50 runs at once: Relight, dbos, duroxide, and SQLite alone with the same rows."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Bench, NotMeasuredError, Section, median, number, ratio, say

STEPS = 10
WARM_UP = 2
RAW_WAYS = ("rows", "bulk", "append")


# ---- in the child


def relight(folder: str, runs: int, rounds: int) -> dict[str, Any]:
    """Seconds and commits of each round of `runs` runs started and awaited at once; the file stays for `raw`."""
    from benchmarks import flows
    from relight import Relight

    async def main() -> dict[str, Any]:
        times, commits = [], []
        async with Relight(Path(folder) / "relight.db") as rl:
            recorder = rl.services.recorder
            for _ in range(WARM_UP + rounds):
                before, began = recorder.commits, time.perf_counter()
                results = await asyncio.gather(*(rl.run(flows.steps, STEPS) for _ in range(runs)))
                times.append(time.perf_counter() - began)
                commits.append(recorder.commits - before)
                assert results == [STEPS] * runs
        return {"seconds": times[WARM_UP:], "commits": commits}

    return asyncio.run(main())


# ---- in the parent


def run(bench: Bench) -> Section:
    section = Section(
        "throughput",
        f"{STEPS} no-op steps per run, steps per second",
        ["runs at once", "who", "steps/s", "Relight is", "commits per round"],
    )
    for runs in (500, 50):
        _at_once(bench, section, runs)
    section.notes.append("synchronous=FULL for Relight, raw and dbos (SQLite's default there; checked).")
    section.notes.append(
        "duroxide sets synchronous=NORMAL itself and offers no setting: it syncs at WAL checkpoints only."
    )
    section.notes.append(
        "dbos-wal: the file was switched to WAL before dbos opened it; by default it uses a rollback journal."
    )
    return section


def _at_once(bench: Bench, section: Section, runs: int) -> None:
    children, rounds = (2, 5) if bench.quick else (5, 9)
    if runs < 500:
        rounds *= 4
    rates: dict[str, list[float]] = {}
    commits: list[int] = []
    for turn in range(children):  # alternating, so that a slow minute of the machine hits all alike
        say(f"throughput: {runs} at once, turn {turn + 1} of {children}")
        with bench.place() as place:
            try:
                found = bench.child("benchmarks.throughput:relight", folder=str(place), runs=runs, rounds=rounds)
            except NotMeasuredError as error:
                section.notes.append(f"relight could not be run: {error}")
                return
            commits += found["commits"][WARM_UP:]
            rates.setdefault("relight", []).append(runs * STEPS / median(found["seconds"]))
            for way in RAW_WAYS:
                raw = bench.alone(
                    "benchmarks.peers.raw:write",
                    recording=str(place / "relight.db"),
                    commits=found["commits"],
                    warm_up=WARM_UP,
                    way=way,
                )
                rates.setdefault(f"raw-{way}", []).append(runs * STEPS / median(raw["seconds"]))
    for label, target, more in _peers(bench, runs):
        say(f"throughput: {runs} at once, {label}")
        peer = bench.peer(section, label, target, **more)
        if peer is not None:
            rates[label] = [peer["steps"] / peer["seconds"]]
    _report(section, runs, {who: median(values) for who, values in rates.items()}, median([float(n) for n in commits]))
    section.data[f"{runs}"]["all"] = rates


def _peers(bench: Bench, runs: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Their rates hardly depend on how many runs there are, so --quick starts fewer of them at once."""
    size = {"runs": min(runs, 50) if bench.quick else runs, "steps": STEPS}
    peers: list[tuple[str, str, dict[str, Any]]] = [
        ("dbos", "benchmarks.peers.dbos_peer:throughput", size | {"wal": False}),
        ("dbos-wal", "benchmarks.peers.dbos_peer:throughput", size | {"wal": True}),
        ("duroxide", "benchmarks.peers.duroxide_peer:throughput", size),
    ]
    return peers if not bench.quick or runs == 500 else peers[:1]


def _report(section: Section, runs: int, rates: dict[str, float], commits: float) -> None:
    ours = rates["relight"]
    for who, rate in rates.items():
        times = ours / rate
        compared = "" if who == "relight" else f"{times:.0%} of it" if who.startswith("raw") else f"{number(times)}×"
        section.rows.append([str(runs), who, number(rate), compared, number(commits) if who == "relight" else ""])
    section.data[f"{runs}"] = {"steps_per_second": rates, "commits_per_round": commits}
    wanted = 100 if runs == 500 else 80
    best = max((rates[who] for who in ("dbos", "dbos-wal") if who in rates), default=None)
    section.target(
        f"{runs} at once, to dbos", f"≥ {wanted}×", ratio(ours, rates.get("dbos")), lambda x: x >= wanted, "×"
    )
    section.target(
        f"{runs} at once, to dbos at its best", f"≥ {wanted}×", ratio(ours, best), lambda x: x >= wanted, "×"
    )
    if runs == 500:
        for way in RAW_WAYS:
            share = ratio(ours, rates.get(f"raw-{way}"))
            percent = None if share is None else share * 100
            section.target(f"500 at once, of raw-{way}", "≥ 50 %", percent, lambda x: x >= 50, " %")
