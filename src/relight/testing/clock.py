"""FakeClock: time that passes only when a test advances it, so that a durable sleep of a week takes no time at all.

    clock = FakeClock()
    async with Relight("memory:", clock=clock) as rl:
        run = await rl.start(remind_in_a_week)
        await rl.idle()              # the run sleeps
        clock.advance("7d")
        await run.result()

or, if the test checks nothing in between, with time that passes by itself:

    async with Relight("memory:", clock=clock) as rl, clock.advancing(rl):
        await rl.run(remind_in_a_week)

Waits for a schedule (sleeps, timeouts of signals, back-off, parking) follow this clock. Waits for a machine do not: a
step's own `await asyncio.sleep(1)`, the pause before a disk is tried again, the `timeout` of `result()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from relight.durations import Duration, parse_duration

START = 1_700_000_000.0  # in November 2023: an arbitrary time, the same in every test
ROUNDING_SECONDS = 1e-6  # the rounding error of sums of such floats: ten advances by 0.1 must end a sleep of 1


class Engine(Protocol):
    """The part of a Relight that a clock needs."""

    async def idle(self) -> None: ...


class FakeTimer:
    """A pending call_later; `at` is the clock's time at which it fires."""

    __slots__ = ("at", "callback", "cancelled", "loop")

    def __init__(self, at: float, callback: Callable[[], None], loop: asyncio.AbstractEventLoop | None) -> None:
        self.at = at
        self.callback = callback
        self.loop = loop
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def fire(self) -> None:
        if not self.cancelled:
            self.callback()


class FakeClock:
    """A `relight.clock.Clock` that stands still until it is advanced. A timer of zero seconds fires without that."""

    def __init__(self, now: float = START) -> None:
        self._now = now
        self._monotonic = 0.0
        self._timers: list[tuple[float, int, FakeTimer]] = []  # a heap by monotonic time, then by order of creation
        self._order = itertools.count()
        self._armed: asyncio.Event | None = None  # set when there is a new timer: `advancing` waits for it
        self._advancing: asyncio.AbstractEventLoop | None = None  # the loop of `advancing`

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def call_later(self, seconds: float, callback: Callable[[], None]) -> FakeTimer:
        delay = max(seconds, 0.0)
        timer = FakeTimer(self._now + delay, callback, _running_loop())
        if delay == 0.0 and timer.loop is not None:
            timer.loop.call_soon(timer.fire)
        else:
            heapq.heappush(self._timers, (self._monotonic + delay, next(self._order), timer))
            if self._armed is not None and self._advancing is not None:
                self._advancing.call_soon_threadsafe(self._armed.set)
        return timer

    @property
    def pending(self) -> list[FakeTimer]:
        """The timers that have not fired, in the order in which they will."""
        return [timer for _, _, timer in sorted(self._timers) if not timer.cancelled]

    def advance(self, duration: Duration) -> None:
        """Let this time pass. Timers that fall due in it are called in order, each at its own time. That includes
        timers that these calls create. Zero calls what is due now.

        Callbacks of another event loop than the caller's are passed to that loop, and run soon after this returns. So a
        sync test may advance the clock of a blocking Relight.
        """
        target = self._monotonic + parse_duration(duration, "FakeClock.advance()")
        here = _running_loop()
        while self._timers and self._timers[0][0] <= target + ROUNDING_SECONDS:
            due, _, timer = heapq.heappop(self._timers)
            if timer.cancelled:
                continue
            self._pass(due - self._monotonic)
            if abs(timer.at - self._now) < ROUNDING_SECONDS:
                self._now = timer.at  # otherwise a rounding error would be left between now and the timer's time
            if timer.loop is None or timer.loop is here:
                timer.fire()
            else:
                timer.loop.call_soon_threadsafe(timer.fire)
        self._pass(target - self._monotonic)

    def advance_to_next(self) -> bool:
        """Let time pass until the next timer is due, and call what is due then. False if there is no timer."""
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return False
        self.advance(max(self._timers[0][0] - self._monotonic, 0.0))
        return True

    @contextlib.asynccontextmanager
    async def advancing(self, *engines: Engine) -> AsyncIterator[None]:
        """In this context time passes by itself: whenever all these engines are idle, it jumps to the next timer.

        It waits for steps, which take real time. While a step waits for an event of the test, time does not pass, so
        the step is not timed out. If one of the engines is closed in this context, time stands still for the others. So
        what the test waits for is cancelled then, and the context raises RelightError.
        """
        self._armed, self._advancing = asyncio.Event(), asyncio.get_running_loop()
        body = asyncio.current_task()
        assert body is not None
        cancellations = body.cancelling()
        broken: list[BaseException] = []

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                broken.append(error)
                body.cancel()

        task = asyncio.ensure_future(self._advance_by_itself(engines, self._armed))
        task.add_done_callback(ended)
        try:
            yield
        except BaseException as error:
            if broken and body.uncancel() <= cancellations and isinstance(error, asyncio.CancelledError):
                raise broken[0] from None
            raise
        else:
            if broken:
                body.uncancel()
                raise broken[0]
        finally:
            self._armed = self._advancing = None
            task.remove_done_callback(ended)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # it is raised above, or came when the context was being left

    async def _advance_by_itself(self, engines: tuple[Engine, ...], armed: asyncio.Event) -> None:
        while True:
            armed.clear()
            for engine in engines:
                await engine.idle()
            for engine in engines[:-1]:  # the last engine may have given the others something to do
                await engine.idle()
            if not self.advance_to_next():
                await armed.wait()

    def set(self, now: float) -> None:
        """Set the wall clock, as an administrator would. Timers follow monotonic time and are not affected."""
        self._now = now

    def _pass(self, seconds: float) -> None:
        if seconds > 0:
            self._monotonic += seconds
            self._now += seconds


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
