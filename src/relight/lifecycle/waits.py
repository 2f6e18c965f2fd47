"""Waits: everything that waits for a time or a message, in memory or parked.

A wait's beginning is journaled with its deadline, so that a crash or a parking forgets neither; its end is journaled too, so
that replay does not look at the clock again. Between the two it is a future in `run.waits`: a timer of the clock or a message
ends it, parking and cancelling break it off.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from relight.clock import Timer
from relight.flow.operations import MISSING
from relight.flow.payloads import ValueCodec
from relight.flow.scope import Scope, here
from relight.lifecycle import hold, steps
from relight.lifecycle.threads import DurableFuture
from relight.model.journal import NULL, SignalReceived, TimerFired, WaitStarted
from relight.model.replay import Ending
from relight.model.run import Message, MessageKind, Status

if TYPE_CHECKING:
    from relight.lifecycle.run import LiveRun

# Timers are re-armed at least this often, because a deadline is wall-clock time and timers count monotonic time.
LONGEST_TIMER_SECONDS = 3600.0

_KIND = {"signal": MessageKind.SIGNAL, "run": MessageKind.ENDED}
_UNSAFE = re.compile(r"[^\w.\- ]")


class Wait:
    """One wait in memory. Its future gets the message, or None when the time has come."""

    __slots__ = ("future", "key", "name", "run", "scope", "timer", "until", "what")

    def __init__(self, run: LiveRun, scope: Scope, key: str, what: str, name: str, until: float | None) -> None:
        self.run = run
        self.scope = scope
        self.key = key
        self.what = what  # sleep | signal | run | pause
        self.name = name
        self.until = until
        self.future: DurableFuture[Message | None] = DurableFuture(loop=run.services.loop)
        self.timer: Timer | None = None

    def arm(self) -> None:
        if self.until is None or self.future.done():
            return
        clock = self.run.services.clock
        remaining = self.until - clock.now()
        if remaining <= 0:
            self.future.set_result(None)
        else:
            self.timer = clock.call_later(min(remaining, LONGEST_TIMER_SECONDS), self.arm)

    def break_off(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


async def _wait(run: LiveRun, scope: Scope, key: str, what: str, name: str, until: float | None) -> Message | None:
    """Wait in memory, or until the run is parked (which raises Unwind here)."""
    # While the wait's beginning was being committed there was no wait that anybody could have broken off.
    if run.stopping is not None:
        await hold.hold_back(run)
    if run.cancel_reason is not None and not scope.cancel_seen:
        await hold.interrupt(run, scope, key)
    wait = Wait(run, scope, key, what, name, until)
    run.waits[key] = wait
    wait.arm()
    hand_over(run)
    if not wait.future.done():
        if run.sole and run.status is not Status.WAITING:  # it waited before its process died, and waits again
            run.change(Status.WAITING, owner=run.services.owner, wake_at=run.wake_at())
        hold.consider_parking(run)
    try:
        return await wait.future
    except asyncio.CancelledError:
        message = None if wait.future.cancelled() else wait.future.result()
        if message is not None and message not in run.mailbox:
            run.mailbox.insert(0, message)  # it came in the same moment: for whoever waits for it next
        raise
    finally:
        del run.waits[key]
        if wait.timer is not None:
            wait.timer.cancel()


async def given_up(run: LiveRun, scope: Scope, key: str) -> None:
    """Replay of an operation that the flow itself gave up on: wait, not for its end, but for the flow to do so again."""
    run.waits[key] = wait = Wait(run, scope, key, "nothing", "", None)
    try:
        await wait.future
    finally:
        del run.waits[key]


async def pause(run: LiveRun, scope: Scope, key: str, until: float) -> None:
    """The back-off of a retry: its end is in the journal already, and the next attempt is its end."""
    if run.cancel_reason is not None and not scope.cancel_seen:
        await hold.interrupt(run, scope, key)
    if until > run.services.clock.now():
        if run.sole:
            run.change(Status.WAITING, owner=run.services.owner, wake_at=run.wake_at(until))
            await run.settle()
        await _wait(run, scope, key, "pause", "", until)


async def begin(run: LiveRun, key: str, what: str, name: str, until: float | None) -> None:
    """Journal a wait's beginning. A run that has no other branch is waiting as a whole from now on."""
    run.unsettled = False
    run.record(WaitStarted(key, what, name, until, run.services.clock.now()))
    if run.sole:
        run.change(Status.WAITING, owner=run.services.owner, wake_at=run.wake_at(until))
    await run.settle()


async def sleep(run: LiveRun, scope: Scope | None, seconds: float) -> None:
    """See flow.operations.sleep."""
    scope = here(scope)
    key = scope.begin("$sleep")
    if scope.recorded is not None and await run.replayed(scope, key, "wait") is not None:
        return
    begun = run.begun(key)
    async with steps.under_way(run, scope, key):
        if run.cancel_reason is not None and not scope.cancel_seen:
            await hold.interrupt(run, scope, key)
        if begun is not None and begun.until is not None:
            until = begun.until
        else:
            until = run.services.clock.now() + seconds
            await begin(run, key, "sleep", "", until)
        await _wait(run, scope, key, "sleep", "", until)
        run.record(TimerFired(key, False, run.services.clock.now()))
        run.set_running()
        await run.settle()


async def wait_for_signal(
    run: LiveRun, scope: Scope | None, name: str, payload_type: Any, timeout_seconds: float | None, default: Any
) -> Any:
    """See flow.operations.wait_for."""
    scope = here(scope)
    key = scope.begin(f"$wait.{_UNSAFE.sub('_', name)}")
    codec = ValueCodec(payload_type, f"signal {name!r}")
    if scope.recorded is not None:
        outcome = await run.replayed(scope, key, "wait")
        if outcome is not None:
            if outcome.ending is Ending.TIMED_OUT:
                return _timed_out(name, default)
            return codec.open(await run.load(outcome.output, outcome.blob))
    async with steps.under_way(run, scope, key):
        message = await receive(run, scope, key, "signal", name, timeout_seconds)
        if message is None:
            run.record(TimerFired(key, True, run.services.clock.now()))
            run.set_running()
            await run.settle()
            return _timed_out(name, default)
        data = message.payload
        if message.payload_blob:
            data = await run.load(NULL, message.payload_blob)
        output, blob = (NULL, message.payload_blob) if message.payload_blob else run.payload(data)
        run.record(SignalReceived(key, output, blob, message.id))
        run.writer.consume([message.id])
        run.set_running()
        await run.settle()
    return codec.open(data)  # recorded before it is read: one that does not fit raises here live and replayed alike


async def receive(
    run: LiveRun, scope: Scope, key: str, what: str, name: str, timeout_seconds: float | None
) -> Message | None:
    """Take the next message of this kind and name, or wait for it; None after the timeout."""
    begun = run.begun(key)
    if run.cancel_reason is not None and not scope.cancel_seen:
        await hold.interrupt(run, scope, key)
    if begun is not None:
        until = begun.until
    else:
        message = take(run, what, name)
        if message is not None:
            return message
        until = None if timeout_seconds is None else run.services.clock.now() + timeout_seconds
        await begin(run, key, what, name, until)
    return await _wait(run, scope, key, what, name, until)


def take(run: LiveRun, what: str, name: str) -> Message | None:
    """The oldest message of this kind and name that nobody has taken. A run's end is news for all who wait for it."""
    for position, message in enumerate(run.mailbox):
        if message.kind is _KIND[what] and message.name == name:
            return message if message.kind is MessageKind.ENDED else run.mailbox.pop(position)
    return None


def forget(run: LiveRun, message: Message) -> None:
    """It no longer holds: whoever waits for such a message waits for the next."""
    if message in run.mailbox:  # else another branch that had it, too, has come before
        run.mailbox.remove(message)
    run.writer.consume([message.id])


def hand_over(run: LiveRun) -> None:
    """Give messages to the waits that want them, first come first served."""
    if not run.mailbox:
        return
    for wait in list(run.waits.values()):
        if wait.what in _KIND and not wait.future.done():
            message = take(run, wait.what, wait.name)
            if message is not None:
                wait.future.set_result(message)


def _timed_out(name: str, default: Any) -> Any:
    if default is MISSING:
        raise TimeoutError(f"no signal {name!r} arrived in time")
    return default
