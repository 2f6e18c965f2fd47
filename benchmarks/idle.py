"""Ten orchestrators with nothing to do, each a process of its own, on one PostgreSQL: their queries and their CPU.

The server logs every statement (it is not used for anything else), and the log is counted: whatever is sent, by whichever
connection, with or without a transaction. CPU is what Linux has accounted to each process, all its threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.measure import Bench, Section, number, say
from benchmarks.nodes import Node, die_with_parent, node, tell
from benchmarks.servers import fresh_database, postgres

ORCHESTRATORS = 10
SETTLE_SECONDS = 5.0  # start-up recovery, the first heartbeat, connections
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# The log names a prepared statement before its text, and calls the others "statement".
STATEMENT = re.compile(r"\[relight\] LOG:  (?:execute [^:]*|statement): (.*)")
NAME = re.compile(r"relight\.(\w+)")


# ---- in the nodes


def rest(url: str, name: str) -> None:
    """An orchestrator with default settings and one known flow, until it is signalled."""
    die_with_parent()
    from benchmarks import flows
    from relight import Relight

    async def main() -> None:
        async with Relight(url, orchestrator_id=name) as rl:
            await rl.run(flows.empty, 1)
            tell(ready=True)
            await rl.signalled()

    asyncio.run(main())


# ---- in the parent


def run(bench: Bench) -> Section:
    section = Section(
        "idle",
        f"{ORCHESTRATORS} idle orchestrators on PostgreSQL, each its own process, default settings",
        ["", "mean of all", "most of one"],
    )
    seconds = 30.0 if bench.quick else 180.0
    settings = {"log_statement": "all", "log_line_prefix": "[%a] ", "logging_collector": "off"}
    with postgres(**settings) as server, bench.place() as place:
        say(f"idle: {ORCHESTRATORS} orchestrators for {seconds:.0f} s")
        url = fresh_database(server)
        found = asyncio.run(_watch(place, url, server.log, seconds))
    queries, cpu = found["queries_per_second"], found["cpu_shares"]
    section.data = found
    section.rows.append(["queries per s", number(queries), ""])
    section.rows.append(["CPU of one core", f"{sum(cpu) / len(cpu):.2%}", f"{max(cpu):.2%}"])
    kinds = ", ".join(f"{count}× {name}" for name, count in found["statements"].items())
    section.notes.append(f"All statements of the {ORCHESTRATORS} in {seconds:.0f} s: {kinds or 'none'}.")
    section.target(f"queries per s, each of {ORCHESTRATORS} idle", "≤ 1", queries, lambda x: x <= 1)
    section.target(f"CPU, busiest of {ORCHESTRATORS} idle", "< 1 %", max(cpu) * 100, lambda x: x < 1, " %")
    return section


async def _watch(place: Path, url: str, log: Path, seconds: float) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        nodes: list[Node] = []
        for i in range(ORCHESTRATORS):
            one = await stack.enter_async_context(
                node(place, f"idle-{i}", "benchmarks.idle:rest", url=url, name=f"idle-{i}")
            )
            await one.told()
            nodes.append(one)
        await asyncio.sleep(SETTLE_SECONDS)
        at, before = _size(log), [_cpu_seconds(one.pid) for one in nodes]
        await asyncio.sleep(seconds)
        after = [_cpu_seconds(one.pid) for one in nodes]
        statements = Counter(_name(statement) for statement in STATEMENT.findall(_since(log, at)))
    return {
        "seconds": seconds,
        "queries_per_second": statements.total() / seconds / ORCHESTRATORS,
        "cpu_shares": [(now - then) / seconds for now, then in zip(after, before, strict=True)],
        "statements": dict(statements.most_common()),
    }


def _size(log: Path) -> int:
    return log.stat().st_size


def _since(log: Path, at: int) -> str:
    with log.open("rb") as file:
        file.seek(at)
        return file.read().decode(errors="replace")


def _name(statement: str) -> str:
    """What a statement touches: its function or table."""
    found = NAME.search(statement)
    return found[1] if found else statement.partition("(")[0][:40].strip()


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
