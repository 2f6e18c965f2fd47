"""Conversion between rows and the model that only SQLite needs. The rest is in `backends/rows.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from relight.backends.rows import Row
from relight.model.run import LogLine, RunChange
from relight.model.text import prose


def json_array(values: Iterable[Any]) -> str:
    """Any number of values as one parameter of a statement, for json_each."""
    return msgspec.json.encode(list(values)).decode()


def change_row(change: RunChange, root_id: str, now: float, reopen: bool) -> tuple[Any, ...]:
    """A row of the `change_runs` query."""
    return (
        change.run_id,
        root_id,
        change.status,
        change.owner,
        change.wake_at,
        change.hold,
        prose(change.reason),
        change.output,
        change.output_blob,
        change.error,
        now,
        reopen,
        change.heard,
    )


def log_row(line: LogLine) -> tuple[Any, ...]:
    """A row of the `put_log` query."""
    return (line.run_id, line.stream, line.at, line.token, prose(line.text))


def log_from(row: Row) -> LogLine:
    """A row of the `read_log` query."""
    return LogLine(id=row[0], run_id=row[1], stream=row[2], at=row[3], token=row[4], text=row[5])
