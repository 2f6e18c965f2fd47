"""PostgreSQL without an engine: the rows that Relight wrote, written again by `unnest` in as many commits.

    raw         the same rows in the same tables and indexes: runs, heads and entries inserted, runs and heads updated at the end
    raw-lanes   the same, shared out to two connections, as Relight's store has for commits
    raw-fenced  as raw, and every entry advances its run's head, as a fence must: what no store with fencing can leave out

The rows are in memory before the clock starts: nothing is encoded, hashed, compared or woken up. Each commit is one
transaction, of one to five statements that are prepared beforehand and sent one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import asyncpg

from relight.backends.postgres import PostgresStore
from relight.clock import SYSTEM_CLOCK

OWNER = "benchmark-host#0123456789ab"
LANES = 2

Columns = tuple[list[Any], ...]
Batch = list[tuple[str, Columns]]
"""One commit: statements and their arguments."""

ENTRIES = """
    INSERT INTO relight.journal (run, sequence, event, crc)
    SELECT * FROM unnest($1::bigint[], $2::integer[], $3::bytea[], $4::bigint[])
"""
NEW_HEADS = """
    INSERT INTO relight.heads (run, epoch, last, ended)
    SELECT *, 1, 0 FROM unnest($1::bigint[], $2::bigint[])
"""
ADVANCE = """
    UPDATE relight.heads AS h SET last = u.last
    FROM unnest($1::bigint[], $2::bigint[], $3::integer[]) AS u (run, epoch, last)
    WHERE h.run = u.run AND h.epoch = u.epoch AND h.last = u.last - 1 AND h.ended = 0
"""
END_HEADS = """
    UPDATE relight.heads AS h SET last = u.last, ended = 2
    FROM unnest($1::bigint[], $2::integer[]) AS u (run, last) WHERE h.run = u.run
"""
END_RUNS = """
    UPDATE relight.runs AS r SET status = u.status, owner = NULL, output = u.output, updated_at = u.updated_at
    FROM unnest($1::bigint[], $2::text[], $3::bytea[], $4::double precision[]) AS u (key, status, output, updated_at)
    WHERE r.key = u.key
"""


class Recording:
    """What a finished benchmark of Relight left in its database, round by round."""

    def __init__(self, columns: dict[str, str], runs: list[Any], entries: list[Any], ends: dict[int, int]) -> None:
        self._columns = columns
        self._runs = {run["key"]: dict(run) for run in runs}
        self._ends = ends
        self._entries: dict[int, list[Any]] = {}
        for entry in entries:
            self._entries.setdefault(entry["run"], []).append(entry)
        types = ", ".join(f"${place}::{kind}[]" for place, kind in enumerate(columns.values(), 1))
        self.new_runs = f"INSERT INTO relight.runs ({', '.join(columns)}) SELECT * FROM unnest({types})"

    def rounds(self, commits: list[int], way: str) -> list[list[Batch]]:
        """The same rows in as many commits per round as Relight took; every round has as many runs as the others."""
        keys = sorted(self._runs, key=lambda key: (self._runs[key]["created_at"], key))
        size, rest = divmod(len(keys), len(commits))
        assert rest == 0, f"{len(keys)} runs do not make {len(commits)} equal rounds"
        rounds = []
        for turn, count in enumerate(commits):
            entries = [entry for key in keys[turn * size : (turn + 1) * size] for entry in self._entries[key]]
            # As runs at once write them: everybody's first, then everybody's second. What advances a head comes after it.
            entries.sort(key=lambda entry: (entry["sequence"], entry["run"]))
            shares: list[list[Any]] = [[] for _ in range(count)]
            for place, entry in enumerate(entries):
                shares[place * count // len(entries)].append(entry)
            rounds.append([self._batch(share, way) for share in shares])
        return rounds

    def _batch(self, entries: Sequence[Any], way: str) -> Batch:
        begun = [self._runs[entry["run"]] for entry in entries if entry["sequence"] == 1]
        ended = [self._runs[entry["run"]] for entry in entries if entry["sequence"] == self._ends[entry["run"]]]
        batch: Batch = []
        if begun:
            new = [run | {"status": "running", "owner": OWNER, "output": None} for run in begun]
            batch.append((self.new_runs, tuple([run[name] for run in new] for name in self._columns)))
            batch.append((NEW_HEADS, _columns([(run["key"], run["epoch"]) for run in new])))
        if way == "raw-fenced":
            moved = {entry["run"]: entry["sequence"] for entry in entries if entry["sequence"] > 1}
            epochs = [self._runs[key]["epoch"] for key in moved]
            if moved:
                batch.append((ADVANCE, (list(moved), epochs, list(moved.values()))))
        batch.append((ENTRIES, _columns([tuple(entry) for entry in entries])))
        if ended:
            batch.append((END_HEADS, _columns([(run["key"], self._ends[run["key"]]) for run in ended])))
            rows = [(run["key"], run["status"], run["output"], run["updated_at"]) for run in ended]
            batch.append((END_RUNS, _columns(rows)))
        return batch


async def read(url: str) -> Recording:
    connection = await asyncpg.connect(url)
    kinds = await connection.fetch(
        "SELECT column_name, data_type FROM information_schema.columns "
        "WHERE table_schema = 'relight' AND table_name = 'runs' ORDER BY ordinal_position"
    )
    runs = await connection.fetch("SELECT * FROM relight.runs")
    entries = await connection.fetch("SELECT run, sequence, event, crc FROM relight.journal ORDER BY run, sequence")
    heads = await connection.fetch("SELECT run, last FROM relight.heads")
    await connection.close()
    return Recording(dict(map(tuple, kinds)), runs, entries, {head[0]: head[1] for head in heads})


def write(url: str, recording: str, commits: list[int], warm_up: int, way: str) -> dict[str, Any]:
    """Seconds per round, without the first `warm_up` rounds."""

    async def main() -> list[float]:
        await make_schema(url)
        rounds = (await read(recording)).rounds(commits, way)
        connections = [await connect(url) for _ in range(LANES if way == "raw-lanes" else 1)]
        times = []
        for batches in rounds:
            began = time.perf_counter()
            await asyncio.gather(
                *(_write(one, batches, place, len(connections)) for place, one in enumerate(connections))
            )
            times.append(time.perf_counter() - began)
        for connection in connections:
            await connection.close()
        return times

    return {"seconds": asyncio.run(main())[warm_up:]}


async def _write(connection: Any, batches: list[Batch], first: int, step: int) -> None:
    """Every so-manyth batch. What a run's end updates was written before: by this connection or a round trip earlier."""
    for batch in batches[first::step]:
        if len(batch) == 1:
            statement, arguments = batch[0]
            await connection.fetch(statement, *arguments)
            continue
        await connection.execute("BEGIN")
        for statement, arguments in batch:
            await connection.fetch(statement, *arguments)
        await connection.execute("COMMIT")


async def make_schema(url: str) -> None:
    """Relight's own tables and indexes."""
    store = PostgresStore(url, clock=SYSTEM_CLOCK)
    await store.open()
    await store.close()


async def connect(url: str) -> Any:
    """With what of Relight's session settings concerns plans: nested loops by index."""
    settings = {"jit": "off", "enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
    connection = await asyncpg.connect(url, server_settings=settings)
    assert await connection.fetchval("SHOW synchronous_commit") == "on"
    return connection


def _columns(rows: Sequence[tuple[Any, ...]]) -> Columns:
    return tuple(list(column) for column in zip(*rows, strict=True))
