"""Take up runs: lease, claim, restore, decide, resume. Recovery and parked runs that are due both go this way.

lease ── acquire it first: only the process that gets the lease reads the run
claim ── raise the epoch in the store, for the whole pass at once; a process that loses the race drops the run
read ─── checkpoint, tail and inbox of all claimed runs, in one read
decide ─ model.decisions, from facts
resume ─ call the flow again; it is told the recorded outcomes instead of executing those operations
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from relight.errors import StoreError
from relight.flow.payloads import record_error
from relight.model import journal as j
from relight.model.decisions import Action, Decision, Facts, decide
from relight.model.journal import Journal
from relight.model.lease import Session
from relight.model.operations import failure_reason
from relight.model.replay import TreeState, restore
from relight.model.run import Hold, Message, MessageKind, Run, RunChange, Status
from relight.recovery import run_leases, unreadable, upgrades
from relight.recovery.facts import ENDINGS, facts_of, open_children
from relight.recovery.memory import RunsInMemory
from relight.run import leaving
from relight.run.live_run import LiveRun
from relight.run.services import Services
from relight.telemetry import Token, log

TRIES_ALONE = 3

_TOKENS = {
    Action.RESUME: Token.RUN_RESUMED,
    Action.WAIT: Token.RUN_SUSPECTED,
    Action.CANCEL: Token.RUN_GIVEN_UP,
    Action.FAIL: Token.RUN_NOT_RESUMABLE,
    Action.HOLD_POISON: Token.RUN_POISONED,
    Action.HOLD_DEFINITION: Token.DEFINITION_MISSING,
    Action.HOLD_VERSION: Token.FINGERPRINT_MISMATCH,
}


class Death(msgspec.Struct, frozen=True):
    """The dead owner of the runs of a pass: its last session, if that is known, and whether these are all its runs."""

    session: Session | None = None
    whole: bool = False


UNKNOWN = Death()


class _Restored(msgspec.Struct):
    """A claimed run whose journal was read: the decision on it, and the messages in its inbox."""

    run: LiveRun
    state: TreeState
    decision: Decision
    inbox: list[Message]


async def take_up_claimed(orchestrator: RunsInMemory, rows: list[Run], lapses: int) -> None:
    """Take up due runs that this process has claimed already; `lapses` is the heartbeats' count before the claim.

    Runs that this process cannot drive yet become uncertain: a run that is still leaving memory here, or all runs if
    the lease was lost or this process stops. In the second case they are released, if the store accepts that, so that
    other processes need not wait until this one counts as dead."""
    able = orchestrator.services.heartbeats.may_drive and not orchestrator.stopping
    late = [row.id for row in rows if not able or row.id in orchestrator.live or row.id in orchestrator.taking]
    if late:
        orchestrator.check_ownership(late, crashed=False)
    if not able:
        now = orchestrator.services.clock.now()
        released = RunChange(run_id="", status=Status.PENDING, wake_at=now, reason="released")
        await orchestrator.services.store.hold({row.id: row.epoch for row in rows}, released)
        return  # another process may drive them by now, even if the lease is ours again
    await take_up(orchestrator, rows, crashed=False, claimed_under=lapses)


async def take_up(
    orchestrator: RunsInMemory,
    rows: list[Run],
    *,
    crashed: bool,
    death: Death = UNKNOWN,
    claimed_under: int | None = None,
) -> int:
    """Bring these unfinished roots into memory and drive them, as far as there is room. Returns how many were claimed."""
    rows = [row for row in rows if not row.status.terminal and not row.newer and row.id not in orchestrator.live]
    rows = [row for row in rows if row.id not in orchestrator.taking]
    if not rows or orchestrator.stopping or not orchestrator.services.heartbeats.may_drive:
        return 0
    if claimed_under is None and len(rows) > orchestrator.room:  # it was filled since these rows were read
        rows = rows[: max(orchestrator.room, 0)]
        orchestrator.no_room()
    services, ids = orchestrator.services, [row.id for row in rows]
    orchestrator.taking.update(ids)
    restored: list[_Restored] = []
    began = services.clock.monotonic()
    # Read before the claim: if this process is frozen after it, it must confirm that it still owns the runs.
    lapses = services.heartbeats.lapses if claimed_under is None else claimed_under
    try:
        if claimed_under is None:
            rows = await run_leases.acquire(services, rows)
        epochs = {row.id: row.epoch for row in rows}
        if claimed_under is None and epochs:
            epochs = await services.store.claim(epochs, services.owner)
            run_leases.give_up(services, [row.id for row in rows if row.id not in epochs])
        restored = await _restore(orchestrator, [row for row in rows if row.id in epochs], epochs, crashed, death)
        for one in restored:
            one.run.lapses = lapses
            await one.run.writer.committed()  # one commit for all runs: a crash after it counts against the run
            if not one.run.writer.lost:
                await _act_on(orchestrator, one, crashed)
            elif not one.run.writer.fenced:
                orchestrator.check_ownership([one.run.id], crashed=crashed)
        if crashed and epochs:
            services.metrics.claims.inc(len(epochs))
            services.metrics.resume.observe(services.clock.monotonic() - began)
        return len(epochs)
    except Exception:
        # The claim may have succeeded: then no other process would ever take these runs up.
        orchestrator.check_ownership(ids, crashed=crashed)
        raise
    finally:
        orchestrator.taken_up(ids)
        _free_again(orchestrator, restored)


async def _restore(
    orchestrator: RunsInMemory, rows: list[Run], epochs: dict[str, int], crashed: bool, death: Death
) -> list[_Restored]:
    """Read the claimed runs' journals and inboxes, restore them, and decide. A run that cannot be read is held here."""
    if not rows:
        return []
    services = orchestrator.services
    journals, inboxes = await _read(services, [row.id for row in rows])
    found: list[tuple[LiveRun, TreeState, Facts]] = []
    for row, journal in zip(rows, journals, strict=True):
        try:
            if isinstance(journal, Exception):
                raise journal
            state = restore(journal)
            upgrades.refuse_newer(inboxes[row.id])
            run = LiveRun(services, orchestrator, row, epochs[row.id], state)
            # woken=True: it was decided before the claim that the run may be taken up.
            resumed = any(message.kind is MessageKind.RESUME for message in inboxes[row.id])
            session = death.session
            known = facts_of(services, row, state=state, crashed=crashed, woken=True, session=session, resumed=resumed)
        except Exception as error:  # noqa: BLE001 - an error in one run: the other runs of the pass go on
            await _set_aside(orchestrator, row, epochs[row.id], error, inboxes[row.id])
            continue
        found.append((run, state, known))
    restored = []
    for (run, state, _), known in zip(found, _judge(orchestrator, found, death), strict=True):
        run.recovered = int(crashed)
        try:
            decision = decide(known)
            if crashed and decision.action is not Action.FINISH:
                _record_recovery(run, state, decision, known)
            elif decision.trial_seconds:
                _record_turn(run, decision)
            elif known.resumed and state.crashes.count:  # resumed by hand: its crashes are counted from 0 again
                run.writer.add(j.RunResumed("", services.clock.now()))
        except Exception as error:  # noqa: BLE001 - an error in one run: the other runs of the pass go on
            run.writer.drop()
            run.let_go()
            await _set_aside(orchestrator, run.row, epochs[run.id], error, inboxes[run.id])
            continue
        restored.append(_Restored(run, state, decision, inboxes[run.id]))
    return restored


async def _set_aside(
    orchestrator: RunsInMemory, row: Run, epoch: int, error: Exception, messages: list[Message]
) -> None:
    """Hold a run that cannot be taken up. If that breaks as well, `look_for_lost` finds the run later."""
    try:
        await unreadable.hold(orchestrator, row, epoch, error, messages)
    except StoreError:
        raise
    except Exception as again:  # noqa: BLE001 - the other runs of the pass go on
        log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {row.id}: holding it broke: {again!r}", again)
        return
    run_leases.give_up(orchestrator.services, [row.id])  # another process may be able to take it up


async def _read(
    services: Services, ids: list[str], tries: int = TRIES_ALONE
) -> tuple[list[Journal | Exception], dict[str, list[Message]]]:
    """Read journals and inboxes. If that breaks, they are read one by one, to find the run that breaks it. That run is
    read again, in case the fault has passed."""
    inboxes: dict[str, list[Message]] = {run_id: [] for run_id in ids}
    try:
        journals = await services.store.read(ids)
        for message in await services.store.inbox(ids):
            inboxes[message.run_id].append(message)
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001 - a bug that the rows of some run trigger
        log(logging.CRITICAL, Token.INTERNAL_ERROR, f"reading {len(ids)} runs broke: {error!r}", error)
        if len(ids) == 1 and tries == 1:
            return [error], inboxes
        if len(ids) == 1:
            return await _read(services, ids, tries - 1)
        journals = []
        for run_id in ids:
            alone, inbox = await _read(services, [run_id])
            journals += alone
            inboxes |= inbox
    return journals, inboxes


def _judge(orchestrator: RunsInMemory, found: list[tuple[LiveRun, TreeState, Facts]], death: Death) -> list[Facts]:
    """Add the facts that depend on the other runs of the pass: whether the run was the only suspect, and its turn."""
    trials = orchestrator.trials
    stood_still = [run.id for run, state, _ in found if state.crashes.count]  # since their last recovery
    to_blame = stood_still or [run.id for run, _, _ in found]
    judged, on_trial, suspects = [], trials.count(), 0
    for run, state, known in found:
        alone = known.crashed and death.whole and to_blame == [run.id]
        facts = msgspec.structs.replace(
            known,
            crashes_alone=state.crashes.alone + 1 if alone else known.crashes_alone,
            on_trial=on_trial,
            trial_ends_at=trials.ends_at,
            turn=suspects,
        )
        suspects += decide(facts).trial_seconds > 0  # a run that will be held is not tried, and needs no turn
        judged.append(facts)
    return [msgspec.structs.replace(facts, suspects=max(suspects, 1)) for facts in judged]


def _record_turn(run: LiveRun, decision: Decision) -> None:
    """A suspect's turn has come, and its journal says so before its code is called. Or it has to wait again."""
    services, now = run.services, run.services.clock.now()
    if decision.action is Action.RESUME:
        event = j.RunRecovered("", services.owner, None, now, False, decision.tried_with, decision.trial_seconds, False)
        run.writer.add(event)
    else:
        run.change(Status.PENDING, owner=None, wake_at=decision.until, reason=decision.reason)


def _record_recovery(run: LiveRun, state: TreeState, decision: Decision, facts: Facts) -> None:
    """Write who recovered the run from whom, and why: into its journal, which counts crashes, and into its log. If a
    suspect has to wait, the same commit removes its owner: the run must not count it if this process dies now."""
    services, now = run.services, run.services.clock.now()
    alone = facts.crashes_alone > state.crashes.alone
    event = j.RunRecovered("", services.owner, run.row.owner, now, alone, decision.tried_with, decision.trial_seconds)
    run.writer.add(event)
    if decision.action is Action.WAIT:
        run.change(Status.PENDING, owner=None, wake_at=decision.until, reason=decision.reason)
    else:
        run.change(Status.RUNNING, owner=services.owner)
    begun = [key for key, open_ in state.open.items() if open_.kind == "step" and open_.until is None]
    known = f"; in flight then: {', '.join(begun[:10])}" if begun else ""
    run.log(
        _TOKENS.get(decision.action, Token.RUN_HELD),
        f"claimed from {run.row.owner} by {services.owner} at epoch {run.writer.epoch}: {decision.reason}; "
        f"{run.restored} operations restored{known}",
    )


def _free_again(orchestrator: RunsInMemory, restored: list[_Restored]) -> None:
    """A flow may have been registered while runs were being held because it was unknown. The look for held runs that
    followed its registration came too early for them, so look again."""
    missing = {one.run.row.flow for one in restored if one.decision.action is Action.HOLD_DEFINITION}
    if any(orchestrator.services.registry.find(name) is not None for name in missing):
        orchestrator.look_for_held()


async def _act_on(orchestrator: RunsInMemory, restored: _Restored, crashed: bool) -> None:
    """Do what was decided. A bug of ours that only this run triggers must not stop the other runs of the pass."""
    try:
        await _act(orchestrator, restored, crashed)
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001 - a bug of ours, in one run
        run = restored.run
        log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {run.id}: taking it up broke: {error!r}", error)
        if orchestrator.has_left(run):
            orchestrator.check_ownership([run.id], crashed=True)
        else:
            leaving.broke(run, error)


async def _act(orchestrator: RunsInMemory, restored: _Restored, crashed: bool) -> None:
    run, decision = restored.run, restored.decision
    flow = orchestrator.services.registry.find(run.row.flow)
    if crashed:
        orchestrator.services.metrics.decisions.inc(value=decision.action.value)
    if decision.action is Action.RESUME and flow is not None:
        if crashed:
            log(
                logging.INFO,
                Token.RUN_RESUMED,
                f"run {run.id} of flow {run.row.flow!r}: {decision.reason}; {run.restored} operations restored",
            )
        if decision.tried_with:
            orchestrator.trials.begin(run, decision.trial_seconds)
        orchestrator.drive(run, flow, restored.inbox)
        return
    if decision.action is Action.WAIT:
        log(logging.WARNING, Token.RUN_SUSPECTED, f"run {run.id}: {decision.reason}")
        orchestrator.trials.wait(run.row, run.writer.epoch)
        orchestrator.services.heartbeats.detach(run.id)
        orchestrator.wake_at(decision.until or run.services.clock.now())
        run.let_go()
        return
    orchestrator.enter(run)
    run.inbox.heard = max((message.id for message in restored.inbox), default=0)
    run.departure.tells_others = any(message.kind is MessageKind.JOIN for message in restored.inbox)
    write = _final_write(restored)
    if run.departure.held is not None:  # it is held all the same: a request to resume it counts as received
        run.writer.consume([message.id for message in restored.inbox if message.kind is MessageKind.RESUME])
        if not crashed:  # after a crash, _record_recovery has written this line
            run.log(_TOKENS[decision.action], decision.reason)
    await leaving.depart(run, decision.reason, 0.0, write)


def _final_write(restored: _Restored) -> Callable[[], None] | None:
    """What is committed for a run that is not driven. None for a run that is held: `depart` writes that."""
    run, decision = restored.run, restored.decision
    now, children = run.services.clock.now(), open_children(restored.state)
    cancel = next((message for message in restored.inbox if message.kind is MessageKind.CANCEL), None)
    if decision.action is Action.FINISH:
        return lambda: _finish(run, restored.state, decision)
    if cancel is not None:  # the flow's code cannot be called, so it cannot clean up: the run just ends
        reason = leaving.cancel_reason(cancel)
        return lambda: leaving.cancel_without_code(run, reason, children)
    if decision.action is Action.CANCEL:
        log(logging.WARNING, Token.RUN_GIVEN_UP, f"run {run.id}: {decision.reason}")
        event = j.RunCancelled("", decision.reason, now)
        return lambda: leaving.end_without_code(run, event, children, reason=decision.reason, hold=Hold.RECOVERY)
    if decision.action is Action.FAIL:
        log(logging.WARNING, Token.RUN_NOT_RESUMABLE, f"run {run.id}: {decision.reason}")
        error = record_error(RuntimeError(decision.reason))
        failed = j.RunFailed("", error, now)
        encoded = msgspec.json.encode(error)
        return lambda: leaving.end_without_code(run, failed, children, error=encoded, reason=decision.reason)
    if decision.action is Action.HOLD_POISON:
        run.departure.held = (Hold.POISON, decision.reason)
    elif decision.action is Action.HOLD_VERSION:
        run.departure.held = (Hold.VERSION, decision.reason)
    else:
        run.departure.held = (Hold.DEFINITION, decision.reason)
    return None


def _finish(run: LiveRun, state: TreeState, decision: Decision) -> None:
    """The journal has the run's end and the row does not: update the row, and nothing else."""
    outcome = state.outcomes[""]
    log(logging.WARNING, Token.RUN_FINISHED, f"run {run.id}: {decision.reason}")
    status = ENDINGS[outcome.ending]
    cancelled = state.cancelled.reason if state.cancelled is not None else "cancelled"
    failed = "" if outcome.error is None else failure_reason(outcome.error)
    fields = {
        "output": bytes(outcome.output) if status is Status.COMPLETED else None,
        "output_blob": outcome.blob,
        "error": msgspec.json.encode(outcome.error) if outcome.error is not None else None,
        "reason": cancelled if status is Status.CANCELLED else failed,
    }
    run.log(Token.RUN_FINISHED, decision.reason)
    leaving.end(run, status, run.services.clock.now(), **fields)
