"""A run's row for programs: times as datetimes, arguments and result as decoded values."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from relight.errors import CorruptionError, PayloadError
from relight.flow.definitions import Flow
from relight.model.blob import check_blob
from relight.model.journal import ErrorRecord
from relight.model.operations import error_text
from relight.model.run import Hold, Run, Status
from relight.ports.store import Store


class Unreadable(msgspec.Struct, frozen=True):
    """Replaces a stored value that cannot be read because its blob is missing or damaged."""

    why: str


class RunDescription(msgspec.Struct, kw_only=True, frozen=True):
    """One run, as `Handle.describe()` gives it. Times are in UTC."""

    id: str
    flow: str
    status: Status
    hold: Hold | None  # of a paused run: what holds it
    reason: str  # why it is paused, cancelled or failed
    root_id: str
    parent_id: str | None
    owner: str | None  # the session that has the run in memory; None once the run is parked
    epoch: int
    created_at: dt.datetime
    updated_at: dt.datetime
    wake_at: dt.datetime | None  # when a waiting run is due by itself
    input: Any  # arguments by name, in the types of the flow's annotations if the flow is known here, else plain JSON
    output: Any  # the result, typed in the same way; None before there is one
    error: str | None  # of a failed run: the type and the message
    traceback: str | None


async def describe(store: Store, row: Run, flow: Flow[..., Any] | None) -> RunDescription:
    """`flow` is the run's flow, if it is known here."""
    error = None if row.error is None else msgspec.json.decode(row.error, type=ErrorRecord)
    input_bytes = await _stored(store, row, row.input, row.input_blob)
    output_bytes = await _stored(store, row, row.output, row.output_blob)
    return RunDescription(
        id=row.id,
        flow=row.flow,
        status=row.status,
        hold=row.hold,
        reason=row.reason,
        root_id=row.root_id,
        parent_id=row.parent_id,
        owner=row.owner,
        epoch=row.epoch,
        created_at=_datetime(row.created_at),
        updated_at=_datetime(row.updated_at),
        wake_at=None if row.wake_at is None else _datetime(row.wake_at),
        input=input_bytes if isinstance(input_bytes, Unreadable) else _arguments(input_bytes, flow),
        output=output_bytes if isinstance(output_bytes, Unreadable) else _result(output_bytes, flow),
        error=error_text(error),
        traceback=None if error is None else error.traceback or None,
    )


async def _stored(store: Store, row: Run, data: bytes | None, blob: str) -> bytes | Unreadable:
    if not blob:
        return data or b"null"
    try:
        return check_blob(await store.get_blob(blob), blob, row.root_id)
    except CorruptionError as error:
        return Unreadable(str(error))


def _arguments(data: bytes, flow: Flow[..., Any] | None) -> Any:
    """The arguments as the flow's present signature has them. If they do not fit it, as JSON has them."""
    if flow is not None:
        try:
            args, kwargs = flow.arguments.open(data)
            return flow.arguments.bind(args, kwargs)
        except PayloadError:
            pass
    return msgspec.json.decode(data)


def _result(data: bytes, flow: Flow[..., Any] | None) -> Any:
    if flow is not None and data != b"null":
        try:
            return flow.result.open(data)
        except PayloadError:
            pass
    return msgspec.json.decode(data)


def _datetime(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)
