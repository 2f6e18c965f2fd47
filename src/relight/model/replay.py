"""Replay: from journal entries to the state of a run's tree, by one pure fold (`tree.py`).

Restoring a checkpoint and the entries after it gives the same state as replaying all entries: a checkpoint is this
state, encoded.
"""

from __future__ import annotations

from typing import Any

import msgspec

from relight.errors import CorruptionError, UpgradeRequiredError
from relight.model import journal as j
from relight.model.formats import FORMAT, not_understood, state_not_understood
from relight.model.outcomes import (
    INTERRUPTED,
    Cancellation,
    Ending,
    Open,
    Outcome,
    Unclaimed,
    item_index,
    item_path,
    item_scope,
)
from relight.model.tree import TreeState, retried_at

__all__ = [
    "INTERRUPTED",
    "Cancellation",
    "Ending",
    "Open",
    "Outcome",
    "TreeState",
    "Unclaimed",
    "encode_state",
    "item_index",
    "item_path",
    "item_scope",
    "restore",
    "retried_at",
]

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TreeState)


def encode_state(state: TreeState) -> bytes:
    """A checkpoint's content."""
    return _encoder.encode(state)


def restore(journal: j.Journal) -> TreeState:
    """Apply the checkpoint, then the entries after it. Raises CorruptionError, with the sequence, for a row that does
    not read back or a gap; and UpgradeRequiredError for something that only a newer version understands."""
    root_id, checkpoint = journal.root_id, journal.checkpoint
    state = TreeState()
    if checkpoint is not None:
        try:
            state = _decoder.decode(checkpoint.state)
            _refuse_newer(checkpoint, root_id, state.format)
        except msgspec.MsgspecError as error:
            _refuse_newer(checkpoint, root_id, _format_of(checkpoint.state))
            raise CorruptionError(
                f"checkpoint {checkpoint.sequence} of run {root_id!r} does not read back: {error}",
                root_id=root_id,
                sequence=checkpoint.sequence,
            ) from error
        state.sequence = checkpoint.sequence
    for entry in journal.entries:
        if entry.sequence != state.sequence + 1:
            raise CorruptionError(
                f"journal of run {root_id!r} has a gap: {state.sequence + 1} is missing before {entry.sequence}",
                root_id=root_id,
                sequence=state.sequence + 1,
            )
        try:
            event = j.decode_event(entry.event)
        except msgspec.MsgspecError as error:
            tag = _tag_of(entry.event)
            if tag is not None and tag not in j.TAGS:
                what = not_understood(f"entry {entry.sequence} of run {root_id!r}, an event", tag)
                raise UpgradeRequiredError(what) from error
            raise CorruptionError(
                f"entry {entry.sequence} of run {root_id!r} does not read back: {error}",
                root_id=root_id,
                sequence=entry.sequence,
            ) from error
        state.apply(entry.sequence, event)
    if state.created is None:
        raise CorruptionError(f"journal of run {root_id!r} has no beginning", root_id=root_id, sequence=1)
    return state


class _Numbered(msgspec.Struct):
    """The part of a checkpoint that every version can read."""

    format: int = 1


def _format_of(state: bytes) -> int:
    try:
        return msgspec.json.decode(state, type=_Numbered).format
    except msgspec.MsgspecError:
        return 0


def _refuse_newer(checkpoint: j.Checkpoint, root_id: str, number: int) -> None:
    if number > FORMAT:
        what = state_not_understood(f"checkpoint {checkpoint.sequence} of run {root_id!r}", number)
        raise UpgradeRequiredError(what)


def _tag_of(event: bytes) -> str | None:
    """The kind of an encoded event; None for bytes that are no event of any version."""
    try:
        parts = msgspec.json.decode(event, type=list[Any])
    except msgspec.MsgspecError:
        return None
    return parts[0] if parts and isinstance(parts[0], str) else None
