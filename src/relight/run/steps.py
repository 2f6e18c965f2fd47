"""Steps, as the flow sees them: awaiting a `StepCall` asks for the step, and a `StepOperation` is what it waits for.

Unless the journal has the outcome, the step's body is called on the program's loop: see `step_bodies.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from relight.clock import SYSTEM_CLOCK
from relight.errors import NonDeterminismError, Unwind, VersionMismatchError
from relight.execution.body_tasks import OVER
from relight.flow import garbage
from relight.flow.call import Call
from relight.flow.changed_arguments import changed_arguments
from relight.flow.definitions import Step
from relight.flow.payloads import rebuild_error
from relight.flow.scope import CURRENT, Scope, here
from relight.model.replay import Outcome
from relight.model.run import Hold
from relight.run import step_bodies
from relight.run.operation import Operation
from relight.run.phase import DRIVEN
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun


_monotonic = SYSTEM_CLOCK.monotonic
MOST_SAID = 10_000  # changes that are remembered as logged
MOST_LISTED = 20  # steps in flight at a crash that a run's own log names
_init_future = asyncio.Future.__init__


class StepOperation(Operation):
    """One step call of a flow."""

    __slots__ = ("args", "began", "context", "coro", "digest", "kwargs", "on_result", "parts", "step", "task")

    kind = "step"
    ends_later = True
    in_thread = False
    item = ""  # the scope of the foreach item that this step does, if any

    def __init__(
        self,
        run: LiveRun,
        scope: Scope,
        key: str,
        step: Step[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        _init_future(self, loop=run.loop)  # as Operation.__init__ does, without a call: every step comes here
        self.run = run
        self.scope = scope
        self.key = key
        self.begun = None
        self.recorded = self.unheard = self.given_up = self.interrupted = self.waiting = False
        self.body = self.value = self.error = None
        self.step = step
        self.args = args
        self.kwargs = kwargs
        self.digest, self.parts = (
            step.arguments.digests(args, kwargs)
            if run.replay is None
            else step.arguments.digests(args, kwargs, run.replay.digest_of(key))
        )
        # The body sees the context variables that the flow has set so far. What the body sets, only the body sees.
        self.context = contextvars.copy_context()
        self.task: asyncio.Task[None] | None = None
        self.on_result: Callable[[bytes, Any], None] | None = None  # of a foreach item: records its end

    @property
    def entries(self) -> tuple[str, ...]:
        return (self.key, self.item) if self.item else (self.key,)

    @property
    def lingers(self) -> bool:  # type: ignore[override]
        return self.step.is_async or self.was_interrupted

    def begin(self) -> None:
        run = self.run
        if run.recovered:
            _say_repeated(self)
        run.services.bodies.start(self)

    @property
    def at_work(self) -> asyncio.Task[None] | None:
        return self.task

    def stop(self) -> None:
        """A body in a thread cannot be stopped. A cancelled run waits for it, since it may have taken effect."""
        if not (self.in_thread and self.interrupted):
            self.halt()

    # ---- Work: see body_tasks.py

    def first_stretch(self) -> Any:
        run = self.run
        self.began = run.now()
        plainly = not (
            not self.step.plain
            or (run.seen_not_durable and run.has_seen_not_durable())
            or run.lapses != run.heartbeats.lapses  # this line and the next are run.lease_has_lapsed
            or _monotonic() >= run.heartbeats.valid_until
            or self.given_up
            or self.interrupted
            or run.phase is not DRIVEN
            or self.done()
        )
        coro: Any = step_bodies.do_plainly(self) if plainly else step_bodies.do(self)
        try:
            awaited = next(coro.__await__(), OVER)
        except BaseException as error:  # noqa: BLE001 - any error ends only this body
            self.close(error)
            return OVER
        if awaited is not OVER:
            self.coro = coro
            self.parts = self.parts or self.step.arguments.parts(self.args, self.kwargs)
            if plainly:
                run.inflight[self.key] = self
                run.services.long_steps.add(self, 1)
        return awaited

    def close(self, error: BaseException) -> None:
        if not isinstance(error, Unwind):
            step_bodies.ended_badly(self, error)

    def accept(self, outcome: Outcome) -> bool:
        # An interrupted step is never executed again, even if its arguments or its code have changed since.
        same = outcome.digest == self.digest and outcome.fingerprint == self.step.fingerprint
        if not same and not outcome.interrupted and not _still_valid(self, outcome):
            return False
        if outcome.error is not None:
            self.error = rebuild_error(outcome.error)
        else:
            self.value = self.run.open(self.step.result, outcome)
        return True


class StepCall(Call):
    """A step, called in flow code. Awaiting it asks for the step. This is the hottest code, so it is one function."""

    def __await__(self) -> Generator[Any, Any, Any]:
        if garbage.collector and garbage.runs_this():
            return garbage.for_ever()
        if self._unawaited.pop(self._number, None) is None:
            self.refuse()
        run: LiveRun
        run, scope, step, args, kwargs = self._args
        self._args = ()
        if scope.thread is None:
            current = CURRENT.get()
            scope = current if type(current) is Scope else here(scope)
        try:
            operation = StepOperation(run, scope, scope.begin(step.name), step, args, kwargs)
            if run.replay is not None or run.kept or run.left_open or run.cancel_reason is not None or run.recovered:
                return run.ask(operation)  # type: ignore[return-value]  # an iterator of the same kind
        except Unwind as error:
            if error.stubborn:
                return garbage.for_ever()  # its code catches every Unwind: it waits here for ever
            raise
        # Nearly always. This does what ask() does, and begin() when the flow is at rest: no body begins before that.
        run.pending[operation.key] = operation
        run.busy += 1
        run.services.bodies.queue.append(operation)  # RunningLoop.give_back has a runner look at the queue
        return operation.__await__()


def _still_valid(op: StepOperation, outcome: Outcome) -> bool:
    """Whether an outcome that was recorded with other code or arguments is used. The run may be held instead."""
    run, step, key = op.run, op.step, op.key
    same_arguments = outcome.digest == op.digest
    if not same_arguments and outcome.sequence < run.retried_at(key):
        return False  # a retried flow did something else: this is not the call that was recorded
    policy = run.services.config.recovery.version_mismatch
    if outcome.fingerprint != step.fingerprint:
        what = f"code or options changed ({outcome.fingerprint} → {step.fingerprint})"
        done = {"warn": "its result is used", "rerun": "it is executed again", "fail": "the run is held"}[policy]
        _say_changed(run, Token.FINGERPRINT_MISMATCH, f"step {key!r}: {what} since it was recorded; {done} ({policy})")
        if policy == "fail":
            why = (
                f"step {key!r}: {what} since it was recorded; restore the old code, or set version_mismatch to warn or "
                "rerun, then resume the run"
            )
            run.stuck(Hold.VERSION, VersionMismatchError(why))
        return policy != "rerun"
    what, hint = changed_arguments(
        step.arguments, op.args, op.kwargs, outcome.parts, op.parts or step.arguments.parts(op.args, op.kwargs)
    )
    done = "it is executed again" if policy == "rerun" else "the run is held"
    aside = f" ({hint})" if hint else ""
    _say_changed(run, Token.INPUT_MISMATCH, f"step {key!r}: {what} since it was recorded{aside}; {done} ({policy})")
    if policy == "rerun":
        return False
    # The step's code is the same, so the flow's code was changed or is not deterministic. The result is another call's.
    why = (
        f"step {key!r}: {what} since it was recorded, and its code has not: the flow's code was changed, or is not "
        f"deterministic{aside}; restore it, name the argument in @step(volatile=...), or set version_mismatch to rerun, then "
        "resume the run"
    )
    run.stuck(Hold.NONDETERMINISM, NonDeterminismError(why))
    return True


def _say_changed(run: LiveRun, token: Token, text: str) -> None:
    """Write it to the log and to the run's own log, but only once in the life of this process: a run that wakes up a
    thousand times finds the same change each time."""
    said = run.services.said
    if (run.id, text) not in said:
        if len(said) >= MOST_SAID:
            said.clear()
        said.add((run.id, text))
        log(logging.WARNING, token, f"run {run.id}: {text}")
        run.when_live(lambda: run.log(token, text))


def _say_repeated(op: StepOperation) -> None:
    begun = op.begun
    if begun is not None and begun.fatal:
        return
    if begun is not None and begun.until is not None and begun.until > op.run.now():
        return  # it was in its back-off
    run = op.run
    run.services.metrics.steps_repeated.inc()
    run.recovered += 1
    log(
        logging.INFO,
        Token.STEP_REPEATED,
        f"run {run.id}: step {op.key!r} may have been in flight at the crash; executing it",
    )
    what = f"step {op.key!r} may" if run.recovered <= MOST_LISTED + 1 else "more steps, which are not listed, may"
    if run.recovered <= MOST_LISTED + 2:
        run.log(Token.STEP_REPEATED, f"{what} have been in flight when its last owner died; executed again")
