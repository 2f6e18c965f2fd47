"""Idle: nothing of an engine can happen before time passes, or before somebody tells it something. For tests.

An engine is idle when every run in memory is blocked, nothing is being committed, taken up, created, posted or read, and no pass
over the store is wanted or under way. A step that is under way keeps it from being idle, whatever it waits for; so does a thread
that executes a sync step or flow. A back-off does not: it waits for a time.

Nobody polls for it. Whatever may have been the last thing to end says so (`Idleness.look`), which costs one comparison while
nobody waits. If one of them did not, `CHECK_SECONDS` later somebody would look all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

CHECK_SECONDS = 0.1
# Turns of the program's loop for which it must be idle without a break: callbacks that are about to run, and whoever has just
# been told something (a test that waited for a result, say), come before.
TURNS = 10


class Idleness:
    """One per engine. Parts of the engine that may be busy add themselves to `parts`: each answers whether it is idle."""

    def __init__(self) -> None:
        self.parts: list[Callable[[], bool]] = []
        self.under_way = 0  # requests of this process that are being written
        self._waiters: list[asyncio.Future[None]] = []

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

    async def wait(self) -> None:
        """Until the engine is idle."""
        turns = 0
        while turns < TURNS:
            if self.now:
                turns += 1
                await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop, and no time
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
