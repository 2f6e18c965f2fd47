"""Listings and journals: the reads that need more than one line of code."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from relight.backends.postgres.pool import Pool
from relight.backends.rows import Row, checked_checkpoint, checked_entries, run_from
from relight.errors import CorruptionError
from relight.model.journal import Journal
from relight.model.run import Page, RunFilter, Status, cursor_from, parse_cursor
from relight.model.text import check_filter

# How many journals one query reads. More would save little. So many journals of a thousand entries still fit in memory.
ROOTS_PER_QUERY = 64

# SQLSTATEs for a page or an index that cannot be read, found by PostgreSQL's own checksums.
_DAMAGE = ("XX001", "XX002")


async def list_runs(pool: Pool, sql: dict[str, str], where: RunFilter) -> Page:
    """One page of runs. The query reads one more row than wanted, which shows whether there is a next page."""
    check_filter(where)
    since = float("-inf") if where.since is None else where.since
    page = (*parse_cursor(where.cursor), since, where.roots_only, where.limit + 1)
    statuses: list[str] = list(dict.fromkeys(where.status or Status))
    if Status.PAUSED in statuses:  # runs with a newer version's status are shown as paused
        statuses += [status for (status,) in await pool.fetch(sql["newer_statuses"])]
    if where.parent_id is not None:
        rows = await pool.fetch(sql["list_runs_by_parent"], *page, statuses, where.flow, where.parent_id)
    elif where.flow is not None:
        rows = await pool.fetch(sql["list_runs_by_flow"], *page, statuses, where.flow)
    elif where.status:
        rows = await pool.fetch(sql["list_runs_by_status"], *page, statuses)
    else:
        rows = await pool.fetch(sql["list_runs"], *page)
    found = [run_from(row) for row in rows[: where.limit]]
    more = len(rows) > where.limit > 0
    return Page(runs=found, next_cursor=cursor_from(found[-1]) if more else None)


async def journals(pool: Pool, sql: dict[str, str], root_ids: Sequence[str]) -> list[Journal | Exception]:
    """Checkpoint and tail of each root."""
    found: list[Journal | Exception] = []
    for start in range(0, len(root_ids), ROOTS_PER_QUERY):
        some = root_ids[start : start + ROOTS_PER_QUERY]
        try:
            rows = await pool.fetch(sql["journals"], some)
        except asyncpg.PostgresError as error:
            if error.sqlstate not in _DAMAGE:
                raise
            found += [await _alone(pool, sql, root_id) for root_id in some]
            continue
        by_id = {row[0]: row for row in rows}
        found += [_journal(root_id, by_id.get(root_id)) for root_id in some]
    return found


def _journal(root_id: str, row: Row | None) -> Journal | CorruptionError:
    if row is None:
        return Journal(root_id, None, [])
    _, sequence, state, crc, sequences, events, crcs = row
    try:
        checkpoint = checked_checkpoint(root_id, (sequence, state, crc))
        tail = zip(sequences, events, crcs, strict=True) if sequences else ()
        return Journal(root_id, checkpoint, checked_entries(root_id, tail))
    except CorruptionError as error:
        return error


async def _alone(pool: Pool, sql: dict[str, str], root_id: str) -> Journal | Exception:
    """One journal, or the error. The error has no sequence: the server does not say which entry it could not read."""
    try:
        rows = await pool.fetch(sql["journals"], [root_id])
    except asyncpg.PostgresError as error:
        if error.sqlstate not in _DAMAGE:
            raise
        return CorruptionError(f"the journal of run {root_id!r} cannot be read: {error}", root_id=root_id, sequence=0)
    return _journal(root_id, rows[0] if rows else None)
