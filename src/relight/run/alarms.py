"""Alarms: the times at which a run is due while it is in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relight.clock import Timer
from relight.run.operation import Operation
from relight.run.phase import DRIVEN

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun

# Timers are re-armed at least this often, because a deadline is wall-clock time and timers count monotonic time.
LONGEST_TIMER_SECONDS = 3600.0


class Timers:
    """The timers of one run."""

    __slots__ = ("due", "of_calls", "overdue")

    def __init__(self) -> None:
        self.due: dict[str, float] = {}  # when the operations that wait for a time are due, by key
        self.overdue: list[Alarm] | None = None  # when replay ends: the alarms whose time has passed meanwhile
        self.of_calls: dict[int, dict[Operation, None]] = {}  # asyncio's timers, which end with their call of a flow


class Alarm:
    """Calls back at a wall-clock time. Until then, that time is one of `Timers.due`."""

    __slots__ = ("_callback", "_key", "_run", "_timer", "until")

    def __init__(self, run: LiveRun, key: str, until: float, callback: Any) -> None:
        self._run = run
        self._key = key
        self.until = until
        self._callback = callback
        self._timer: Timer | None = None
        run.timers.due[key] = until
        self._arm()

    def _arm(self) -> None:
        run = self._run
        remaining = self.until - run.services.clock.now()
        if remaining > 0:
            self._timer = run.services.clock.call_later(min(remaining, LONGEST_TIMER_SECONDS), self._arm)
        elif run.timers.overdue is not None:
            run.timers.overdue.append(self)
        else:
            self.go_off()

    def go_off(self) -> None:
        """Its time has come."""
        if self._key in self._run.timers.due:
            self.cancel()
            if self._run.phase is DRIVEN:
                self._callback()

    def cancel(self) -> None:
        self._run.timers.due.pop(self._key, None)
        if self._timer is not None:
            self._timer.cancel()
