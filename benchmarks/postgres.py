"""Ten no-op steps per run on PostgreSQL: Relight, dbos, absurd, duroxide, and the same rows without an engine.

Everybody has the same server, one after the other, in turns, each with a database of its own.
"""

from __future__ import annotations

import asyncio
import operator
import time
from functools import partial
from typing import Any

from benchmarks.measure import Bench, NotMeasuredError, Section, median, number, ratios, say
from benchmarks.servers import drop, fresh_database, postgres
from tests.servers.postgres import PostgresServer, find_binaries

STEPS = 10
WARM_UP = 2
AT_ONCE = (500, 50, 1)
PEER_TURNS = 2
QUICK_RUNS = 50  # of the peers, at most, with --quick
RAW_WAYS = ("raw", "raw-lanes", "raw-fenced")
PEERS: dict[str, str] = {
    "dbos": "benchmarks.peers.dbos_peer:throughput_on_postgres",
    "absurd": "benchmarks.peers.absurd_peer:throughput",
    "duroxide": "benchmarks.peers.duroxide_peer:throughput_on_postgres",
}
WANTED = {"dbos": 60, "absurd": 20, "duroxide": 20}


# ---- in the child


def relight(url: str, runs: int, rounds: int) -> dict[str, Any]:
    """Seconds and commits of each round of `runs` runs started and awaited at once; the database stays for `raw`."""
    from benchmarks import flows
    from relight import Relight

    async def main() -> dict[str, Any]:
        times, commits, cpu = [], [], []
        async with Relight(url) as rl:
            recorder = rl.services.recorder
            for _ in range(WARM_UP + rounds):
                before, began, used = recorder.commits, time.perf_counter(), time.process_time()
                results = await asyncio.gather(*(rl.run(flows.steps, STEPS) for _ in range(runs)))
                times.append(time.perf_counter() - began)
                cpu.append(time.process_time() - used)
                commits.append(recorder.commits - before)
                assert results == [STEPS] * runs
        return {"seconds": times[WARM_UP:], "commits": commits, "cpu": cpu[WARM_UP:]}

    return asyncio.run(main())


# ---- in the parent


def run(bench: Bench) -> Section:
    section = Section(
        "postgres",
        f"PostgreSQL: {STEPS} no-op steps per run, steps per second",
        ["runs at once", "who", "steps/s", "Relight is", "commits per round", "CPU of the engine"],
    )
    with postgres() as server:
        for runs in AT_ONCE:
            _at_once(bench, section, server, runs)
        section.data["server"] = server.sql("SELECT version()")
    if bench.quick:
        section.notes.append(f"--quick: at 500 the peers ran only {QUICK_RUNS} at once; their ratios there are rough.")
    section.notes.append(
        "fsync, synchronous_commit and full_page_writes are on for everybody: one server, in turns, a database for each."
    )
    section.notes.append(
        "CPU of the engine: of its process, per second of the measurement; the server's own processes come on top of it."
    )
    return section


def _at_once(bench: Bench, section: Section, server: PostgresServer, runs: int) -> None:
    """Turns of everybody, alternating; the slow peers take part in the first ones only.

    Ratios are taken turn by turn: on a busy machine the same engine may be three times slower a minute later, and a peer that
    is compared with another minute's Relight looks as good or as bad as the minute was.
    """
    turns, rounds = (2, 5) if bench.quick else (5, 9)
    rounds *= {500: 1, 50: 4, 1: 20}[runs]
    rates: dict[str, list[float]] = {}
    more: dict[str, list[float]] = {"commits": [], "cpu": []}
    running = list(PEERS)
    for turn in range(turns):
        say(f"postgres: {runs} at once, turn {turn + 1} of {turns}")
        _one_turn(bench, server, runs, rounds, rates, more)
        for label in list(running) if turn < PEER_TURNS else []:
            say(f"postgres: {runs} at once, {label}")
            rate = _peer(bench, section, server, label, runs)
            if rate is None:
                running.remove(label)
            else:
                rates.setdefault(label, []).append(rate)
    _report(section, runs, rates, {name: median(values) for name, values in more.items()})


def _one_turn(
    bench: Bench,
    server: PostgresServer,
    runs: int,
    rounds: int,
    rates: dict[str, list[float]],
    more: dict[str, list[float]],
) -> None:
    """Relight, then its rows again without it."""
    ours = fresh_database(server)
    found = bench.child("benchmarks.postgres:relight", url=ours, runs=runs, rounds=rounds)
    rates.setdefault("relight", []).append(runs * STEPS / median(found["seconds"]))
    more["commits"] += found["commits"][WARM_UP:]
    more["cpu"].append(sum(found["cpu"]) / sum(found["seconds"]))
    for way in RAW_WAYS:
        url = fresh_database(server)
        raw = bench.child(
            "benchmarks.peers.raw_postgres:write",
            url=url,
            recording=ours,
            commits=found["commits"],
            warm_up=WARM_UP,
            way=way,
        )
        drop(server, url)
        rates.setdefault(way, []).append(runs * STEPS / median(raw["seconds"]))
    drop(server, ours)


def _peer(bench: Bench, section: Section, server: PostgresServer, label: str, runs: int) -> float | None:
    """Steps per second. --quick starts fewer of them at once, and a note says so."""
    url = fresh_database(server)
    size = {"runs": min(runs, QUICK_RUNS) if bench.quick else runs, "steps": STEPS, "rounds": 10 if runs == 1 else 1}
    arguments: dict[str, Any] = {"url": url, **size}
    if label == "absurd":
        arguments["binaries"] = str(find_binaries())
    try:
        found = bench.child(PEERS[label], **arguments)
    except NotMeasuredError as error:
        section.rows.append([str(runs), label, f"not run: {error}", "", "", ""])
        return None
    finally:
        drop(server, url)
    return float(found["steps"] / found["seconds"])


def _to(all_rates: dict[str, list[float]], who: str) -> list[float]:
    """Relight's rate to theirs, for each turn that they took part in."""
    return ratios(all_rates["relight"][: len(all_rates[who])], all_rates[who])


def _compared(all_rates: dict[str, list[float]], who: str, form: str) -> str:
    """The median of the turns, and how far they lie apart: one that moves by half between turns tells little."""
    found = _to(all_rates, who)
    return f"{form.format(median(found))} ({form.format(min(found))} to {form.format(max(found))})".replace(
        " of it", ""
    )


def _report(section: Section, runs: int, all_rates: dict[str, list[float]], more: dict[str, float]) -> None:
    rates = {who: median(all_rates[who]) for who in ("relight", *RAW_WAYS, *PEERS) if who in all_rates}
    shares = {way: median(_to(all_rates, way)) for way in RAW_WAYS}
    times = {who: median(_to(all_rates, who)) for who in PEERS if who in all_rates}
    for who, rate in rates.items():
        compared = _compared(all_rates, who, "{:.0%} of it" if who in shares else "{:.3g}×")
        cells = [number(more["commits"]), f"{more['cpu']:.0%}"] if who == "relight" else ["", ""]
        section.rows.append([str(runs), who, number(rate), "" if who == "relight" else compared, *cells])
    section.data[f"{runs}"] = {
        "steps_per_second": rates,
        "share_of_raw": shares,
        "times_of_peers": times,
        "commits_per_round": more["commits"],
        "cpu_share": more["cpu"],
        "turns": all_rates,
    }
    if runs != 500:
        return
    for who, wanted in WANTED.items():
        name = f"PostgreSQL, 500 at once, to {who}"
        section.target(name, f"≥ {wanted}×", times.get(who), partial(operator.le, wanted), "×")
    section.target("PostgreSQL, 500 at once, of raw", "≥ 50 %", shares["raw"] * 100, lambda x: x >= 50, " %")
