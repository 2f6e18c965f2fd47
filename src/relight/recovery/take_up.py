"""Recover: lease, claim, restore, decide, resume. Also how a parked run comes back: only the reason differs.

lease ── acquire it first: only the holder pays for reading
claim ── raise the epoch in the store, for the whole pass at once; whoever loses the race drops the run
read ─── checkpoint, tail and inbox of all claimed runs, in one read
decide ─ model.decisions, from facts
resume ─ the flow is called again; what the journal holds is given back to it instead of done
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
from relight.model.lease import OwnedBy, Session
from relight.model.operations import failure_reason
from relight.model.replay import TreeState, restore
from relight.model.run import Hold, Message, MessageKind, Run, RunChange, Status
from relight.recovery import unreadable, upgrades
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
    """Of whom the runs of a pass are taken over: its last session, if that is known, and whether these are all its runs."""

    session: Session | None = None
    whole: bool = False


UNKNOWN = Death()


class _Restored(msgspec.Struct):
    """A claimed run on its way back: what will be done with it, and what it was told meanwhile."""

    run: LiveRun
    state: TreeState
    decision: Decision
    inbox: list[Message]


async def take_up_claimed(orchestrator: RunsInMemory, rows: list[Run], lapses: int) -> None:
    """Runs that were due, and that this process has claimed already, when our lease had lapsed so often. Those that it cannot
    drive yet stay in doubt: one whose last life is just leaving memory, or all of them when the lease was lost meanwhile. Then
    they are given back, if the store still takes that: others need not wait until we are known to be dead."""
    able = orchestrator.services.heartbeats.may_drive and not orchestrator.stopping
    late = [row.id for row in rows if not able or row.id in orchestrator.live or row.id in orchestrator.taking]
    if late:
        orchestrator.check_ownership(late, crashed=False)
    if not able:
        now = orchestrator.services.clock.now()
        released = RunChange(run_id="", status=Status.PENDING, wake_at=now, reason="released")
        await orchestrator.services.store.hold({row.id: row.epoch for row in rows}, released)
    await take_up(orchestrator, rows, crashed=False, claimed_under=lapses)


async def take_up(
    orchestrator: RunsInMemory,
    rows: list[Run],
    *,
    crashed: bool,
    death: Death = UNKNOWN,
    claimed_under: int | None = None,
) -> int:
    """Bring these unfinished roots into memory and drive them; how many were claimed."""
    rows = [row for row in rows if not row.status.terminal and not row.newer and row.id not in orchestrator.live]
    rows = [row for row in rows if row.id not in orchestrator.taking]
    if not rows or orchestrator.stopping or not orchestrator.services.heartbeats.may_drive:
        return 0
    services, ids = orchestrator.services, [row.id for row in rows]
    orchestrator.taking.update(ids)
    restored: list[_Restored] = []
    began = services.clock.monotonic()
    # From before the claim: frozen after it, we must ask again.
    lapses = services.heartbeats.lapses if claimed_under is None else claimed_under
    try:
        epochs = {row.id: row.epoch for row in rows}
        if claimed_under is None:
            rows = await _lease(services, rows)
            epochs = await services.store.claim({row.id: row.epoch for row in rows}, services.owner)
        restored = await _restore(orchestrator, [row for row in rows if row.id in epochs], epochs, crashed, death)
        for one in restored:
            one.run.lapses = lapses
            await one.run.writer.committed()  # one commit for all: a crash from here on counts against the run
            if not one.run.writer.lost:
                await _act_on(orchestrator, one, crashed)
            elif not one.run.writer.fenced:
                orchestrator.check_ownership([one.run.id], crashed=crashed)
        if crashed and epochs:
            services.metrics.claims.inc(len(epochs))
            services.metrics.resume.observe(services.clock.monotonic() - began)
        return len(epochs)
    except Exception:
        # Perhaps they are claimed: then nobody but this process would ever look at them again.
        orchestrator.check_ownership(ids, crashed=crashed)
        raise
    finally:
        orchestrator.taken_up(ids)
        _free_again(orchestrator, restored)


async def _lease(services: Services, rows: list[Run]) -> list[Run]:
    """Those whose lease is ours now. Where it turns out to be another's than the row says, the row is corrected."""
    heartbeats = services.heartbeats
    # On a store that keeps the leases, claiming a run without owner acquires its lease.
    wanted = [row for row in rows if not heartbeats.leases.in_store or row.owner not in (None, services.owner)]
    if not wanted:
        return rows
    answers = await heartbeats.call(lambda leases: leases.acquire_lease([row.id for row in wanted]))
    refused = set()
    for row in wanted:
        answer = answers.get(row.id)
        if answer is None or isinstance(answer, OwnedBy):
            refused.add(row.id)
        if isinstance(answer, OwnedBy) and not heartbeats.leases.in_store and row.owner not in (None, answer.owner):
            await _correct_owner(services, row, answer.owner)
    return [row for row in rows if row.id not in refused]


async def _correct_owner(services: Services, row: Run, holder: str) -> None:
    """In the row, which named another. What breaks for one run is tried again in the next round."""
    try:
        await services.store.correct_owner(row.id, row.epoch, holder)
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001 - the others of the pass go on
        log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {row.id}: correcting its owner broke: {error!r}", error)
        return
    what = f"run {row.id}: its lease is held by {holder}, not by {row.owner}; corrected"
    log(logging.WARNING, Token.OWNER_CORRECTED, what)


async def _restore(
    orchestrator: RunsInMemory, rows: list[Run], epochs: dict[str, int], crashed: bool, death: Death
) -> list[_Restored]:
    """Read the claimed runs' journals and inboxes, replay them, and decide. One that cannot be read is held here."""
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
            # woken: whether it may be taken up at all was decided before; now its lease is ours.
            resumed = any(message.kind is MessageKind.RESUME for message in inboxes[row.id])
            session = death.session
            known = facts_of(services, row, state=state, crashed=crashed, woken=True, session=session, resumed=resumed)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with this run, the others of the pass go on
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
            elif known.resumed and state.crashes.count:  # by hand: it begins to count anew
                run.writer.add(j.RunResumed("", services.clock.now()))
        except Exception as error:  # noqa: BLE001 - as above
            run.writer.abandon(None)
            run.let_go()
            await _set_aside(orchestrator, run.row, epochs[run.id], error, inboxes[run.id])
            continue
        restored.append(_Restored(run, state, decision, inboxes[run.id]))
    return restored


async def _set_aside(
    orchestrator: RunsInMemory, row: Run, epoch: int, error: Exception, messages: list[Message]
) -> None:
    """This run cannot be taken up, and is held. If that breaks as well it stays ours, and is found by looking for lost runs."""
    try:
        await unreadable.hold(orchestrator, row, epoch, error, messages)
    except StoreError:
        raise
    except Exception as again:  # noqa: BLE001 - the others of the pass go on
        log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {row.id}: holding it broke: {again!r}", again)


async def _read(
    services: Services, ids: list[str], tries: int = TRIES_ALONE
) -> tuple[list[Journal | Exception], dict[str, list[Message]]]:
    """Journals and inboxes. If reading them breaks, they are read one by one, to find out which run it is; and that one again, in
    case it has passed."""
    inboxes: dict[str, list[Message]] = {run_id: [] for run_id in ids}
    try:
        journals = await services.store.read(ids)
        for message in await services.store.inbox(ids):
            inboxes[message.run_id].append(message)
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001 - a bug that some run's rows bring out
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
    """Facts that follow from the others of the pass: who was alone with its process, and whose turn it is among the suspects."""
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
        suspects += decide(facts).trial_seconds > 0  # held, it would not be tried, and takes nobody's turn
        judged.append(facts)
    return [msgspec.structs.replace(facts, suspects=max(suspects, 1)) for facts in judged]


def _record_turn(run: LiveRun, decision: Decision) -> None:
    """A suspect's turn has come, and its journal says so before its code is called; or it has to wait once more."""
    services, now = run.services, run.services.clock.now()
    if decision.action is Action.RESUME:
        event = j.RunRecovered("", services.owner, None, now, False, decision.tried_with, decision.trial_seconds, False)
        run.writer.add(event)
    else:
        run.change(Status.PENDING, owner=None, wake_at=decision.until, reason=decision.reason)


def _record_recovery(run: LiveRun, state: TreeState, decision: Decision, facts: Facts) -> None:
    """Who recovered the run from whom, and why: in its journal, which counts crashes, and in its log, for people. A suspect that
    has to wait is free in the same commit: should this process die now, that is none of its deaths."""
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
    """Flows registered while runs were being held for want of them: whoever looked for held runs then came too early."""
    missing = {one.run.row.flow for one in restored if one.decision.action is Action.HOLD_DEFINITION}
    if any(orchestrator.services.registry.find(name) is not None for name in missing):
        orchestrator.look_for_held()


async def _act_on(orchestrator: RunsInMemory, restored: _Restored, crashed: bool) -> None:
    """Do what was decided. A bug of ours that this run alone brings out must not strand the others of the pass."""
    try:
        await _act(orchestrator, restored, crashed)
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001 - see above
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
    write = _final_write(restored)
    if run.departure.held is not None:  # whoever resumed it came too early, and has been heard
        run.writer.consume([message.id for message in restored.inbox if message.kind is MessageKind.RESUME])
        if not crashed:  # see _record_recovery
            run.log(_TOKENS[decision.action], decision.reason)
    await leaving.depart(run, decision.reason, 0.0, write)


def _final_write(restored: _Restored) -> Callable[[], None] | None:
    """What is committed for a run that is not driven; None for one that is held, which `depart` writes."""
    run, decision = restored.run, restored.decision
    now = run.services.clock.now()
    cancel = next((message for message in restored.inbox if message.kind is MessageKind.CANCEL), None)
    if decision.action is Action.FINISH:
        return lambda: _finish(run, restored.state, decision)
    if cancel is not None:  # nothing can be run for it, so there is nothing to clean up either
        reason = leaving.cancel_reason(cancel)
        return lambda: _end(run, restored.state, j.RunCancelled("", reason, now), reason=reason)
    if decision.action is Action.CANCEL:
        log(logging.WARNING, Token.RUN_GIVEN_UP, f"run {run.id}: {decision.reason}")
        event = j.RunCancelled("", decision.reason, now)
        return lambda: _end(run, restored.state, event, reason=decision.reason, hold=Hold.RECOVERY)
    if decision.action is Action.FAIL:
        log(logging.WARNING, Token.RUN_NOT_RESUMABLE, f"run {run.id}: {decision.reason}")
        error = record_error(RuntimeError(decision.reason))
        failed = j.RunFailed("", error, now)
        encoded = msgspec.json.encode(error)
        return lambda: _end(run, restored.state, failed, error=encoded, reason=decision.reason)
    if decision.action is Action.HOLD_POISON:
        run.departure.held = (Hold.POISON, decision.reason)
    elif decision.action is Action.HOLD_VERSION:
        run.departure.held = (Hold.VERSION, decision.reason)
    else:
        run.departure.held = (Hold.DEFINITION, decision.reason)
    return None


def _end(run: LiveRun, state: TreeState, event: j.RunFailed | j.RunCancelled, **fields: object) -> None:
    """End a run without calling its code: its unfinished child runs end with it, or they would seem to go on for ever."""
    leaving.conclude(run, event, **fields)
    status, reason = (Status.FAILED if isinstance(event, j.RunFailed) else Status.CANCELLED), "its root run has ended"
    for key in open_children(state):
        run.writer.change(RunChange(run_id=run.run_id(key), status=status, reason=reason))


def _finish(run: LiveRun, state: TreeState, decision: Decision) -> None:
    """The journal has the end, the row does not: bring up the row, and nothing else."""
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
