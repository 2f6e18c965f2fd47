"""Execute: a run's code from its first call to its final commit."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from relight.clock import Timer
from relight.errors import (
    DefinitionError,
    NonDeterminismError,
    PayloadError,
    StepTimeoutError,
    Unwind,
    VersionMismatchError,
)
from relight.flow.definitions import Flow
from relight.flow.payloads import record_error
from relight.flow.scope import CURRENT, Scope
from relight.lifecycle import hold, waits
from relight.lifecycle.replayer import Replayer
from relight.lifecycle.threads import FlowThread
from relight.model import journal as j
from relight.model.blob import blob_digest
from relight.model.replay import Open, restore
from relight.model.run import Hold, Run
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.lifecycle.run import LiveRun

MAX_RUN_ID = 255
CATCH_UP_SECONDS = 0.05  # a replayed flow that is given nothing for so long has reached the place where it waits


class Call:
    """One call of a flow function: the root run's, or a child run's."""

    __slots__ = ("args", "attempt", "deadline", "flow", "key", "kwargs", "until")

    def __init__(
        self,
        flow: Flow[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: str,
        created_at: float,
        begun: Open | None,
    ) -> None:
        self.flow = flow
        self.args = args
        self.kwargs = kwargs
        self.key = key
        self.attempt = begun.attempt if begun else 1
        self.until = begun.until if begun else None  # the end of a back-off that was under way
        self.deadline = None if flow.timeout_seconds is None else created_at + flow.timeout_seconds


def check_run_id(run_id: str) -> str:
    """A run id that a user chose."""
    if not isinstance(run_id, str) or not 1 <= len(run_id) <= MAX_RUN_ID or "/" in run_id or not run_id.isprintable():
        raise DefinitionError(
            f"{run_id!r} cannot be a run id: give 1 to {MAX_RUN_ID} printable characters without '/', which separates child runs"
        )
    return run_id


def same_input(row: Run, data: bytes) -> bool:
    """Whether a run was started with exactly this input."""
    return row.input == data if not row.input_blob else row.input_blob == blob_digest(data)


async def drive(run: LiveRun, flow: Flow[..., Any]) -> None:
    """The main task of a run in memory. It ends with the final commit, or with an Unwind that somebody else asked for."""
    value: Any = None
    failure: BaseException | None = None
    try:
        assert run.created is not None
        data = await run.load(run.created.input, run.created.input_blob)
        args, kwargs = _open_input(run, flow, data)
        call = Call(flow, args, kwargs, "", run.created.at, None)
        call.attempt, call.until = run.attempt, run.retry_until
        value = await call_flow(run, call, None)
    except (KeyboardInterrupt, SystemExit):
        raise  # the process is being stopped: the run stays as it is and is recovered
    except BaseException as error:  # noqa: BLE001 - how the flow ended is what is recorded next
        failure = error
    try:
        if run.stopping is None:
            await _finish(run, flow, value, failure)
    except Unwind:
        pass  # fenced, or held, in the last moment
    if run.stopping is not None and not run.departing:
        await hold.depart_by_itself(run)


def _open_input(run: LiveRun, flow: Flow[..., Any], data: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments the run was accepted with. They fitted then: if they do not now, the signature has changed."""
    try:
        return flow.arguments.open(data)
    except PayloadError as error:
        why = f"flow {flow.name!r} no longer takes the input this run was started with: {error}; restore it, then resume()"
        raise run.stuck(Hold.VERSION, VersionMismatchError(why)) from error


async def call_flow(run: LiveRun, call: Call, parent: Scope | None) -> Any:
    """Call a flow's function until it returns, its retries are used up, or its timeout has passed."""
    flow = call.flow
    if call.until is not None:
        await waits.pause(run, parent or Scope(run, call.key, call.key, None), call.key, call.until)
    while True:
        thread = parent.thread if parent is not None else None
        scope = Scope(run, call.key, call.key, parent, thread if not flow.is_async else None)
        try:
            if (
                flow.is_async and flow.timeout_seconds is None
            ):  # the usual way, with no frames in between to wake through
                token = CURRENT.set(scope)
                try:
                    value = await flow.fn(*call.args, **call.kwargs)
                finally:
                    CURRENT.reset(token)
            else:
                value = await _with_timeout(run, call, scope)
        except Exception as error:
            retry = flow.retry
            if run.stopping is not None or retry is None or not retry.again(call.attempt, error):
                raise
            if call.deadline is not None and call.deadline <= run.services.clock.now():
                raise
            until = run.services.clock.now() + retry.delay_after(call.attempt, run.services.entropy.random())
            log(
                logging.INFO,
                Token.RUN_RETRYING,
                f"run {run.run_id(call.key)}: attempt {call.attempt} failed: {error!r}",
            )
            run.record(j.RunRetrying(call.key, call.attempt, record_error(error), until))
            run.set_running()
            await run.settle()
            await waits.pause(run, scope, call.key, until)
            call.attempt += 1
            await _remember(run, call.key)
        else:
            replayer = run.replayer
            left = None if replayer is None else replayer.left_over(scope)
            if left is not None and run.cancel_reason is None:
                raise run.stuck(
                    Hold.NONDETERMINISM,
                    NonDeterminismError(f"the flow {flow.name!r} returned where its journal holds {left!r} next"),
                )
            return value


async def _remember(run: LiveRun, key: str) -> None:
    """Before a flow is called again: bring back what its earlier attempts finished, from the journal."""
    (journal,) = await run.ask(lambda store: store.read([run.id]))
    if isinstance(journal, Exception):
        raise journal
    state = restore(journal)
    if run.replayer is None or not key:
        run.replayer = Replayer(run.services.loop)
    run.replayer.add(state, key + "/" if key else "")


async def _with_timeout(run: LiveRun, call: Call, scope: Scope) -> Any:
    """The call itself. A flow's timeout counts from the run's creation, so a crash does not renew it."""
    if call.deadline is None:
        return await _invoke(run, call, scope)
    deadline = call.deadline
    task = asyncio.current_task()
    assert task is not None
    expired = False
    timer: Timer | None = None
    ahead = -1

    def expire() -> None:
        nonlocal expired, ahead, timer
        before, ahead = ahead, 0 if run.replayer is None else run.replayer.ahead_of(scope)
        if ahead and ahead != before:  # it is still on its way to where it was when its time ran out
            timer = run.services.loop.call_later(CATCH_UP_SECONDS, expire)
            return
        expired = True
        task.cancel()

    run.deadlines[call.key] = deadline
    try:
        remaining = deadline - run.services.clock.now()
        timer = run.services.clock.call_later(max(remaining, 0.0), expire)
        return await _invoke(run, call, scope)
    except asyncio.CancelledError:
        if not expired or run.stopping is not None:
            raise
        task.uncancel()
        raise StepTimeoutError(
            f"flow {call.flow.name!r} did not finish within its timeout of {call.flow.timeout_seconds}s"
        ) from None
    finally:
        del run.deadlines[call.key]
        if timer is not None:
            timer.cancel()


async def _invoke(run: LiveRun, call: Call, scope: Scope) -> Any:
    """Sync code in its thread, async code in this task."""
    fn, args, kwargs = call.flow.fn, call.args, call.kwargs
    if call.flow.is_async:
        token = CURRENT.set(scope)
        try:
            return await fn(*args, **kwargs)
        finally:
            CURRENT.reset(token)
    if scope.thread is not None:
        return await scope.thread.call(lambda: fn(*args, **kwargs), scope)
    thread = FlowThread(run.services.threads, bounded=not scope.holds_thread)
    scope.thread = thread
    run.threads.add(thread)
    try:
        return await thread.start(lambda: fn(*args, **kwargs), scope)
    finally:
        run.threads.discard(thread)


async def _finish(run: LiveRun, flow: Flow[..., Any], value: Any, failure: BaseException | None) -> None:
    """One commit: the final entry, the status, the parent's notification."""
    now = run.services.clock.now()
    if run.cancel_reason is not None:
        hold.conclude(run, j.RunCancelled("", run.cancel_reason, now), reason=run.cancel_reason)
    else:
        data = b"null"
        if failure is None:
            try:
                data, _ = flow.result.seal(value, run.services.config.payload.max_bytes)
            except Exception as error:  # noqa: BLE001 - a result that cannot be journaled fails the run
                failure = error
        if failure is None:
            output, blob = run.payload(data)
            hold.conclude(run, j.RunCompleted("", output, blob, now), output=b"" if blob else data, output_blob=blob)
        else:
            record = record_error(failure)
            hold.conclude(run, j.RunFailed("", record, now), error=msgspec.json.encode(record))
    run.over = True  # from here on nothing may be added behind the final entry
    await run.writer.committed()
    if run.writer.lost:
        await hold.hold_back(run)
    run.ended = True
    run.host.ended(run)
