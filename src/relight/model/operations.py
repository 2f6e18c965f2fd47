"""A run's operations as people and programs are shown them: when each began and ended, its attempt, its errors.

All of it comes from the replayed state, so that a run which is parked, finished or another process's is shown like one that is
driven here. A step that is under way is there once it is announced: see `run/long_steps.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from relight.errors import StoreError
from relight.model.journal import ErrorRecord
from relight.model.replay import Ending, Open, Outcome, TreeState
from relight.model.run import Run

T = TypeVar("T", Open, Outcome)
_ENDINGS = {
    Ending.OK: "done",
    Ending.ERROR: "failed",
    Ending.CANCELLED: "cancelled",
    Ending.TIMED_OUT: "timed out",
    Ending.GIVEN_UP: "given up",
    Ending.UNSEEN: "not heard of",
}


class OperationReport(msgspec.Struct, kw_only=True):
    """One operation of a run. Times are seconds since the epoch; None where the journal does not know them, as in entries that
    were written before they had times."""

    key: str
    kind: str  # step | run | wait | timer | value | spawn | item
    state: str
    """How it ended: done, failed, cancelled, timed out, given up, not heard of (the flow had given up on it). Or, before that:
    running, waiting, backing off (until the next attempt), begun (nobody drives the run now), left behind (the run has
    ended without it)."""
    attempt: int  # the last one; while it backs off, the next one
    started_at: float | None  # the first attempt
    attempt_started_at: float | None  # the attempt under way
    ended_at: float | None
    seconds: float | None  # from the start to the end, or until now
    until: float | None  # when a wait, or a back-off, is over
    deadline: float | None  # of the attempt under way
    error: str | None  # with which it ended
    last_error: str | None  # of the last attempt that failed and was followed by another
    output: bytes | None  # JSON; empty when output_blob names a blob
    output_blob: str
    place: str  # in a listing: see `page`


class StepPage(msgspec.Struct, kw_only=True, frozen=True):
    """One page of a run's steps; `next_cursor` is None on the last one."""

    steps: list[OperationReport]
    next_cursor: str | None = None


def operations(state: TreeState, row: Run, now: float) -> list[OperationReport]:
    """Everything recorded in this run (its child runs included): what has ended, in the order of that, then what has not."""
    prefix = "" if row.is_root else row.id.removeprefix(row.root_id + "/") + "/"
    ended = sorted(_inside(state.outcomes, prefix), key=lambda pair: pair[1].sequence)
    begun = sorted(_inside(state.open, prefix), key=lambda pair: pair[1].sequence)
    reports = [_ended(key, outcome) for key, outcome in ended]
    left = "" in state.outcomes
    driven = row.owner is not None or not row.is_root  # a child run's row does not tell
    return reports + [_begun(key, one, now, driven=driven, left=left) for key, one in begun]


def page(found: list[OperationReport], limit: int, cursor: str | None) -> StepPage:
    """The steps of these that come after the cursor. What ends between two pages comes on a later one, since it ends last."""
    steps = [one for one in found if one.kind == "step"]
    if cursor is not None:
        after = _place(cursor)
        steps = [one for one in steps if _place(one.place) > after]
    more = len(steps) > limit
    return StepPage(steps=steps[:limit], next_cursor=steps[limit - 1].place if more else None)


def error_text(error: ErrorRecord | None) -> str | None:
    """An error on one line."""
    return None if error is None else f"{error.type.rpartition(':')[2]}: {error.message}"


def _inside(table: dict[str, T], prefix: str) -> Iterator[tuple[str, T]]:
    return ((key, one) for key, one in table.items() if key and key.startswith(prefix))


def _place(cursor: str) -> tuple[bool, int]:
    kind, _, sequence = cursor.partition(":")
    try:
        return {"ended": False, "open": True}[kind], int(sequence)
    except (KeyError, ValueError):
        raise StoreError(f"cursor {cursor!r} is not one that a listing gave: pass next_cursor as it came") from None


def _ended(key: str, outcome: Outcome) -> OperationReport:
    ok = outcome.ending is Ending.OK
    return OperationReport(
        key=key,
        kind=outcome.kind,
        state=_ENDINGS[outcome.ending],
        attempt=outcome.attempt,
        started_at=outcome.began or None,
        attempt_started_at=None,
        ended_at=outcome.at or None,
        seconds=max(outcome.at - outcome.began, 0.0) if outcome.at and outcome.began else None,
        until=None,
        deadline=None,
        error=error_text(outcome.error),
        last_error=error_text(outcome.last_error),
        output=bytes(outcome.output) if ok else None,
        output_blob=outcome.blob if ok else "",
        place=f"ended:{outcome.sequence}",
    )


def _begun(key: str, begun: Open, now: float, *, driven: bool, left: bool) -> OperationReport:
    started = begun.began or begun.at or None
    return OperationReport(
        key=key,
        kind=begun.kind,
        state=_state(begun, now, driven=driven, left=left),
        attempt=begun.attempt,
        started_at=started,
        attempt_started_at=begun.at or None,
        ended_at=None,
        seconds=None if started is None or left else max(now - started, 0.0),
        until=begun.until,
        deadline=begun.deadline,
        error=None,
        last_error=error_text(begun.last_error),
        output=None,
        output_blob="",
        place=f"open:{begun.sequence}",
    )


def _state(begun: Open, now: float, *, driven: bool, left: bool) -> str:
    if left:
        return "left behind"
    if begun.kind == "wait":
        return "waiting"
    if begun.until is not None and begun.until > now:
        return "backing off"
    return "running" if driven else "begun"
