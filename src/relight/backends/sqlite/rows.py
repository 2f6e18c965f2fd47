"""Between rows and the model: the columns stand in the order of the `runs` table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import msgspec

from relight.errors import CorruptionError
from relight.model.journal import Checkpoint, Entry
from relight.model.run import ItemResult, LogLine, Message, Run, RunChange, message_of, run_of
from relight.model.text import check_message, prose

Row = Sequence[Any]


def json_array(values: Iterable[Any]) -> str:
    """Any number of values as one binding, for json_each."""
    return msgspec.json.encode(list(values)).decode()


def run_from(row: Row) -> Run:
    """A row of `runs`."""
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


def run_row(key: int, run: Run) -> tuple[Any, ...]:
    """A row of `runs`."""
    return (
        key,
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


def message_row(message: Message) -> tuple[Any, ...]:
    """A row of the `put_messages` query."""
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


def item_row(item: ItemResult) -> tuple[Any, ...]:
    """A row of `items`."""
    return (item.run_id, item.key, item.index, item.digest, item.output, item.output_blob)


def item_from(row: Row) -> ItemResult:
    """A row of `items`."""
    return ItemResult(run_id=row[0], key=row[1], index=row[2], digest=row[3], output=row[4], output_blob=row[5])


def log_row(line: LogLine) -> tuple[Any, ...]:
    """A row of the `put_log` query."""
    return (line.run_id, line.stream, line.at, line.token, prose(line.text))


def log_from(row: Row) -> LogLine:
    """A row of the `read_log` query."""
    return LogLine(id=row[0], run_id=row[1], stream=row[2], at=row[3], token=row[4], text=row[5])


def checksum(sequence: int, data: bytes) -> int:
    """Started with the sequence, so that two rows that changed places are told as well."""
    return crc32(data, sequence & 0xFFFFFFFF)


def checked_entries(root_id: str, rows: Iterable[Row]) -> list[Entry]:
    """Rows of sequence, event and checksum."""
    entries = []
    for sequence, event, crc in rows:
        if crc32(event, sequence & 0xFFFFFFFF) != crc:
            raise CorruptionError(
                f"entry {sequence} of run {root_id!r} does not match its checksum: the file was damaged",
                root_id=root_id,
                sequence=sequence,
            )
        entries.append(Entry(sequence, event))
    return entries


def checked_checkpoint(root_id: str, row: Row | None) -> Checkpoint | None:
    """A row of sequence, state and checksum."""
    if row is None:
        return None
    sequence, state, crc = row
    if checksum(sequence, state) != crc:
        raise CorruptionError(
            f"checkpoint {sequence} of run {root_id!r} does not match its checksum: the file was damaged",
            root_id=root_id,
            sequence=sequence,
        )
    return Checkpoint(sequence, state)
