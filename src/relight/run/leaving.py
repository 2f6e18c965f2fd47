"""Leaving memory: parking, pausing, holding, shutdown, fencing; and what every end of a run writes.

Leaving memory is invisible to the flow. From STOPPING or LEAVING on (`phase.py`), nothing begins and nothing is told,
so that the flow's code stays where it is. Steps in flight may finish and are recorded; the flow is told of them when
the run is back in memory. Then the code is unwound where it waits, and the object is dropped. One commit writes the
run's new status.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from relight.clock import Timer
from relight.errors import StoreError
from relight.model import journal as j
from relight.model.run import Hold, LogLine, Message, MessageKind, Run, RunChange, Status
from relight.run.phase import CLOSING, DRIVEN, ENDED, ENDING, LEAVING, LEFT, STOPPING
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun

PARK_GRACE_SECONDS = 5.0  # how long a flow's own `finally` may take in a thread when it is unwound
STOP_SECONDS = 1.0  # how long a step's body may take to end once it is cancelled


# How each kind of hold is logged. It is logged once.
_HELD = {
    Hold.DEFINITION: (logging.WARNING, Token.DEFINITION_MISSING),
    Hold.VERSION: (logging.ERROR, Token.FINGERPRINT_MISMATCH),
    Hold.NONDETERMINISM: (logging.ERROR, Token.NONDETERMINISM),
    Hold.CORRUPT: (logging.ERROR, Token.JOURNAL_CORRUPT),
    Hold.POISON: (logging.ERROR, Token.RUN_POISONED),
}


class Departure:
    """How a run leaves memory."""

    __slots__ = (
        "calm",
        "cancelled_at",
        "grace_began_at",
        "held",
        "leave_by",
        "outcome",
        "park_armed",
        "park_timer",
        "refusals",
        "tells_others",
    )

    def __init__(self, cancelled_at: int) -> None:
        self.cancelled_at = cancelled_at  # the journal's length when the run was cancelled
        self.grace_began_at = 0  # and when its cancel_grace began, the last time
        self.held: tuple[Hold, str] | None = None  # the run cannot go on, and why
        self.outcome: Run | None = None  # the final row, once it is written into a commit
        self.tells_others = False  # its end puts messages into the inboxes of other runs
        self.park_armed = False
        self.park_timer: Timer | None = None
        self.calm: asyncio.Future[None] | None = None  # done when the last body has ended: `_calm` waits for it
        self.leave_by = math.inf  # by the loop's time: the lease is lost, and no grace may go on for longer (`hurry`)
        self.refusals = 0  # how often Unwind was raised in the flow's code


# ---- leaving memory


def due_at(run: LiveRun) -> float | None:
    """When this run is due by itself while it waits."""
    return min(run.timers.due.values(), default=None)


async def park(run: LiveRun) -> None:
    """Take a blocked run out of memory, until it is due or gets a message."""
    if run.phase is not DRIVEN or not run.blocked:
        return  # it was woken since it was checked: if it were parked now, nothing would wake it again
    wake_at = due_at(run)
    if run.cancel_reason is not None:
        # Otherwise its grace would never end if what it waits for never comes.
        grace_over = run.services.clock.now() + run.services.config.cancel_grace_seconds
        wake_at = grace_over if wake_at is None else min(wake_at, grace_over)

    def write() -> None:
        run.change(Status.WAITING, owner=None, wake_at=wake_at, heard=run.last_heard)

    await depart(run, "parked", PARK_GRACE_SECONDS, write)
    if wake_at is not None and not run.writer.fenced:
        run.host.wake_at(wake_at)


def stop(run: LiveRun, reason: str) -> None:
    """Nothing begins and nothing is told from now on: the caller is about to take the run out of memory."""
    run.stopping = run.stopping or reason
    if run.phase in (DRIVEN, ENDING):
        run.enter(STOPPING)


async def depart(run: LiveRun, reason: str, grace_seconds: float, write: Any = None) -> None:
    """Unwind the run's code, let `write` put its new status into a commit, and drop the object."""
    if _begin_departure(run, reason):
        await _depart(run, reason, grace_seconds, write)


def _begin_departure(run: LiveRun, reason: str) -> bool:
    """From now on nothing begins and nothing is told. False: the run has left, is leaving already, or is ending."""
    if run.phase > STOPPING:
        return False
    run.enter(LEAVING)
    if run.inbox.early:  # the flow never receives these: they stay in the inbox
        run.inbox.missed = True
        run.inbox.heard = run.inbox.early[0].id - 1
    if run.stopping is None and run.writer.notes:
        run.writer.flush()
    run.stopping = run.stopping or reason
    return True


async def _depart(run: LiveRun, reason: str, grace_seconds: float, write: Any) -> None:
    grace_seconds = await _calm(run, grace_seconds)
    if not run.loop.unwind(reason):
        _say_stuck(run)
    run.turns.unwind(reason)
    await _threads_gone(run, grace_seconds)
    await _bodies_gone(run)
    to_cancel = next((message for message in run.inbox.early if message.kind is MessageKind.CANCEL), None)
    if run.departure.held is not None and to_cancel is not None and run.departure.held[0] is not Hold.UPGRADE:
        cancel_without_code(run, cancel_reason(to_cancel), run.replay.unfinished() if run.replay is not None else ())
    elif run.departure.held is not None:
        kind, why = run.departure.held
        log(*_HELD.get(kind, (logging.WARNING, Token.RUN_HELD)), f"run {run.id}: {why}")
        run.change(Status.PAUSED, hold=kind, reason=why, owner=None, heard=run.last_heard)
    elif write is not None:
        write()
    run.enter(CLOSING)
    await run.writer.committed()
    if run.departure.outcome is not None and not run.writer.lost:
        run.enter(ENDED)
        run.host.ended(run)
    else:
        run.enter(LEFT)
        run.host.left(run)


async def _calm(run: LiveRun, grace_seconds: float) -> float:
    """Wait until no step's body is under way, and return what is left of the grace for the code around them."""
    if not run.inflight:
        return grace_seconds
    loop = run.services.loop
    # `hurry` may have been called before this: a departure begins a turn of the loop earlier than its task.
    grace_seconds = max(min(grace_seconds, run.departure.leave_by - loop.time()), 0.0)
    until = loop.time() + grace_seconds
    run.departure.calm = loop.create_future()
    await asyncio.wait([run.departure.calm], timeout=grace_seconds)
    left = max(until - loop.time(), 0.0)
    return 0.0 if run.inflight else max(left, min(grace_seconds, PARK_GRACE_SECONDS))


def hurry(run: LiveRun, grace_seconds: float) -> None:
    """The lease is lost. A run that is leaving memory already has at most this grace for its steps in flight: after
    that another process may execute them."""
    departure, loop = run.departure, run.services.loop
    departure.leave_by = min(departure.leave_by, loop.time() + grace_seconds)
    if departure.calm is not None and not departure.calm.done():
        loop.call_later(grace_seconds, _end_wait, departure.calm)
    if run.turns.gone is not None and not run.turns.gone.done():
        loop.call_later(max(grace_seconds, STOP_SECONDS), _end_wait, run.turns.gone)


def _end_wait(waited_for: asyncio.Future[None]) -> None:
    if not waited_for.done():
        waited_for.set_result(None)


def body_ended(run: LiveRun, key: str) -> None:
    """A step's body has ended. Its outcome is recorded before `_calm`, which waits for the last body, goes on."""
    ended = run.inflight.pop(key, None)
    if ended is not None:
        run.services.long_steps.drop(ended)
    if run.departure.calm is not None and not run.inflight and not run.departure.calm.done():
        run.departure.calm.set_result(None)


async def _threads_gone(run: LiveRun, grace_seconds: float) -> None:
    """Wait until the threads of sync code have unwound; after the grace, abandon them."""
    turns = run.turns
    if not turns.threads:
        return
    loop = run.services.loop
    turns.gone = loop.create_future()
    grace_seconds = min(grace_seconds, run.departure.leave_by - loop.time())
    await asyncio.wait([turns.gone], timeout=max(grace_seconds, STOP_SECONDS))
    if turns.threads:
        _say_stuck(run)
        for thread in turns.threads:
            thread.abandon()


async def _bodies_gone(run: LiveRun) -> None:
    """Cancel the work of operations, and wait for its end: bodies that outlived the grace, and work that only waits."""
    tasks = stop_bodies(run)
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
        if late:
            _say_stuck(run)


def stop_bodies(run: LiveRun) -> list[asyncio.Task[None]]:
    """Nothing waits any more for what is being done for this run: cancel async code; a thread cannot be stopped.
    Returns the tasks that were cancelled."""
    if not run.pending and not run.inflight:
        return []
    operations = {*run.pending.values(), *run.inflight.values()}
    tasks = {operation.at_work for operation in operations}
    for operation in operations:
        operation.halt()
        operation.silence()
    return [task for task in tasks if task is not None and task is not asyncio.current_task()]


def _say_stuck(run: LiveRun) -> None:
    log(
        logging.ERROR,
        Token.UNWIND_STUCK,
        f"run {run.id}: its code did not end when it was unwound ({run.stopping}); abandoned",
    )


def depart_by_itself(run: LiveRun) -> None:
    """Take a run out of memory that cannot go on: it is held, or its entries could not be written."""
    run.services.background.start(depart(run, run.stopping or "stopped", PARK_GRACE_SECONDS), "depart", run.broke)


def failed(run: LiveRun) -> None:
    """The recorder could not write what the run did last, perhaps its end. The run must not go on as if it had."""
    stop(run, "its entries could not be written by this process")
    run.departure.outcome = None
    if not run.departing:
        depart_by_itself(run)


def broke(run: LiveRun, error: BaseException) -> None:
    """Something that was done for this run has failed because of a bug in Relight. The run is dropped from memory, by
    force if leaving is what broke. The orchestrator finds in the store that it still owns the run, and takes it up
    again."""
    if run.phase is ENDED or run.host.has_left(run):
        return
    departing = run.departing
    run.writer.abandon()
    if not departing:
        return  # it leaves memory by itself now
    if run.phase is not LEFT:
        run.enter(LEFT)
    stop_bodies(run)
    run.host.left(run)


def fenced(run: LiveRun, refused: bool) -> None:
    """The run has another owner: nothing that this process still does for it is written. `refused`: the store has
    refused entries of this process."""
    log(logging.WARNING, Token.RUN_FENCED, f"run {run.id}: another owner has claimed it; this process lets go of it")
    run.services.metrics.fenced.inc(refused)
    run.services.metrics.false_deaths.inc()
    run.services.background.start(_note_fenced(run), "note")
    if run.over and run.departure.outcome is None and run.next is None:
        return  # its code has ended, and the object is about to be dropped
    stop(run, "fenced")
    run.departure.outcome = None
    stop_bodies(run)
    if not run.departing:
        run.services.background.start(depart(run, "fenced", PARK_GRACE_SECONDS), "depart", run.broke)


async def _note_fenced(run: LiveRun) -> None:
    """Write it to the run's log, to which any process may write. If that fails, it is not tried again."""
    text = (
        f"{run.services.owner} still drove it at epoch {run.writer.epoch} and was fenced; nothing of that was written"
    )
    line = LogLine(run_id=run.id, at=run.services.clock.now(), text=text, token=Token.RUN_FENCED.value)
    try:
        await run.services.store.append_log([line])
    except StoreError as error:
        log(logging.DEBUG, Token.RUN_FENCED, f"run {run.id}: its log could not be written: {error}")


# ---- requests from outside


def handle_request(run: LiveRun, message: Message) -> None:
    """A request in the run's inbox to pause, or to resume."""
    if message.kind is MessageKind.PAUSE:
        # At once: if the run were parked first, the request would count as received, and the run would not be paused.
        if _begin_departure(run, "paused"):
            run.services.background.start(_pause(run, message), "pause", run.broke)
    elif message.kind is MessageKind.RESUME:  # the run is in memory, so it has been resumed already
        run.writer.consume([message.id])


async def _pause(run: LiveRun, message: Message) -> None:
    def write() -> None:
        reason = "paused by request; resume() frees it"
        run.change(Status.PAUSED, hold=Hold.USER, reason=reason, owner=None, heard=run.last_heard)
        run.writer.consume([message.id])

    await _depart(run, "paused", run.services.config.shutdown_grace_seconds, write)


# ---- the end


def cancel_reason(message: Message) -> str:
    """The reason that a request to cancel gives."""
    return str(msgspec.json.decode(message.payload) or "cancelled")


_STATUS = {j.RunCompleted: Status.COMPLETED, j.RunFailed: Status.FAILED, j.RunCancelled: Status.CANCELLED}


def conclude(run: LiveRun, event: j.RunCompleted | j.RunFailed | j.RunCancelled, **fields: Any) -> None:
    """End a root run in one commit: the final entry, the status, and the message to the run that spawned it."""
    run.writer.add(event)
    end(run, _STATUS[type(event)], event.at, **fields)


def cancel_without_code(run: LiveRun, reason: str, unfinished: Iterable[str]) -> None:
    """A person or another run has asked for the end of a run whose code cannot be called. As for any run that is
    cancelled, the runs that it has spawned are cancelled, too."""
    end_without_code(run, j.RunCancelled("", reason, run.services.clock.now()), unfinished, reason=reason)
    run.writer.cancel_spawned(reason)
    run.departure.tells_others = True


def end_without_code(
    run: LiveRun, event: j.RunFailed | j.RunCancelled, unfinished: Iterable[str], **fields: Any
) -> None:
    """End a run without calling its code: nothing can be cleaned up. Its unfinished child runs, given by their keys, end
    in the same way: otherwise they would seem to go on for ever."""
    conclude(run, event, **fields)
    for key in unfinished:
        ended = RunChange(run_id=run.run_id(key), status=_STATUS[type(event)], reason="its root run has ended")
        run.writer.change(ended)


def end(run: LiveRun, status: Status, at: float, **fields: Any) -> None:
    """Write what every end of a root run has beside its final entry. The run that spawned it always gets a message: it
    may be waiting for this end."""
    run.change(status, **fields)
    run.departure.outcome = msgspec.structs.replace(
        run.row, status=status, updated_at=at, owner=None, wake_at=None, **fields
    )
    if run.row.parent_id is not None:
        run.departure.tells_others = True
        run.writer.send(Message.end_of(run.id, run.writer.epoch, at, to=run.row.parent_id))
