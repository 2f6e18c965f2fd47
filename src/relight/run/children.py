"""Child runs: a flow called in a flow. Same tree, same journal, same owner; the child's key is the scope of its operations."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from relight.errors import RunCancelled, Unwind
from relight.flow.definitions import Flow
from relight.flow.payloads import rebuild_error, record_error
from relight.flow.scope import Scope, here
from relight.model import journal as j
from relight.model.blob import blob_digest
from relight.model.operations import failure_reason
from relight.model.replay import Outcome
from relight.model.run import Run, RunChange, Status
from relight.run import cancel, execute, step_bodies
from relight.run.operation import Finished, Operation, Recorded

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun


async def call(run: LiveRun, scope: Scope, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a flow in a flow. The end of the child run is the outcome of the call."""
    scope = here(scope)
    key = scope.begin(flow.name)
    # Before the journal is looked at: a call that does not fit raises here, live and on replay, and leaves no entry.
    data = flow.arguments.seal(args, kwargs, run.services.config.payload.max_bytes)
    ended = _ended(run, key, data)
    if ended is not None:
        return await run.asked(Finished(run, scope, key, ended, lambda outcome: _open(run, flow, outcome)))
    cancel.raise_if_told(run, scope)
    begun = run.begun(key)
    inner_args, inner_kwargs = flow.arguments.open(data)
    at = begun.at if begun is not None and begun.at else run.services.clock.now()
    if run.replay is not None and run.replay.has_ended(key):
        at = run.children[key].at  # its code is called again, and comes to the same end
    elif begun is None:
        _create(run, scope, flow, key, data, at)
    try:
        inner = execute.Call(flow, inner_args, inner_kwargs, key, at, begun)
        value = await execute.call_flow(run, inner, scope)
        sealed, value = flow.result.seal(value, run.services.config.payload.max_bytes)
    except Unwind:
        raise
    except BaseException as error:
        raised = await _ended_badly(run, scope, key, step_bodies.ordinary(error, flow.what), flow.what)
        if raised is error:
            raise
        raise raised from error

    def record(end: Operation) -> None:
        output, blob = run.payload(sealed)
        run.record(j.RunCompleted(key, output, blob, run.services.clock.now()), end)
        _end(run, key, Status.COMPLETED, output=b"" if blob else sealed, output_blob=blob)

    await run.asked(_End(run, scope, key, record))
    run.host.notify_watchers(run.run_id(key))
    return value


class _End(Recorded):
    """The end of a child run."""

    kind = "run"


def _ended(run: LiveRun, key: str, data: bytes) -> Outcome | None:
    """The outcome of a child run that has ended, and is not replayed."""
    replay = run.replay
    if replay is not None and key in replay.boxes and key in replay.recorded:
        return replay.recorded[key]
    kept = run.kept.get(key)
    if kept is None or kept.kind != "run":
        return None
    first = run.children.get(key)
    if first is not None and (first.input_blob or bytes(first.input)) not in (data, blob_digest(data)):
        return None  # a retried flow did something else: this is not the call that was recorded
    return kept


def _open(run: LiveRun, flow: Flow[..., Any], outcome: Outcome) -> tuple[Any, BaseException | None]:
    if outcome.error is not None:
        return None, rebuild_error(outcome.error)
    return run.open(flow.result, outcome), None


async def _ended_badly(run: LiveRun, scope: Scope, key: str, error: BaseException, what: str) -> BaseException:
    """A child run has ended without a result: record how, unless the run leaves memory. Returns the error to raise in the
    flow that called it."""
    if run.stopping is not None:
        raise Unwind(run.stopping) from None
    if isinstance(error, RunCancelled):
        _note_end(run, key, j.RunCancelled(key, run.cancel_reason or "", run.services.clock.now()), run.cancel_reason)
    elif isinstance(error, asyncio.CancelledError) and execute.is_being_cancelled():
        # Replay calls its code again, and comes to the same end. So the caller need not wait for the commit.
        by_flow = j.OperationCancelled(key, by_flow=True, at=run.now())
        _note_end(run, key, by_flow, "the flow that called it gave up on it")
    else:
        error = step_bodies.recordable(error, what)
        failure = record_error(error)

        def record(end: Operation) -> None:
            run.record(j.RunFailed(key, failure, run.services.clock.now()), end)
            _end(run, key, Status.FAILED, error=msgspec.json.encode(failure), reason=failure_reason(failure))

        await run.asked(_End(run, scope, key, record))
    run.host.notify_watchers(run.run_id(key))
    return error


def _note_end(run: LiveRun, key: str, event: j.Event, reason: str | None) -> None:
    """Record the end of a child run whose code comes to the same end by itself on replay."""

    def record() -> None:
        run.record(event)
        _end(run, key, Status.CANCELLED, reason=reason or "")

    if run.replay is None or key not in run.replay.ended_by_itself:
        run.when_live(record)


def _create(run: LiveRun, scope: Scope, flow: Flow[..., Any], key: str, data: bytes, at: float) -> None:
    """Add the child's row and first entry to the next commit. Before that commit, nothing of the child is durable."""

    def create() -> None:
        raw, blob = run.payload(data)
        run.record(j.RunCreated(key, flow.name, flow.fingerprint, raw, blob, at))
        run.writer.insert(
            Run(
                id=run.run_id(key),
                root_id=run.id,
                parent_id=run.run_id(scope.run_key),
                flow=flow.name,
                flow_hash=flow.fingerprint,
                status=Status.RUNNING,
                created_at=at,
                updated_at=at,
                input=b"" if blob else data,
                input_blob=blob,
            )
        )

    run.when_live(create)


def _end(run: LiveRun, key: str, status: Status, **fields: Any) -> None:
    run.writer.change(RunChange(run_id=run.run_id(key), status=status, **fields))
