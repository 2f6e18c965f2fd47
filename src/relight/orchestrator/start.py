"""Start: one commit accepts a run: its row, its input, its first entry. After that commit the run is never lost."""

from __future__ import annotations

from functools import partial
from typing import Any

from relight.errors import ConflictError, DefinitionError
from relight.flow.definitions import Flow, without_id
from relight.flow.registry import Registry
from relight.model import journal as j
from relight.model.blob import blob_digest
from relight.model.replay import TreeState
from relight.model.run import Status
from relight.orchestrator.orchestrator import Orchestrator
from relight.ports.store import Commit, Exists, Extras, Fenced
from relight.run.arguments import check_run_id, new_root, same_input


def flow_to_start(registry: Registry, given: object, run_id: str | None) -> tuple[Flow[..., Any], str | None]:
    """The registered flow, and the run's id, for the argument of start(): a flow, a flow with an id, or a name."""
    if isinstance(given, str):
        return registry.get(given), run_id
    flow, run_id = without_id(given, run_id)
    if not isinstance(flow, Flow):
        raise DefinitionError(f"start() takes a flow or its name, not {given!r}; decorate the function with @flow")
    registry.check(flow)
    return flow, run_id


async def start(
    orchestrator: Orchestrator, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run_id: str | None
) -> str:
    """Accept a run and, if there is room, begin to drive it. The same id with the same flow and input is the same run."""
    services = orchestrator.services
    data = flow.arguments.seal(args, kwargs, services.config.payload.max_bytes)
    new_id = services.entropy.run_id() if run_id is None else check_run_id(run_id)
    at = services.clock.now()
    room = orchestrator.reserve(new_id)
    lapses = services.heartbeats.lapses
    commit, first = creation(services.config.payload.blob_threshold, flow, new_id, data, at)
    assert commit.create is not None
    if room:
        commit.create.status, commit.create.owner, commit.create.wake_at = Status.RUNNING, services.owner, None
    try:
        result = await services.recorder.create(commit)
    except BaseException:
        services.recorder.withdraw(commit, partial(_check, orchestrator, new_id, room))
        raise
    finally:
        orchestrator.release(new_id, room)
    if isinstance(result, Exists):
        known = result.run
        if known.flow != flow.name or not same_input(known, data):
            raise ConflictError(
                f"run id {new_id!r} is taken by flow {known.flow!r} with input {_short(known.input)}, "
                f"not flow {flow.name!r} with input {_short(data)}"
            )
        if not services.config.recovery.enabled:
            orchestrator.offer(new_id)  # perhaps no other process takes it up when it is due
        if known.owner == services.owner and not orchestrator.has(new_id):
            orchestrator.check_ownership(
                [new_id], crashed=False
            )  # its creation was reported as failed, and was written
    elif isinstance(result, Fenced):
        raise AssertionError(f"creating {new_id!r} cannot be fenced")
    elif room:
        orchestrator.drive_new(commit.create, TreeState(sequence=1, created=first), flow, lapses)
    else:
        orchestrator.offer(new_id)
    return new_id


def _check(orchestrator: Orchestrator, run_id: str, owned: bool) -> None:
    """A call of start() has failed, or its caller has given up, and the store may have written the run all the same. If this
    process owns it then, no other process drives it."""
    orchestrator.memory.started_here(run_id)
    if owned:
        orchestrator.check_ownership([run_id], crashed=False)
    else:
        orchestrator.offer(run_id)


def creation(
    blob_threshold: int, flow: Flow[..., Any], run_id: str, data: bytes, at: float
) -> tuple[Commit, j.RunCreated]:
    """The commit that accepts a run, pending, for any orchestrator to take up; and the run's first event."""
    blob = blob_digest(data) if len(data) > blob_threshold else ""
    row, first = new_root(flow, run_id, data, blob, at)
    row.epoch = 1
    commit = Commit(root_id=run_id, epoch=1, create=row, entries=[j.encode_event(first)])
    if blob:
        commit.extras = Extras(blobs={blob: data})
    return commit, first


def _short(data: bytes) -> str:
    text = data.decode(errors="replace")
    return text if len(text) <= 120 else text[:120] + "…"
