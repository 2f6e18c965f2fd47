"""Resume by hand: bring back a run that recovery would leave alone, or has given up on.

The run is only freed (pending, due, without an owner), by one commit under a raised epoch; an orchestrator with room
takes it up. So a person may resume it from any process, even from one that does not know the flow.
"""

from __future__ import annotations

from relight.errors import ConflictError, RunStateError
from relight.model import journal as j
from relight.model.run import RESUMED_BY_HAND, Hold, LogLine, Message, MessageKind, Run, RunChange, Status
from relight.ports.store import Commit, Committed, Extras
from relight.recovery.explain import sentence
from relight.recovery.facts import open_children
from relight.recovery.memory import RunsInMemory
from relight.recovery.plan import Known, know_one
from relight.run.services import Services
from relight.telemetry import Token


async def resume(orchestrator: RunsInMemory, run_id: str) -> None:
    """Resume a run. Raises RunNotFoundError, or RunStateError if the run is driven, waits, or has ended for good."""
    known = await know_one(orchestrator.services, run_id)
    row = known.row
    if row.status is Status.PAUSED:
        now = orchestrator.services.clock.now()
        await orchestrator.services.store.append_log([by_hand(row.id, now)])
        message = Message(run_id=row.id, kind=MessageKind.RESUME, at=now)
        (message.id,) = [found or 0 for found in await orchestrator.services.store.post([message])]
        _offer(orchestrator, row)
        await orchestrator.message_posted(message)
        return
    _refuse(known, orchestrator.services)
    await _free(orchestrator, known)
    _offer(orchestrator, row)


def _offer(orchestrator: RunsInMemory, row: Run) -> None:
    """This process takes the freed run up, if it can call its code. Otherwise another process is given time to do so."""
    if orchestrator.services.registry.find(row.flow) is not None:
        orchestrator.offer(row.id)
    else:
        orchestrator.look_for_messages()


def _refuse(known: Known, services: Services) -> None:
    """Raise RunStateError if there is nothing to resume. While recovery is off, a run without an owner can be resumed,
    because no process takes it up automatically."""
    row = known.row
    if row.status is Status.CANCELLED and row.hold is Hold.RECOVERY:
        return
    if row.status.terminal:
        why = "it was cancelled by request, not by recovery" if row.status is Status.CANCELLED else "it has ended"
        raise RunStateError(f"run {row.id!r} is {row.status}: {why}, so there is nothing to resume; fork() starts anew")
    if row.owner is None and (services.config.recovery.enabled or row.reason == RESUMED_BY_HAND):
        raise RunStateError(f"there is nothing to resume: {sentence(known, services.clock.now())}")
    if known.alive:
        raise RunStateError(f"run {row.id!r} is alive: {row.owner} drives it, so there is nothing to resume")


async def _free(orchestrator: RunsInMemory, known: Known) -> None:
    services, row = orchestrator.services, known.row
    if known.state is None:
        raise RunStateError(f"run {row.id!r} cannot be resumed, its journal cannot be read: {known.trouble}")
    if row.status.terminal:
        await _commit_freed(services, known, row.epoch)
        return
    try:  # an orphan: fence its owner, which may be alive after all
        claimed = await services.store.claim({row.id: row.epoch}, services.owner)
        await _commit_freed(services, known, claimed.get(row.id, 0))
    except BaseException:
        # It may be claimed and not freed. Then no other process takes it up, as its owner is alive.
        orchestrator.check_ownership([row.id], crashed=False)
        raise


async def _commit_freed(services: Services, known: Known, epoch: int) -> None:
    row, now = known.row, services.clock.now()
    assert known.state is not None
    commit = Commit(
        root_id=row.id,
        epoch=epoch,
        after=known.state.sequence,
        entries=[j.encode_event(j.RunResumed("", now))],
        extras=Extras(changes=[_freed(row, now), *_children(known)], log=[by_hand(row.id, now)]),
        reopen=row.status.terminal,
    )
    (result,) = await services.store.commit([commit])
    if not isinstance(result, Committed):
        raise ConflictError(f"run {row.id!r} was taken up or changed by another process in this moment; look again")


def by_hand(run_id: str, now: float) -> LogLine:
    """What a run's own log says of a person's request to resume it."""
    return LogLine(run_id=run_id, at=now, text="resumed by hand; free to be taken up", token=Token.RUN_RESUMED.value)


def _freed(row: Run, now: float) -> RunChange:
    return RunChange(run_id=row.id, status=Status.PENDING, wake_at=now, reason=RESUMED_BY_HAND)


def _children(known: Known) -> list[RunChange]:
    """Child runs that ended with their root go on with it."""
    if known.state is None or not known.row.status.terminal:
        return []
    return [RunChange(run_id=f"{known.row.id}/{key}", status=Status.RUNNING) for key in open_children(known.state)]
