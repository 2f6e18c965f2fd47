"""Operation: something that flow code has asked for and waits for, from asking to the moment its outcome reaches the flow.

            asked ──▶ begun ──▶ recorded ──▶ told
              ╲                               ▲
               ╲── on replay: its outcome is in the journal, and comes in its turn

It is the future that the flow waits for, on the run's own loop. What it does (a step's body, a timer, a message) happens on the
program's loop and ends with an entry in the journal; when that is durable, the run tells the flow, one outcome at a time.

A flow may give up on it (task.cancel(), asyncio.timeout). Most operations end at once then. A step whose body is a coroutine
`lingers`: as in plain asyncio, the body is cancelled, and whoever waits for it waits until its clean-up is over.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from relight.execution.body_tasks import Body
from relight.model.journal import OperationCancelled
from relight.model.replay import Ending, Open, Outcome

if TYPE_CHECKING:
    from relight.flow.scope import Scope
    from relight.run.live_run import LiveRun


_init_future = asyncio.Future.__init__
GIVEN_UP = asyncio.CancelledError()  # as an operation's `error`: what it had begun was cancelled, as the flow wanted


class Operation(asyncio.Future[Any]):
    """Base of all operations; subclasses say what it is to begin one, and what its recorded outcome means."""

    # One is made for every step: in a dict these would take three times as long to set and to read.
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

    kind = "any"  # of its outcome
    lingers = False
    interruptible = True  # RunCancelled is raised at it
    ends_later = False  # when the run is cancelled: not at once, but when what it had begun has ended

    def __init__(self, run: LiveRun, scope: Scope, key: str) -> None:
        _init_future(self, loop=run.loop)
        self.run = run
        self.scope = scope
        self.key = key
        # Where it is.
        self.begun: Open | None = None  # what the journal knows of its beginning
        self.recorded = False  # its end stands in the journal, or in a commit on its way there
        self.unheard = False  # and was recorded before the run's cancellation, which the flow hears instead
        self.given_up = False  # the flow did, and waits for what it had begun to end
        self.interrupted = False  # the run was cancelled meanwhile: whatever comes of it, the flow gets RunCancelled
        self.waiting = False  # only for a time or a message: nothing is being done for it
        self.body: Body | None = None  # what is being done for it on the program's loop
        self.value: Any = None  # how it ended, for the flow
        self.error: BaseException | None = None

    @property
    def entries(self) -> tuple[str, ...]:
        """The keys of the entries that record its end."""
        return (self.key,)

    # ---- for subclasses

    def begin(self) -> None:
        """Do it. Called once, when it is not replayed."""
        raise NotImplementedError

    def accept(self, outcome: Outcome) -> bool:
        """Take its recorded outcome as `value` or `error`. False: it does not count, and the operation is done anew."""
        raise NotImplementedError

    def stop(self) -> None:
        """The flow gave up on it, or the run was cancelled: whatever it does is in vain."""
        self.halt()

    @property
    def at_work(self) -> asyncio.Task[None] | None:
        """The task of the program's loop that does something for it."""
        return None if self.body is None else self.body.task

    def halt(self) -> None:
        """Cancel that. What has not begun looks for itself whether it is still wanted."""
        task = self.at_work
        if task is not None:
            task.cancel()

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """On the program's loop, in a task."""
        self.body = Body(work, contextvars.Context())
        self.run.services.bodies.start(self.body)

    def silence(self) -> None:
        """The run leaves memory, or has ended: no timer of it may go off any more."""

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
        """Called by whoever cancels the task that waits for it."""
        if self.done():
            return False
        if self.run.stopping is not None:  # not by the flow's wish: it leaves memory, and what is under way may finish
            return super().cancel(msg)
        if self.interrupted:  # by the run's cancellation, which the flow hears when what it had begun has ended
            return True
        if self.recorded:
            # Too late for what was done, but the flow never hears of it; and replay must know that, before anything follows.
            for key in self.entries:
                self.run.record(OperationCancelled(key, True, self.given_up, self.run.now()))
            self.run.unsettled += 1
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
        """What was recorded for it is given to others, if it is something that must not be lost."""

    @property
    def was_interrupted(self) -> bool:
        """Whether it was under way when its process died, and may not be repeated."""
        return self.begun is not None and self.begun.fatal

    def cut_short(self) -> bool:
        """Whether nobody wants it any more."""
        return self.given_up or self.interrupted

    # ---- its outcome reaches the flow

    def tell(self) -> None:
        """Give the flow `value` or `error`."""
        if self.done():
            return
        if self.error is None:
            self.set_result(self.value)
        elif isinstance(self.error, StopIteration):  # a future refuses to carry it
            self.set_exception(RuntimeError(f"StopIteration escaped: {self.error!r}"))
        else:
            self.set_exception(self.error)

    def break_off(self, error: BaseException) -> None:
        """The flow gets this instead of its outcome."""
        if not self.done():
            self.set_exception(error)

    def tell_given_up(self) -> None:
        """What it had begun was cancelled and is over."""
        super().cancel()


class Recorded(Operation):
    """Waits for nothing but its own entry to be durable: the end of a child run or of an item."""

    def __init__(self, run: LiveRun, scope: Scope, key: str, record: Any) -> None:
        super().__init__(run, scope, key)
        self._record = record

    def begin(self) -> None:
        self._record(self)

    def accept(self, outcome: Outcome) -> bool:
        return True  # the code that led to it has been executed again, and has its value


class Finished(Operation):
    """A child run or an item that ended before the crash: its code is not called again, and its end comes in its turn."""

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
