"""Execute: calls the code of a run, from the first call to the final commit."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from relight.errors import (
    ContinueAs,
    FlowCodeError,
    NonDeterminismError,
    PayloadError,
    StepTimeoutError,
    StoreError,
    Unwind,
    VersionMismatchError,
)
from relight.execution import refused_calls
from relight.execution.run_loop import Ready
from relight.flow.call import Call as Forgotten
from relight.flow.definitions import Flow
from relight.flow.error_records import add_note
from relight.flow.payloads import record_error
from relight.flow.scope import CURRENT, Scope
from relight.model import journal as j
from relight.model.operations import failure_reason
from relight.model.replay import Open, restore
from relight.model.run import Hold
from relight.model.text import shown
from relight.run import leaving, next_generation, replaying, step_bodies, waits
from relight.run.alarms import Alarm
from relight.run.arguments import input_refusal
from relight.run.operation import Operation
from relight.run.phase import DRIVEN, ENDED, ENDING
from relight.run.sync_flows import FlowThread
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun


class Call:
    """One call of a flow function: the root run's, or a child run's."""

    __slots__ = ("args", "attempt", "deadline", "flow", "key", "kwargs", "since", "until")

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
        self.until = begun.until if begun else None  # the end of the last back-off
        self.since = begun.sequence if begun else 0  # the sequence of the entry with that time
        self.deadline = None if flow.timeout_seconds is None else created_at + flow.timeout_seconds


def drive(run: LiveRun, flow: Flow[..., Any]) -> None:
    """On the program's loop: call the flow's code, at once if nothing has to be read from the store for that."""
    assert run.created is not None
    if run.created.input_blob or run.kept:
        run.services.background.start(_read_and_begin(run, flow), "drive", run.broke)
    else:
        _begin(run, flow, bytes(run.created.input))


async def _read_and_begin(run: LiveRun, flow: Flow[..., Any]) -> None:
    assert run.created is not None
    try:
        data = await run.load(run.created.input, run.created.input_blob)
        await replaying.load_kept(run)
    except Unwind:
        pass  # the run left memory before its code was called, or is held because a blob cannot be read
    else:
        _begin(run, flow, data)


def _begin(run: LiveRun, flow: Flow[..., Any], data: bytes) -> None:
    if run.phase is not DRIVEN:
        return
    try:
        args, kwargs = flow.arguments.open(data)
    except PayloadError as error:  # the arguments fitted when the run was accepted, so the signature has changed
        why = input_refusal(error, run.generation)
        run.log(Token.FINGERPRINT_MISMATCH, why)
        run.stuck(Hold.VERSION, VersionMismatchError(why))
    else:
        run.start(flow, args, kwargs)


async def root(run: LiveRun, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parent: Scope) -> Any:
    """The run's main task, on its own loop."""
    assert run.created is not None
    call = Call(flow, args, kwargs, "", run.created.at, run.begun_again)
    return await call_flow(run, call, parent)


def ended(run: LiveRun) -> None:
    """The flow is at rest and its main task has ended: with a result, an error, or because it cannot go on."""
    main = run.main
    if main is None or run.stopping is not None:
        return
    value: Any = None
    failure: BaseException | None = asyncio.CancelledError() if main.cancelled() else main.exception()
    if failure is None:
        value = main.result()
    if run.deadlocked and (failure is None or isinstance(failure, asyncio.CancelledError)):
        failure = deadlock()
    if isinstance(failure, Unwind) or not replaying.finished(run):
        return  # the run was held, while its code ran or just now
    if failure is None and type(value) is ContinueAs and run.cancel_reason is None:
        next_generation.begin(run, value.input)
    else:
        end(run, value, failure)


def end(run: LiveRun, value: Any, failure: BaseException | None) -> None:
    """End the run in one commit: the final entry, the status, the message to the parent. Nothing may be told, begun or
    recorded after it."""
    _conclude(run, value, failure)
    run.enter(ENDING)
    run.writer.committed().add_done_callback(lambda _: _end_is_durable(run))


def deadlock() -> FlowCodeError:
    """The error of a flow that nothing can wake."""
    return FlowCodeError(
        "the flow waits for something that nothing in its run can bring about: a future, an event, a lock or a queue "
        "that only other code could serve, or that other code (perhaps a step's body) has used, which would not happen "
        "again on replay; put that into a step, return a value from it, or wait_for() a signal"
    )


async def call_flow(run: LiveRun, call: Call, parent: Scope | None) -> Any:
    """Call a flow's function until it returns, its retries are used up, or its timeout has passed."""
    flow, path = call.flow, call.key or run.path
    if call.until is not None and not (run.replay is not None and run.replay.has_begun_again(call.key, call.since)):
        scope = parent or Scope(run, path, call.key, None)
        await run.asked(_BackOff(run, scope, call, None))
    while True:
        thread = parent.thread if parent is not None else None
        scope = Scope(run, path, call.key, parent, thread if not flow.is_async else None, ends_branches=True)
        try:
            try:
                if flow.is_async and flow.timeout_seconds is None:  # the usual way, with fewer frames to wake through
                    token = CURRENT.set(scope)
                    try:
                        value = await flow.fn(*call.args, **call.kwargs)
                    finally:
                        CURRENT.reset(token)
                else:
                    value = await _with_timeout(run, call, scope)
            except (ContinueAs, BaseExceptionGroup) as error:
                value = next_generation.found_in(error)
            _check_return(run, call, scope, value)
            await _leave(run, scope)
        except Unwind:
            raise
        except BaseException as error:
            if run.stopping is None:
                _note_forgotten(error, _close_forgotten(run, call))
                await _leave(run, scope)
            failure = refused_calls.explain(step_bodies.ordinary(error, flow.what))
            if not _is_retried(run, call, failure):
                if failure is error:
                    raise
                raise failure from error
            await run.asked(_BackOff(run, scope, call, failure))
            call.attempt += 1
        else:
            return value


async def _leave(run: LiveRun, scope: Scope) -> None:
    """A call of a flow is over: end the tasks and timers that it has left behind."""
    if scope.branches:
        await run.loop.end_branches(scope)
    waits.cancel_timers(run, scope)


def _is_retried(run: LiveRun, call: Call, failure: BaseException) -> bool:
    """Whether a flow that has failed is called again."""
    retry = call.flow.retry
    if retry is None or run.stopping is not None or run.cancelled or not retry.again(call.attempt, failure):
        return False
    return call.deadline is None or call.deadline > run.services.clock.now()


def _check_return(run: LiveRun, call: Call, scope: Scope, value: Any) -> None:
    """A flow has returned: check that it has awaited all that it called, and asked for every operation that its journal
    has."""
    next_generation.check_return(run, scope, value)
    left = None if run.replay is None else run.replay.left_in(scope)
    if left is not None and run.cancel_reason is None:
        error = NonDeterminismError(f"the flow {call.flow.name!r} returned where its journal holds {left!r} next")
        run.stuck(Hold.NONDETERMINISM, error)
        raise Unwind(run.stopping)
    first = _close_forgotten(run, call)
    if first is not None:
        raise FlowCodeError(
            f"{first.name!r} was called at {first.place} and never awaited, so that it did nothing: write "
            f"`await {first.name}(...)`"
        )


def _note_forgotten(error: BaseException, call: Forgotten | None) -> None:
    """A flow has failed after it called something without awaiting it: perhaps that is why (`charge() + 1`)."""
    if call is not None and isinstance(error, Exception):
        add_note(error, f"{call.name!r} was called at {call.place} and never awaited: was an `await` forgotten?")


def _close_forgotten(run: LiveRun, call: Call) -> Forgotten | None:
    """Close the operations that this call of the flow has made and never awaited. Returns the first of them."""
    forgotten = [one for one in run.unawaited.values() if one.run_key == call.key]
    for one in forgotten:
        one.close()
    return forgotten[0] if forgotten else None


class _BackOff(Operation):
    """Between two attempts of a flow: record the failure, wait, and bring back what the attempts so far have finished.

    Its end is not recorded: on replay the flow begins with its newest attempt.
    """

    kind = "back-off"

    def __init__(self, run: LiveRun, scope: Scope, call: Call, failure: BaseException | None) -> None:
        key = f"{call.key}/$retry" if call.key else "$retry"
        super().__init__(run, scope, key)
        self._call = call
        self._failure = failure  # None: the failure is recorded, and the pause is under way
        self._alarm: Alarm | None = None

    def begin(self) -> None:
        if self._failure is None:
            assert self._call.until is not None
            self._wait(self._call.until)
            return
        run, call, retry = self.run, self._call, self._call.flow.retry
        assert retry is not None
        until = run.services.clock.now() + retry.delay_after(call.attempt, run.services.entropy.random())
        text = f"run {run.run_id(call.key)}: attempt {call.attempt} failed: {shown(self._failure)}"
        log(logging.INFO, Token.RUN_RETRYING, text)
        run.record(j.RunRetrying(call.key, call.attempt, record_error(self._failure), until, run.now()))
        run.set_running()
        self._wait(until)

    def _wait(self, until: float) -> None:
        self.only_waits()
        self._alarm = Alarm(self.run, self.key, until, self._due)

    def stop(self) -> None:
        super().stop()
        self.silence()

    def silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _due(self) -> None:
        self.waits_no_more()
        self.do(self._remember())

    async def _remember(self) -> None:
        run, key = self.run, self._call.key
        try:
            await run.wait_until_durable()
            (journal,) = await run.read(lambda store: store.read([run.id]))
            if isinstance(journal, Exception):
                raise journal
            await replaying.remember(run, restore(journal), key + "/" if key else "")
        except Unwind:
            return
        except StoreError as error:
            run.stuck(Hold.CORRUPT, error)
            return
        run.told.append(self)
        run.wake()


async def _with_timeout(run: LiveRun, call: Call, scope: Scope) -> Any:
    """Call the flow within its timeout, which counts from the run's creation, so that a crash does not renew it."""
    if call.deadline is None:
        return await _invoke(run, call, scope)
    task = asyncio.current_task()
    assert task is not None
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    ready = Ready(expire, (), contextvars.copy_context())
    timer = waits.Deadline(run, scope, scope.child_path("$timeout"), call.deadline, ready)
    run.add(timer)
    try:
        return await _invoke(run, call, scope)
    except asyncio.CancelledError:
        if not expired or run.stopping is not None:
            raise
        task.uncancel()
        raise StepTimeoutError(
            f"flow {call.flow.name!r} did not finish within its timeout of {call.flow.timeout_seconds}s"
        ) from None
    finally:
        timer.cancel()


def is_being_cancelled() -> bool:
    """Whether the task that runs this has been cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _invoke(run: LiveRun, call: Call, scope: Scope) -> Any:
    """Call the flow's function: sync code in its thread, async code in this task."""
    fn, args, kwargs = call.flow.fn, call.args, call.kwargs
    if call.flow.is_async:
        token = CURRENT.set(scope)
        try:
            return await fn(*args, **kwargs)
        finally:
            CURRENT.reset(token)
    thread: Any = scope.thread
    if thread is not None:
        return await thread.call(lambda: fn(*args, **kwargs), scope)
    thread = scope.thread = FlowThread(run.services.threads, run.own_turns(), bounded=not scope.has_thread)
    return await thread.start(lambda: fn(*args, **kwargs), scope)


def _conclude(run: LiveRun, value: Any, failure: BaseException | None) -> None:
    now = run.services.clock.now()
    if run.cancel_reason is not None:
        leaving.conclude(run, j.RunCancelled("", run.cancel_reason, now), reason=run.cancel_reason)
    else:
        data = b"null"
        if failure is None:
            try:
                assert run.flow is not None
                data, _ = run.flow.result.seal(value, run.services.config.payload.max_bytes)
            except Exception as error:  # noqa: BLE001 - a result that cannot be journaled fails the run
                failure = error
        if failure is None:
            output, blob = run.payload(data)
            leaving.conclude(run, j.RunCompleted("", output, blob, now), output=b"" if blob else data, output_blob=blob)
        else:
            record = record_error(step_bodies.recordable(failure, f"flow {run.row.flow!r}"))
            event, reason = j.RunFailed("", record, now), failure_reason(record)
            leaving.conclude(run, event, error=msgspec.json.encode(record), reason=reason)


def _end_is_durable(run: LiveRun) -> None:
    if run.writer.lost:
        return
    run.enter(ENDED)
    try:
        leaving.stop_bodies(run)
        run.host.ended(run)
    except Exception as error:  # noqa: BLE001 - a bug in Relight: this is a callback, nothing else would log it
        log(logging.CRITICAL, Token.INTERNAL_ERROR, f"the end of run {run.id} broke: {shown(error)}", error)
