"""Idle: nothing can happen in an engine before time passes, or before a message or a request reaches it. For tests.

An engine is idle when every run in memory is blocked, nothing is being committed, taken up, created, posted or read, and no pass
over the store is wanted or under way. A step that is under way keeps it from being idle, whatever it waits for; so does a thread
that executes a sync step or flow. A back-off does not: it waits for a time.

This does not depend on polling. Everything that may be the last to end calls `Idleness.look`, which costs one
comparison while nothing waits. If such a call is missing, `wait` looks all the same after `CHECK_SECONDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from relight.errors import RelightError

CHECK_SECONDS = 0.1
# For how many turns of the program's loop the engine must be idle without a break. Callbacks that are about to run, and
# code that has just got a result (a test, for example), go on in these turns.
TURNS = 10


class Idleness:
    """One per engine. Each part of it that may be busy adds a function to `parts`, which returns whether it is idle."""

    def __init__(self) -> None:
        self.parts: list[Callable[[], bool]] = []
        self.under_way = 0  # requests of this process that are being written
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False

    @property
    def now(self) -> bool:
        """Whether the engine is idle in this moment."""
        return not self.under_way and all(idle() for idle in self.parts)

    def look(self) -> None:
        """Something has ended: perhaps the engine is idle."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def close(self) -> None:
        """The engine is closed. It never becomes idle any more: whoever waits for that is told so."""
        self._closed = True
        self.look()

    async def wait(self) -> None:
        """Wait until the engine is idle. RelightError if it is closed meanwhile."""
        turns = 0
        while turns < TURNS:
            if self._closed:
                raise RelightError("this Relight was closed while idle() waited for it")
            if self.now:
                turns += 1
                await asyncio.sleep(0)  # noqa: TID251 - this waits for a turn of the loop, not for a time
                continue
            turns = 0
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await waiter

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A request is being written: the engine is not idle meanwhile."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self.look()
