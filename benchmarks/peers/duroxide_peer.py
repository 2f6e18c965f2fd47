"""duroxide (a Rust core with a Python binding) on SQLite or PostgreSQL.

It opens its SQLite file with WAL and synchronous=NORMAL and has no setting for that: its commits are not synced, everybody
else's are. On PostgreSQL the server's settings hold for it as for everybody. Its dispatchers poll; the interval here is the
shortest that helps.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from duroxide import Client, PostgresProvider, Runtime, RuntimeOptions, SqliteProvider

WAIT_MS = 200_000


def _noop(_: Any, i: int) -> int:
    return i


def _steps(context: Any, count: int) -> Generator[Any, Any, int]:
    for i in range(count):
        yield context.schedule_activity("noop", i)
    return count


def launch(folder: str) -> tuple[Runtime, Client]:
    path = Path(folder) / "duroxide.db"
    path.touch()
    return _launch(SqliteProvider.open(f"sqlite:{path}"))


def _launch(provider: Any) -> tuple[Runtime, Client]:
    runtime = Runtime(provider, RuntimeOptions(dispatcher_poll_interval_ms=10, log_level="off"))
    runtime.register_activity("noop", _noop)
    runtime.register_orchestration("steps", _steps)
    runtime.start()
    return runtime, Client(provider)


def throughput(folder: str, runs: int, steps: int) -> dict[str, Any]:
    return _throughput(*launch(folder), runs, steps)


def throughput_on_postgres(url: str, runs: int, steps: int, rounds: int) -> dict[str, Any]:
    # With its default number of dispatchers: 8 and 16 of each were tried at 500 runs at once and were not faster.
    return _throughput(*_launch(PostgresProvider.connect(url)), runs, steps, rounds)


def _throughput(runtime: Runtime, client: Client, runs: int, steps: int, rounds: int = 1) -> dict[str, Any]:
    _at_once(client, "warm", 5, steps)
    began = time.perf_counter()
    for turn in range(rounds):
        _at_once(client, f"run{turn}-", runs, steps)
    seconds = time.perf_counter() - began
    runtime.shutdown(1000)
    return {"seconds": seconds, "steps": runs * steps * rounds}


def latency(folder: str, runs: int, steps: int) -> dict[str, Any]:
    runtime, client = launch(folder)
    times = []
    for i in range(runs + 2):
        began = time.perf_counter()
        _at_once(client, f"run{i}-", 1, steps)
        times.append((time.perf_counter() - began) / steps)
    runtime.shutdown(1000)
    return {"seconds": times[2:]}


def _at_once(client: Client, prefix: str, runs: int, steps: int) -> None:
    for i in range(runs):
        client.start_orchestration(f"{prefix}{i}", "steps", steps)
    for i in range(runs):
        status = client.wait_for_orchestration(f"{prefix}{i}", WAIT_MS)
        assert status.status == "Completed", status.status
