"""Supervisor: keeps the engine's long-lived tasks alive, and reports their health.

    work ── raises ──▶ reported and counted ──▶ a pause, longer each time ──▶ work, from its beginning
                            │
                            └─ MOST_FAILURES in a row, without one good round between them: `broken`
                               a good round, or a long rest, a while after that: `mended`

A task is an endless coroutine function. It calls `Part.well` after each successful round, and `Part.rest` where it may
wait for work for ever. Not every task is essential: if a task that only wakes others (a listener) fails for ever, that
costs latency alone. An outage (the store or the lease manager does not answer) is no fault of the task. An outage is
reported, and the task is tried again, but it never counts as broken: all processes of the server have the same outage.

`orchestrator/health.py` decides what a broken task means: the process lets go of its lease.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from relight.clock import SYSTEM_CLOCK
from relight.errors import RelightError, StoreError
from relight.model.text import shown
from relight.retry_pause import RetryPause

MOST_FAILURES = 8  # in a row; with the pauses between them, about ten seconds
# A broken part counts as mended by a good round this long after it broke, or by a rest of this length. With less, its
# process would acquire and lose its lease in turns.
MENDED_SECONDS = 60.0
QUIET_SECONDS = 10.0  # a part that only waits for something (a listener) is well after it has waited for this long
CANCEL_SECONDS = 0.1  # between two cancellations of one task

Work = Callable[["Part"], Coroutine[Any, Any, None]]


class PartHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One long-lived task."""

    name: str
    failures: int  # since the engine was opened: exceptions that ended it, each a bug
    failing: bool  # the last round failed, and the task is tried again
    broken: bool  # the task cannot be kept alive
    error: str  # the last exception; "" if there was none


class Watcher(Protocol):
    """The supervisor, as a part sees it."""

    @property
    def report(self) -> Callable[[Part, Exception, float], None]:
        """Called when a part has failed, with the pause before it is tried again."""
        ...

    def broke(self, part: Part) -> None:
        """An essential part cannot be kept alive."""
        ...

    def mended(self, part: Part) -> None:
        """A part that was broken works again."""
        ...

    def back(self, part: Part) -> None:
        """An outage is over that has made more than one round of the part fail."""
        ...


class Part:
    """One long-lived task that is kept alive. Any thread may read its numbers; all else happens on the task's loop."""

    def __init__(self, name: str, watcher: Watcher, *, essential: bool = True) -> None:
        self.name = name
        self.essential = essential
        self.failures = 0
        self.in_a_row = 0
        self.broken = False
        self.outages = 0  # in a row
        self.outage = ""  # why the task cannot do its work right now, if that is no fault of the task
        self.error = ""
        self.task: asyncio.Task[None] | None = None
        self._stopping = False
        self._broken_at = self._begun_at = 0.0
        self._pause = RetryPause()
        self._watcher = watcher

    def well(self) -> None:
        """The task calls this after a successful round."""
        if not self.in_a_row and not self.outage:
            return
        if self.broken:
            if SYSTEM_CLOCK.monotonic() < self._broken_at + MENDED_SECONDS:
                return
            self.broken = False
            self._watcher.mended(self)
        if self.outages > 1:
            self._watcher.back(self)
        self.in_a_row, self.outage, self.outages = 0, "", 0
        self._pause.reset()

    async def rest(self, wanted: asyncio.Future[None]) -> None:
        """Wait for work: until `wanted` is done. A broken part that has rested for a while counts as mended: its
        process has let go of its lease, so there would never be work that could show it."""
        while self.broken and not wanted.done():
            left = self._begun_at + MENDED_SECONDS - SYSTEM_CLOCK.monotonic()
            if left <= 0:
                self.well()
            else:
                await asyncio.wait([wanted], timeout=left)
        await wanted

    @property
    def failing(self) -> bool:
        """The last round failed, and none has gone well since."""
        return (self.in_a_row > 0 or bool(self.outage)) and not self._quiet

    @property
    def _quiet(self) -> bool:
        return SYSTEM_CLOCK.monotonic() - self._begun_at >= QUIET_SECONDS

    def failed(self, error: Exception) -> None:
        if self._quiet and self.task is not None:
            self.in_a_row = self.outages = 0
            self._pause.reset()
        if isinstance(error, StoreError):
            self.outages += 1
            self.outage = str(error)
        else:
            self.failures += 1
            self.in_a_row += 1
            self.error = shown(error)
        self._watcher.report(self, error, self._pause.seconds)
        if self.in_a_row >= MOST_FAILURES and self.essential and not self.broken:
            self._break()

    def next_pause(self) -> float:
        """For a part that is no task: how long to wait before the next try."""
        return self._pause.next()

    async def run(self, work: Work) -> None:
        while True:
            self._begun_at = SYSTEM_CLOCK.monotonic()
            try:
                await work(self)
                self._stopping = True  # the task returns only when it was asked to stop
                return
            except asyncio.CancelledError as error:
                if _is_being_cancelled():
                    raise
                # A driver raised it, or another task's cancellation has come through: nobody has cancelled this task.
                self.failed(RelightError(f"a cancellation came from inside: {shown(error)}"))
            except Exception as error:  # noqa: BLE001 - any error: without this task, runs would stand still in silence
                self.failed(error)
            await self._pause.wait()

    async def over(self, within_seconds: float) -> None:
        """The task was asked to end: wait for that. After this time, cancel it."""
        if self.task is not None and not self.task.done():
            await asyncio.wait([self.task], timeout=within_seconds)
        await self.stop()

    async def stop(self) -> None:
        """Cancel the task until it has ended. One cancellation may not be enough: a driver may swallow a cancellation
        that comes together with an answer or an error (gRPC does). A task that then tries again would go on."""
        self._stopping = True
        task = self.task
        while task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_SECONDS)

    def ended(self, _: object) -> None:
        """The task is over. After a cancellation by the program it is not started again: the program probably ends."""
        if not self._stopping:
            self.error = "its task was cancelled by the program"
            self._break()

    def _break(self) -> None:
        self.broken, self._broken_at = True, SYSTEM_CLOCK.monotonic()
        if self.essential:
            self._watcher.broke(self)

    @property
    def health(self) -> PartHealth:
        return PartHealth(
            name=self.name,
            failures=self.failures,
            failing=self.failing,
            broken=self.broken,
            error=self.outage or self.error,
        )


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _log(part: Part, error: Exception, pause_seconds: float) -> None:
    """Report to the log. For a supervisor without an engine: of a store opened by itself, in a test."""
    logging.getLogger("relight").warning("%s: %r; trying again in %.2gs", part.name, error, pause_seconds)


class Supervisor:
    """One per engine; its parts may live on several loops."""

    def __init__(self, report: Callable[[Part, Exception, float], None] = _log) -> None:
        self.report = report
        # Called in the thread of the part: an essential part cannot be kept alive; no part is broken any more.
        self.on_broken: Callable[[Part], None] | None = None
        self.on_mended: Callable[[Part], None] | None = None
        self.on_back: Callable[[Part], None] | None = None  # an outage with more than one failed round is over
        self.parts: dict[str, Part] = {}

    def part(self, name: str, *, essential: bool = True) -> Part:
        """A part that is no task (a thread), and itself reports how it is."""
        part = self.parts[name] = Part(name, self, essential=essential)
        return part

    def keep(self, name: str, work: Work, *, essential: bool = True) -> Part:
        """Keep `work` alive on the running loop, until `Part.stop`. It runs in a context of its own, because it is part
        of no run, also if a run's code starts it. The loop's task factory is not used: it may be an eager one."""
        part = self.part(name, essential=essential)
        loop, empty = asyncio.get_running_loop(), contextvars.Context()
        part.task = asyncio.Task(part.run(work), loop=loop, name=f"relight-{name}", context=empty)
        part.task.add_done_callback(part.ended)
        return part

    async def stop(self) -> None:
        """Stop the tasks that are left on this loop."""
        loop = asyncio.get_running_loop()
        here = [part for part in self.parts.values() if part.task is not None and part.task.get_loop() is loop]
        await asyncio.gather(*(part.stop() for part in here))

    def back(self, part: Part) -> None:
        if self.on_back is not None:
            self.on_back(part)

    def broke(self, part: Part) -> None:
        if self.on_broken is not None:
            self.on_broken(part)

    def mended(self, part: Part) -> None:
        if self.on_mended is not None and not self.trouble:
            self.on_mended(part)

    @property
    def failing(self) -> str:
        """Which parts are failing or broken, and why; "" if none is."""
        failing = [part for part in self.parts.values() if part.failing or part.broken]
        return "; ".join(f"{part.name} fails: {part.outage or part.error}" for part in failing)

    @property
    def trouble(self) -> str:
        """Which essential parts cannot be kept alive, and why; "" if all can."""
        broken = [part for part in self.parts.values() if part.broken and part.essential]
        return "; ".join(f"{part.name} keeps failing: {part.error}" for part in broken)
