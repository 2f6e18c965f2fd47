"""Between rows and the model: the columns stand in the order of the tables and types of the migrations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

from relight.errors import CorruptionError
from relight.model.journal import Checkpoint, Entry
from relight.model.run import TERMINAL, Hold, ItemResult, LogLine, Message, Run, RunChange, Status, message_of, run_of
from relight.model.text import check_message, check_run, prose

Row = Sequence[Any]


def ended(status: Status, hold: Hold | None) -> int:
    """heads.ended of a root with this status: 1 is an end that `Commit.reopen` may undo."""
    if status not in TERMINAL:
        return 0
    return 1 if status is Status.CANCELLED and hold is Hold.RECOVERY else 2


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


def run_row(root: int, key: int, run: Run, last: int) -> tuple[Any, ...]:
    """A `new_run`; `last` is the last sequence of the journal it begins with."""
    check_run(run)
    return (
        root,
        last,
        ended(run.status, run.hold),
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
    check_message(message)
    return (
        root,
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


def item_row(root: int, item: ItemResult) -> tuple[Any, ...]:
    """A `new_item`."""
    return (root, item.run_id, item.key, item.index, item.digest, item.output, item.output_blob)


def item_from(row: Row) -> ItemResult:
    """A row of the `items` query."""
    return ItemResult(run_id=row[0], key=row[1], index=row[2], digest=row[3], output=row[4], output_blob=row[5])


def line_row(root: int, line: LogLine) -> tuple[Any, ...]:
    """A `new_line`."""
    return (root, line.run_id, line.stream, line.token, line.at, prose(line.text))


def line_from(run_id: str, row: Row) -> LogLine:
    """A row of the `read_log` query."""
    return LogLine(run_id=run_id, id=row[0], stream=row[1], token=row[2], at=row[3], text=row[4])


def checksum(sequence: int, data: bytes) -> int:
    """Started with the sequence, so that two rows that changed places are told as well."""
    return crc32(data, sequence)


def checked_entries(root_id: str, rows: Iterable[Row]) -> list[Entry]:
    """Rows of sequence, event and checksum."""
    entries = []
    for sequence, event, crc in rows:
        if crc32(event, sequence) != crc:
            raise damaged("entry", root_id, sequence)
        entries.append(Entry(sequence, event))
    return entries


def checked_checkpoint(root_id: str, sequence: int | None, state: bytes, crc: int) -> Checkpoint | None:
    """No sequence: there is none."""
    if sequence is None:
        return None
    if checksum(sequence, state) != crc:
        raise damaged("checkpoint", root_id, sequence)
    return Checkpoint(sequence, state)


def damaged(what: str, root_id: str, sequence: int) -> CorruptionError:
    """A stored row that does not read back as what was written."""
    return CorruptionError(
        f"{what} {sequence} of run {root_id!r} does not match its checksum: the database was damaged",
        root_id=root_id,
        sequence=sequence,
    )
