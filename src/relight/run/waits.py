"""Waits: everything that waits for a time or a message, in memory or parked.

The beginning of a wait is journaled with its deadline, so that neither is lost when the process crashes or the run is
parked. Its end is journaled too, so that replay does not look at the clock again. A timer of the clock or a message
ends it.

asyncio's own timers (asyncio.sleep, asyncio.timeout, …) are waits of the run as well, with one difference: their
beginning is a note that is written with the next commit. Most of them are timeouts that never expire, and these cost no
commit.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from relight.errors import PayloadError, Unwind
from relight.execution.run_loop import Ready
from relight.flow.operations import MISSING
from relight.flow.payloads import ValueCodec
from relight.flow.scope import Scope, here
from relight.model.journal import NULL, OperationCancelled, SignalReceived, TimerFired, WaitStarted
from relight.model.replay import Ending, Outcome, Unclaimed
from relight.model.run import Message, MessageKind, Status
from relight.run import leaving, parking
from relight.run.alarms import Alarm
from relight.run.arguments import why_misread
from relight.run.operation import Operation

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun

_UNSAFE = re.compile(r"[^\w.\- ]")


class Wait(Operation):
    """A wait for a time; see Receive for messages."""

    kind = "wait"
    what = "sleep"
    timed_out = False  # whether it is a timeout when its time is over

    def __init__(self, run: LiveRun, scope: Scope, key: str, seconds: float | None) -> None:
        super().__init__(run, scope, key)
        self._seconds = seconds
        self._loop_until = run.loop.now + (seconds or 0.0)  # time() of the run's loop when its time is over
        self._passed = False  # whether it ended because its time was over
        self._alarm: Alarm | None = None

    def begin(self) -> None:
        if self.begun is not None:
            until = self.begun.until
        else:
            now = self.run.services.clock.now()
            until = None if self._seconds is None else now + self._seconds
            self.journal_beginning(until, now)
        self.only_waits()
        if until is not None:
            self._alarm = Alarm(self.run, self.key, until, self._due)

    def journal_beginning(self, until: float | None, now: float) -> None:
        self.run.record(WaitStarted(self.key, self.what, self.name, until, now))

    @property
    def name(self) -> str:
        """What it waits for: a signal's name, or a run's id."""
        return ""

    def stop(self) -> None:
        super().stop()
        self.silence()

    def silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _due(self) -> None:
        if not self.recorded and not self.done():
            self.waits_no_more()
            self.on_due()
            self.run.record(TimerFired(self.key, self.timed_out, self.run.services.clock.now()), self)

    def on_due(self) -> None:
        """Its time has come."""
        self._passed = True

    def accept(self, outcome: Outcome) -> bool:
        self._passed = True
        return True

    def tell(self) -> None:
        if self._passed:
            self.run.loop.now = max(self.run.loop.now, self._loop_until)
        super().tell()


def sleep(run: LiveRun, scope: Scope, seconds: float) -> Iterator[Any]:
    """See flow.operations.sleep."""
    scope = here(scope)
    return run.ask(Wait(run, scope, scope.begin("$sleep"), seconds))


# ---- asyncio's timers


class LoopTimer(Wait):
    """`call_later` of the run's loop. The flow does not await it: its end puts a callback into the loop's queue."""

    kind = "timer"
    what = "timer"
    interruptible = False  # when the run is cancelled, the task that waits for it is cancelled as asyncio does it

    def __init__(self, run: LiveRun, scope: Scope, key: str, when: float, seconds: float, ready: Ready) -> None:
        super().__init__(run, scope, key, seconds)
        self._ready = ready
        self._when = when
        # The timers of one call of a flow, which end with that call.
        self._siblings = run.timers.of_calls.setdefault(id(scope.branches), {})
        self._siblings[self] = None

    def cancel(self, msg: Any = None) -> bool:
        self._siblings.pop(self, None)
        return super().cancel(msg)

    def journal_beginning(self, until: float | None, now: float) -> None:
        self.run.note(WaitStarted(self.key, self.what, "", until, now))

    def tell(self) -> None:
        self._siblings.pop(self, None)
        if not self.done():
            self.set_result(None)
            self.run.loop.now = max(self.run.loop.now, self._when)
            if not self._ready.cancelled():
                self.run.loop.ready.append(self._ready)

    def when(self) -> float:
        return self._when


def start_timer(run: LiveRun, scope: Scope, when: float, seconds: float, ready: Ready) -> LoopTimer:
    """See run_loop.Host.start_timer."""
    timer = LoopTimer(run, scope, scope.begin("$timer"), when, seconds, ready)
    run.add(timer)
    return timer


def cancel_timers(run: LiveRun, scope: Scope) -> None:
    """A call of a flow is over: cancel the timers that it has made by `call_later` and left behind."""
    for timer in list(run.timers.of_calls.pop(id(scope.branches), ())):
        timer.cancel()


class Deadline(LoopTimer):
    """The deadline of a flow with a timeout: a time that was fixed when the run was created."""

    def __init__(self, run: LiveRun, scope: Scope, key: str, until: float, ready: Ready) -> None:
        super().__init__(run, scope, key, 0.0, 0.0, ready)
        self._until = until

    def begin(self) -> None:
        if self.begun is None:
            self.journal_beginning(self._until, self.run.services.clock.now())
        self.only_waits()
        self._alarm = Alarm(self.run, self.key, self._until, self._due)


# ---- messages


class Receive(Wait):
    """A wait for a message of one kind and name."""

    what = "signal"
    takes = MessageKind.SIGNAL
    timed_out = True

    def __init__(self, run: LiveRun, scope: Scope, key: str, name: str, seconds: float | None) -> None:
        super().__init__(run, scope, key, seconds)
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def begin(self) -> None:
        message = take_signal(self.run, self) if self.begun is None else None
        if message is None:
            super().begin()
            hand_over(self.run)
        else:
            self.receive(message)

    def receive(self, message: Message) -> None:
        raise NotImplementedError


class Signal(Receive):
    """The wait of wait_for()."""

    def __init__(
        self, run: LiveRun, scope: Scope, key: str, name: str, codec: ValueCodec, seconds: float | None, default: Any
    ) -> None:
        super().__init__(run, scope, key, name, seconds)
        self._codec = codec
        self._default = default
        self._message: Message | None = None

    def receive(self, message: Message) -> None:
        self.waits_no_more()
        if self._alarm is not None:
            self._alarm.cancel()
        self._message = message
        if message.payload_blob:
            self.run.services.background.start(self._fetch(message), "fetch", self.run.broke)
        else:
            self._received(message, message.payload)

    async def _fetch(self, message: Message) -> None:
        try:
            data = await self.run.load(NULL, message.payload_blob)
        except Unwind:
            return  # the run leaves memory, or is held because the blob cannot be read: the message stays in the inbox
        self._received(message, data)

    def _received(self, message: Message, data: bytes) -> None:
        run = self.run
        if self.done() or run.stopping is not None:
            self.take_back()
            return
        self._open(data)
        output, blob = (NULL, message.payload_blob) if message.payload_blob else run.payload(data)
        run.record(SignalReceived(self.key, output, blob, message.id, self._name, run.now()), self)
        run.writer.consume([message.id])
        run.inbox.taken_back.discard(message.id)

    def stop(self) -> None:
        super().stop()
        if not self.recorded:
            self._take_from_journal()
            self.take_back()  # even if its payload is being read: the flow may end now, so this cannot wait for that

    def _take_from_journal(self) -> None:
        """On replay: take back the recorded signal. The flow had given up on this wait, but that was not written."""
        replay, key = self.run.replay, self.key
        outcome = None if replay is None or key in replay.unheard else replay.recorded.get(key)
        if outcome is not None and outcome.message_id:
            run, taken = self.run, Unclaimed(outcome.message_id, outcome.name, outcome.output, outcome.blob)
            self._message = returned(run.id, taken)
            run.inbox.taken_back.add(taken.message_id)
            run.when_live(lambda: run.record(OperationCancelled(key, by_flow=True, at=run.now())))

    def take_back(self) -> None:
        """The signal came, but the flow has given up on this wait: give the signal to the next wait for it."""
        message, self._message = self._message, None
        if message is not None:
            if self.recorded:  # it is no longer in the store's inbox
                self.run.inbox.taken_back.add(message.id)
            bisect.insort(self.run.inbox.mailbox, message, key=lambda one: one.id)  # before later ones
            hand_over(self.run)

    def _open(self, data: Any) -> None:
        """Decode the payload. One of another type is recorded all the same, and raises live and on replay alike."""
        try:
            self.value = self._codec.open(data)
        except PayloadError as error:
            self.error = PayloadError(f"{why_misread(error)}; the sender gave it a value of another type")
            self.error.__cause__ = error

    def on_due(self) -> None:
        super().on_due()
        if self._default is MISSING:
            self.error = TimeoutError(f"no signal {self._name!r} arrived in time")
        else:
            self.value = self._default

    def accept(self, outcome: Outcome) -> bool:
        if outcome.ending is Ending.TIMED_OUT:
            self.on_due()
        else:
            self._open(outcome.output)
        return True


def wait_for_signal(
    run: LiveRun, scope: Scope, name: str, payload_type: Any, timeout_seconds: float | None, default: Any
) -> Iterator[Any]:
    """See flow.operations.wait_for."""
    scope = here(scope)
    key = scope.begin(f"$wait.{_UNSAFE.sub('_', name)}")
    codec = ValueCodec(payload_type, f"signal {name!r}")
    return run.ask(Signal(run, scope, key, name, codec, timeout_seconds, default))


def take_signal(run: LiveRun, wait: Receive) -> Message | None:
    """The oldest message for this wait. A signal is removed from the mailbox. A run's end stays there, since several
    waits may need it."""
    for position, message in enumerate(run.inbox.mailbox):
        if message.kind is wait.takes and message.name == wait.name:
            return message if message.kind is MessageKind.ENDED else run.inbox.mailbox.pop(position)
    return None


def forget(run: LiveRun, message: Message) -> None:
    """Drop a message that is no longer true: a wait for such a message waits for the next one."""
    if message in run.inbox.mailbox:  # otherwise another branch that received it, too, has removed it
        run.inbox.mailbox.remove(message)
    run.writer.consume([message.id])


def hand_over(run: LiveRun) -> None:
    """Give messages to the waits for them, in the order in which the flow asked for the waits."""
    if not run.inbox.mailbox or run.timers.overdue is not None:
        return
    for operation in list(run.pending.values()):
        if isinstance(operation, Receive) and operation.waiting and not operation.done():
            message = take_signal(run, operation)
            if message is not None:
                operation.receive(message)


def catch_up(run: LiveRun) -> None:
    """The run is back in memory. What happened meanwhile reaches it in the order of time, as if it had stayed in
    memory: times that have passed, and messages that came before or after them."""
    overdue, run.timers.overdue = run.timers.overdue or [], None
    late = run.inbox.mailbox
    for alarm in sorted(overdue, key=lambda one: one.until):
        run.inbox.mailbox = [message for message in late if message.at <= alarm.until]
        if run.inbox.mailbox:
            later = [message for message in late if message.at > alarm.until]
            hand_over(run)
            late = [*run.inbox.mailbox, *later]
        alarm.go_off()
    run.inbox.mailbox = late
    hand_over(run)


def returned(run_id: str, signal: Unclaimed) -> Message:
    """A signal that a wait had received, and that never reached the flow, because the flow gave up on the wait."""
    return Message(
        id=signal.message_id,
        run_id=run_id,
        kind=MessageKind.SIGNAL,
        name=signal.name,
        payload=b"" if signal.blob else bytes(signal.output),
        payload_blob=signal.blob,
    )


# ---- the whole run waits


def blocked(run: LiveRun) -> None:
    """The flow is at rest, and nothing is being done for it. Set its status, if possible in the commit that is being
    gathered. Make notes durable now, since no other commit would write them. Then consider parking."""
    writer = run.writer
    timers = any(type(event) is WaitStarted for event in writer.notes.values())
    if run.status is not Status.WAITING or writer.gathering or timers:
        run.change(Status.WAITING, owner=run.services.owner, wake_at=leaving.due_at(run))
        writer.flush()
    parking.consider_parking(run)
    run.services.idleness.look()
