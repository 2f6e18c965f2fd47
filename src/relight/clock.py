"""Where time, ids and randomness come from: this module, and no other.

Code that needs one of them is given a `Clock` or an `Entropy`. A test gives its own clock, advances it by hand
and never sleeps. A simulation seeds its entropy, so that every execution is the same. Everywhere else in the package
the linter refuses `time`, `random` and everything that makes a uuid.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol
from uuid import UUID, uuid4

import uuid_utils


class Clock(Protocol):
    """Two readings of time that must not be mixed up, and the one way to wait."""

    def now(self) -> float:
        """Seconds since the Unix epoch: what is stored, and compared with what other processes stored.

        It may step backwards or jump when the machine's clock is set.
        """
        ...

    def monotonic(self) -> float:
        """Seconds since an unknown point: for waits and measurements inside this process, never stored.

        It never goes backwards and means nothing to another process.
        """
        ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` on the running event loop after `seconds`, unless the timer is cancelled."""
        ...


class Timer(Protocol):
    """A pending call_later."""

    def cancel(self) -> None: ...


class Entropy(Protocol):
    """Everything that may differ between two otherwise equal executions."""

    def run_id(self) -> str:
        """A new run id, unique without any coordination; ids made later in one process sort later."""
        ...

    def uuid(self) -> UUID:
        """A random uuid (version 4), which does not reveal when and where it was made."""
        ...

    def random(self) -> float:
        """A number from 0 up to but not including 1."""
        ...


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    now = staticmethod(time.time)  # these two without a wrapper around them: every step calls them
    monotonic = staticmethod(time.monotonic)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)


# How often the server's clock is read at most. An answer within SHORT_SECONDS is exact enough and ends the readings.
MAX_QUESTIONS = 5
SHORT_SECONDS = 0.005


class StoreClock:
    """A clock whose `now` follows the database server's: several machines compare the times that they store.

    `offset` is how far the server is ahead of this machine.
    """

    __slots__ = ("_base", "offset")

    def __init__(self, base: Clock) -> None:
        self._base = base
        self.offset = 0.0

    def now(self) -> float:
        return self._base.now() + self.offset

    def monotonic(self) -> float:
        return self._base.monotonic()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return self._base.call_later(seconds, callback)

    async def follow(self, ask: Callable[[], Awaitable[float | None]]) -> bool:
        """Set this clock by the server's; False if the server has none.

        The server read its clock at some moment between the request and the answer, so the offset may be wrong by half
        of that time. The first request may be slow (a connection had to be made), so the fastest of several counts.
        """
        shortest = float("inf")
        for _ in range(MAX_QUESTIONS):
            asked_at = self._base.now()
            server_now = await ask()
            if server_now is None:
                return False
            took = self._base.now() - asked_at
            if took < shortest:
                shortest, self.offset = took, server_now - (asked_at + took / 2)
            if took <= SHORT_SECONDS:
                break
        return True


class EarliestTimer:
    """One timer for many times: it goes off at the earliest. What it calls finds the other times, and sets them again."""

    LONGEST_SECONDS = 3600.0  # it goes off this early for a later time: clocks are set, and loops limit their timers

    def __init__(self, clock: Clock, callback: Callable[[], None]) -> None:
        self._clock = clock
        self._callback = callback
        self._timer: Timer | None = None
        self._when = float("inf")

    def set(self, when: float) -> None:
        """Go off at this time, or earlier."""
        if when >= self._when:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._when = when
        delay = max(0.0, when - self._clock.now())
        self._timer = self._clock.call_later(min(delay, self.LONGEST_SECONDS), self._gone_off)

    def _gone_off(self) -> None:
        self._timer, self._when = None, float("inf")
        self._callback()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._when = None, float("inf")


@contextlib.asynccontextmanager
async def time_limit(clock: Clock, seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout`, but by this clock."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = clock.call_later(seconds, lambda: limit.reschedule(loop.time()))
        try:
            yield limit
        finally:
            timer.cancel()


class SystemEntropy:
    """The operating system's randomness.

    Not the generator behind `random.random()`: after a flow's own `random.seed(0)` every process would draw
    the same back-off jitter, and retries would meet at the same instant.
    """

    __slots__ = ("_source",)

    def __init__(self) -> None:
        self._source = random.SystemRandom()

    def run_id(self) -> str:
        return str(uuid_utils.uuid7())

    def uuid(self) -> UUID:
        return uuid4()

    def random(self) -> float:
        return self._source.random()


SYSTEM_CLOCK: Clock = SystemClock()
"""For code that cannot be given a clock: a flow called as a plain function."""

SYSTEM_ENTROPY: Entropy = SystemEntropy()
"""For code that cannot be given an entropy: a flow called as a plain function."""


def block(seconds: float) -> None:
    """Block this thread: what a sync flow's sleep() does when it is called outside a run."""
    time.sleep(seconds)
