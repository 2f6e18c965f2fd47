"""Notifications from other processes: a connection that listens, and reconnects by itself.

Notifications only wake; a lost one costs latency. After each (re)connection some may have been missed, and the listener
calls `missed`. Where LISTEN cannot work (PgBouncer), `Polling` calls `missed` at intervals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import asyncpg

from relight.backends.postgres.connection import Connection, Connector, Target, read_only
from relight.errors import StoreUnavailableError
from relight.retry_pause import RetryPause
from relight.supervisor import Part, Supervisor
from relight.ticker import Ticker

# An idle connection may be cut without an error. A statement this often shows whether it still works.
PROBE_SECONDS = 30.0
TICK_SECONDS = 1.0
CLOSE_SECONDS = 2.0
# Less than the supervisor's QUIET_SECONDS: an attempt that gets no answer must not look like one that has gone well.
ANSWER_SECONDS = 8.0


class Listener:
    """`heard` is called with the payload of each notification, `missed` when some may have been lost."""

    def __init__(
        self,
        target: Target,
        channel: str,
        heard: Callable[[str], None],
        missed: Callable[[], None],
        supervisor: Supervisor | None = None,
    ) -> None:
        self._target = target
        self._channel = channel
        self._heard = heard
        self._missed = missed
        self._connector = Connector(target, lambda connection: connection.terminate())
        self._lost = asyncio.Event()  # set when the connection that listens is lost
        self._part = (supervisor or Supervisor()).keep(f"listen-{channel}", self._run, essential=False)

    def renew(self) -> None:
        """Listen over a new connection: other processes may send their notifications to another server now."""
        self._lost.set()

    async def close(self) -> None:
        await self._part.stop()
        await self._connector.close(CLOSE_SECONDS)

    async def _run(self, part: Part) -> None:
        """Polling goes on while no connection can be had. The supervisor calls this again, and reports an outage once."""
        while True:
            try:
                connection = await self._connector.connect(ANSWER_SECONDS)
                try:
                    await self._listen(connection, part)
                finally:
                    connection.terminate()
            except StoreUnavailableError:
                raise
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:  # any other error is a bug
                raise StoreUnavailableError(f"{self._target.name}: cannot listen for news: {error}") from error
            await RetryPause().wait()

    async def _listen(self, connection: Connection, part: Part) -> None:
        """Listen until the connection is lost, or its server is no primary any more."""
        lost = self._lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        await connection.add_listener(self._channel, self._on_notification)
        self._missed()
        part.well()
        while not lost.is_set():
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    await lost.wait()
            except TimeoutError:
                await connection.execute("SELECT 1")
                if self._target.primary and read_only(connection):
                    return

    def _on_notification(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        self._heard(str(payload))


class Polling:
    """Calls `missed` every TICK_SECONDS."""

    def __init__(self, missed: Callable[[], None], supervisor: Supervisor | None = None) -> None:
        self._missed = missed
        ticker = Ticker(self.run_once, TICK_SECONDS)
        self._part = (supervisor or Supervisor()).keep("tick", ticker.run, essential=False)

    def renew(self) -> None:
        """Does nothing: this has no connection."""

    async def close(self) -> None:
        await self._part.stop()

    async def run_once(self) -> None:
        self._missed()
