"""The store's writes apart from the group commit, each a job of the writer thread and one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import apsw
import msgspec

from relight.backends.rows import Row, checksum, message_columns, run_from
from relight.backends.sqlite import read
from relight.backends.sqlite.connection import transaction
from relight.backends.sqlite.queries import SQL
from relight.backends.sqlite.rows import json_array, log_row
from relight.backends.sqlite.writes import Writes
from relight.model.lease import Process
from relight.model.run import TERMINAL, LogLine, Message, Run, RunChange
from relight.model.sharing import share
from relight.ports.store import KEPT_DEDUPS


def claim(db: apsw.Connection, epochs: dict[str, int], owner: str, now: float) -> dict[str, int]:
    """The new epochs of the roots that are the owner's now."""
    with transaction(db):
        keys = _unfinished(db, epochs)
        db.execute(SQL["claim"], (owner, now, json_array(keys.values())))
    return {root_id: epochs[root_id] + 1 for root_id in keys}


def claim_due(db: apsw.Connection, owner: str, now: float, since: float, limit: int, but: Sequence[str]) -> list[Run]:
    """The runs that are due and the owner's now: with what fell due after `since`, no more than its share."""
    with transaction(db):
        rows = [row for row in read.rows(db, "due", (now, limit + len(but))) if row[1] not in but][:limit]
        living = read.value(db, "living")
        if living > 1 and any(_wake_at(row) > since for row in rows):
            given = {"now": now, "since": since, "limit": limit * living, "owner": owner}
            recent, active, mine = read.rows(db, "to_share", given)[0]
            old = sum(_wake_at(row) <= since for row in rows)
            rows = rows[: old + share(recent, living, active, mine)]
        db.execute(SQL["claim"], (owner, now, json_array(row[0] for row in rows)))
    runs = [run_from(row) for row in rows]
    return [msgspec.structs.replace(run, owner=owner, epoch=run.epoch + 1, updated_at=now) for run in runs]


def _wake_at(row: Row) -> float:
    return run_from(row).wake_at or 0.0


def correct_owner(db: apsw.Connection, run_id: str, epoch: int, owner: str) -> bool:
    """Whether the row was there to be corrected."""
    with transaction(db):
        return bool(read.rows(db, "correct_owner", {"id": run_id, "epoch": epoch, "owner": owner}))


def note_session(db: apsw.Connection, owner: str, process: Process, ttl_seconds: float) -> None:
    """As a heartbeat of the leases that are kept here."""
    with transaction(db):
        db.execute(
            SQL["heartbeat"], {"owner": owner, "process": msgspec.json.encode(process).decode(), "ttl": ttl_seconds}
        )


def forget_session(db: apsw.Connection, owner: str) -> None:
    """Unless it is fresh."""
    with transaction(db):
        db.execute(SQL["forget_session"], (owner,))


def set_lease_manager(db: apsw.Connection, name: str, before: str | None) -> bool:
    """Whether it was still `before`."""
    with transaction(db):
        if read.value(db, "lease_manager") != before:
            return False
        db.execute(SQL["set_lease_manager"], (name,))
        return True


def hold(db: apsw.Connection, epochs: dict[str, int], status: RunChange, now: float) -> None:
    """Change the roots' rows, not their journals."""
    with transaction(db):
        writes = Writes(db, now)
        for root_id, key in _unfinished(db, epochs).items():
            writes.change(msgspec.structs.replace(status, run_id=root_id), root_id)
            if status.status in TERMINAL:
                writes.end(key, for_good=status.hold is None)
        writes.flush()


def _unfinished(db: apsw.Connection, epochs: dict[str, int]) -> dict[str, int]:
    """The keys, by id, of those roots that stand at these epochs and have not ended."""
    found = read.value(db, "unfinished", (json_array(epochs.items()),))
    return dict(msgspec.json.decode(found, type=list[tuple[str, int]]))


def post(db: apsw.Connection, messages: Sequence[Message]) -> list[int | None]:
    """The messages' ids; None where nobody is there to read them."""
    with transaction(db):
        return [_post(db, message) for message in messages]


def _post(db: apsw.Connection, message: Message) -> int | None:
    message_id: int | None = read.value(db, "post_message", message_columns(message))
    if message_id is None and message.dedup is not None:
        message_id = read.value(db, "told_before", (message.run_id, message.dedup))
    return message_id


def append_log(db: apsw.Connection, lines: Sequence[LogLine]) -> None:
    """In their order, so that their ids follow it."""
    with transaction(db):
        db.executemany(SQL["put_log"], map(log_row, lines))


def put_blob(db: apsw.Connection, data: bytes) -> str:
    """The digest under which it is kept."""
    digest = sha256(data).hexdigest()
    with transaction(db):
        db.execute(SQL["put_blobs"], (digest, data))
    return digest


def checkpoint(db: apsw.Connection, root_id: str, epoch: int, sequence: int, state: bytes) -> bool:
    """Whether it was taken."""
    with transaction(db):
        found = read.root(db, root_id)
        if found is None or found.epoch != epoch or not found.checkpoint < sequence <= found.last:
            return False
        db.execute(SQL["put_checkpoints"], (found.key, sequence, state, checksum(sequence, state)))
        db.execute(SQL["drop_entries"], (found.key, sequence))
        db.execute(SQL["prune_inbox"], {"run": found.key, "kept": KEPT_DEDUPS})
    return True
