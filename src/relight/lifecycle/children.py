"""Child runs (a flow called in a flow: same tree, same journal) and spawned runs (roots of their own, linked to their parent)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from relight.errors import ConflictError, DefinitionError, RunCancelled, RunCancelledError, RunNotFoundError, Unwind
from relight.flow.definitions import Flow
from relight.flow.payloads import rebuild_error, record_error
from relight.flow.scope import Scope, here
from relight.lifecycle import execute, hold, steps, waits
from relight.model import journal as j
from relight.model.blob import blob_digest
from relight.model.run import Message, MessageKind, Run, RunChange, Status

if TYPE_CHECKING:
    from relight.lifecycle.run import LiveRun


async def call(
    run: LiveRun, scope: Scope | None, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A child run: the scope of its key. Its end is the outcome of the call."""
    scope = here(scope)
    key = scope.begin(flow.name)
    # Before the journal is asked: a call that does not fit raises here, live and replayed, and leaves no entry.
    data = flow.arguments.seal(args, kwargs, run.services.config.payload.max_bytes)
    if scope.recorded is not None:
        outcome = await run.replayed(scope, key, "run")
        if outcome is not None and not _another_call(run, scope, key, data):
            if outcome.error is not None:
                raise rebuild_error(outcome.error)
            return await run.open(flow.result, outcome)
    begun = run.begun(key)
    if begun is None and run.cancel_reason is not None and not scope.cancel_seen:
        await hold.interrupt(run, scope, key)  # one that has begun hears of it inside, where it can clean up
    at = begun.at if begun is not None and begun.at else run.services.clock.now()
    if begun is None:
        _create(run, scope, flow, key, data, at)
    inner_args, inner_kwargs = flow.arguments.open(data)
    inner = execute.Call(flow, inner_args, inner_kwargs, key, at, begun)
    try:
        value = await execute.call_flow(run, inner, scope)
        sealed, value = flow.result.seal(value, run.services.config.payload.max_bytes)
    except Unwind:
        raise
    except BaseException as error:
        await _ended_badly(run, key, error)
        raise
    output, blob = run.payload(sealed)
    run.record(j.RunCompleted(key, output, blob, run.services.clock.now()))
    _end(run, key, Status.COMPLETED, output=b"" if blob else sealed, output_blob=blob)
    run.set_running()
    async with steps.under_way(run, scope, key):
        await run.settle()
    run.host.tell(run.run_id(key))
    return value


async def _ended_badly(run: LiveRun, key: str, error: BaseException) -> None:
    """A child run has ended without a result: record how, unless the whole run only leaves memory."""
    now = run.services.clock.now()
    if isinstance(error, RunCancelled):
        run.record(j.RunCancelled(key, run.cancel_reason or "", now))
        _end(run, key, Status.CANCELLED, reason=run.cancel_reason or "")
        await run.settle()
    elif run.stopping is not None:
        raise Unwind(run.stopping) from None
    elif isinstance(error, asyncio.CancelledError):
        if steps.given_up(run, key):
            _end(run, key, Status.CANCELLED, reason="the flow that called it gave up on it")
    elif isinstance(error, Exception):
        record = record_error(error)
        run.record(j.RunFailed(key, record, now))
        _end(run, key, Status.FAILED, error=msgspec.json.encode(record))
        await run.settle()


def _another_call(run: LiveRun, scope: Scope, key: str, data: bytes) -> bool:
    """Whether a retried flow took another way: then this is not the call whose outcome was recorded."""
    if run.replayer is None or not run.replayer.in_retry(scope):
        return False
    first = run.replayer.children.get(key)
    return first is not None and (first.input_blob or bytes(first.input)) not in (data, blob_digest(data))


def _create(run: LiveRun, scope: Scope, flow: Flow[..., Any], key: str, data: bytes, at: float) -> None:
    """The child's row and first entry ride with whatever is committed next: before that, nothing of it has happened."""
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


def _end(run: LiveRun, key: str, status: Status, **fields: Any) -> None:
    run.writer.change(RunChange(run_id=run.run_id(key), status=status, **fields))


async def spawn(
    run: LiveRun,
    scope: Scope | None,
    flow: Flow[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run_id: str | None,
) -> str:
    """One commit: this run's entry, the spawned run's row and its first entry."""
    scope = here(scope)
    key = scope.begin(f"$spawn.{flow.name}")
    data = flow.arguments.seal(args, kwargs, run.services.config.payload.max_bytes)  # here, as in `call`
    if scope.recorded is not None:
        outcome = await run.replayed(scope, key, "spawn")
        if outcome is not None:
            if outcome.error is not None:
                raise rebuild_error(outcome.error)
            return str(msgspec.json.decode(bytes(outcome.output)))
    if run.cancel_reason is not None and not scope.cancel_seen:
        await hold.interrupt(run, scope, key)
    if run.services.registry.find(flow.name) is not flow:
        raise DefinitionError(f"spawn({flow.name!r}): the flow is not registered under that name in this process")
    at = run.services.clock.now()
    spawned_id = execute.check_run_id(run_id) if run_id is not None else run.run_id(key)
    if run_id is not None:
        async with steps.under_way(run, scope, key):
            await _check_free(run, flow, key, spawned_id, data)
    raw, blob = run.payload(data)
    first = j.encode_event(j.RunCreated("", flow.name, flow.fingerprint, raw, blob, at, parent=run.id))
    run.record(j.RunSpawned(key, spawned_id))
    run.writer.insert(
        Run(
            id=spawned_id,
            root_id=spawned_id,
            parent_id=run.id,
            flow=flow.name,
            flow_hash=flow.fingerprint,
            status=Status.PENDING,
            created_at=at,
            updated_at=at,
            wake_at=at,
            input=b"" if blob else data,
            input_blob=blob,
        ),
        first,
    )
    run.unsettled = False
    run.set_running()
    async with steps.under_way(run, scope, key):
        await run.settle()
    run.host.offer(spawned_id)
    return spawned_id


async def _check_free(run: LiveRun, flow: Flow[..., Any], key: str, run_id: str, data: bytes) -> None:
    """An id that is taken is an outcome like any other: the flow may react to it, and replay must see it again."""
    known = await run.ask(lambda store: store.get_run(run_id))
    if known is not None and (known.flow != flow.name or not execute.same_input(known, data)):
        error = ConflictError(f"run id {run_id!r} is taken by flow {known.flow!r} with another input")
        run.record(j.RunSpawned(key, run_id, record_error(error)))
        run.set_running()
        await run.settle()
        raise error


async def join(run: LiveRun, scope: Scope | None, run_id: str, flow: Flow[..., Any]) -> Any:
    """Wait for a spawned run's end. Its last commit puts a message into this run's inbox, so the wake-up cannot be lost."""
    scope = here(scope)
    key = scope.begin("$join")
    if scope.recorded is not None:
        outcome = await run.replayed(scope, key, "wait")
        if outcome is not None:
            if outcome.error is not None:
                raise rebuild_error(outcome.error)
            return await run.open(flow.result, outcome)
    async with steps.under_way(run, scope, key):
        ended, message = await _awaited(run, scope, key, run_id)
        error = None
        if ended.status is Status.CANCELLED:
            error = record_error(
                RunCancelledError(f"run {run_id!r} was cancelled: {ended.reason}", run_id=run_id, reason=ended.reason)
            )
        elif ended.error is not None:
            error = msgspec.json.decode(ended.error, type=j.ErrorRecord)
        output = j.NULL if ended.output is None or ended.output_blob else msgspec.Raw(ended.output)
        run.record(j.RunJoined(key, output, ended.output_blob, error, 0 if message is None else message.id))
        if message is not None:
            run.writer.consume([message.id])
        run.set_running()
        await run.settle()
    if error is not None:
        raise rebuild_error(error)
    return flow.result.open(await run.load(output, ended.output_blob))


async def _awaited(run: LiveRun, scope: Scope, key: str, run_id: str) -> tuple[Run, Message | None]:
    """The awaited run's final row, and the message that told of it, if there was need of one."""
    while True:
        message = None
        if await _will_tell(run, run_id):
            message = await waits.receive(run, scope, key, "run", run_id, None)
        else:
            run.begun(key)
            if run.cancel_reason is not None and not scope.cancel_seen:
                await hold.interrupt(run, scope, key)
        row = await run.ask(lambda store: store.get_run(run_id))
        if row is None:
            raise RunNotFoundError(f"run {run_id!r} is not there; was it deleted?")
        if row.status.terminal:
            return row, message
        # Recovery gave up on it, and somebody has brought it back since: it tells of its next end, too.
        if message is not None:
            waits.forget(run, message)


async def _will_tell(run: LiveRun, run_id: str) -> bool:
    """Whether the awaited run has yet to end, and then tells this one. A run tells whoever spawned it; one that was there
    already under the id this run gave has to be asked (asked again after a crash, it tells once all the same)."""
    row = await run.ask(lambda store: store.get_run(run_id))
    if row is None or row.status.terminal or row.parent_id == run.id:
        return row is not None and not row.status.terminal
    join = Message(
        run_id=run_id, kind=MessageKind.JOIN, name=run.id, dedup=f"join:{run.id}", at=run.services.clock.now()
    )
    (asked,) = await run.ask(lambda store: store.post([join]))
    run.host.listen()
    return asked is not None  # else it has ended in this moment
