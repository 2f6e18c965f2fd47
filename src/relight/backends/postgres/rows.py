"""Conversion between rows and the model that only PostgreSQL needs, with the columns in the order of the types in the
migrations. The rest is in `backends/rows.py`."""

from __future__ import annotations

from typing import Any

from relight.backends.rows import Row, item_columns, message_columns, run_columns
from relight.model.run import TERMINAL, Hold, ItemResult, LogLine, Message, Run, RunChange, Status
from relight.model.text import check_run, prose


def ended(status: Status, hold: Hold | None) -> int:
    """heads.ended of a root with this status: 1 is an end that `Commit.reopen` may undo."""
    if status not in TERMINAL:
        return 0
    return 1 if status is Status.CANCELLED and hold is Hold.RECOVERY else 2


def run_row(root: int, key: int, run: Run, last: int) -> tuple[Any, ...]:
    """A `new_run`; `last` is the last sequence of its first journal entries."""
    check_run(run)
    return (root, last, ended(run.status, run.hold), key, *run_columns(run))


def change_row(root: int, root_id: str, change: RunChange) -> tuple[Any, ...]:
    """A `new_change`."""
    return (
        root,
        root_id,
        change.run_id,
        change.status,
        change.owner,
        change.wake_at,
        change.hold,
        prose(change.reason),
        change.output,
        change.output_blob,
        change.error,
        change.heard,
    )


def message_row(root: int, message: Message) -> tuple[Any, ...]:
    """A `new_message`."""
    return (root, *message_columns(message))


def item_row(root: int, item: ItemResult) -> tuple[Any, ...]:
    """A `new_item`."""
    return (root, *item_columns(item))


def line_row(root: int, line: LogLine) -> tuple[Any, ...]:
    """A `new_line`."""
    return (root, line.run_id, line.stream, line.token, line.at, prose(line.text))


def line_from(run_id: str, row: Row) -> LogLine:
    """A row of the `read_log` query."""
    return LogLine(run_id=run_id, id=row[0], stream=row[1], token=row[2], at=row[3], text=row[4])
