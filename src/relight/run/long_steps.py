"""Steps that take long: their start is journaled while they are under way, so that everybody can see them.

A step's start costs no commit of its own: it stands in the entry of its end. Whoever looks at a run from outside would see
nothing of a step that has been at work for an hour. So a step that has been under way for LONG_SECONDS is announced by a
StepStarted. One timer of the process serves all of them, and their entries share a commit; there is no timer, and nothing is
written, while no step waits for anything.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from relight.clock import Clock, Timer
from relight.model.journal import StepStarted
from relight.run.phase import DRIVEN
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.run.steps import StepOperation

LONG_SECONDS = 1.0
LEAST_PAUSE_SECONDS = 0.25  # between two looks: what becomes long in between is announced together


class LongSteps:
    """One per engine. Knows the steps whose bodies are under way and whose start is not journaled."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way: dict[Any, tuple[float, int]] = {}  # when each began, by the monotonic clock, and its attempt
        self._timer: Timer | None = None

    def add(self, operation: StepOperation, attempt: int) -> None:
        """Its body has begun, and has not ended at once."""
        self._under_way[operation] = self._clock.monotonic(), attempt
        if self._timer is None:
            self._timer = self._clock.call_later(LONG_SECONDS, self.look)

    def drop(self, operation: Any) -> None:
        """Its body has ended."""
        self._under_way.pop(operation, None)

    def stop(self) -> None:
        """The engine closes."""
        self._under_way.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Announce those that have become long, and look again when the next one does."""
        self._timer = None
        now = self._clock.monotonic()
        long: list[tuple[StepOperation, int]] = []
        for operation, (since, attempt) in self._under_way.items():  # the oldest comes first
            if now - since < LONG_SECONDS:
                break
            long.append((operation, attempt))
        for operation, attempt in long:
            try:
                announced = _announce(operation, attempt)
            except Exception as error:  # noqa: BLE001 - a bug of ours: the others are announced all the same
                log(
                    logging.CRITICAL, Token.INTERNAL_ERROR, f"announcing step {operation.key!r} broke: {error!r}", error
                )
                announced = True
            del self._under_way[operation]
            if not announced:
                self._under_way[operation] = now, attempt  # looked at again after the same time
        if self._under_way:
            since, _ = next(iter(self._under_way.values()))
            pause = max(since + LONG_SECONDS - now, LEAST_PAUSE_SECONDS)
            self._timer = self._clock.call_later(pause, self.look)


def _announce(operation: StepOperation, attempt: int) -> bool:
    """False: not yet."""
    run = operation.run
    if run.phase is not DRIVEN or operation.recorded or operation.done() or operation.cut_short():
        return True  # nobody needs to know any more
    if run.replay is not None:
        return False  # it is done anew in the midst of replay, and nothing else is written then
    run.announce(StepStarted(operation.key, attempt, operation.began, None, False))
    return True
