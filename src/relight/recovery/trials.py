"""Trials: the suspects that this orchestrator tries now, apart from all others (see model/decisions.py).

A trial ends when all runs on trial have made progress or left memory, or when its time is over. A run that has made no
progress by then has passed, and its journal says so: a later death of this process is no longer blamed on that run
alone. Then the suspects that this process let wait are taken up again. Suspects that wait because of other processes
come when they are due.

If this process dies during a trial, the journals of the runs on trial say with how many others each was tried.
"""

from __future__ import annotations

from collections.abc import Callable

from relight.clock import Timer
from relight.model import journal as j
from relight.model.run import Run
from relight.run.live_run import LiveRun
from relight.run.services import Services

MAX_WAITING = 1000  # suspects that are taken up as soon as a trial is over; others come when they are due


class Trials:
    """One per orchestrator. `wake` takes up runs without an owner."""

    def __init__(self, services: Services, wake: Callable[[list[Run]], None]) -> None:
        self._services = services
        self._wake = wake
        self._tried: dict[str, tuple[LiveRun, int]] = {}  # with the number of its entries when the trial began
        self._waiting: dict[str, Run] = {}
        self._timer: Timer | None = None
        self.ends_at = 0.0

    def count(self) -> int:
        """How many runs are on trial now. A run that has made progress no longer is. Progress is any new entry of its
        journal but one that announces an attempt, as in model/crashes.py."""
        self._tried = {
            run_id: (run, begun_at)
            for run_id, (run, begun_at) in self._tried.items()
            if run.writer.sequence - run.announced <= begun_at and not run.over and not run.writer.lost
        }
        return len(self._tried)

    def begin(self, run: LiveRun, seconds: float) -> None:
        """This suspect is driven from now on."""
        self._tried[run.id] = run, run.writer.sequence - run.announced
        self._waiting.pop(run.id, None)
        self.ends_at = max(self.ends_at, self._services.clock.now() + seconds)
        self._set_timer(seconds)

    def wait(self, row: Run, epoch: int) -> None:
        """This suspect was released, to wait for its turn."""
        if len(self._waiting) < MAX_WAITING:
            row.owner, row.epoch = None, epoch
            self._waiting[row.id] = row

    def left(self, run_id: str) -> None:
        """A run has left memory."""
        if run_id in self._tried:
            del self._tried[run_id]
            if not self.count():
                self._over()

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._services.clock.call_later(seconds, self._time_is_over)

    def _time_is_over(self) -> None:
        now = self._services.clock.now()
        if now < self.ends_at:
            self._set_timer(self.ends_at - now)
            return
        self.count()
        for run, _ in self._tried.values():
            if run.stopping is None:
                run.writer.add(j.RunRecovered("", self._services.owner, None, now, died=False))
        self._tried.clear()
        self._over()

    def _over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.ends_at = None, 0.0
        waiting, self._waiting = list(self._waiting.values()), {}
        if waiting:
            self._wake(waiting)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
