"""A run's operations as people and programs are shown them: when each began and ended, its attempt, its errors.

All of it comes from the replayed state, so that a run which is parked, finished or driven by another process is shown
like one that is driven here. A step that is under way is shown once it is announced: see `run/long_steps.py`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from relight.errors import StoreError
from relight.model.journal import GROUP, ErrorRecord
from relight.model.replay import Ending, Open, Outcome, TreeState
from relight.model.run import Run
from relight.model.text import prose

T = TypeVar("T", Open, Outcome)
REASON_CHARS = 300
_ENDINGS = {
    Ending.OK: "done",
    Ending.ERROR: "failed",
    Ending.CANCELLED: "cancelled",
    Ending.TIMED_OUT: "timed out",
    Ending.GIVEN_UP: "given up",
    Ending.UNSEEN: "not heard of",
}


class OperationReport(msgspec.Struct, kw_only=True):
    """One operation of a run. Times are seconds since the epoch; None if the journal does not have them, as in entries
    of older versions."""

    key: str
    kind: str  # step | run | wait | timer | value | spawn | item
    state: str
    """How it ended: done, failed, cancelled, timed out, given up, not heard of (it ended after the flow had given up on
    it). Or, if it has not ended: running, waiting, backing off (until the next attempt), begun (no process drives the
    run now), left behind (the run has ended without it)."""
    attempt: int  # the last one; while it backs off, the next one
    started_at: float | None  # the first attempt
    attempt_started_at: float | None  # the attempt under way
    ended_at: float | None
    seconds: float | None  # from the start to the end, or until now
    until: float | None  # when a wait, or a back-off, is over
    deadline: float | None  # of the attempt under way
    error: str | None  # the error with which it ended
    last_error: str | None  # of the last attempt that failed and was followed by another
    traceback: str | None  # of `error`; without one, of `last_error`
    output: bytes | None  # JSON; empty when output_blob names a blob
    output_blob: str
    place: str  # in a listing: see `page`


class StepPage(msgspec.Struct, kw_only=True, frozen=True):
    """One page of a run's steps; `next_cursor` is None on the last one."""

    steps: list[OperationReport]
    next_cursor: str | None = None


def operations(state: TreeState, row: Run, now: float) -> list[OperationReport]:
    """All recorded operations of this run and its child runs: those that have ended, in that order, then the others."""
    everything = len(state.outcomes) + len(state.open) + 1
    return page(state, row, now, limit=everything, every_kind=True).steps


def page(
    state: TreeState,
    row: Run,
    now: float,
    *,
    limit: int,
    cursor: str | None = None,
    failed: bool = False,
    newest: bool = False,
    every_kind: bool = False,
) -> StepPage:
    """The steps (or operations of every kind) of this run that come after the cursor, in the order of `operations`, or
    with the `newest` first. Only one page of them is turned into reports. A step that ends between two pages is on a
    later page, since it is the last that ended. `failed`: only steps that have failed, or are tried again after
    that."""
    prefix = row.key_prefix
    found: list[tuple[tuple[bool, int], str, Outcome | Open]] = [
        ((False, one.sequence), key, one)
        for key, one in _inside(state.outcomes, prefix)
        if (every_kind or one.kind == "step") and (not failed or one.ending is Ending.ERROR)
    ]
    found += [
        ((True, one.sequence), key, one)
        for key, one in _inside(state.open, prefix)
        if (every_kind or one.kind == "step") and (not failed or one.last_error is not None)
    ]
    if cursor is not None:
        after = _place(cursor)
        found = [one for one in found if (one[0] < after if newest else one[0] > after)]
    found.sort(key=lambda one: one[0], reverse=newest)
    shown = _reports(found[:limit], state, row, now)
    return StepPage(steps=shown, next_cursor=shown[-1].place if len(found) > limit else None)


def unfinished_steps(state: TreeState, row: Run, now: float) -> list[OperationReport]:
    """The steps that have begun and not ended, as far as the journal knows. Steps that have ended are not looked at."""
    found: list[tuple[tuple[bool, int], str, Outcome | Open]] = [
        ((True, one.sequence), key, one) for key, one in _inside(state.open, row.key_prefix) if one.kind == "step"
    ]
    return _reports(sorted(found, key=lambda one: one[0]), state, row, now)


def count_steps(state: TreeState, row: Run, now: float) -> dict[str, int]:
    """How many steps of this run, its child runs included, are in which state."""
    prefix = row.key_prefix
    ended = (_ENDINGS[one.ending] for _, one in _inside(state.outcomes, prefix) if one.kind == "step")
    left, driven = _left_or_driven(state, row)
    begun = (one for _, one in _inside(state.open, prefix) if one.kind == "step")
    return dict(Counter((*ended, *(_state(one, now, driven=driven, left=left) for one in begun))))


def error_text(error: ErrorRecord | None) -> str | None:
    """An error on one line. Of an exception group also its first member: the group's own message says only how many
    there are."""
    if error is None:
        return None
    text = f"{error.type.rpartition(':')[2]}: {error.message}"
    first = _first_member(error)
    return text if first is None else f"{text}, the first is {error_text(first)}"


def _first_member(error: ErrorRecord) -> ErrorRecord | None:
    match (error.attributes or {}).get(GROUP):
        case {"members": [first, *_]}:
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(first, ErrorRecord)
    return None


def failure_reason(error: ErrorRecord) -> str:
    """Why a run has failed, for its row: the beginning of its error. The row's `error` field has the whole of it."""
    text = " ".join(prose(error_text(error) or "").split())
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"


def _left_or_driven(state: TreeState, row: Run) -> tuple[bool, bool]:
    """Whether the run has ended without its open operations, and whether a process drives it. The row of a child run
    does not say so: it counts as driven."""
    return "" in state.outcomes, row.owner is not None or not row.is_root


def _reports(
    found: list[tuple[tuple[bool, int], str, Outcome | Open]], state: TreeState, row: Run, now: float
) -> list[OperationReport]:
    left, driven = _left_or_driven(state, row)
    return [
        _ended(key, one) if isinstance(one, Outcome) else _begun(key, one, now, driven=driven, left=left)
        for _, key, one in found
    ]


def _traceback(error: ErrorRecord | None, last_error: ErrorRecord | None) -> str | None:
    shown = error or last_error
    return shown.traceback or None if shown is not None else None


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
        traceback=_traceback(outcome.error, outcome.last_error),
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
        traceback=_traceback(None, begun.last_error),
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
