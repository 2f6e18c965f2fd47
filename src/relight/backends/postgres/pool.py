"""A few connections, kept open and used for one statement or transaction at a time.

asyncpg's own pool resets a connection, with one more round trip, each time it is given back. Connections of this pool
never need that: after an interruption, a timeout, or a failure that is no fault of the statement, they are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import asyncpg

from relight.backends.postgres.connection import (
    AGAIN,
    BEGIN,
    COMMAND_SECONDS,
    DURABLE,
    NO_WRITES,
    READ_ONLY,
    Connection,
    Connector,
    Target,
    read_only,
    refused,
    unavailable,
    unknown,
)
from relight.errors import StoreUnavailableError

T = TypeVar("T")
Fetch = Callable[..., Awaitable[Sequence[Any]]]

CLOSE_SECONDS = 2.0
# After a deadlock or a serialization failure. Nothing was written, and the other transactions go on meanwhile.
ATTEMPTS = 5
# The source of the server's warning that a commit is on its own disk only: its wait for the standby was cancelled.
WAIT_FOR_STANDBY = "SyncRepWaitForLSN"


class Pool:
    """At most `size` connections, made on demand. Made and used on one event loop.

    `moved` is called when a server is found not to be the primary any more, or does not answer: other connections to it
    should be made anew, perhaps to another server.
    """

    def __init__(
        self,
        target: Target,
        size: int,
        command_seconds: float = COMMAND_SECONDS,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.made = 0  # how many connections were made: each may lead to another server than the one before
        self._target = target
        self._command_seconds = command_seconds
        self._moved = moved
        self._size = size
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Connection] = []
        self._connector = Connector(target, lambda connection: self._keep(self._new(connection)))
        self._closed = False

    async def fetch(self, statement: str, *arguments: Any) -> list[Any]:
        """The rows of one statement, which is one transaction."""

        async def job(connection: Connection) -> list[Any]:
            return await connection.fetch(statement, *arguments)

        return await self._run(job, transaction=self._target.pgbouncer)

    async def value(self, statement: str, *arguments: Any) -> Any:
        """The first column of the first row; None when there is no row."""
        rows = await self.fetch(statement, *arguments)
        return rows[0][0] if rows else None

    async def session(self, job: Callable[[Fetch], Awaitable[T]]) -> T:
        """Statements on one connection, each in its own transaction (behind PgBouncer all in one). The job may be
        called again, from the beginning."""
        return await self._run(lambda connection: job(connection.fetch), transaction=self._target.pgbouncer)

    async def transaction(self, job: Callable[[Fetch], Awaitable[T]]) -> T:
        """Several statements in one transaction. The job may be called again, from the beginning."""
        return await self._run(lambda connection: job(connection.fetch), transaction=True)

    def drop_idle(self) -> None:
        """Close the idle connections, so that the next statement uses a new one."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.terminate()

    async def close(self) -> None:
        """Waits for all earlier statements at once: a server that hangs costs CLOSE_SECONDS, not a multiple."""
        self._closed = True  # connections that are given back from now on are closed
        idle, self._idle = self._idle, []
        await asyncio.gather(
            self._given_back(), self._connector.close(CLOSE_SECONDS), *(close(connection) for connection in idle)
        )

    async def _given_back(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                for _ in range(self._size):
                    await self._slots.acquire()

    async def _run(self, job: Callable[[Connection], Awaitable[T]], *, transaction: bool) -> T:
        if self._closed:
            raise StoreUnavailableError(f"{self._target.name} is not open")
        async with self._slots:
            for _ in range(ATTEMPTS - 1):
                try:
                    return await self._once(job, transaction=transaction)
                except asyncpg.PostgresError as error:
                    if error.sqlstate not in AGAIN:
                        raise
            try:
                return await self._once(job, transaction=transaction)
            except asyncpg.PostgresError as error:
                if (passing := unavailable(error, self._target)) is not None:
                    raise passing from error
                raise

    async def _once(self, job: Callable[[Connection], Awaitable[T]], *, transaction: bool) -> T:
        connection = await self._check_out()
        try:
            if transaction:
                await connection.execute(f"{BEGIN}; {DURABLE.format(local='true')}")
            result = await job(connection)
            if transaction:
                await connection.execute("COMMIT")
        except asyncpg.PostgresError as error:
            await self._give_back(connection, error, transaction=transaction)
            if error.sqlstate in AGAIN:
                raise
            if (passing := unavailable(error, self._target)) is not None:
                raise passing from error
            raise
        except BaseException as error:
            # After a cancellation, a timeout, a lost connection or a bug, the connection's state is unknown.
            connection.terminate()
            if isinstance(error, TimeoutError):
                self._leave()
            if (passing := unavailable(error, self._target)) is not None:
                raise passing from error
            raise
        if connection.is_closed():
            raise unknown("the connection was lost with the answer", self._target)
        if self._target.primary and read_only(connection):  # its answer may be old data
            connection.terminate()
            self._leave()
            raise unknown(NO_WRITES, self._target)
        self._keep(connection)
        return result

    def _leave(self) -> None:
        """The server is no primary any more, or does not answer. New connections may find the primary."""
        self.drop_idle()
        self._moved()

    async def _check_out(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        try:
            return self._new(await self._connector.connect(self._command_seconds))
        except asyncpg.PostgresError as error:
            if refused(error):  # it worked before: perhaps a password is being changed, or the primary is new
                raise unknown(f"{error} [{error.sqlstate}]", self._target) from error
            raise

    def _new(self, connection: Connection) -> Connection:
        connection.add_log_listener(_noticed)
        self.made += 1
        return connection

    async def _give_back(self, connection: Connection, error: asyncpg.PostgresError, *, transaction: bool) -> None:
        """Called after an error that the server sent: the statement has ended, and the session goes on."""
        if error.sqlstate == READ_ONLY:
            connection.terminate()
            self._leave()
            return
        if transaction and not connection.is_closed():
            try:
                await connection.execute("ROLLBACK")
            except BaseException:
                connection.terminate()
                raise
        self._keep(connection)

    def _keep(self, connection: Connection) -> None:
        if self._closed or connection.is_closed() or connection.is_in_transaction():
            connection.terminate()
        else:
            self._idle.append(connection)


def _noticed(connection: Any, message: asyncpg.PostgresLogMessage) -> None:
    """A commit that no standby is known to have is no commit yet. Close the connection, which makes its outcome
    unknown. The repeated commit then waits for the standby."""
    if message.server_source_function == WAIT_FOR_STANDBY:
        connection.terminate()


async def close(connection: Connection) -> None:
    """Close a connection in order if the server answers soon, otherwise at once."""
    try:
        await connection.close(timeout=CLOSE_SECONDS)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
        connection.terminate()
