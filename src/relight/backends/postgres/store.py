"""PostgresStore: the whole Store protocol in one schema of a PostgreSQL database (14 or newer).

At most five connections per process: two for commits, so that a long listing never delays them; two for everything
else; one that listens.

Times: `now()` is the server's clock. `updated_at` is the injected clock's, like every time in a commit: the process
that writes a row sets its times, and they are compared only with times of the same clock.

Behind PgBouncer in transaction mode write `?pgbouncer=true`. Then no state of a session outlives a transaction:
statements are prepared anew each time, each has its own BEGIN and COMMIT (four round trips instead of one), and there
is no LISTEN, so that news of other processes takes up to a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from relight.backends.postgres import read
from relight.backends.postgres.batch import news_of
from relight.backends.postgres.commit import Committer
from relight.backends.postgres.connection import parse
from relight.backends.postgres.listen import Listener, Polling
from relight.backends.postgres.pool import Pool
from relight.backends.postgres.queries import migrations, queries
from relight.backends.postgres.rows import change_row, ended, line_from, line_row, message_row
from relight.backends.postgres.schema import check_name, prepare, version_of
from relight.backends.rows import checked_entries, checksum, item_from, message_from, run_from
from relight.backends.writing import writing
from relight.clock import SYSTEM_ENTROPY, Clock
from relight.errors import StoreUnavailableError
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
    progress_of,
)
from relight.model.text import storable
from relight.ports.store import KEPT_DEDUPS, Commit, CommitResult
from relight.supervisor import Supervisor

CONNECTIONS = 2  # besides those for commits and the one that listens


class PostgresStore:
    """`url` as asyncpg accepts it. With several hosts in it, the store looks for the one that accepts writes."""

    lanes = 2  # while the server works on one batch, the engine goes on with the runs of the other

    def __init__(self, url: str, *, clock: Clock, schema: str = "relight", migrate: bool = True) -> None:
        self._target = parse(url)
        self._clock = clock
        self._migrate = migrate
        self.schema = check_name(schema)
        self._sql = queries(self.schema)
        self._sender = str(SYSTEM_ENTROPY.uuid())  # distinguishes this store's own notifications
        self._rest: Pool | None = None
        self._committing: tuple[Pool, Committer] | None = None
        self._hearing: Listener | Polling | None = None
        self._changed: Callable[[News], None] | None = None

    # ---- opening and closing

    async def open(self) -> None:
        await prepare(self._target, self.schema, migrate=self._migrate)
        self._rest = Pool(self._target, CONNECTIONS, moved=self._moved)
        pool = Pool(self._target, self.lanes, moved=self._moved)
        self._committing = (pool, Committer(pool, self._sql, self._sender, self._clock))

    async def schema_version(self) -> tuple[int, int]:
        """How many migrations have been applied, and how many there are. The store need not be open."""
        return await version_of(self._target, self.schema), len(migrations(self.schema))

    async def migrate(self) -> None:
        """Bring the schema up to date, also if `migrate` is false: for the command line. The store need not be open."""
        await prepare(self._target, self.schema, migrate=True)

    async def close(self) -> None:
        """Waits for earlier calls. If the store is not open, this does nothing."""
        hearing, self._hearing = self._hearing, None
        committing, self._committing = self._committing, None
        rest, self._rest = self._rest, None
        parts = (hearing, None if committing is None else committing[0], rest)
        await asyncio.gather(*(part.close() for part in parts if part is not None))

    def _moved(self) -> None:
        """One connection has noticed that the primary has changed. The others might notice much later, and those that
        only read or listen never."""
        if self._rest is not None and self._committing is not None:
            self._rest.drop_idle()
            self._committing[0].drop_idle()
        if self._hearing is not None:
            self._hearing.renew()

    @property
    def _pool(self) -> Pool:
        if self._rest is None:
            raise StoreUnavailableError(f"{self._target.name} is not open")
        return self._rest

    @property
    def _committer(self) -> Committer:
        if self._committing is None:
            raise StoreUnavailableError(f"{self._target.name} is not open")
        return self._committing[1]

    # ---- the single fenced write

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        if not commits:
            return []
        committer = self._committer
        with writing():
            return await committer.commit(commits)

    async def _change(self, name: str, *arguments: object) -> list[Any]:
        """The rows of any other statement that writes."""
        pool = self._pool
        with writing():
            return await pool.fetch(self._sql[name], *arguments)

    # ---- news of other processes

    def watch(self, changed: Callable[[News], None], supervisor: Supervisor | None = None) -> None:
        _ = self._pool  # raises if the store is not open
        self._changed = changed
        if self._hearing is None:
            if self._target.pgbouncer:
                self._hearing = Polling(self._missed, supervisor)
            else:
                self._hearing = Listener(self._target, f"{self.schema}.news", self._notified, self._missed, supervisor)

    def _missed(self) -> None:
        if self._changed is not None:
            self._changed(News.ANYTHING)

    def _notified(self, payload: str) -> None:
        sender, _, flags = payload.partition(" ")
        if sender == self._sender or self._changed is None:
            return
        known = flags.isdecimal() and int(flags) <= News.ANYTHING.value
        self._changed(News(int(flags)) if known else News.ANYTHING)  # a newer version may have more kinds of news

    # ---- runs

    async def _runs(self, name: str, *arguments: object) -> list[Run]:
        return [run_from(row) for row in await self._pool.fetch(self._sql[name], *arguments)]

    async def get_run(self, run_id: str) -> Run | None:
        found = await self.get_runs([run_id])
        return found[0] if found else None

    async def get_runs(self, run_ids: Sequence[str]) -> list[Run]:
        return await self._runs("get_runs", list(filter(storable, run_ids)))

    async def list_runs(self, where: RunFilter) -> Page:
        return await read.list_runs(self._pool, self._sql, where)

    async def list_active_roots(self, owner: str, after: str | None, limit: int) -> list[Run]:
        return await self._runs("active_roots", owner, after or "", limit)

    async def owners(self) -> list[str]:
        return [row[0] for row in await self._pool.fetch(self._sql["owners"])]

    async def note_session(self, owner: str, process: Process, ttl_seconds: float) -> None:
        await self._change("heartbeat", owner, msgspec.json.encode(process).decode(), ttl_seconds)

    async def sessions(self) -> list[Session]:
        return [session_from(row) for row in await self._pool.fetch(self._sql["sessions"])]

    async def forget_session(self, owner: str) -> None:
        await self._change("forget_session", owner)

    async def lease_manager(self) -> str | None:
        name: str | None = await self._pool.value(self._sql["lease_manager"])
        return name

    async def set_lease_manager(self, name: str, before: str | None) -> bool:
        return bool(await self._change("set_lease_manager", name, before))

    async def now(self) -> float | None:
        now: float = await self._pool.value(self._sql["now"])
        return now

    async def due(self, now: float, limit: int, *, freed: bool = False) -> list[Run]:
        return await self._runs("due_freed" if freed else "due", now, limit)

    async def claim_due(self, owner: str, now: float, since: float, limit: int, but: Sequence[str]) -> list[Run]:
        rows = await self._change("claim_due", owner, now, since, limit, but)
        self._committer.learn([(row[1], row[0]) for row in rows])
        return sorted((run_from(row) for row in rows), key=lambda run: run.wake_at or 0.0)

    async def next_due(self) -> float | None:
        wake_at: float | None = await self._pool.value(self._sql["next_due"])
        return wake_at

    async def list_held(self, hold: Hold, flows: Sequence[str], limit: int) -> list[Run]:
        return await self._runs("held", hold, flows, limit)

    async def claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
        now = self._clock.now()
        rows = await self._change("claim", list(epochs), list(epochs.values()), owner, now)
        self._committer.learn([(row[0], row[1]) for row in rows])
        return {row[0]: row[2] for row in rows}

    async def correct_owner(self, run_id: str, epoch: int, owner: str) -> bool:
        return bool(await self._change("correct_owner", run_id, epoch, owner))

    async def hold(self, epochs: dict[str, int], status: RunChange) -> None:
        news = news_of(status) | News.RUNS
        change = change_row(0, "", status)
        end = ended(status.status, status.hold)
        given = (self._sender, news.value, self._clock.now(), list(epochs), list(epochs.values()), change, end)
        await self._change("hold", *given)

    # ---- messages, logs and items

    async def post(self, messages: Sequence[Message]) -> list[int | None]:
        rows = [message_row(0, message) for message in messages]
        ((ids,),) = await self._change("post", self._sender, rows)
        return list(ids)

    async def inbox(self, root_ids: Sequence[str]) -> list[Message]:
        return [message_from(row) for row in await self._pool.fetch(self._sql["inbox"], root_ids)]

    async def newest_message(self) -> int:
        (row,) = await self._pool.fetch(self._sql["newest_message"])
        newest: int = row[0]
        return newest

    async def messages_after(self, message_id: int, limit: int) -> list[Message]:
        rows = await self._pool.fetch(self._sql["messages_after"], message_id, limit)
        return [message_from(row) for row in rows]

    async def append_log(self, lines: Sequence[LogLine]) -> None:
        if lines:
            await self._change("append_log", [line_row(0, line) for line in lines])

    async def read_log(
        self, run_id: str, stream: str, after: int, limit: int, *, newest: bool = False
    ) -> list[LogLine]:
        query = self._sql["read_newest_log" if newest else "read_log"]
        rows = await self._pool.fetch(query, run_id, stream, after, limit)
        return [line_from(run_id, row) for row in (reversed(rows) if newest else rows)]

    async def item_results(self, run_id: str, key: str | None = None) -> list[ItemResult]:
        if not storable(run_id):
            return []
        return [item_from(row) for row in await self._pool.fetch(self._sql["items"], run_id, key)]

    async def foreach_progress(self, run_id: str, prefix: str = "") -> list[ForeachProgress]:
        if not storable(run_id):
            return []
        return [progress_of(*row) for row in await self._pool.fetch(self._sql["foreach_progress"], run_id, prefix)]

    # ---- blobs

    async def put_blob(self, data: bytes) -> str:
        digest = sha256(data).hexdigest()
        await self._change("put_blob", digest, data)
        return digest

    async def get_blob(self, digest: str) -> bytes | None:
        data: bytes | None = await self._pool.value(self._sql["get_blob"], digest)
        return data

    # ---- journals

    async def read_from(self, root_id: str, sequence: int, limit: int) -> Journal:
        rows = await self._pool.fetch(self._sql["read_entries"], root_id, sequence, limit)
        return Journal(root_id, None, checked_entries(root_id, rows))

    async def read(self, root_ids: Sequence[str]) -> list[Journal | Exception]:
        return await read.journals(self._pool, self._sql, root_ids)

    async def latest_sequence(self, root_id: str) -> int:
        return await self._pool.value(self._sql["latest_sequence"], root_id) or 0

    async def checkpoint(self, root_id: str, epoch: int, sequence: int, state: bytes) -> bool:
        given = (root_id, epoch, sequence, state, checksum(sequence, state), KEPT_DEDUPS)
        ((kept,),) = await self._change("checkpoint", *given)
        return bool(kept)

    async def get_checkpoint(self, root_id: str) -> int | None:
        sequence: int | None = await self._pool.value(self._sql["checkpoint_sequence"], root_id)
        return sequence

    async def journal_bytes(self, root_id: str) -> int:
        return (await self._pool.value(self._sql["journal_bytes"], root_id) or 0) if storable(root_id) else 0
