"""Steps that take long: their start is journaled while they are under way, so that users can see them.

The start of a step costs no commit of its own: it is part of the entry of the step's end. So a user who looks at a run
would not see a step that has been under way for an hour. A step that has been under way for LONG_SECONDS is therefore
announced by a StepStarted. One timer of the process serves all steps, and their entries share a commit. While no step
waits for anything, there is no timer and nothing is written.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from relight.clock import Clock, Timer
from relight.model.journal import StepStarted
from relight.model.text import shown
from relight.run.phase import DRIVEN
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.run.steps import StepOperation

LONG_SECONDS = 1.0
LEAST_PAUSE_SECONDS = 0.25  # between two looks: steps that become long in between are announced together


class LongSteps:
    """One per engine. Knows the steps whose bodies are under way and whose start is not journaled."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way: dict[Any, tuple[float, int]] = {}  # when each began, by the monotonic clock, and its attempt
        self._timer: Timer | None = None

    def add(self, operation: StepOperation, attempt: int) -> None:
        """The body of a step has begun, and has not ended at once."""
        self._under_way[operation] = self._clock.monotonic(), attempt
        if self._timer is None:
            self._timer = self._clock.call_later(LONG_SECONDS, self.look)

    def drop(self, operation: Any) -> None:
        """The body of a step has ended."""
        self._under_way.pop(operation, None)

    def stop(self) -> None:
        """The engine closes."""
        self._under_way.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Announce the steps that have become long, and look again when the next one does."""
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
            except Exception as error:  # noqa: BLE001 - a bug in Relight: the other steps are still announced
                log(
                    logging.CRITICAL,
                    Token.INTERNAL_ERROR,
                    f"announcing step {operation.key!r} broke: {shown(error)}",
                    error,
                )
                announced = True
            del self._under_way[operation]
            if not announced:
                self._under_way[operation] = now, attempt  # it is checked again after the same time
        if self._under_way:
            since, _ = next(iter(self._under_way.values()))
            pause = max(since + LONG_SECONDS - now, LEAST_PAUSE_SECONDS)
            self._timer = self._clock.call_later(pause, self.look)


def _announce(operation: StepOperation, attempt: int) -> bool:
    """Journal the start of a step. False: it cannot be journaled yet."""
    run = operation.run
    if run.phase is not DRIVEN or operation.recorded or operation.done() or operation.cut_short():
        return True  # its start is of no interest any more
    if run.replay is not None:
        return False  # the step is done again during replay, and nothing but its end is written then
    run.announce(StepStarted(operation.key, attempt, operation.began, None, False))
    return True
