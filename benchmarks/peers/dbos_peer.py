"""dbos on SQLite or PostgreSQL, embedded: sync workflows on its thread pool. On SQLite its async workflows were tried too and
are a little slower; on PostgreSQL they were not tried.

By default dbos leaves SQLite's rollback journal on. With `wal` the file is switched to WAL before dbos opens it (the mode
is kept in the file), which is what a careful user would do. On PostgreSQL its pool has its
default size (20).
"""

from __future__ import annotations

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dbos import DBOS

THREADS = 64


def _noop(i: int) -> int:
    return i


def _steps(count: int) -> int:
    for i in range(count):
        noop(i)
    return count


def _empty(i: int) -> int:
    return i


noop = DBOS.step()(_noop)
ten_steps = DBOS.workflow()(_steps)
empty = DBOS.workflow()(_empty)


def launch(folder: str, wal: bool) -> None:
    path = Path(folder) / "dbos.sqlite"
    if wal:
        with sqlite3.connect(path) as db:
            assert db.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
        db.close()
    _launch(f"sqlite:///{path}")
    # That it really syncs every commit, as everybody here.
    assert _setting("PRAGMA synchronous") == 2
    assert _setting("PRAGMA journal_mode") == ("wal" if wal else "delete")


def launch_on_postgres(url: str) -> None:
    _launch(url.replace("postgresql://", "postgresql+psycopg://"))
    assert [_setting(f"SHOW {name}") for name in ("fsync", "synchronous_commit", "full_page_writes")] == ["on"] * 3


def _launch(url: str) -> None:
    DBOS(
        config={
            "name": "benchmark",
            "system_database_url": url,
            "log_level": "ERROR",
            "run_admin_server": False,
            "max_executor_threads": THREADS,
        }
    )
    DBOS.launch()


def _setting(sql: str) -> Any:
    from dbos._dbos import _get_dbos_instance

    with _get_dbos_instance()._sys_db.engine.connect() as connection:
        return connection.exec_driver_sql(sql).scalar()


def throughput(folder: str, runs: int, steps: int, wal: bool) -> dict[str, Any]:
    launch(folder, wal)
    return _throughput(runs, steps)


def throughput_on_postgres(url: str, runs: int, steps: int, rounds: int) -> dict[str, Any]:
    launch_on_postgres(url)
    return _throughput(runs, steps, rounds)


def _throughput(runs: int, steps: int, rounds: int = 1) -> dict[str, Any]:
    _at_once(ten_steps, 5, steps)
    began = time.perf_counter()
    for _ in range(rounds):
        _at_once(ten_steps, runs, steps)
    seconds = time.perf_counter() - began
    DBOS.destroy()
    return {"seconds": seconds, "steps": runs * steps * rounds}


def latency(folder: str, runs: int, steps: int, wal: bool) -> dict[str, Any]:
    """Seconds per step, one run at a time: dbos's own start and end are shared among the run's steps."""
    launch(folder, wal)
    times = []
    for _ in range(runs + 2):
        began = time.perf_counter()
        ten_steps(steps)
        times.append((time.perf_counter() - began) / steps)
    DBOS.destroy()
    return {"seconds": times[2:]}


def starting(folder: str, starters: int, runs: int, wal: bool, await_result: bool) -> dict[str, Any]:
    """Seconds in which `starters` threads start `runs` runs between them."""
    launch(folder, wal)

    def start(i: int) -> Any:
        handle = DBOS.start_workflow(empty, i)
        if await_result:
            assert handle.get_result() == i
        return handle

    with ThreadPoolExecutor(starters) as pool:
        list(pool.map(start, range(starters)))
        began = time.perf_counter()
        handles = list(pool.map(start, range(runs)))
        seconds = time.perf_counter() - began
    for handle in handles:
        handle.get_result()
    DBOS.destroy()
    return {"seconds": seconds}


def _at_once(workflow: Any, runs: int, argument: int) -> None:
    handles = [DBOS.start_workflow(workflow, argument) for _ in range(runs)]
    for handle in handles:
        assert handle.get_result() == argument
