"""SQLite without an engine: the rows that Relight wrote, written again in as many commits.

Three ways, because "raw" can mean several things:

    rows    the same rows in the same tables and indexes, `executemany` of one-row statements
    bulk    the same, with multi-row VALUES statements, as Relight's own backend writes them
    append  the same bytes as blobs in one table without any index: what an append-only log would cost

The rows are in memory before the clock starts: nothing is encoded, hashed, fenced or waited for. Everything runs on one
thread with nothing else in the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import apsw
import msgspec

ROWS_PER_STATEMENT = 256
OWNER = "benchmark-host#0123456789ab"

Batch = list[tuple[str, Any]]
"""One commit: ("run", row), ("entry", row) and ("end", row) in the order in which they were written."""


def connect(path: Path) -> apsw.Connection:
    """With the settings of Relight's own connections."""
    db = apsw.Connection(str(path))
    db.pragma("journal_mode", "wal")
    db.execute("PRAGMA synchronous = FULL")
    db.wal_autocheckpoint(4_000)
    assert db.pragma("synchronous") == 2
    return db


class Recording:
    """What a finished benchmark of Relight left in its file."""

    def __init__(self, path: str) -> None:
        db = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
        self.schema = [
            sql
            for (sql,) in db.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'")
        ]
        self.columns = [row[1] for row in db.execute("PRAGMA table_info(runs)")]
        self.runs = {row[0]: row for row in db.execute("SELECT * FROM runs")}
        self.entries = list(db.execute("SELECT id, run, sequence, event, crc FROM journal ORDER BY id"))
        self.ends: dict[Any, Any] = dict(db.execute("SELECT run, max(sequence) FROM journal GROUP BY run").fetchall())  # type: ignore[arg-type] # pairs
        db.close()

    def rounds(self, commits: list[int]) -> list[list[Batch]]:
        """The same rows in as many commits per round as Relight took; every round has as many rows as the others."""
        size, rest = divmod(len(self.entries), len(commits))
        assert rest == 0, f"{len(self.entries)} entries do not make {len(commits)} equal rounds"
        rounds = []
        for turn, count in enumerate(commits):
            batches: list[Batch] = [[] for _ in range(count)]
            for place, entry in enumerate(self.entries[turn * size : (turn + 1) * size]):
                batches[place * count // size] += self._rows(entry)
            rounds.append(batches)
        return rounds

    def _rows(self, entry: Any) -> Batch:
        _, run, sequence, _, _ = entry
        rows: Batch = [("entry", entry)]
        if sequence == 1:
            new = dict(zip(self.columns, self.runs[run], strict=True)) | {
                "status": "running",
                "owner": OWNER,
                "output": None,
            }
            rows.insert(0, ("run", tuple(new.values())))
        if sequence == self.ends[run]:
            old = dict(zip(self.columns, self.runs[run], strict=True))
            rows.append(("end", (old["id"], old["status"], old["output"], old["updated_at"])))
        return rows


def write_rows(db: apsw.Connection, batch: Batch, columns: int) -> None:
    kinds = _by_kind(batch)
    if kinds["run"]:
        db.executemany(f"INSERT INTO runs VALUES ({','.join('?' * columns)})", kinds["run"])
    if kinds["entry"]:
        db.executemany("INSERT INTO journal (id, run, sequence, event, crc) VALUES (?, ?, ?, ?, ?)", kinds["entry"])
    if kinds["end"]:
        db.executemany(
            "UPDATE runs SET status = ?2, owner = NULL, output = ?3, updated_at = ?4 WHERE id = ?1", kinds["end"]
        )


def write_bulk(db: apsw.Connection, batch: Batch, columns: int) -> None:
    kinds = _by_kind(batch)
    _many(db, "INSERT INTO runs VALUES {}", columns, kinds["run"])
    _many(db, "INSERT INTO journal (id, run, sequence, event, crc) VALUES {}", 5, kinds["entry"])
    _many(
        db,
        "UPDATE runs SET status = v.column2, owner = NULL, output = v.column3, updated_at = v.column4 "
        "FROM (VALUES {}) AS v WHERE runs.id = v.column1",
        4,
        kinds["end"],
    )


def write_append(db: apsw.Connection, batch: Batch, _: int) -> None:
    db.executemany("INSERT INTO log (data) VALUES (?)", [(row,) for _, row in batch])


def write(folder: str, recording: str, commits: list[int], warm_up: int, way: str) -> dict[str, Any]:
    """Seconds per round, without the first `warm_up` rounds."""
    source = Recording(recording)
    rounds = source.rounds(commits)
    db = connect(Path(folder) / "raw.db")
    if way == "append":
        db.execute("CREATE TABLE log (id INTEGER PRIMARY KEY, data BLOB NOT NULL)")
        rounds = [[[(kind, _blob(kind, row)) for kind, row in batch] for batch in batches] for batches in rounds]
    else:
        for sql in source.schema:
            db.execute(sql)
    apply: Callable[[apsw.Connection, Batch, int], None] = {
        "rows": write_rows,
        "bulk": write_bulk,
        "append": write_append,
    }[way]
    times = []
    for batches in rounds:
        began = time.perf_counter()
        for batch in batches:
            db.execute("BEGIN IMMEDIATE")
            apply(db, batch, len(source.columns))
            db.execute("COMMIT")
        times.append(time.perf_counter() - began)
    return {"seconds": times[warm_up:]}


def one_row_commits(folder: str, commits: int, event: str) -> dict[str, Any]:
    """Seconds of each commit of one journal row, in a table of the journal's shape."""
    db = connect(Path(folder) / "raw.db")
    db.execute(
        "CREATE TABLE journal (id INTEGER PRIMARY KEY, run INTEGER NOT NULL, sequence INTEGER NOT NULL, "
        "event BLOB NOT NULL, crc INTEGER NOT NULL) STRICT"
    )
    db.execute("CREATE UNIQUE INDEX journal_order ON journal (run, sequence)")
    data, times = event.encode(), []
    for sequence in range(commits + 100):
        began = time.perf_counter()
        db.execute("BEGIN IMMEDIATE")
        db.execute(
            "INSERT INTO journal (run, sequence, event, crc) VALUES (?, ?, ?, ?)", (1, sequence, data, 123456789)
        )
        db.execute("COMMIT")
        times.append(time.perf_counter() - began)
    return {"seconds": times[100:]}


def _by_kind(batch: Batch) -> dict[str, list[Any]]:
    kinds: dict[str, list[Any]] = {"run": [], "entry": [], "end": []}
    for kind, row in batch:
        kinds[kind].append(row)
    return kinds


def _many(db: apsw.Connection, sql: str, width: int, rows: Iterable[Any]) -> None:
    """Statements of a few sizes, which apsw keeps prepared."""
    values = [value for row in rows for value in row]
    row, start, size = f"({','.join('?' * width)})", 0, ROWS_PER_STATEMENT
    while start < len(values):
        while len(values) - start < size * width or len(row) * size > 15_000:
            size //= 2
        db.execute(sql.format(",".join([row] * size)), values[start : start + size * width])
        start += size * width


def _blob(kind: str, row: Any) -> bytes:
    """The entry's own bytes; of a run's row, its values."""
    if kind == "entry":
        return bytes(row[3])
    return msgspec.json.encode([value.decode() if isinstance(value, bytes) else value for value in row])
