"""Steps: what the flow asks for, and what is done for it on the program's loop.

Awaiting a `StepCall` in the flow asks for the step and waits for the outcome. `_do` is what happens then, unless the
journal has the outcome: the body is called, and its end is recorded. The short way (async steps without retry, timeout or
on_crash="fail") is the hot path: one digest, one encode, one group commit. Everything that has more to remember goes through
`_attempts`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from relight.clock import SYSTEM_CLOCK, time_limit
from relight.errors import (
    NonDeterminismError,
    StepError,
    StepInterruptedError,
    StepTimeoutError,
    Unwind,
    VersionMismatchError,
)
from relight.flow.call import Call, for_ever
from relight.flow.definitions import Step
from relight.flow.payloads import rebuild_error, record_error
from relight.flow.scope import CURRENT, Scope, StepInfo, here
from relight.lifecycle import cancel, hold, waits
from relight.lifecycle.bodies import OVER
from relight.lifecycle.operation import Operation
from relight.lifecycle.run_record import RUNNING
from relight.model.journal import StepCompleted, StepFailed, StepRetrying, StepStarted
from relight.model.replay import Outcome
from relight.model.run import Hold
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.lifecycle.run import LiveRun


_monotonic = SYSTEM_CLOCK.monotonic
_init_future = asyncio.Future.__init__


class StepOperation(Operation):
    """One step call of a flow."""

    __slots__ = ("args", "context", "coro", "digest", "kwargs", "on_result", "step", "task")

    kind = "step"
    ends_later = True
    in_thread = False
    item = ""  # of a foreach, if that is what it does

    def __init__(
        self,
        run: LiveRun,
        scope: Scope,
        key: str,
        step: Step[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        _init_future(self, loop=run.loop)  # as Operation.__init__ does: this is every step
        self.run = run
        self.scope = scope
        self.key = key
        self.begun = None
        self.recorded = self.unheard = self.given_up = self.interrupted = self.waiting = False
        self.body = self.value = self.error = None
        self.step = step
        self.args = args
        self.kwargs = kwargs
        self.digest = step.arguments.digest(args, kwargs)
        # What the flow has set so far is seen by the body; what the body sets stays in it, as with a task.
        self.context = contextvars.copy_context()
        self.task: asyncio.Task[None] | None = None
        self.on_result: Callable[[bytes, Any], None] | None = None  # of a foreach item: records the end of both

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
        """A body in a thread cannot be stopped. When the run is cancelled it is waited for, as it may have taken effect."""
        if not (self.in_thread and self.interrupted):
            self.halt()

    # ---- Work: see bodies.py

    def first_stretch(self) -> Any:
        run = self.run
        plainly = not (
            not self.step.plain
            or (run.unsettled and run.is_unsettled())
            or run.generation != run.keeper.generation  # this and the next: run.doubtful
            or _monotonic() >= run.keeper.valid_until
            or self.given_up
            or self.interrupted
            or run.stopping is not None
            or run.over
            or self.done()
        )
        coro: Any = _do_plainly(self) if plainly else _do(self)
        try:
            awaited = next(coro.__await__(), OVER)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is how that body ended, and nothing else
            self.close(error)
            return OVER
        if awaited is not OVER:
            self.coro = coro
            if plainly:
                run.inflight[self.key] = self
        return awaited

    def close(self, error: BaseException) -> None:
        if not isinstance(error, Unwind):
            _ended_badly(self, error)

    def accept(self, outcome: Outcome) -> bool:
        # One that was interrupted is never executed again, also if it is asked for with other arguments or code now.
        if not outcome.interrupted and not _still_valid(self, outcome):
            return False
        if outcome.error is not None:
            self.error = rebuild_error(outcome.error)
        else:
            self.value = self.run.open(self.step.result, outcome)
        return True


class StepCall(Call):
    """A step, called in flow code. Awaiting it asks for the step: the hottest code there is, all of it in one function."""

    def __await__(self) -> Generator[Any, Any, Any]:
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
                return for_ever()
            raise
        # Nearly always. As ask() does, and begin() when the flow is at rest: its body is not looked at before that.
        run.pending[operation.key] = operation
        run.busy += 1
        bodies = run.services.bodies
        bodies.queue.append(operation)
        if not bodies.looking:
            bodies.look()
        return operation.__await__()


async def _do_plainly(op: StepOperation) -> None:
    """On the program's loop: call a step's body as it is, with nothing around it. Most end without having waited for anything."""
    run, step, key, run_key = op.run, op.step, op.key, op.scope.run_key
    CURRENT.set(StepInfo(run.run_id(run_key) if run_key else run.id, key, 1))
    try:
        result = await step.fn(*op.args, **op.kwargs)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is how that body ended, and nothing else
        if run.inflight:
            hold.body_ended(run, key)
        op.close(error)
        return
    if run.inflight:
        hold.body_ended(run, key)
    try:
        _completed(op, result, 1)
    except Exception as refused:  # noqa: BLE001 - a result that cannot be journaled fails the step
        _ended_badly(op, refused)


async def _do(op: StepOperation) -> None:
    """On the program's loop: execute a step that has more to remember than its result, or that cannot begin at once. Unwind:
    the run leaves memory, and what was not recorded is done again when it comes back."""
    run = op.run
    if run.stopping is not None:
        raise Unwind(run.stopping)
    if op.done() or run.over:
        return  # the flow gave up on it before it began; or ended, and left it behind
    if op.was_interrupted:
        _say_interrupted(op)
        return
    if op.cut_short():
        raise asyncio.CancelledError
    if run.is_unsettled():  # what the body may act on must be durable first, or a crash would give it something else
        mark = run.unsettled
        await run.settle()
        if (
            run.unsettled == mark and run.replay is None
        ):  # nothing new meanwhile: what came then is for those who ask after it
            run.unsettled = 0
    if run.doubtful:
        await run.confirm()
    await _attempts(op)


def _completed(op: StepOperation, result: Any, attempt: int) -> None:
    run, step = op.run, op.step
    data, op.value = step.result.seal(result, run.max_bytes)
    if run.over:
        return
    if len(data) <= run.blob_threshold:
        output, blob = Raw(data), ""
    else:
        output, blob = run.payload(data)
    completed = StepCompleted(op.key, output, blob, step.fingerprint, op.digest, attempt)
    if op.on_result is None:
        op.recorded = True  # as run.record() does
        if run.status is not RUNNING:
            run.set_running()
        run.writer.add(completed, op)
    else:
        run.record(completed)
        op.on_result(data, op.value)


def _ended_badly(op: StepOperation, error: BaseException, attempt: int = 1) -> None:
    """A step's error is an outcome like any other: durable before the flow may react to it."""
    run = op.run
    if run.over or op.done() or op.recorded:
        return  # nobody is left who could want to know
    if isinstance(error, asyncio.CancelledError):
        if run.stopping is not None:
            return  # cancelled because the run leaves memory
        if op.cut_short():
            cancel.end(op)
            return
    op.error = ordinary(error, op.step.what)
    run.record(StepFailed(op.key, record_error(op.error), op.step.fingerprint, op.digest, attempt), op)


def ordinary(error: BaseException, what: str) -> BaseException:
    """What a step or flow raises ends that step or flow, and nothing else: not the program, whatever it is."""
    if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
        name = type(error).__name__
        stand_in = StepError(f"{what} raised {name}({', '.join(map(repr, error.args))})", type_name=name)
        stand_in.__cause__ = error
        return stand_in
    return error


async def _attempts(op: StepOperation) -> None:
    """Try until it completes, its retries are used up, or nobody may try any more. `op.begun` is what a crash left behind."""
    run, step, begun = op.run, op.step, op.begun
    attempt = begun.attempt if begun else 1
    deadline = begun.deadline if begun else None
    if begun is not None and begun.until is not None:
        await _pause(op, begun.until)
    while True:
        if run.stopping is not None or run.over or op.done():
            return  # the next attempt is made when the run comes back, if it does; or the flow has given up on it
        if attempt > 1 and run.doubtful:
            await run.confirm()
        if deadline is None:
            deadline = await _announce(op, attempt)
        info = StepInfo(run.run_id(op.scope.run_key), op.key, attempt)
        try:
            _completed(op, await _body(op, info, deadline), attempt)
        except (Unwind, asyncio.CancelledError):
            raise
        except BaseException as raised:  # noqa: BLE001 - as in _do
            caught = ordinary(raised, step.what)
            if step.retry is None or not step.retry.again(attempt, caught) or op.cut_short() or run.over:
                _ended_badly(op, caught, attempt)
                return
            delay = step.retry.delay_after(attempt, run.services.entropy.random())
            until = run.services.clock.now() + delay
            text = f"run {run.id}: step {op.key!r} failed, attempt {attempt}: {caught!r}"
            log(logging.INFO, Token.STEP_RETRYING, text)
            run.record(StepRetrying(op.key, attempt, record_error(caught), until))
            run.set_running()
        else:
            return
        await _pause(op, until)
        await run.settle()
        attempt += 1
        deadline = None


def _say_interrupted(op: StepOperation) -> None:
    """It had begun when its process died. Also for a flow that has given up on it since: a retry must not execute it again."""
    run, begun = op.run, op.begun
    error = StepInterruptedError(
        f"step {op.key!r} of run {run.id!r} was running when its process died, and on_crash='fail' forbids repeating it; "
        "whether it took effect is unknown"
    )
    log(logging.WARNING, Token.STEP_INTERRUPTED, f"run {run.id}: {error}")
    _ended_badly(op, error, begun.attempt if begun else 1)


async def _pause(op: StepOperation, until: float) -> None:
    """The back-off of a retry: its end is in the journal already, and the next attempt is its end."""
    run = op.run
    if until <= run.services.clock.now():
        return
    over = run.services.loop.create_future()

    def due() -> None:
        op.stir()  # at once: a run that still seemed to wait would be parked with nothing to wake it
        if not over.done():
            over.set_result(None)

    op.rest()
    alarm = waits.Alarm(run, op.key, until, due)
    if run.blocked:  # the whole run only waits now, and the commit that holds this failure says so
        waits.blocked(run)
    try:
        await over
    finally:
        op.stir()
        alarm.cancel()


async def _announce(op: StepOperation, attempt: int) -> float | None:
    """Journal that an attempt starts, where a crash must not forget it; the attempt's deadline."""
    run, step = op.run, op.step
    fatal = step.on_crash == "fail"
    if step.timeout_seconds is None and not fatal:
        return None
    at = run.services.clock.now()
    deadline = None if step.timeout_seconds is None else at + step.timeout_seconds
    run.record(StepStarted(op.key, attempt, at, deadline, fatal))
    if fatal:  # durable before it starts, or a crash would not know that it may not be repeated
        await run.settle()
    return deadline


async def _body(op: StepOperation, info: StepInfo, deadline: float | None) -> Any:
    """One attempt of the function itself."""
    if deadline is None:
        return await _call(op, info)
    remaining = deadline - op.run.services.clock.now()
    if remaining <= 0:
        raise StepTimeoutError(f"step {info.step!r} passed its deadline while no process was running it")
    limit = None
    try:
        async with time_limit(op.run.services.clock, remaining) as limit:
            return await _call(op, info)
    except TimeoutError as error:
        if limit is None or not limit.expired():
            raise
        raise StepTimeoutError(
            f"step {info.step!r} did not finish within its timeout of {op.step.timeout_seconds}s"
        ) from error


async def _call(op: StepOperation, info: StepInfo) -> Any:
    op.run.inflight[op.key] = op
    try:
        if not op.step.is_async:
            return await _call_in_thread(op, info)
        CURRENT.set(info)
        return await op.step.fn(*op.args, **op.kwargs)
    finally:
        hold.body_ended(op.run, op.key)


class _LapsedError(Exception):
    """Our lease has lapsed while a step waited for a thread."""


async def _call_in_thread(op: StepOperation, info: StepInfo) -> Any:
    """A sync body. A free thread may be long in coming, so the lease is looked at again where the body begins."""
    run, step, scope = op.run, op.step, op.scope
    thread: Any = scope.thread  # a FlowThread, seen through its protocol

    def body() -> Any:
        if run.doubtful:
            raise _LapsedError
        if op.done() or op.cut_short() or run.over or run.stopping is not None:
            raise asyncio.CancelledError  # nobody wants it any more: it waited long for a thread
        return step.fn(*op.args, **op.kwargs)

    op.in_thread = True
    try:
        while True:
            try:
                if thread is not None and step.timeout_seconds is None:
                    return await thread.lend(body, info)
                # With a timeout it needs a thread that can be left behind.
                return await run.services.threads.call(body, info, bounded=not scope.holds_thread)
            except _LapsedError:
                await run.confirm()
    finally:
        op.in_thread = False


def _still_valid(op: StepOperation, outcome: Outcome) -> bool:
    """Whether a recorded outcome may be given to today's code. The run may be held instead."""
    run, step, key = op.run, op.step, op.key
    same_arguments = outcome.digest == op.digest
    if outcome.fingerprint == step.fingerprint and same_arguments:
        return True
    if not same_arguments and outcome.sequence < run.retried_at(key):
        return False  # a retried flow took another way: this is not the call that was recorded
    policy = run.services.config.recovery.version_mismatch
    if outcome.fingerprint != step.fingerprint:
        what = f"code or options changed ({outcome.fingerprint} → {step.fingerprint})"
        text = f"run {run.id}: step {key!r}: {what} since it was recorded; version_mismatch={policy}"
        log(logging.WARNING, Token.FINGERPRINT_MISMATCH, text)
        if policy == "fail":
            why = (
                f"step {key!r}: {what} since it was recorded; restore the old code, or set version_mismatch to warn or "
                "rerun, then resume the run"
            )
            run.stuck(Hold.VERSION, VersionMismatchError(why))
        return policy != "rerun"
    what = f"arguments changed ({outcome.digest} → {op.digest})"
    log(logging.WARNING, Token.INPUT_MISMATCH, f"run {run.id}: step {key!r}: {what} since it was recorded")
    if policy == "rerun":
        return False
    # No edit of the step explains that: flow code was changed, or is not deterministic. Its result is another call's.
    why = (
        f"step {key!r}: {what} since it was recorded, and its code has not: the flow's code was changed, or is not "
        "deterministic; restore it, name the argument in @step(volatile=...), or set version_mismatch to rerun, then resume "
        "the run"
    )
    run.stuck(Hold.NONDETERMINISM, NonDeterminismError(why))
    return True


def _say_repeated(op: StepOperation) -> None:
    begun = op.begun
    if begun is not None and (begun.until is not None or begun.fatal):
        return
    run = op.run
    text = f"run {run.id}: step {op.key!r} may have been in flight at the crash; executing it"
    log(logging.INFO, Token.STEP_REPEATED, text)
    run.services.metrics.steps_repeated.inc()
    run.log(Token.STEP_REPEATED, f"step {op.key!r} may have been in flight when its last owner died; executed again")
