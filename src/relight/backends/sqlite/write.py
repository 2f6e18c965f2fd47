"""All writes of the store except the group commit. Each function is a job of the writer thread and one transaction."""

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
    """Claim roots for the owner. The new epochs of those that it now owns."""
    with transaction(db):
        keys = _unfinished(db, epochs)
        db.execute(SQL["claim"], (owner, now, json_array(keys.values())))
    return {root_id: epochs[root_id] + 1 for root_id in keys}


def claim_due(db: apsw.Connection, owner: str, now: float, since: float, limit: int, but: Sequence[str]) -> list[Run]:
    """Claim due runs for the owner. Of the runs that fell due after `since`, it gets no more than its share."""
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
    """Whether a row was corrected."""
    with transaction(db):
        return bool(read.rows(db, "correct_owner", {"id": run_id, "epoch": epoch, "owner": owner}))


def note_session(db: apsw.Connection, owner: str, process: Process, ttl_seconds: float) -> None:
    """Write the session's row, as a heartbeat does when the leases are in this store."""
    with transaction(db):
        db.execute(
            SQL["heartbeat"], {"owner": owner, "process": msgspec.json.encode(process).decode(), "ttl": ttl_seconds}
        )


def forget_session(db: apsw.Connection, owner: str) -> None:
    """Delete the owner's session, unless it is fresh."""
    with transaction(db):
        db.execute(SQL["forget_session"], (owner,))


def set_lease_manager(db: apsw.Connection, name: str, before: str | None) -> bool:
    """Set the name if it is still `before`, and return whether it was."""
    with transaction(db):
        if read.value(db, "lease_manager") != before:
            return False
        db.execute(SQL["set_lease_manager"], (name,))
        return True


def hold(db: apsw.Connection, epochs: dict[str, int], status: RunChange, now: float) -> None:
    """Change the rows of roots, not their journals."""
    with transaction(db):
        writes = Writes(db, now)
        for root_id, key in _unfinished(db, epochs).items():
            writes.change(msgspec.structs.replace(status, run_id=root_id), root_id)
            if status.status in TERMINAL:
                writes.end(key, for_good=status.hold is None)
        writes.flush()


def _unfinished(db: apsw.Connection, epochs: dict[str, int]) -> dict[str, int]:
    """The keys, by id, of the unfinished roots that still have these epochs."""
    found = read.value(db, "unfinished", (json_array(epochs.items()),))
    return dict(msgspec.json.decode(found, type=list[tuple[str, int]]))


def post(db: apsw.Connection, messages: Sequence[Message]) -> list[int | None]:
    """The messages' ids; None for a message to a run that has ended or does not exist."""
    with transaction(db):
        return [_post(db, message) for message in messages]


def _post(db: apsw.Connection, message: Message) -> int | None:
    message_id: int | None = read.value(db, "post_message", message_columns(message))
    if message_id is None and message.dedup is not None:
        message_id = read.value(db, "posted_before", (message.run_id, message.dedup))
    return message_id


def append_log(db: apsw.Connection, lines: Sequence[LogLine]) -> None:
    """Insert the lines in their order, so that their ids have the same order."""
    with transaction(db):
        db.executemany(SQL["put_log"], map(log_row, lines))


def put_blob(db: apsw.Connection, data: bytes) -> str:
    """Store a blob. The digest is its key."""
    digest = sha256(data).hexdigest()
    with transaction(db):
        db.execute(SQL["put_blobs"], (digest, data))
    return digest


def checkpoint(db: apsw.Connection, root_id: str, epoch: int, sequence: int, state: bytes) -> bool:
    """Whether the checkpoint was written."""
    with transaction(db):
        found = read.root(db, root_id)
        if found is None or found.epoch != epoch or not found.checkpoint < sequence <= found.last:
            return False
        db.execute(SQL["put_checkpoints"], (found.key, sequence, state, checksum(sequence, state)))
        db.execute(SQL["drop_entries"], (found.key, sequence))
        db.execute(SQL["trim_inbox"], {"run": found.key, "kept": KEPT_DEDUPS})
    return True
