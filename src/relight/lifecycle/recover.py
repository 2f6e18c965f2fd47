"""Recover: claim, restore, replay, resume. Also how a parked run comes back: only the reason differs.

claim ─ raise the epoch in the store, for the whole pass at once; whoever loses the race drops the run
read ── checkpoint, tail and inbox of all claimed runs, in one read
decide ─ model.decisions, from facts
resume ─ the flow is called again; what the journal holds is given back to it instead of done
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from relight.errors import CorruptionError, StoreError
from relight.flow.payloads import record_error
from relight.lifecycle import hold
from relight.lifecycle.run import LiveRun
from relight.model import journal as j
from relight.model.decisions import Action, Decision, Facts, decide
from relight.model.replay import TreeState, restore
from relight.model.run import Hold, Message, MessageKind, Run, RunChange, Status
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.lifecycle.orchestrator import Orchestrator


class _Restored(msgspec.Struct):
    """A claimed run on its way back: what will be done with it, and what it was told meanwhile."""

    run: LiveRun
    decision: Decision
    inbox: list[Message]


async def take_up(orchestrator: Orchestrator, rows: list[Run], *, crashed: bool) -> int:
    """Bring these unfinished roots into memory and drive them; how many were claimed."""
    rows = [row for row in rows if not row.status.terminal and row.id not in orchestrator.live]
    rows = [row for row in rows if row.id not in orchestrator.taking]
    if not rows or orchestrator.stopping:
        return 0
    ids = [row.id for row in rows]
    orchestrator.taking.update(ids)
    restored: list[_Restored] = []
    try:
        epochs = await orchestrator.services.store.claim(
            {row.id: row.epoch for row in rows}, orchestrator.services.owner
        )
        restored = await _restore(orchestrator, [row for row in rows if row.id in epochs], epochs, crashed)
        for one in restored:
            if crashed:
                await one.run.writer.committed()  # one commit for all: a crash from here on counts against the run
            if not one.run.writer.fenced:
                await _act(orchestrator, one, crashed)
        return len(epochs)
    except StoreError:
        # Perhaps they are claimed: then nobody but this process would ever look at them again.
        orchestrator.doubt(ids, crashed=crashed)
        raise
    finally:
        orchestrator.taken(ids)
        _free_again(orchestrator, restored)


async def _restore(
    orchestrator: Orchestrator, rows: list[Run], epochs: dict[str, int], crashed: bool
) -> list[_Restored]:
    """Read the claimed runs' journals and inboxes, replay them, and decide. One that cannot be read is held here."""
    if not rows:
        return []
    store = orchestrator.services.store
    journals = await store.read([row.id for row in rows])
    inboxes: dict[str, list[Message]] = {row.id: [] for row in rows}
    for message in await store.inbox([row.id for row in rows]):
        inboxes[message.run_id].append(message)
    restored = []
    for row, journal in zip(rows, journals, strict=True):
        try:
            if isinstance(journal, Exception):
                raise journal
            state = restore(journal)
        except CorruptionError as error:
            await _hold_unreadable(orchestrator, row, epochs[row.id], error, inboxes[row.id])
            continue
        run, decision = _decide(orchestrator, row, epochs[row.id], state, crashed)
        if crashed:
            now = orchestrator.services.clock.now()
            run.writer.add(j.RunRecovered("", orchestrator.services.owner, row.owner, now))
            run.change(Status.RUNNING, owner=orchestrator.services.owner)
        restored.append(_Restored(run, decision, inboxes[row.id]))
    return restored


def _free_again(orchestrator: Orchestrator, restored: list[_Restored]) -> None:
    """Flows registered while runs were being held for want of them: whoever looked for held runs then came too early."""
    missing = {one.run.row.flow for one in restored if one.decision.action is Action.HOLD_DEFINITION}
    for name in missing:
        if orchestrator.services.registry.find(name) is not None:
            orchestrator.flow_registered(name)


def _decide(
    orchestrator: Orchestrator, row: Run, epoch: int, state: TreeState, crashed: bool
) -> tuple[LiveRun, Decision]:
    services = orchestrator.services
    flow = services.registry.find(row.flow)
    decision = decide(
        Facts(
            status=row.status,
            flow=row.flow,
            flow_registered=flow is not None,
            resumable=flow is None or flow.resumable,
            crashed=crashed,
            crashes_without_progress=state.recoveries,
            max_attempts=services.config.recovery.max_attempts,
        )
    )
    run = LiveRun(services, orchestrator, row, epoch, state)
    run.recovered = crashed
    return run, decision


async def _act(orchestrator: Orchestrator, restored: _Restored, crashed: bool) -> None:
    """Do what was decided."""
    run, decision = restored.run, restored.decision
    flow = orchestrator.services.registry.find(run.row.flow)
    if decision.action is Action.RESUME and flow is not None:
        if crashed:
            log(
                logging.INFO,
                Token.RUN_RESUMED,
                f"run {run.id} of flow {run.row.flow!r}: {decision.reason}; {run.restored} operations restored",
            )
        orchestrator.drive(run, flow, restored.inbox)
        return
    orchestrator.live[run.id] = run
    await hold.depart(run, decision.reason, 0.0, _final_write(run, decision, restored.inbox))


def _final_write(run: LiveRun, decision: Decision, messages: list[Message]) -> Callable[[], None] | None:
    """What is committed for a run that is not driven; None for one that is held, which `depart` writes."""
    now = run.services.clock.now()
    cancel = next((message for message in messages if message.kind is MessageKind.CANCEL), None)
    if cancel is not None:  # nothing can be run for it, so there is nothing to clean up either
        reason = str(msgspec.json.decode(cancel.payload) or "cancelled")
        return lambda: hold.conclude(run, j.RunCancelled("", reason, now), reason=reason)
    if decision.action is Action.FAIL:
        log(logging.WARNING, Token.RUN_NOT_RESUMABLE, f"run {run.id}: {decision.reason}")
        error = record_error(RuntimeError(decision.reason))
        encoded = msgspec.json.encode(error)
        return lambda: hold.conclude(run, j.RunFailed("", error, now), error=encoded, reason=decision.reason)
    if decision.action is Action.HOLD_POISON:
        log(logging.ERROR, Token.RUN_POISONED, f"run {run.id}: {decision.reason}")
        run.held = (Hold.POISON, decision.reason)
    else:
        log(logging.WARNING, Token.DEFINITION_MISSING, f"run {run.id}: {decision.reason}")
        run.held = (Hold.DEFINITION, decision.reason)
    return None


async def _hold_unreadable(
    orchestrator: Orchestrator, row: Run, epoch: int, error: CorruptionError, messages: list[Message]
) -> None:
    """The journal cannot be read, so nothing can be appended to it either: only the row says what is wrong."""
    log(logging.ERROR, Token.JOURNAL_CORRUPT, f"run {row.id}: {error}")
    reason = f"{error}; restore the file from a backup and resume() the run, or cancel() it"
    status = RunChange(run_id=row.id, status=Status.PAUSED, hold=Hold.CORRUPT, reason=reason)
    if any(message.kind is MessageKind.CANCEL for message in messages):
        status = RunChange(
            run_id=row.id, status=Status.CANCELLED, reason=f"cancelled; its journal was corrupt: {error}"
        )
    await orchestrator.services.store.hold({row.id: epoch}, status)
    if status.status.terminal and row.parent_id is not None:
        ended = Message(run_id=row.parent_id, kind=MessageKind.ENDED, name=row.id, dedup=f"ended:{row.id}")
        await orchestrator.services.store.post([ended])
    orchestrator.tell(row.id)
