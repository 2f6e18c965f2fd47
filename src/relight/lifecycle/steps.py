"""Steps: look in the journal first, run only what is not there, record the end.

The short way (`perform`, for async steps without retry, timeout or on_crash="fail") is the hot path: one lookup, one encode,
one group commit. Everything that has more to remember goes through `_attempts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from relight.clock import time_limit
from relight.errors import StepInterruptedError, StepTimeoutError, Unwind, VersionMismatchError
from relight.flow.definitions import Step
from relight.flow.payloads import rebuild_error, record_error
from relight.flow.scope import CURRENT, Scope, StepInfo, here
from relight.lifecycle import hold, waits
from relight.model.journal import OperationCancelled, StepCompleted, StepFailed, StepRetrying, StepStarted
from relight.model.replay import Open, Outcome
from relight.model.run import Hold, Status
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.lifecycle.run import LiveRun


async def perform(
    run: LiveRun,
    scope: Scope | None,
    step: Step[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wait: bool = True,
) -> Any:
    """One step call of a flow. With wait=False its commit is left to whoever records next (a foreach item)."""
    scope = here(scope)
    key = scope.begin(step.name)
    digest = step.arguments.digest(args, kwargs)
    begun: Open | None = None
    if scope.recorded is not None:
        outcome = await run.replayed(scope, key, "step")
        if outcome is not None and _still_valid(run, scope, step, key, digest, outcome):
            if outcome.error is not None:
                raise rebuild_error(outcome.error)
            return await run.open(step.result, outcome)
        begun = run.begun(key)
        _say_repeated(run, key, begun, outcome)
    elif run.recovered:  # the first step of a branch that the journal does not know: it may have been in flight
        _say_repeated(run, key, None, None)
    try:
        if run.cancel_reason is not None or run.unsettled or run.doubtful:
            await _before_acting(run, scope, key)
        if not step.plain:
            value = await _attempts(run, scope, step, key, digest, args, kwargs, begun)
        else:
            info = StepInfo(run.run_id(scope.run_key), key, 1, f"{run.id}/{key}")
            token = CURRENT.set(info)
            run.inflight[key] = scope
            try:
                try:
                    result = await step.fn(*args, **kwargs)
                finally:
                    CURRENT.reset(token)
                    run.body_ended(key)
                data, value = step.result.seal(result, run.services.config.payload.max_bytes)
            except Exception as error:
                await _failed(run, scope, step, key, digest, 1, error)
                raise
            output, blob = run.payload(data)
            run.record(StepCompleted(key, output, blob, step.fingerprint, digest, 1))
        if run.status is not Status.RUNNING:
            run.set_running()
        if wait:  # as run.settle() does, without its frame
            writer = run.writer
            await writer.committed()
            if writer.lost or run.stopping is not None:
                await hold.hold_back(run)
    except asyncio.CancelledError as error:
        await _failed(run, scope, step, key, digest, 1, error)
        raise
    return value


async def _before_acting(run: LiveRun, scope: Scope, key: str) -> None:
    """What must be settled before a step's body may take effect."""
    if run.cancel_reason is not None and not scope.cancel_seen:
        await hold.interrupt(run, scope, key)
    if run.unsettled:  # values the body may act on must be durable first, or a crash would give it others
        run.unsettled = False
        await run.settle()
    if run.doubtful:
        await run.confirm()


async def _attempts(
    run: LiveRun,
    scope: Scope,
    step: Step[..., Any],
    key: str,
    digest: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    begun: Open | None,
) -> Any:
    """Try until it completes, its retries are used up, or nobody may try any more. `begun` is what a crash left behind."""
    attempt = begun.attempt if begun else 1
    if begun is not None and begun.fatal:
        error = StepInterruptedError(
            f"step {key!r} of run {run.id!r} was running when its process died, and on_crash='fail' forbids repeating it; "
            "whether it took effect is unknown"
        )
        log(logging.WARNING, Token.STEP_INTERRUPTED, f"run {run.id}: {error}")
        await _failed(run, scope, step, key, digest, attempt, error)
        raise error
    deadline = begun.deadline if begun else None
    if begun is not None and begun.until is not None:
        await waits.pause(run, scope, key, begun.until)
    while True:
        if run.stopping is not None:  # between two attempts: the run leaves memory, and the next one is made after that
            await hold.hold_back(run)
        if attempt > 1 and run.doubtful:
            await run.confirm()
        if deadline is None:
            deadline = await _announce(run, step, key, attempt)
        info = StepInfo(run.run_id(scope.run_key), key, attempt, f"{run.id}/{key}")
        try:
            result = await _body(run, scope, step, info, deadline, args, kwargs)
            data, value = step.result.seal(result, run.services.config.payload.max_bytes)
        except Exception as error:
            if step.retry is None or not step.retry.again(attempt, error):
                await _failed(run, scope, step, key, digest, attempt, error)
                raise
            delay = step.retry.delay_after(attempt, run.services.entropy.random())
            until = run.services.clock.now() + delay
            log(logging.INFO, Token.STEP_RETRYING, f"run {run.id}: step {key!r} failed, attempt {attempt}: {error!r}")
            run.record(StepRetrying(key, attempt, record_error(error), until))
            run.set_running()
            await run.settle()
        else:
            output, blob = run.payload(data)
            run.record(StepCompleted(key, output, blob, step.fingerprint, digest, attempt))
            return value
        await waits.pause(run, scope, key, until)
        attempt += 1
        deadline = None


async def _announce(run: LiveRun, step: Step[..., Any], key: str, attempt: int) -> float | None:
    """Journal that an attempt starts, where a crash must not forget it; the attempt's deadline."""
    fatal = step.on_crash == "fail"
    if step.timeout_seconds is None and not fatal:
        return None
    at = run.services.clock.now()
    deadline = None if step.timeout_seconds is None else at + step.timeout_seconds
    run.record(StepStarted(key, attempt, at, deadline, fatal))
    if fatal:  # durable before it starts, or a crash would not know that it may not be repeated
        await run.settle()
    return deadline


async def _body(
    run: LiveRun,
    scope: Scope,
    step: Step[..., Any],
    info: StepInfo,
    deadline: float | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One attempt of the function itself."""
    if deadline is None:
        return await _call(run, scope, step, info, args, kwargs)
    remaining = deadline - run.services.clock.now()
    if remaining <= 0:
        raise StepTimeoutError(f"step {info.step!r} passed its deadline while no process was running it")
    limit = None
    try:
        async with time_limit(run.services.clock, remaining) as limit:
            return await _call(run, scope, step, info, args, kwargs)
    except TimeoutError as error:
        if limit is None or not limit.expired():
            raise
        raise StepTimeoutError(
            f"step {info.step!r} did not finish within its timeout of {step.timeout_seconds}s"
        ) from error


async def _call(
    run: LiveRun, scope: Scope, step: Step[..., Any], info: StepInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    run.inflight[info.step] = scope if step.is_async else None
    try:
        if not step.is_async:
            return await _call_in_thread(run, scope, step, info, args, kwargs)
        token = CURRENT.set(info)
        try:
            return await step.fn(*args, **kwargs)
        finally:
            CURRENT.reset(token)
    finally:
        run.body_ended(info.step)


class _LapsedError(Exception):
    """Our lease has lapsed while a step waited for a thread."""


async def _call_in_thread(
    run: LiveRun, scope: Scope, step: Step[..., Any], info: StepInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A sync body. A free thread may be long in coming, so the lease is looked at again where the body begins."""

    def body() -> Any:
        if run.doubtful:
            raise _LapsedError
        return step.fn(*args, **kwargs)

    while True:
        try:
            if scope.thread is not None and step.timeout_seconds is None:
                return await scope.thread.call(body, info)
            # With a timeout it needs a thread that can be left behind.
            return await run.services.threads.call(body, info, bounded=not scope.holds_thread)
        except _LapsedError:
            await run.confirm()


async def _failed(
    run: LiveRun, scope: Scope, step: Step[..., Any], key: str, digest: str, attempt: int, error: BaseException
) -> None:
    """A step's error is an outcome like any other: durable before the flow may react to it."""
    if isinstance(error, asyncio.CancelledError) and await cancelled(run, scope, key):
        return
    run.record(StepFailed(key, record_error(error), step.fingerprint, digest, attempt))
    run.set_running()
    await run.settle()


async def cancelled(run: LiveRun, scope: Scope, key: str) -> bool:
    """An operation was cancelled from below: because the run unwinds, because it is being cancelled, or by the flow itself,
    which gave up on it (by a timeout of its own or task.cancel()) and must find it given up when it is replayed. False if
    nobody did: the code itself raised CancelledError, which is an error like any other."""
    if run.stopping is not None:
        raise Unwind(run.stopping)
    if run.cancel_reason is not None and not scope.cancel_seen:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()  # answered: from here on it travels as RunCancelled
        await hold.interrupt(run, scope, key)
    return given_up(run, key)


@contextlib.asynccontextmanager
async def under_way(run: LiveRun, scope: Scope, key: str) -> AsyncIterator[None]:
    """Around what an operation does anew: wherever it is cancelled, it is recorded as such."""
    try:
        yield
    except asyncio.CancelledError:
        await cancelled(run, scope, key)
        raise


def given_up(run: LiveRun, key: str) -> bool:
    """Record that the flow gave up on an operation, if it was that which cancelled it. The commit is not waited for:
    whatever the flow does next is recorded behind it, and lost with it."""
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        return False
    if not run.over:
        run.record(OperationCancelled(key, by_flow=True))
    return True


def _still_valid(run: LiveRun, scope: Scope, step: Step[..., Any], key: str, digest: str, outcome: Outcome) -> bool:
    """Whether a recorded outcome may be given to today's code. Raises Unwind when the run must be held instead."""
    if outcome.fingerprint == step.fingerprint and outcome.digest == digest:
        return True
    if outcome.digest != digest and run.replayer is not None and run.replayer.in_retry(scope):
        return False  # a retried flow took another way: this is not the call that was recorded
    if outcome.fingerprint != step.fingerprint:
        token, what = (
            Token.FINGERPRINT_MISMATCH,
            f"code or options changed ({outcome.fingerprint} → {step.fingerprint})",
        )
    else:
        token, what = Token.INPUT_MISMATCH, f"arguments changed ({outcome.digest} → {digest})"
    policy = run.services.config.recovery.version_mismatch
    log(logging.WARNING, token, f"run {run.id}: step {key!r}: {what} since it was recorded; version_mismatch={policy}")
    if policy == "fail":
        raise run.stuck(
            Hold.VERSION,
            VersionMismatchError(
                f"step {key!r}: {what} since it was recorded; restore the old code, or set version_mismatch to warn or rerun, "
                "then resume the run"
            ),
        )
    return policy == "warn"


def _say_repeated(run: LiveRun, key: str, begun: Open | None, outcome: Outcome | None) -> None:
    if outcome is None and run.recovered and (begun is None or (begun.until is None and not begun.fatal)):
        run.recovered = begun is not None  # where nothing is journaled of its start, only the first is suspect
        log(
            logging.INFO,
            Token.STEP_REPEATED,
            f"run {run.id}: step {key!r} may have been in flight at the crash; executing it",
        )
        run.services.metrics.steps_repeated.inc()
        run.log(Token.STEP_REPEATED, f"step {key!r} may have been in flight when its last owner died; executed again")
