"""Bugs to plant into the engine of a child process, to prove that the checks find them. Each is a bug that a change of the engine
could bring in by mistake."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from relight.model.replay import Outcome
from relight.record.writer import Writer
from relight.run import waits
from relight.run.live_run import LiveRun
from relight.run.replay_order import Replay
from relight.run.steps import StepOperation


def reversed_batches() -> None:
    """Outcomes of one commit are told in the reverse of the journal's order."""
    settle = Writer.committed_up_to

    def planted(self: Writer, sequence: int) -> Callable[[], None] | None:
        if isinstance(self._sent_told, list):
            self._sent_told.reverse()
        return settle(self, sequence)

    Writer.committed_up_to = planted  # type: ignore[method-assign]


def forgotten_timer() -> None:
    """One in seven timers is not set again when a run comes back."""
    begin = waits.Wait.begin
    count = itertools.count(1)

    def planted(self: waits.Wait) -> None:
        if self.begun is not None and next(count) % 7 == 0:
            self.only_waits()
        else:
            begin(self)

    waits.Wait.begin = planted  # type: ignore[method-assign]


def stale_outcome() -> None:
    """Now and then a step that is replayed gets the outcome of another call of the same step."""
    accept = StepOperation.accept
    last: dict[tuple[str, str], Outcome] = {}
    count = itertools.count(1)

    def planted(self: StepOperation, outcome: Outcome) -> bool:
        before = last.get((self.run.id, self.step.name))
        last[self.run.id, self.step.name] = outcome
        if before is not None and outcome.error is None and before.error is None and next(count) % 5 == 0:
            outcome.output = before.output
        return accept(self, outcome)

    StepOperation.accept = planted  # type: ignore[method-assign]


def two_at_once() -> None:
    """Live, two outcomes that are ready are told without letting the flow come to rest in between."""
    tell = LiveRun.tell

    def planted(self: LiveRun, what: Any) -> None:
        tell(self, what)
        if self.replay is None and self.told and self.stopping is None:
            tell(self, self.told.popleft())

    LiveRun.tell = planted  # type: ignore[method-assign, assignment]


def early_ends() -> None:
    """On replay, outcomes of child runs and items are told before the other outcomes, as if they had no place in the order."""
    made = Replay.__init__

    def planted(self: Replay, *args: Any) -> None:
        made(self, *args)
        order = list(self._order)
        boxes = [key for key in order if key in self.boxes]
        self._order.clear()
        self._order.extend(boxes + [key for key in order if key not in self.boxes])

    Replay.__init__ = planted  # type: ignore[method-assign, assignment]


PLANTS: dict[str, Callable[[], None]] = {
    made.__name__: made for made in (reversed_batches, forgotten_timer, stale_outcome, two_at_once, early_ends)
}


def plant(name: str) -> None:
    PLANTS[name]()
