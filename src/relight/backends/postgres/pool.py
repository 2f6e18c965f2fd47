"""A few connections, kept open and given out one statement at a time.

asyncpg's own pool resets a connection with one more round trip each time it comes back; ours are never in a state that needs
it: whatever was interrupted, timed out or failed in a way that is not the statement's own fault is closed, not kept.
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
    READ_ONLY,
    Connection,
    Connector,
    Target,
    unavailable,
)
from relight.errors import StoreUnavailableError

T = TypeVar("T")
Fetch = Callable[..., Awaitable[Sequence[Any]]]

CLOSE_SECONDS = 5.0
# Deadlocks and serialization failures: nothing was written, and the others go on meanwhile.
ATTEMPTS = 5


class Pool:
    """At most `size` connections, made when they are needed. Made and used on one event loop."""

    def __init__(self, target: Target, size: int, command_seconds: float = COMMAND_SECONDS) -> None:
        self._target = target
        self._command_seconds = command_seconds
        self._size = size
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Connection] = []
        self._connector = Connector(target, self._keep)
        self._closed = False

    async def fetch(self, statement: str, *arguments: Any) -> list[Any]:
        """The rows of one statement, which is a transaction of its own."""

        async def job(connection: Connection) -> list[Any]:
            return await connection.fetch(statement, *arguments)

        return await self._run(job, transaction=self._target.pgbouncer)

    async def value(self, statement: str, *arguments: Any) -> Any:
        """The first column of the first row; None when there is no row."""
        rows = await self.fetch(statement, *arguments)
        return rows[0][0] if rows else None

    async def transaction(self, job: Callable[[Fetch], Awaitable[T]]) -> T:
        """Several statements. The job may be called again, from the beginning."""
        return await self._run(lambda connection: job(connection.fetch), transaction=True)

    async def close(self) -> None:
        """Waits for what was asked before."""
        self._closed = True
        for _ in range(self._size):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._slots.acquire()
        await self._connector.close(CLOSE_SECONDS)
        idle, self._idle = self._idle, []
        for connection in idle:
            await close(connection)

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
        connection = await self._take()
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
            # Cancelled, timed out, cut off, or a bug in the middle of a conversation with the server.
            connection.terminate()
            if (passing := unavailable(error, self._target)) is not None:
                raise passing from error
            raise
        self._keep(connection)
        return result

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return await self._connector.connect(self._command_seconds)

    async def _give_back(self, connection: Connection, error: asyncpg.PostgresError, *, transaction: bool) -> None:
        """After an error that the server sent: it has ended the statement, and the session goes on."""
        if error.sqlstate == READ_ONLY:
            # The server is no primary any more. New connections may find the one that is.
            idle, self._idle = self._idle, []
            for other in (connection, *idle):
                other.terminate()
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


async def close(connection: Connection) -> None:
    """In order if the server answers soon, and at once if not."""
    try:
        await connection.close(timeout=CLOSE_SECONDS)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
        connection.terminate()
