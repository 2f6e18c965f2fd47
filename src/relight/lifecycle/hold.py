"""Hold: taking a run out of memory (parking, pausing, holding, shutdown, fencing), and cancelling it.

Leaving memory is invisible to the flow. `stopping` is set first, so that no operation begins any more; steps in flight may
finish and are recorded, and the code behind them is held back; then every wait is broken off with Unwind, all at once, the
code unwinds and the object is let go. What the store says about the run afterwards is one commit.

Cancelling is visible: RunCancelled is raised at every operation the run is blocked in, recorded first, so that replay raises
it at the same place. Operations after that are clean-up, within cancel_grace.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from relight.errors import RunCancelled, StoreError, Unwind
from relight.flow.scope import Scope
from relight.lifecycle.blocked import break_off, is_blocked
from relight.model import journal as j
from relight.model.run import Hold, LogLine, Message, MessageKind, Status
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.lifecycle.run import LiveRun

PARK_GRACE_SECONDS = 5.0  # what a flow's own `finally` may take when it is unwound
LONGEST_PARK_CHECK_SECONDS = 60.0


# ---- leaving memory


def consider_parking(run: LiveRun) -> None:
    """A wait has begun: look, after a moment, whether the whole run waits."""
    if run.park_armed or run.stopping is not None:
        return
    run.park_armed = True
    # At once when others want its room, or when it is a sync flow, which would hold its thread.
    if run.host.crowded or (run.threads and not run.tasks):
        run.services.loop.call_soon(_check_parking, run)
    else:
        run.services.clock.call_later(_park_pause(run), lambda: _check_parking(run))


def _park_pause(run: LiveRun) -> float:
    """park_after, and longer the more often in a row it was not the time."""
    first = run.services.config.park_after_seconds
    return max(first, min(first * 2.0**run.park_checks, LONGEST_PARK_CHECK_SECONDS))


def _check_parking(run: LiveRun) -> None:
    run.park_armed = False
    if run.over or run.stopping is not None or not run.waits or run.cancel_reason is not None:
        return
    due = run.wake_at()
    if due is not None and due - run.services.clock.now() <= run.services.config.park_after_seconds:
        run.park_checks = 1
        consider_parking_later(run)
    elif is_blocked(run):
        run.services.background.start(park(run), "park")
    else:
        run.park_checks = min(run.park_checks + 1, 10)
        consider_parking_later(run)


def consider_parking_later(run: LiveRun) -> None:
    """It was not the time: look again, less and less often."""
    run.park_armed = True
    run.services.clock.call_later(max(_park_pause(run), 0.01), lambda: _check_parking(run))


async def park(run: LiveRun) -> None:
    """The run waits, and leaves memory until it is due or told something."""
    if run.stopping is not None or run.over:
        return
    if not is_blocked(run):  # it was woken since somebody looked: parked now, nobody would wake it again
        consider_parking_later(run)
        return
    wake_at = run.wake_at()

    def write() -> None:
        run.change(Status.WAITING, owner=None, wake_at=wake_at, heard=run.last_heard)

    await depart(run, "parked", PARK_GRACE_SECONDS, write)
    if wake_at is not None and not run.writer.fenced:
        run.host.wake_at(wake_at)


async def depart(run: LiveRun, reason: str, grace_seconds: float, write: Any = None) -> None:
    """Unwind the run's code, let `write` put its new status into a commit, and drop the object."""
    if _begin_departure(run, reason):
        await _depart(run, reason, grace_seconds, write)


def _begin_departure(run: LiveRun, reason: str) -> bool:
    """From now on no operation begins, and those that end are held back. False: it has left, or does so already."""
    if run.departing or run.ended:
        return False
    run.departing = True
    run.stopping = run.stopping or reason
    return True


async def _depart(run: LiveRun, reason: str, grace_seconds: float, write: Any) -> None:
    grace_seconds = await _calm(run, grace_seconds)
    run.unwinding = True
    for task in (run.main, *run.tasks):
        if task is not None:
            break_off(task, Unwind(reason))
    for wait in list(run.waits.values()):
        wait.break_off(Unwind(reason))
    for ended in run.held_back:
        if not ended.done():
            ended.set_exception(Unwind(reason))
    await _unwound(run, grace_seconds)
    if run.main_ended():
        return  # it reached its end in the meantime
    if run.held is not None:
        kind, why = run.held
        log(logging.WARNING, Token.RUN_HELD, f"run {run.id}: {why}")
        run.change(Status.PAUSED, hold=kind, reason=why, owner=None, heard=run.last_heard)
    elif write is not None:
        write()
    run.over = True
    await run.writer.committed()
    if run.outcome is not None and not run.writer.lost:
        run.ended = True
        run.host.ended(run)
    else:
        run.host.left(run)


async def _calm(run: LiveRun, grace_seconds: float) -> float:
    """Wait until no step's body is under way, and return what is left of the grace for the code around them.

    Broken off before, one branch would take the others with it: a TaskGroup cancels what its other tasks are doing.
    """
    if not run.inflight:
        return grace_seconds
    loop = run.services.loop
    until = loop.time() + grace_seconds
    run.calm = loop.create_future()
    await asyncio.wait([run.calm], timeout=grace_seconds)
    left = max(until - loop.time(), 0.0)
    return left if run.inflight else max(left, min(grace_seconds, PARK_GRACE_SECONDS))


async def hold_back(run: LiveRun) -> NoReturn:
    """An operation has ended or would begin, but the run leaves memory (or is not ours any more): its code goes no further."""
    if run.writer.lost:
        raise run.adrift()
    if run.departing and not run.unwinding:
        ended: asyncio.Future[None] = run.services.loop.create_future()
        run.held_back.append(ended)
        await ended
    raise Unwind(run.stopping or "stopped")


async def depart_by_itself(run: LiveRun) -> None:
    """The main task has ended by Unwind without anybody waiting for it: held, fenced, or its entries could not be written.

    Called from the main task itself, so that only the others are waited for.
    """
    run.services.background.start(depart(run, run.stopping or "stopped", PARK_GRACE_SECONDS), "depart")


async def _unwound(run: LiveRun, grace_seconds: float) -> None:
    """Wait until no code of the run is left; after the grace, cancel what is left, and in the end abandon it."""
    for patience in (grace_seconds, 1.0):
        tasks = [task for task in (run.main, *run.tasks) if task is not None and not task.done()]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=patience)
        for task in late:
            task.cancel()
    left = [task for task in (run.main, *run.tasks) if task is not None and not task.done()]
    if left:
        await asyncio.wait(left, timeout=1.0)
        if any(not task.done() for task in left):
            log(
                logging.ERROR,
                Token.UNWIND_STUCK,
                f"run {run.id}: its code did not end when told to ({run.stopping}); abandoned",
            )


def fenced(run: LiveRun, refused: bool) -> None:
    """Another owner has the run: whatever this process still does for it is in vain. `refused`: and has tried to record."""
    log(logging.WARNING, Token.RUN_FENCED, f"run {run.id}: another owner has claimed it; this process lets go of it")
    run.services.metrics.fenced.inc(refused)
    run.services.metrics.false_deaths.inc()
    run.services.background.start(_note_fenced(run), "note")
    if run.over and run.outcome is None:
        return  # its code has ended, and the object is about to be let go
    run.stopping = run.stopping or "fenced"
    run.outcome = None
    run.over = False
    _cancel_bodies(run)
    if not run.departing:
        run.services.background.start(depart(run, "fenced", PARK_GRACE_SECONDS), "depart")


async def _note_fenced(run: LiveRun) -> None:
    """Into the run's log, which is open to whoever saw something happen to it. Not worth a second try."""
    text = (
        f"{run.services.owner} still drove it at epoch {run.writer.epoch} and was fenced; nothing of that was written"
    )
    line = LogLine(run_id=run.id, at=run.services.clock.now(), text=text, token=Token.RUN_FENCED.value)
    try:
        await run.services.store.append_log([line])
    except StoreError as error:
        log(logging.DEBUG, Token.RUN_FENCED, f"run {run.id}: its log could not be written: {error}")


def _cancel_bodies(run: LiveRun) -> None:
    """Step bodies under way: async ones hear of it; a thread cannot be stopped."""
    for scope in list(run.inflight.values()):
        if scope is not None and scope.task is not None:
            scope.task.cancel()


# ---- requests from outside


def attend(run: LiveRun, message: Message) -> None:
    """A request in the run's inbox."""
    if message.kind is MessageKind.CANCEL:
        cancel(run, message)
    elif message.kind is MessageKind.PAUSE:
        # At once: parked in between, it would have heard of it and not done it; and an operation that ends in between would
        # not be held back, and take steps of other branches with it.
        if _begin_departure(run, "paused"):
            run.services.background.start(_pause(run, message), "pause")
    elif message.kind is MessageKind.RESUME:  # it is in memory, so it has been
        run.writer.consume([message.id])


async def _pause(run: LiveRun, message: Message) -> None:
    def write() -> None:
        reason = "paused by request; resume() frees it"
        run.change(Status.PAUSED, hold=Hold.USER, reason=reason, owner=None, heard=run.last_heard)
        run.writer.consume([message.id])

    await _depart(run, "paused", run.services.config.shutdown_grace_seconds, write)


def cancel(run: LiveRun, message: Message) -> None:
    """Record that the run is cancelled, with every wait that this interrupts; then let the flow hear it."""
    if run.stopping is not None or run.over:
        return  # it leaves memory: the message stays in its inbox
    if run.cancel_reason is not None:
        run.writer.consume([message.id])
        return
    reason = str(msgspec.json.decode(message.payload) or "cancelled")
    run.cancel_reason = reason
    run.writer.add(j.CancelRequested("", reason, run.services.clock.now()))
    run.writer.consume([message.id])
    run.writer.cancel_spawned(reason)
    # Raised at once, committed in the journal's order: whatever the flow records about it comes behind these entries.
    for wait in list(run.waits.values()):
        if not wait.future.done() and wait.what != "nothing":
            run.writer.add(j.OperationCancelled(wait.key))
            mark_cancel_seen(wait.scope)
            wait.break_off(RunCancelled(reason))
    run.set_running()
    _cancel_bodies(run)
    begin_grace(run)
    run.services.background.start(_pass_on(run), "cancel")


async def _pass_on(run: LiveRun) -> None:
    """Once the cancellation is durable, the spawned runs have it in their inboxes: let them be looked at."""
    await run.writer.committed()
    run.host.listen()


def begin_grace(run: LiveRun) -> None:
    """Clean-up may take so long and no longer."""
    run.services.clock.call_later(run.services.config.cancel_grace_seconds, lambda: _force(run))


def _force(run: LiveRun) -> None:
    if run.over or run.stopping is not None:
        return
    log(
        logging.WARNING,
        Token.CANCEL_FORCED,
        f"run {run.id}: its clean-up took longer than cancel_grace; cancelled all the same",
    )

    def write() -> None:
        assert run.cancel_reason is not None
        conclude(run, j.RunCancelled("", run.cancel_reason, run.services.clock.now()), reason=run.cancel_reason)

    run.services.background.start(depart(run, "cancelled", 0.0, write), "cancel")


_STATUS = {j.RunCompleted: Status.COMPLETED, j.RunFailed: Status.FAILED, j.RunCancelled: Status.CANCELLED}


def conclude(run: LiveRun, event: j.RunCompleted | j.RunFailed | j.RunCancelled, **fields: Any) -> None:
    """A root run's end, as one commit: the final entry, the status, and the message to whoever spawned it."""
    status = _STATUS[type(event)]
    run.writer.add(event)
    run.change(status, **fields)
    run.outcome = msgspec.structs.replace(
        run.row, status=status, updated_at=event.at, owner=None, wake_at=None, **fields
    )
    if run.row.parent_id is not None:
        run.writer.send(Message.end_of(run.id, run.writer.epoch, event.at, to=run.row.parent_id))


async def interrupt(run: LiveRun, scope: Scope, key: str) -> None:
    """Raise the run's cancellation at an operation that was about to begin or was under way."""
    run.record(j.OperationCancelled(key))
    mark_cancel_seen(scope)
    await run.settle()
    raise RunCancelled(run.cancel_reason or "cancelled")


def mark_cancel_seen(scope: Scope | None) -> None:
    """This branch, and those it will propagate to, have heard of the cancellation."""
    while scope is not None:
        scope.cancel_seen = True
        scope = scope.parent
