"""PostgresLeases: leases in the store's own schema, by the server's clock.

A run has a lease if its row has an owner, and that owner's session has not lapsed. A session is a row of
`orchestrators`, and a heartbeat writes only that row.

The end of a session is pushed (NOTIFY). No process causes a lapse, so lapses are found by reading that small table. It
is read when the next known session may have lapsed, or after two thirds of the ttl, because unknown sessions may have
begun. Behind PgBouncer nothing is pushed, and the table is read every second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

import asyncpg
import msgspec

from relight.backends.postgres.connection import COMMAND_SECONDS, parse, refused
from relight.backends.postgres.listen import Listener
from relight.backends.postgres.pool import Pool
from relight.backends.postgres.queries import queries
from relight.backends.postgres.schema import check_name, prepare
from relight.errors import LeasesUnavailableError, StoreUnavailableError
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

# Two, besides the one that listens, so that a heartbeat does not wait for a long acquisition.
CONNECTIONS = 2
# Between two readings of the table, where nothing is pushed.
LOOK_SECONDS = 1.0
# At least between two readings: our clock may be a little ahead of the end of a session that we wait for.
SHORTEST_SECONDS = 0.01


class PostgresLeases:
    """`url` and `schema` are those of the store, which has created and migrated the schema before."""

    name = "store"
    in_store = True

    def __init__(self, url: str, *, schema: str = "relight") -> None:
        self._target = parse(url)
        self._schema = check_name(schema)
        self._sql = queries(schema)
        self._pool: Pool | None = None
        self._owner = ""
        self._who, self._process = Process(), ""  # the second is the first as JSON, with the reported trouble
        self._ttl_seconds = 0.0
        self._watches: set[asyncio.Event] = set()  # set when the manager is closed
        self._listeners: set[Listener] = set()

    async def open(self, owner: str, process: Process, ttl_seconds: float) -> None:
        self._owner, self._ttl_seconds = owner, ttl_seconds
        self._who = process
        self.report(process.trouble)
        await self._answer_of(prepare(self._target, self._schema, migrate=False))
        # A heartbeat without an answer fails early enough for another one.
        self._pool = Pool(self._target, CONNECTIONS, min(COMMAND_SECONDS, ttl_seconds / 3), self._moved)

    def _moved(self) -> None:
        for listener in self._listeners:
            listener.renew()

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        for watch in self._watches:
            watch.set()
        if pool is not None:
            await pool.close()

    async def _fetch(self, name: str, *arguments: object) -> list[Any]:
        if self._pool is None:
            raise LeasesUnavailableError(f"the leases in {self._target.name} are not open")
        return await self._answer_of(self._pool.fetch(self._sql[name], *arguments))

    async def _answer_of(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except StoreUnavailableError as error:
            raise LeasesUnavailableError(f"the leases do not answer: {error}") from error
        except asyncpg.PostgresError as error:
            if refused(error):
                raise LeasesUnavailableError(f"the leases in {self._target.name} cannot be opened: {error}") from error
            raise

    # ---- the session

    def report(self, trouble: str) -> None:
        self._process = msgspec.json.encode(msgspec.structs.replace(self._who, trouble=trouble)).decode()

    async def heartbeat(self) -> bool:
        ((begun,),) = await self._fetch("heartbeat", self._owner, self._process, self._ttl_seconds)
        return bool(begun)

    async def end_session(self, owner: str) -> None:
        await self._fetch("end_session", owner)

    async def forget_session(self, owner: str) -> None:
        await self._fetch("forget_session", owner)

    async def list_orchestrators(self) -> list[Session]:
        return (await self._look())[0]

    async def listed_since(self) -> float:
        return 0.0

    async def _look(self) -> tuple[list[Session], float]:
        """All sessions, and the time by which they were judged fresh or lapsed."""
        rows = await self._fetch("sessions")
        return [session_from(row) for row in rows], rows[0][5] if rows else 0.0

    # ---- runs

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        rows = await self._fetch("acquire", self._owner, run_ids)
        return {
            run_id: Acquired() if holder is None else OwnedBy(holder, expires_at) for run_id, holder, expires_at in rows
        }

    async def release_lease(self, run_id: str) -> Released | NotOwner:
        ((released,),) = await self._fetch("release", self._owner, run_id)
        if released:
            return Released()
        lease = await self.get_lease(run_id)
        return NotOwner(None if lease is None else lease.owner)

    async def release_all(self) -> None:
        await self._fetch("release_all", self._owner)

    async def get_lease(self, run_id: str) -> Lease | None:
        rows = await self._fetch("get_lease", run_id)
        return Lease(run_id, *rows[0]) if rows else None

    # ---- watching other sessions

    async def watch_orphans(self, supervisor: Supervisor | None = None) -> AsyncIterator[Orphaned]:
        woken = asyncio.Event()
        pushed: set[str] = set()

        def heard(owner: str) -> None:
            pushed.add(owner)
            woken.set()

        listener = None
        if not self._target.pgbouncer:
            listener = Listener(self._target, f"{self._schema}.sessions", heard, woken.set, supervisor)
            self._listeners.add(listener)
        self._watches.add(woken)
        try:
            before, now = await self._look()
            while True:
                await self._wait(woken, before, now)
                if self._pool is None:
                    return
                after, now = await self._look()
                ended = ended_sessions(before, after) | pushed
                pushed.clear()
                before = after
                for owner in sorted(ended - {self._owner}):
                    yield Orphaned(owner)
        finally:
            self._watches.discard(woken)
            if listener is not None:
                self._listeners.discard(listener)
                await listener.close()

    async def _wait(self, woken: asyncio.Event, sessions: list[Session], now: float) -> None:
        """Wait until the next reading."""
        ends = [session.expires_at - now for session in sessions if session.fresh and session.owner != self._owner]
        longest = LOOK_SECONDS if self._target.pgbouncer else self._ttl_seconds * 2 / 3
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(min([longest, *ends]), SHORTEST_SECONDS)):
                await woken.wait()
        woken.clear()
