"""All reads of the store. Each function is a job of the reader thread."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import apsw
import msgspec

from relight.backends.rows import Row, checked_checkpoint, checked_entries, item_from, message_from, run_from
from relight.backends.sqlite.connection import snapshot
from relight.backends.sqlite.queries import SQL
from relight.backends.sqlite.rows import json_array, log_from
from relight.errors import CorruptionError
from relight.model.journal import Entry, Journal
from relight.model.run import (
    ForeachProgress,
    ItemResult,
    LogLine,
    Message,
    Page,
    Run,
    RunFilter,
    Status,
    cursor_from,
    parse_cursor,
    progress_of,
)

# How many journals one query reads. More would save little. So many journals of a thousand entries still fit in memory.
ROOTS_PER_QUERY = 64

_places = msgspec.json.Decoder(list[tuple[int, int, int, int]])


def rows(db: apsw.Connection, name: str, bindings: Any = None) -> list[Any]:
    """All rows of a named query."""
    return db.execute(SQL[name], bindings).fetchall()


def value(db: apsw.Connection, name: str, bindings: Any = None) -> Any:
    """The first column of the first row of a named query; None when there is no row."""
    found = rows(db, name, bindings)
    return found[0][0] if found else None


def runs(db: apsw.Connection, name: str, bindings: Any) -> list[Run]:
    """The runs that a named query finds."""
    return [run_from(row) for row in rows(db, name, bindings)]


def messages(db: apsw.Connection, name: str, bindings: Any) -> list[Message]:
    """The messages that a named query finds."""
    return [message_from(row) for row in rows(db, name, bindings)]


def item_results(db: apsw.Connection, run_id: str, key: str | None) -> list[ItemResult]:
    """The finished items of one foreach, or of all foreachs of a run."""
    found = rows(db, "all_items", (run_id,)) if key is None else rows(db, "items", (run_id, key))
    return [item_from(row) for row in found]


def foreach_progress(db: apsw.Connection, run_id: str, prefix: str) -> list[ForeachProgress]:
    """The progress of all foreachs of a run that are not inside another foreach."""
    return [progress_of(*row) for row in rows(db, "foreach_progress", (run_id, prefix))]


def log(
    db: apsw.Connection, run_id: str, stream: str, after: int, limit: int, *, newest: bool = False
) -> list[LogLine]:
    """A page of one run's log."""
    found = rows(db, "read_newest_log" if newest else "read_log", (run_id, stream, after, limit))
    return [log_from(row) for row in (reversed(found) if newest else found)]


def list_runs(db: apsw.Connection, where: RunFilter) -> Page:
    """One query per wanted status, merged: the index has the runs of each status in order, not of several together."""
    cursor_at, cursor_id = parse_cursor(where.cursor)
    bindings = {
        "cursor_at": cursor_at,
        "cursor_id": cursor_id,
        "since": float("-inf") if where.since is None else where.since,
        "roots_only": where.roots_only,
        "flow": where.flow,
        "parent_id": where.parent_id,
        "limit": where.limit + 1,  # the extra run shows whether there is a next page
        "status": None,
    }
    statuses: set[str | None] = set(where.status) or {None}
    if where.parent_id is not None:
        name = "list_runs_by_parent"
    elif where.flow is not None:
        name = "list_runs_by_flow"
        statuses = set(where.status or Status)
    else:
        name = "list_runs_by_status" if where.status else "list_runs"
    with snapshot(db):  # a run that changes its status between two of the queries would be listed twice or not at all
        if Status.PAUSED in statuses:  # runs with a newer version's status are shown as paused
            statuses.update(status for (status,) in rows(db, "newer_statuses"))
        pages = [runs(db, name, bindings | {"status": status}) for status in statuses]
    merged = heapq.merge(*pages, key=lambda run: (run.created_at, run.id), reverse=True)
    found = list(merged)[: where.limit + 1]
    more = len(found) > where.limit > 0
    return Page(runs=found[: where.limit], next_cursor=cursor_from(found[where.limit - 1]) if more else None)


# ---- journals


class Root(NamedTuple):
    """What is needed to read a root's journal. `checkpoint` and `last` are sequences, 0 if there is none."""

    key: int
    epoch: int
    checkpoint: int
    last: int


def root(db: apsw.Connection, root_id: str) -> Root | None:
    """The root of this id; None if there is no such root."""
    found = rows(db, "root", (root_id,))
    return Root(*found[0]) if found else None


def entries(db: apsw.Connection, root_id: str, sequence: int, limit: int) -> Journal:
    """Entries only, without the checkpoint."""
    found = root(db, root_id)
    if found is None:
        return Journal(root_id, None, [])
    return Journal(root_id, None, _entries(db, root_id, found.key, sequence, limit))


def journals(db: apsw.Connection, root_ids: Sequence[str]) -> list[Journal | Exception]:
    """Checkpoint and tail of each root, in one snapshot: otherwise a checkpoint stored meanwhile would delete entries
    of a tail that is not read yet."""
    found: list[Journal | Exception] = []
    with snapshot(db):
        for start in range(0, len(root_ids), ROOTS_PER_QUERY):
            some = root_ids[start : start + ROOTS_PER_QUERY]
            try:
                found += _together(db, some)
            except (CorruptionError, apsw.CorruptError, apsw.TooBigError):
                found += [_alone(db, root_id) for root_id in some]
    return found


def _together(db: apsw.Connection, root_ids: Sequence[str]) -> list[Journal]:
    """Many journals by two queries. One bad row makes all of them fail."""
    wanted = (json_array(root_ids),)
    checkpoints: dict[int, Row] = {row[0]: row[1:] for row in rows(db, "checkpoints", wanted)}
    tails: list[list[Row]] = [[] for _ in root_ids]
    places, data = rows(db, "tails", wanted)[0]
    start = 0
    for position, sequence, length, crc in _places.decode(places):
        tails[position].append((sequence, data[start : start + length], crc))
        start += length
    return [
        Journal(root_id, checked_checkpoint(root_id, checkpoints.get(n)), checked_entries(root_id, tails[n]))
        for n, root_id in enumerate(root_ids)
    ]


def _alone(db: apsw.Connection, root_id: str) -> Journal | CorruptionError:
    """One journal, or the error that says what is wrong with it."""
    sequence = 0
    try:
        found = root(db, root_id)
        if found is None:
            return Journal(root_id, None, [])
        sequence = found.checkpoint
        stored = rows(db, "read_checkpoint", (found.key,))
        checkpoint = checked_checkpoint(root_id, stored[0] if stored else None)
        return Journal(root_id, checkpoint, _entries(db, root_id, found.key, found.checkpoint, -1))
    except CorruptionError as error:
        return error
    except apsw.CorruptError as error:
        return _damaged(root_id, sequence, error)


def _entries(db: apsw.Connection, root_id: str, key: int, after: int, limit: int) -> list[Entry]:
    """Reads entries one by one, so that an error names the sequence at which the damage begins."""
    found: list[Entry] = []
    try:
        for row in db.execute(SQL["read_entries"], (key, after, limit)):
            found += checked_entries(root_id, [row])
    except apsw.CorruptError as error:
        raise _damaged(root_id, after + len(found) + 1, error) from error
    return found


def _damaged(root_id: str, sequence: int, error: apsw.CorruptError) -> CorruptionError:
    return CorruptionError(
        f"the journal of run {root_id!r} cannot be read at {sequence}: {error}", root_id=root_id, sequence=sequence
    )
