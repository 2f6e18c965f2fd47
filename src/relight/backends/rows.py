"""Conversion between rows and the model, for SQLite and PostgreSQL: their tables have the same columns in one order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

from relight.errors import CorruptionError
from relight.model.journal import Checkpoint, Entry
from relight.model.run import ItemResult, Message, Run, message_of, run_of
from relight.model.text import check_message, prose

Row = Sequence[Any]


def run_from(row: Row) -> Run:
    """A row of `runs`: its key, then `run_columns`."""
    return run_of(
        row[6],
        row[10],
        row[11],
        id=row[1],
        root_id=row[1] if row[2] is None else row[2],
        parent_id=row[3],
        flow=row[4],
        flow_hash=row[5],
        owner=row[7],
        epoch=row[8],
        wake_at=row[9],
        created_at=row[12],
        updated_at=row[13],
        input=row[14],
        input_blob=row[15],
        output=row[16],
        output_blob=row[17],
        error=row[18],
    )


def run_columns(run: Run) -> tuple[Any, ...]:
    """The columns of a row of `runs` after its key."""
    return (
        run.id,
        None if run.root_id == run.id else run.root_id,
        run.parent_id,
        run.flow,
        run.flow_hash,
        run.status,
        run.owner,
        run.epoch,
        run.wake_at,
        run.hold,
        prose(run.reason),
        run.created_at,
        run.updated_at,
        run.input,
        run.input_blob,
        run.output,
        run.output_blob,
        run.error,
    )


def message_columns(message: Message) -> tuple[Any, ...]:
    """The columns of a message that is to be put into an inbox."""
    check_message(message)
    return (
        message.run_id,
        message.kind,
        message.name,
        message.payload,
        message.payload_blob,
        message.dedup,
        message.at,
    )


def message_from(row: Row) -> Message:
    """A row of the `inbox` query."""
    return message_of(
        row[2],
        row[3],
        id=row[0],
        run_id=row[1],
        payload=row[4],
        payload_blob=row[5],
        dedup=row[6],
        at=row[7],
    )


def item_columns(item: ItemResult) -> tuple[Any, ...]:
    """The columns of a row of `items`."""
    return (item.run_id, item.key, item.index, item.digest, item.output, item.output_blob)


def item_from(row: Row) -> ItemResult:
    """A row of `items`."""
    return ItemResult(run_id=row[0], key=row[1], index=row[2], digest=row[3], output=row[4], output_blob=row[5])


# ---- checksums


def checksum(sequence: int, data: bytes) -> int:
    """A checksum that includes the sequence, so that two exchanged rows are detected as well."""
    return crc32(data, sequence & 0xFFFFFFFF)


def checked_entries(root_id: str, rows: Iterable[Row]) -> list[Entry]:
    """Entries from rows of sequence, event and checksum."""
    entries = []
    for sequence, event, crc in rows:
        if crc32(event, sequence & 0xFFFFFFFF) != crc:
            raise damaged("entry", root_id, sequence)
        entries.append(Entry(sequence, event))
    return entries


def checked_checkpoint(root_id: str, row: Row | None) -> Checkpoint | None:
    """A checkpoint from a row of sequence, state and checksum; None if there is no row, or no sequence in it."""
    if row is None or row[0] is None:
        return None
    sequence, state, crc = row
    if checksum(sequence, state) != crc:
        raise damaged("checkpoint", root_id, sequence)
    return Checkpoint(sequence, state)


def damaged(what: str, root_id: str, sequence: int) -> CorruptionError:
    """The error for a stored row that does not read back as it was written."""
    return CorruptionError(
        f"{what} {sequence} of run {root_id!r} does not match its checksum: the store was damaged",
        root_id=root_id,
        sequence=sequence,
    )
