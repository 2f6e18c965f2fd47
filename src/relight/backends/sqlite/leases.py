"""SqliteLeases: leases in the SQLite file itself, for several orchestrators on one machine.

A run has a lease if its row has an owner, and that owner's session has not lapsed. A session is a row of
`orchestrators`, and a heartbeat writes only that row. SQLite's clock is the machine's, so all processes have the same.

SQLite pushes nothing. To notice a release or the end of a session, a table of few rows is read once a second at least.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import apsw
import msgspec

from relight.backends.sqlite import read
from relight.backends.sqlite.connection import cause_of, check_same, connect, migrations, transaction
from relight.backends.sqlite.queries import SQL
from relight.backends.sqlite.rows import json_array
from relight.errors import LeasesUnavailableError, StoreError
from relight.model.lease import (
    Acquired,
    Lease,
    NotOwner,
    Orphaned,
    OwnedBy,
    Process,
    Released,
    Session,
    ended_sessions,
    session_from,
)
from relight.supervisor import Supervisor

T = TypeVar("T")

# A heartbeat that waits longer for its turn fails, so that it is reported: its session may lapse meanwhile.
BUSY_MILLISECONDS = 5_000
# The longest time between two readings of the sessions.
LOOK_SECONDS = 1.0


class SqliteLeases:
    """`path` is the store's file, which the store has created and migrated before. For one thread: calls block it."""

    name = "store"
    in_store = True

    def __init__(self, path: str | os.PathLike[str], *, vfs: str | None = None) -> None:
        self.path = Path(path).absolute()
        self._vfs = vfs
        self._version = len(migrations())
        self._connection: apsw.Connection | None = None
        self._owner = ""
        self._who, self._process = Process(), ""  # the second is the first as JSON, with the reported trouble
        self._ttl_seconds = 0.0
        self._closed = asyncio.Event()
        self._closed.set()

    async def open(self, owner: str, process: Process, ttl_seconds: float) -> None:
        self._owner, self._ttl_seconds = owner, ttl_seconds
        self._who = process
        self.report(process.trouble)
        self._closed = asyncio.Event()  # an Event belongs to one loop: this is the loop that opens the leases
        self._do(lambda db: None)

    async def close(self) -> None:
        self._closed.set()
        self._disconnect()

    # ---- the session

    def report(self, trouble: str) -> None:
        self._process = msgspec.json.encode(msgspec.structs.replace(self._who, trouble=trouble)).decode()

    async def heartbeat(self) -> bool:
        row = {"owner": self._owner, "process": self._process, "ttl": self._ttl_seconds}

        def job(db: apsw.Connection) -> bool:
            fresh = read.value(db, "is_fresh", (self._owner,))
            db.execute(SQL["heartbeat"], row)
            return not fresh

        return self._write(job)

    async def end_session(self, owner: str) -> None:
        self._write(lambda db: db.execute(SQL["end_session"], (owner,)))

    async def forget_session(self, owner: str) -> None:
        self._write(lambda db: db.execute(SQL["forget_session"], (owner,)))

    async def list_orchestrators(self) -> list[Session]:
        return self._look()[0]

    async def listed_since(self) -> float:
        return 0.0

    def _look(self) -> tuple[list[Session], float]:
        """All sessions, and the time by which they were judged fresh or lapsed."""
        rows = self._do(lambda db: read.rows(db, "sessions"))
        return [session_from(row) for row in rows], rows[0][5] if rows else 0.0

    # ---- runs

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        wanted = json_array(run_ids)

        def job(db: apsw.Connection) -> list[tuple[str, str, float | None]]:
            now = read.value(db, "clock")  # the same for both statements, so that no session lapses between them
            db.execute(SQL["acquire"], {"ids": wanted, "owner": self._owner, "now": now})
            return read.rows(db, "holders", {"ids": wanted, "now": now})

        return {
            run_id: OwnedBy(owner, expires_at) if owner != self._owner and expires_at is not None else Acquired()
            for run_id, owner, expires_at in self._write(job)
        }

    async def release_lease(self, run_id: str) -> Released | NotOwner:
        def job(db: apsw.Connection) -> Released | NotOwner:
            if read.rows(db, "release", {"id": run_id, "owner": self._owner}):
                return Released()
            lease = _lease(db, run_id)
            return NotOwner(None if lease is None else lease.owner)

        return self._write(job)

    async def release_all(self) -> None:
        def job(db: apsw.Connection) -> None:
            db.execute(SQL["end_session"], (self._owner,))
            db.execute(SQL["forget_session"], (self._owner,))
            db.execute(SQL["release_all"], (self._owner,))

        self._write(job)

    async def get_lease(self, run_id: str) -> Lease | None:
        return self._do(lambda db: _lease(db, run_id))

    # ---- watching other sessions

    async def watch_orphans(self, supervisor: Supervisor | None = None) -> AsyncIterator[Orphaned]:
        before, now = self._look()
        while True:
            await self._wait(before, now)
            if self._closed.is_set():
                return
            after, now = self._look()
            ended, before = ended_sessions(before, after), after
            for owner in sorted(ended - {self._owner}):
                yield Orphaned(owner)

    async def _wait(self, sessions: list[Session], now: float) -> None:
        """Wait until the first session may have lapsed, but not longer than LOOK_SECONDS: a session may also end
        earlier."""
        ends = [session.expires_at - now for session in sessions if session.fresh and session.owner != self._owner]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(self._ttl_seconds / 3, LOOK_SECONDS, *ends)):
                await self._closed.wait()

    # ---- the connection

    def _write(self, job: Callable[[apsw.Connection], T]) -> T:
        """One transaction."""

        def whole(db: apsw.Connection) -> T:
            with transaction(db):
                return job(db)

        return self._do(whole)

    def _do(self, job: Callable[[apsw.Connection], T]) -> T:
        if self._closed.is_set():
            raise LeasesUnavailableError(f"the leases in {self.path} are not open")
        try:
            if self._connection is None:
                self._connection = self._connect()
            return job(self._connection)
        except (apsw.Error, StoreError) as error:
            self._disconnect()  # the next call connects again: no open transaction or dead file handle is left
            why = cause_of(error) if isinstance(error, apsw.Error) else str(error)
            raise LeasesUnavailableError(
                f"the leases in {self.path} cannot be read or written: {why}; it is tried again with the next heartbeat"
            ) from error

    def _connect(self) -> apsw.Connection:
        connection = connect(self.path, create=False, vfs=self._vfs, busy_retries=BUSY_MILLISECONDS)
        try:
            check_same(connection, self.path, self._version)
        except BaseException:
            connection.close(True)
            raise
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(apsw.Error):
                connection.close(True)


def _lease(db: apsw.Connection, run_id: str) -> Lease | None:
    found = read.rows(db, "holders", {"ids": json_array([run_id]), "now": read.value(db, "clock")})
    for _, owner, expires_at in found:
        if expires_at is not None:
            return Lease(run_id, owner, expires_at)
    return None
