"""What is done for a step on the program's loop: its body is called, and how it ends is recorded.

The short way (async steps without retry, timeout or on_crash="fail") is `do_plainly`, the hot path: one encode, one group commit.
All other steps go through `do` and `_attempts`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from relight.clock import time_limit
from relight.errors import (
    PayloadError,
    RunCancelled,
    StepError,
    StepInterruptedError,
    StepResultError,
    StepTimeoutError,
    Unwind,
)
from relight.execution.thread_pool import ThreadExitError
from relight.flow.payloads import record_error
from relight.flow.scope import CURRENT, StepInfo
from relight.model.journal import StepCompleted, StepFailed, StepRetrying, StepStarted
from relight.model.text import shown
from relight.run import cancel, leaving, waits
from relight.run.alarms import Alarm
from relight.run.phase import DRIVEN
from relight.run.recording import RUNNING
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.execution.thread_pool import Slot
    from relight.run.steps import StepOperation


async def do_plainly(op: StepOperation) -> None:
    """On the program's loop: call a step's body with nothing around it. Most bodies end without having to wait."""
    run, step, key, run_key = op.run, op.step, op.key, op.scope.run_key
    CURRENT.set(StepInfo(run.run_id(run_key) if run_key else run.id, key, 1, run.id, run.row.flow))
    try:
        result = await step.fn(*op.args, **op.kwargs)
    except BaseException as error:  # noqa: BLE001 - any error ends only this body
        if run.inflight:
            leaving.body_ended(run, key)
        op.close(error)
        return
    if run.inflight:
        leaving.body_ended(run, key)
    try:
        completed(op, result, 1)
    except Exception as refused:  # noqa: BLE001 - a result that cannot be journaled fails the step
        ended_badly(op, refused)


async def do(op: StepOperation) -> None:
    """On the program's loop: execute a step that records more than its result, or that cannot begin at once. Raises
    Unwind when the run leaves memory: what was not recorded is done again when the run is back in memory."""
    run = op.run
    if run.stopping is not None:
        raise Unwind(run.stopping)
    if op.done() or run.over:
        return  # the flow gave up on the step before it began; or the flow has ended without waiting for it
    if op.was_interrupted:
        _say_interrupted(op)
        return
    if op.cut_short():
        raise asyncio.CancelledError
    if run.has_seen_not_durable():
        # What the body may act on must be durable first: after a crash it could be different.
        mark = run.seen_not_durable
        await run.wait_until_durable()
        # If the flow has seen more meanwhile, later steps have to wait for that.
        if run.seen_not_durable == mark and run.replay is None:
            run.seen_not_durable = 0
    if run.lease_has_lapsed:
        await run.confirm()
    await _attempts(op)


def _conclude(op: StepOperation, result: Any, attempt: int) -> None:
    try:
        completed(op, result, attempt)
    except Exception as refused:  # noqa: BLE001 - a result that cannot be journaled fails the step
        ended_badly(op, refused, attempt)


def completed(op: StepOperation, result: Any, attempt: int) -> None:
    """Record the result that a step's body has returned. Raises StepResultError if it cannot be journaled."""
    run, step = op.run, op.step
    try:
        data, op.value = step.result.seal(result, run.max_bytes)
    except PayloadError as refused:
        raise StepResultError(str(refused)) from refused
    except Exception as refused:  # a method of the result, such as its __eq__, raises
        raise StepResultError(f"{step.result.name} cannot be journaled: {refused!r}") from refused
    if run.over:
        return
    if len(data) <= run.blob_threshold:
        output, blob = Raw(data), ""
    else:
        output, blob = run.payload(data)
    at = run.now()
    took_us = int((at - op.began) * 1e6)
    entry = StepCompleted(op.key, output, blob, step.fingerprint, op.digest, attempt, int(at * 1e6), took_us, op.parts)
    if op.on_result is None:
        op.recorded = True  # as run.record() does
        if run.status is not RUNNING:
            run.set_running()
        run.writer.add(entry, op)
    else:
        run.record(entry)
        op.on_result(data, op.value)


def ended_badly(op: StepOperation, error: BaseException, attempt: int = 1) -> None:
    """A step's error is an outcome like any other: durable before the flow may react to it."""
    run = op.run
    if run.over or op.done() or op.recorded:
        return  # nothing waits for this outcome any more
    if isinstance(error, asyncio.CancelledError):
        if run.stopping is not None:
            return  # cancelled because the run leaves memory
        if op.cut_short():
            cancel.end(op)
            return
    op.error = recordable(error, op.step.what)
    record = record_error(op.error)
    run.record(StepFailed(op.key, record, op.step.fingerprint, op.digest, attempt, *_times(op), op.parts), op)


def _times(op: StepOperation) -> tuple[int, int]:
    """The time now, and how long the attempt was under way; in microseconds."""
    at = op.run.now()
    return int(at * 1e6), int((at - op.began) * 1e6)


def ordinary(error: BaseException, what: str) -> BaseException:
    """Make what a step or flow raises an Exception, so that it ends only that step or flow, and never the program."""
    if isinstance(error, asyncio.CancelledError | RunCancelled | Unwind):
        return error  # the flow and Relight must recognise these while they propagate
    return recordable(error, what)


def recordable(error: BaseException, what: str) -> Exception:
    """The error as it is recorded, and told now and on replay. Only Exceptions can be rebuilt (error_records.py)."""
    if isinstance(error, ThreadExitError):
        error = error.error
    if isinstance(error, Exception):
        return error
    name = type(error).__name__
    stand_in = StepError(f"{what} raised {name}({', '.join(map(shown, error.args))})", type_name=name)
    stand_in.__cause__ = error
    return stand_in


async def _attempts(op: StepOperation) -> None:
    """Try until the step completes, its retries are used up, or it must not be tried any more. `op.begun` is what the
    journal has of earlier attempts."""
    run, step, begun = op.run, op.step, op.begun
    attempt = begun.attempt if begun else 1
    deadline = begun.deadline if begun else None
    if begun is not None and begun.until is not None:
        await _pause(op, begun.until)
    while True:
        if run.phase is not DRIVEN or op.done():
            return  # the next attempt is made when the run is back in memory; or the flow has given up on the step
        if attempt > 1 and run.lease_has_lapsed:
            await run.confirm()
        info = StepInfo(run.run_id(op.scope.run_key), op.key, attempt, run.id, run.row.flow)
        asked_at = run.services.clock.now()
        # The thread comes first: a step that waits for one has not begun, and its timeout does not run.
        slot = await run.services.threads.slot(bounded=not op.scope.has_thread) if _needs_thread(op) else None
        try:
            if deadline is None:
                deadline = await _announce(op, attempt)
            else:
                deadline += run.services.clock.now() - asked_at
            result = await _body(op, info, deadline, slot)
        except (Unwind, asyncio.CancelledError):
            raise
        except BaseException as raised:  # noqa: BLE001 - any error ends only this attempt
            caught = ordinary(raised, step.what)
            if step.retry is None or not step.retry.again(attempt, caught) or op.cut_short() or run.over:
                ended_badly(op, caught, attempt)
                return
            delay = step.retry.delay_after(attempt, run.services.entropy.random())
            until = run.now() + delay
            text = f"run {run.id}: step {op.key!r} failed, attempt {attempt}: {shown(caught)}"
            log(logging.INFO, Token.STEP_RETRYING, text)
            run.record(StepRetrying(op.key, attempt, record_error(caught), until, *_times(op)))
            run.set_running()
        else:
            # Outside the `try`: the body has had its effect, so a result that is refused is not tried again.
            _conclude(op, result, attempt)
            return
        finally:
            if slot is not None:
                slot.release()
        await _pause(op, until)
        await run.wait_until_durable()
        attempt += 1
        deadline = None


def _needs_thread(op: StepOperation) -> bool:
    """Whether its body needs a thread of the pool before its attempt begins. In a sync flow, the flow's own thread
    executes the body, unless the body has a timeout and may have to be abandoned."""
    return not op.step.is_async and (not op.scope.has_thread or op.step.timeout_seconds is not None)


def _say_interrupted(op: StepOperation) -> None:
    """Record that the step had begun when its process died. This is done also if the flow has given up on the step
    since: a retry must not execute it again."""
    run, begun = op.run, op.begun
    error = StepInterruptedError(
        f"step {op.key!r} of run {run.id!r} was running when its process died, and on_crash='fail' forbids repeating it; "
        "whether it took effect is unknown"
    )
    log(logging.WARNING, Token.STEP_INTERRUPTED, f"run {run.id}: {error}")
    ended_badly(op, error, begun.attempt if begun else 1)


async def _pause(op: StepOperation, until: float) -> None:
    """Wait for the back-off of a retry. The journal has its time already, and gets no entry when it is over."""
    run = op.run
    if until <= run.services.clock.now():
        return
    over = run.services.loop.create_future()

    def due() -> None:
        op.waits_no_more()  # at once: a run that still seemed to wait would be parked with nothing to wake it
        if not over.done():
            over.set_result(None)

    op.only_waits()
    alarm = Alarm(run, op.key, until, due)
    if run.blocked:  # the whole run only waits now: the commit with this failure sets its status, too
        waits.blocked(run)
    try:
        await over
    finally:
        op.waits_no_more()
        alarm.cancel()


async def _announce(op: StepOperation, attempt: int) -> float | None:
    """Journal that an attempt starts, if that must survive a crash. Returns the attempt's deadline."""
    run, step = op.run, op.step
    fatal = step.on_crash == "fail"
    if step.timeout_seconds is None and not fatal:
        return None
    at = run.services.clock.now()
    deadline = None if step.timeout_seconds is None else at + step.timeout_seconds
    run.announce(StepStarted(op.key, attempt, at, deadline, fatal))
    if fatal:  # durable before the body starts: otherwise, after a crash, nothing shows that it must not be repeated
        await run.wait_until_durable()
    return deadline


async def _body(op: StepOperation, info: StepInfo, deadline: float | None, slot: Slot | None) -> Any:
    """Make one attempt: call the step's function, within its deadline."""
    if deadline is None:
        return await _call(op, info, slot)
    remaining = deadline - op.run.services.clock.now()
    if remaining <= 0:
        raise StepTimeoutError(f"step {info.step!r} passed its deadline while no process was running it")
    limit = None
    try:
        async with time_limit(op.run.services.clock, remaining) as limit:
            return await _call(op, info, slot)
    except TimeoutError as error:
        if limit is None or not limit.expired():
            raise
        raise StepTimeoutError(
            f"step {info.step!r} did not finish within its timeout of {op.step.timeout_seconds}s"
        ) from error


async def _call(op: StepOperation, info: StepInfo, slot: Slot | None) -> Any:
    run, step = op.run, op.step
    run.inflight[op.key] = op
    op.began = run.now()
    if step.timeout_seconds is None and step.on_crash != "fail":  # otherwise its start is journaled already
        run.services.long_steps.add(op, info.attempt)
    try:
        if not step.is_async:
            return await _call_in_thread(op, info, slot)
        CURRENT.set(info)
        return await step.fn(*op.args, **op.kwargs)
    finally:
        leaving.body_ended(run, op.key)


class _LapsedError(Exception):
    """The lease of this process has lapsed while a step waited for a thread."""


async def _call_in_thread(op: StepOperation, info: StepInfo, slot: Slot | None) -> Any:
    """Call a sync body. It may have waited long for a thread, so the lease is checked again where the body begins."""
    run, step, scope = op.run, op.step, op.scope
    thread: Any = scope.thread  # a FlowThread, seen through its protocol

    def body() -> Any:
        if run.lease_has_lapsed:
            raise _LapsedError
        if op.done() or op.cut_short() or run.phase is not DRIVEN:
            raise asyncio.CancelledError  # its outcome is no longer wanted: it waited long for a thread
        op.began = run.now()
        return step.fn(*op.args, **op.kwargs)

    op.in_thread = True
    try:
        while True:
            try:
                if thread is not None and step.timeout_seconds is None:
                    return await thread.run_body(body, info)
                # With a timeout, the body needs a thread that can be abandoned.
                return await run.services.threads.call(body, info, slot)
            except _LapsedError:  # the slot was given back with the thread
                await run.confirm()
                slot = None if slot is None else await run.services.threads.slot(bounded=slot.bounded)
    finally:
        op.in_thread = False
