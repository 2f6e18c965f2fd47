"""SqliteStore: the whole Store protocol on one SQLite file.

One thread writes and one reads, each with its own connection, so that a long listing never delays a commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import apsw

from relight.backends.sqlite import read, write
from relight.backends.sqlite.commit import Committer
from relight.backends.sqlite.connection import (
    check_same,
    connect,
    data_version,
    migrations,
    opening_error,
    prepare,
    refuse_missing,
    refuse_path,
    runtime_error,
    version_of,
)
from relight.backends.sqlite.rows import json_array
from relight.backends.sqlite.thread import ConnectionThread
from relight.backends.writing import writing
from relight.clock import Clock
from relight.errors import StoreError, StoreUnavailableError
from relight.model.journal import Journal
from relight.model.lease import Process, Session, session_from
from relight.model.run import (
    ForeachProgress,
    Hold,
    ItemResult,
    LogLine,
    Message,
    News,
    Page,
    Run,
    RunChange,
    RunFilter,
)
from relight.model.text import check_filter, check_rows, storable
from relight.ports.store import Commit, CommitResult
from relight.supervisor import Supervisor

T = TypeVar("T")

# How often an idle store checks whether another process has written: one check per store, not one per run.
WATCH_SECONDS = 0.1


class SqliteStore:
    """`path` names a file on a local disk. The file and its `-wal` and `-shm` files are created if they are missing.

    Without `create`, a missing or empty file is refused: a process that only looks at a store, or starts runs for
    others to drive, would wait for ever on a file that no orchestrator knows.
    """

    lanes = 1  # SQLite has one writer at a time

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock,
        migrate: bool = True,
        create: bool = True,
        vfs: str | None = None,
    ) -> None:
        self.path = Path(path).absolute()  # the file is opened again later, perhaps from another working directory
        self._clock = clock
        self._migrate = migrate
        self._create = create
        self._vfs = vfs
        self._opened = False
        self._migrations = migrations()
        self._committer = Committer()
        self._writer: ConnectionThread | None = None
        self._reader: ConnectionThread | None = None
        self._watcher: tuple[asyncio.AbstractEventLoop, Callable[[News], None]] | None = None
        self._seen: tuple[apsw.Connection, int] | None = None  # the data_version the writer saw last

    # ---- opening and closing

    async def open(self) -> None:
        refuse_path(self.path)
        if not self._create:
            refuse_missing(self.path)
        self._opened = False
        try:
            self._writer = ConnectionThread("relight-sqlite-writer", self._connect_writer, self._translate)
            self._reader = ConnectionThread("relight-sqlite-reader", self._connect_reader, self._translate)
            # What other processes write from here on is news, also before watch() is called.
            await self._writer.call(self._poll)
            self._opened = True
            # The reader connects now, not at the first read. A failed transaction may leave a half-written end of the
            # WAL. SQLite ignores it only as long as some connection is open. Without the reader, a writer that has to
            # reconnect would find that end and treat it as committed.
            await self._read(_nothing)
        except BaseException:
            await self.close()
            raise

    async def schema_version(self) -> tuple[int, int]:
        """How many migrations have been applied, and how many there are. The store need not be open."""
        return version_of(self.path), len(self._migrations)

    async def close(self) -> None:
        """Waits for earlier calls, for a few seconds at most (`ConnectionThread.close`). If the store is not open, this
        does nothing."""
        threads, self._reader, self._writer = (self._reader, self._writer), None, None
        for thread in threads:  # the writer last: the last connection folds the WAL into the file
            if thread is not None:
                await thread.close()

    def _connect_writer(self, give_up: threading.Event) -> apsw.Connection:
        create = self._create and self._migrate and not self._opened
        connection = connect(self.path, create=create, vfs=self._vfs, give_up=give_up)
        try:
            if self._opened:
                check_same(connection, self.path, len(self._migrations))
            else:
                prepare(connection, self.path, self._migrations, migrate=self._migrate, create=self._create)
            # A killed process may have left commits in the WAL whose sync had failed. The system still shows them, from
            # its cache, but a power cut would delete them. This copies them into the file and makes them durable.
            with contextlib.suppress(apsw.BusyError):  # another process is making a checkpoint
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except BaseException:
            connection.close(True)
            raise
        return connection

    def _connect_reader(self, give_up: threading.Event) -> apsw.Connection:
        connection = connect(self.path, create=False, vfs=self._vfs, give_up=give_up)
        try:
            check_same(connection, self.path, len(self._migrations))
            connection.pragma("query_only", True)
        except BaseException:
            connection.close(True)
            raise
        return connection

    def _translate(self, error: apsw.Error) -> StoreError:
        return runtime_error(error, self.path) if self._opened else opening_error(error, self.path)

    async def _read(self, job: Callable[[apsw.Connection], T]) -> T:
        if self._reader is None:
            raise StoreUnavailableError(f"{self.path} is not open")
        return await self._reader.call(job)

    async def _write(self, job: Callable[[apsw.Connection], T]) -> T:
        if self._writer is None:
            raise StoreUnavailableError(f"{self.path} is not open")
        with writing():
            return await self._writer.call(job)

    # ---- the single fenced write

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        now = self._clock.now()
        for commit in commits:
            if commit.create is not None or commit.extras.runs or commit.extras.messages:
                check_rows(commit.create, commit.extras.runs, commit.extras.messages)

        def job(db: apsw.Connection) -> list[CommitResult]:
            results = self._committer.commit(db, commits, now)
            # A store that is never idle is never polled: it notices the writes of other processes here.
            self._notice(db, self._committer.version)
            return results

        return await self._write(job) if commits else []

    # ---- noticing other processes' writes

    def watch(self, changed: Callable[[News], None], supervisor: Supervisor | None = None) -> None:
        """Polls on the writer's connection: there `data_version` changes with the writes of others, never with our own.

        It shows only that another process has written, not what.
        """
        if self._writer is None:
            raise StoreUnavailableError(f"{self.path} is not open")
        self._watcher = (asyncio.get_running_loop(), changed)
        self._writer.on_idle(self._poll, WATCH_SECONDS)

    def _poll(self, db: apsw.Connection) -> None:
        self._notice(db, data_version(db))

    def _notice(self, db: apsw.Connection, version: int) -> None:
        if self._seen == (db, version):
            return
        # The first check counts as news, too: another process may have written between the opening of the file and now.
        self._seen = (db, version)
        if self._watcher is not None:
            loop, changed = self._watcher
            with contextlib.suppress(RuntimeError):  # the watcher's loop is closed
                loop.call_soon_threadsafe(changed, News.ANYTHING)

    # ---- runs

    async def get_run(self, run_id: str) -> Run | None:
        found = await self.get_runs([run_id])
        return found[0] if found else None

    async def get_runs(self, run_ids: Sequence[str]) -> list[Run]:
        wanted = json_array(filter(storable, run_ids))
        return await self._read(lambda db: read.runs(db, "get_runs", (wanted,)))

    async def list_runs(self, where: RunFilter) -> Page:
        check_filter(where)
        return await self._read(lambda db: read.list_runs(db, where))

    async def list_active_roots(self, owner: str, after: str | None, limit: int) -> list[Run]:
        page = {"owner": owner, "after": after or "", "limit": limit}
        return await self._read(lambda db: read.runs(db, "active_roots", page))

    async def owners(self) -> list[str]:
        return await self._read(lambda db: [row[0] for row in read.rows(db, "owners")])

    async def note_session(self, owner: str, process: Process, ttl_seconds: float) -> None:
        await self._write(lambda db: write.note_session(db, owner, process, ttl_seconds))

    async def sessions(self) -> list[Session]:
        return await self._read(lambda db: [session_from(row) for row in read.rows(db, "sessions")])

    async def forget_session(self, owner: str) -> None:
        await self._write(lambda db: write.forget_session(db, owner))

    async def lease_manager(self) -> str | None:
        return await self._read(lambda db: read.value(db, "lease_manager"))

    async def set_lease_manager(self, name: str, before: str | None) -> bool:
        return await self._write(lambda db: write.set_lease_manager(db, name, before))

    async def now(self) -> float | None:
        return None  # every process that can open the file is on this machine, and has its clock

    async def due(self, now: float, limit: int, *, freed: bool = False) -> list[Run]:
        return await self._read(lambda db: read.runs(db, "due_freed" if freed else "due", (now, limit)))

    async def claim_due(self, owner: str, now: float, since: float, limit: int, but: Sequence[str]) -> list[Run]:
        def job(db: apsw.Connection) -> list[Run]:
            runs = write.claim_due(db, owner, now, since, limit, but)
            self._committer.forget([run.id for run in runs])
            return runs

        return await self._write(job)

    async def next_due(self) -> float | None:
        return await self._read(lambda db: read.value(db, "next_due"))

    async def list_held(self, hold: Hold, flows: Sequence[str], limit: int) -> list[Run]:
        wanted = (hold, json_array(flows), limit)
        return await self._read(lambda db: read.runs(db, "held", wanted))

    async def claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
        now = self._clock.now()

        def job(db: apsw.Connection) -> dict[str, int]:
            self._committer.forget(epochs)
            return write.claim(db, epochs, owner, now)

        return await self._write(job)

    async def correct_owner(self, run_id: str, epoch: int, owner: str) -> bool:
        return await self._write(lambda db: write.correct_owner(db, run_id, epoch, owner))

    async def hold(self, epochs: dict[str, int], status: RunChange) -> None:
        now = self._clock.now()

        def job(db: apsw.Connection) -> None:
            self._committer.forget(epochs)  # the change may end these roots
            write.hold(db, epochs, status, now)

        await self._write(job)

    # ---- messages, logs and items

    async def post(self, messages: Sequence[Message]) -> list[int | None]:
        return await self._write(lambda db: write.post(db, messages))

    async def inbox(self, root_ids: Sequence[str]) -> list[Message]:
        wanted = json_array(root_ids)
        return await self._read(lambda db: read.messages(db, "inbox", (wanted,)))

    async def newest_message(self) -> int:
        return await self._read(lambda db: read.value(db, "newest_message") or 0)

    async def messages_after(self, message_id: int, limit: int) -> list[Message]:
        return await self._read(lambda db: read.messages(db, "messages_after", (message_id, limit)))

    async def append_log(self, lines: Sequence[LogLine]) -> None:
        await self._write(lambda db: write.append_log(db, lines))

    async def read_log(
        self, run_id: str, stream: str, after: int, limit: int, *, newest: bool = False
    ) -> list[LogLine]:
        return await self._read(lambda db: read.log(db, run_id, stream, after, limit, newest=newest))

    async def item_results(self, run_id: str, key: str | None = None) -> list[ItemResult]:
        return await self._read(lambda db: read.item_results(db, run_id, key)) if storable(run_id) else []

    async def foreach_progress(self, run_id: str, prefix: str = "") -> list[ForeachProgress]:
        return await self._read(lambda db: read.foreach_progress(db, run_id, prefix)) if storable(run_id) else []

    # ---- blobs

    async def put_blob(self, data: bytes) -> str:
        return await self._write(lambda db: write.put_blob(db, data))

    async def get_blob(self, digest: str) -> bytes | None:
        return await self._read(lambda db: read.value(db, "get_blob", (digest,)))

    # ---- journals

    async def read_from(self, root_id: str, sequence: int, limit: int) -> Journal:
        return await self._read(lambda db: read.entries(db, root_id, sequence, limit))

    async def read(self, root_ids: Sequence[str]) -> list[Journal | Exception]:
        return await self._read(lambda db: read.journals(db, root_ids))

    async def latest_sequence(self, root_id: str) -> int:
        root = await self._read(lambda db: read.root(db, root_id))
        return root.last if root else 0

    async def checkpoint(self, root_id: str, epoch: int, sequence: int, state: bytes) -> bool:
        return await self._write(lambda db: write.checkpoint(db, root_id, epoch, sequence, state))

    async def get_checkpoint(self, root_id: str) -> int | None:
        root = await self._read(lambda db: read.root(db, root_id))
        return (root.checkpoint or None) if root else None

    async def journal_bytes(self, root_id: str) -> int:
        return await self._read(lambda db: read.value(db, "journal_bytes", (root_id,)) or 0) if storable(root_id) else 0


def _nothing(db: apsw.Connection) -> None:
    """A job that only makes its thread connect."""
