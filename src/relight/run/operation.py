"""Operation: something that flow code asks for and waits for, until its outcome reaches the flow.

            asked ──▶ begun ──▶ recorded ──▶ told
              ╲                               ▲
               ╲── on replay: its outcome is in the journal, and comes in its turn

An operation is the future that the flow waits for, on the run's own loop. Its work (a step's body, a timer, a message)
happens on the program's loop and ends with an entry in the journal. When that entry is durable, the run tells the flow,
one outcome at a time.

A flow may give up on an operation (task.cancel(), asyncio.timeout). Most operations end at once then. A step whose body
is a coroutine `lingers`: as in plain asyncio, the body is cancelled, and the flow waits until its clean-up is over.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from relight.execution.body_tasks import Body
from relight.model.journal import OperationCancelled
from relight.model.replay import Ending, Open, Outcome
from relight.model.text import shown

if TYPE_CHECKING:
    from relight.flow.scope import Scope
    from relight.run.live_run import LiveRun


_init_future = asyncio.Future.__init__
GIVEN_UP = asyncio.CancelledError()  # as an operation's `error`: its work was cancelled, or never began


class Operation(asyncio.Future[Any]):
    """Base of all operations. Subclasses define how an operation begins, and what its recorded outcome means."""

    # Every step makes an operation. In a dict, these attributes would take three times as long to set and to read.
    __slots__ = (
        "begun",
        "body",
        "error",
        "given_up",
        "interrupted",
        "key",
        "recorded",
        "run",
        "scope",
        "unheard",
        "value",
        "waiting",
    )

    kind = "any"  # the kind of its outcome
    lingers = False
    interruptible = True  # when the run is cancelled, RunCancelled is raised where the flow waits for this
    needs_room = False  # what it waits for happens in another run, which may need the room or the thread of this one
    ends_later = False  # when the run is cancelled, it ends when its work has ended, not at once

    def __init__(self, run: LiveRun, scope: Scope, key: str) -> None:
        _init_future(self, loop=run.loop)
        self.run = run
        self.scope = scope
        self.key = key
        # How far it has come.
        self.begun: Open | None = None  # what the journal has of its beginning
        self.recorded = False  # its end is in the journal, or in a commit that is under way
        self.unheard = False  # its end was recorded before the run's cancellation: the flow is told only the latter
        self.given_up = False  # the flow has given up on it, and waits until its work has ended
        self.interrupted = False  # the run was cancelled meanwhile: the flow gets RunCancelled, whatever the outcome is
        self.waiting = False  # it only waits for a time or a message: nothing is being done for it
        self.body: Body | None = None  # its work on the program's loop
        self.value: Any = None  # how it ended, as the flow gets it
        self.error: BaseException | None = None

    @property
    def entries(self) -> tuple[str, ...]:
        """The keys of the entries that record its end."""
        return (self.key,)

    # ---- for subclasses

    def begin(self) -> None:
        """Begin its work. Called once, unless its outcome is replayed."""
        raise NotImplementedError

    def accept(self, outcome: Outcome) -> bool:
        """Set `value` or `error` from the recorded outcome. False: it does not count, the operation is done again."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop its work: the flow has given up on it, or the run was cancelled."""
        self.halt()

    @property
    def at_work(self) -> asyncio.Task[None] | None:
        """The task of the program's loop that does its work."""
        return None if self.body is None else self.body.task

    def halt(self) -> None:
        """Cancel that task. Work that has not begun checks by itself whether it is still wanted."""
        task = self.at_work
        if task is not None:
            task.cancel()

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` in a task of the program's loop."""
        self.body = Body(work, contextvars.Context())
        self.run.services.bodies.start(self.body)

    def silence(self) -> None:
        """Cancel its timer: the run leaves memory or has ended."""

    # ---- what it is doing

    def only_waits(self) -> None:
        """From now on it waits for a time or a message."""
        if not self.waiting:
            self.waiting = True
            self.run.busy -= 1

    def waits_no_more(self) -> None:
        """It no longer only waits."""
        if self.waiting:
            self.waiting = False
            self.run.busy += 1

    # ---- the flow gives up on it

    def cancel(self, msg: Any = None) -> bool:
        """Called when the flow's task that waits for it is cancelled."""
        if self.done():
            return False
        if self.run.stopping is not None:  # the run leaves memory, the flow has not given up: its work may finish
            return super().cancel(msg)
        if self.interrupted:  # the flow is told the run's cancellation when the work has ended
            return True
        if self.recorded:
            # The work is done, but the flow is never told. Replay must know that before a later step takes effect.
            for key in self.entries:
                self.run.record(OperationCancelled(key, True, self.given_up, self.run.now()))
            self.run.seen_not_durable += 1
            self.take_back()
        elif self.lingers and (self.run.replay is None or self.run.replay.lets_linger(self)):
            self.given_up = True
            self.stop()
            return True
        else:
            if self.begun is not None or self.waiting:
                self.run.note(OperationCancelled(self.key, by_flow=True, at=self.run.now()))
            self.stop()
        self.run.forget(self)
        return super().cancel(msg)

    def take_back(self) -> None:
        """Give what was recorded for it to other waits, if it must not be lost."""

    @property
    def was_interrupted(self) -> bool:
        """Whether it was under way when its process died, and must not be repeated."""
        return self.begun is not None and self.begun.fatal

    def cut_short(self) -> bool:
        """Whether its outcome is no longer wanted: the flow has given up on it, or the run was cancelled."""
        return self.given_up or self.interrupted

    # ---- its outcome reaches the flow

    def tell(self) -> None:
        """Give the flow `value` or `error`."""
        if self.done():
            return
        if self.error is None:
            self.set_result(self.value)
        elif isinstance(self.error, StopIteration):  # a future refuses to carry it
            self.set_exception(RuntimeError(f"StopIteration escaped: {shown(self.error)}"))
        else:
            self.set_exception(self.error)

    def break_off(self, error: BaseException) -> None:
        """Give the flow this error instead of the outcome."""
        if not self.done():
            self.set_exception(error)

    def tell_given_up(self) -> None:
        """Its work was cancelled and has ended: the flow gets CancelledError."""
        super().cancel()


class Recorded(Operation):
    """Waits only until its own entry is durable: the end of a child run or of an item."""

    def __init__(self, run: LiveRun, scope: Scope, key: str, record: Any) -> None:
        super().__init__(run, scope, key)
        self._record = record

    def begin(self) -> None:
        self._record(self)

    def accept(self, outcome: Outcome) -> bool:
        return True  # the flow's code was executed again up to here, and has the value


class Finished(Operation):
    """A child run or an item whose end is in the journal: its code is not called again, its end is told in its turn."""

    lingers = True

    def __init__(self, run: LiveRun, scope: Scope, key: str, outcome: Outcome, open_: Any) -> None:
        super().__init__(run, scope, key)
        self.kind = outcome.kind
        self.outcome = outcome
        self._open = open_

    def accept(self, outcome: Outcome) -> bool:
        assert outcome.ending in (Ending.OK, Ending.ERROR)
        self.value, self.error = self._open(outcome)
        return True
