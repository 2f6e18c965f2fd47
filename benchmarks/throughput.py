"""Ten no-op steps per run, 500 and 50 runs at once: Relight, dbos, duroxide, and SQLite alone with the same rows."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Bench, Section, median, number, ratio, ratios, say

STEPS = 10
WARM_UP = 2
RAW_WAYS = ("rows", "bulk", "append")
ORDER = ("relight", *(f"raw-{way}" for way in RAW_WAYS), "dbos", "dbos-wal", "duroxide")


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
    """Turns of everybody, alternating, so that a slow minute of the machine hits all alike; the slow peers get one turn."""
    turns, rounds = (2, 5) if bench.quick else (5, 9)
    if runs < 500:
        rounds *= 4
    rates: dict[str, list[float]] = {}
    commits: list[float] = []
    peers = _peers(bench, runs)
    for turn in range(max(turns, len(peers))):
        if turn < turns:
            say(f"throughput: {runs} at once, turn {turn + 1} of {turns}")
            commits += _one_turn(bench, runs, rounds, rates)
        if turn < len(peers):
            label, target, arguments = peers[turn]
            say(f"throughput: {runs} at once, {label}")
            peer = bench.peer(section, label, target, **arguments)
            if peer is not None:
                rates[label] = [peer["steps"] / peer["seconds"]]
    _report(section, runs, rates, median(commits), [label for label, _, _ in peers])


def _one_turn(bench: Bench, runs: int, rounds: int, rates: dict[str, list[float]]) -> list[float]:
    """Relight, then its rows again without it; the commits that each of Relight's rounds took."""
    with bench.place() as place:
        found = bench.child("benchmarks.throughput:relight", folder=str(place), runs=runs, rounds=rounds)
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
    return [float(count) for count in found["commits"][WARM_UP:]]


def _peers(bench: Bench, runs: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Their rates hardly depend on how many runs there are, so --quick starts fewer of them at once."""
    size = {"runs": min(runs, 50) if bench.quick else runs, "steps": STEPS}
    peers: list[tuple[str, str, dict[str, Any]]] = [
        ("dbos", "benchmarks.peers.dbos_peer:throughput", size | {"wal": False}),
        ("dbos-wal", "benchmarks.peers.dbos_peer:throughput", size | {"wal": True}),
        ("duroxide", "benchmarks.peers.duroxide_peer:throughput", size),
    ]
    return peers if not bench.quick or runs == 500 else peers[:1]


def _report(section: Section, runs: int, all_rates: dict[str, list[float]], commits: float, peers: list[str]) -> None:
    rates = {who: median(all_rates[who]) for who in ORDER if who in all_rates}
    shares = {way: median(ratios(all_rates["relight"], all_rates[f"raw-{way}"])) for way in RAW_WAYS}
    ours = rates["relight"]
    for who, rate in rates.items():
        compared = "" if who == "relight" else f"{number(ours / rate)}×"
        if who.startswith("raw-"):
            compared = f"{shares[who.removeprefix('raw-')]:.0%} of it"
        section.rows.append([str(runs), who, number(rate), compared, number(commits) if who == "relight" else ""])
    section.data[f"{runs}"] = {
        "steps_per_second": rates,
        "share_of_raw": shares,
        "commits_per_round": commits,
        "turns": all_rates,
    }
    wanted = 100 if runs == 500 else 80
    for who in [peer for peer in peers if peer.startswith("dbos")]:
        name = f"{runs} at once, to {who}"
        section.target(name, f"≥ {wanted}×", ratio(ours, rates.get(who)), lambda x: x >= wanted, "×")
    if runs == 500:
        for way, share in shares.items():
            section.target(f"500 at once, of raw-{way}", "≥ 50 %", share * 100, lambda x: x >= 50, " %")
