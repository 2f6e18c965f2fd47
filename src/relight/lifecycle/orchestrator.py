"""The orchestrator: which runs are in memory, what wakes the others, and who is told when one ends.

Runs come in through `start`, through recovery, and through four wake-ups: a timer at the earliest due time in the store, a
message, the store's hint that another process has written, and room becoming free. All of them end in `take_up`. Every hint
may be lost: the poll at CHECK_SECONDS asks the store again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from relight.clock import Timer
from relight.errors import StoreError, StoreUnavailableError
from relight.flow.definitions import Flow
from relight.flow.scope import start_task
from relight.lifecycle import execute, hold
from relight.lifecycle.blocked import is_blocked
from relight.lifecycle.overtaken import Overtaken
from relight.lifecycle.patience import Patience
from relight.lifecycle.recover import take_up
from relight.lifecycle.run import LiveRun, Services
from relight.model.replay import TreeState
from relight.model.run import Hold, Message, MessageKind, Run, Status
from relight.telemetry import Token, log

CHECK_SECONDS = 5.0  # between looks at the store when nothing wakes us
PASS_LIMIT = 100  # runs per pass; a full pass is followed at once by the next
MESSAGE_LIMIT = 1000


class Orchestrator:
    """Implements `lifecycle.run.Host`."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.live: dict[str, LiveRun] = {}
        self._overtaken = Overtaken(services, self.live)
        self.taking: set[str] = set()  # being claimed and restored right now
        self._unheard: dict[str, set[int]] = {}  # left memory while they were told something: what they did hear
        self._early: dict[str, list[Message]] = {}  # for runs that are ours already and in memory only in a moment
        self.stopping = False
        self._reserved = 0  # rooms promised to runs that are being created
        self._watchers: dict[str, list[Callable[[Run | None], None]]] = {}
        self._last_message = 0
        self._timer: Timer | None = None
        self._timer_at: float | None = None
        self._wanted = asyncio.Event()
        self._look_again = self._listen_again = False  # for due runs; for messages
        self._doubtful: dict[str, bool] = {}  # creating or claiming them failed, perhaps once written; crashed?
        self._own: set[str] = set()  # runs started here; kept only while recovery is off
        self._room_waiters: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    # ---- life

    def start(self) -> None:
        self.services.store.watch(self._changed)
        self._look_again = self._listen_again = True
        self._wanted.set()
        self._task = start_task(self.services.loop, self._attend(), None, "relight-orchestrator")

    async def stop(self, grace_seconds: float) -> None:
        """Take nothing up any more; let steps in flight finish, within the grace; take every run out of memory."""
        self.stopping = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._timer is not None:
            self._timer.cancel()
        runs = list(self.live.values())
        if runs:
            await asyncio.gather(*(self._let_go(run, grace_seconds) for run in runs))
        for watchers in list(self._watchers.values()):
            for watcher in watchers:
                watcher(None)

    async def _let_go(self, run: LiveRun, grace_seconds: float) -> None:
        """Shut down one run: it is free at once for whoever opens the store next, and that counts as no crash."""
        if is_blocked(run):
            await hold.park(run)
            return
        now = self.services.clock.now()
        await hold.depart(
            run,
            "shutdown",
            grace_seconds,
            lambda: run.change(Status.PENDING, owner=None, wake_at=now, reason="released"),
        )

    # ---- room

    @property
    def crowded(self) -> bool:
        return self.room * 10 < self.services.config.max_concurrent_runs

    @property
    def room(self) -> int:
        return self.services.config.max_concurrent_runs - len(self.live) - len(self.taking) - self._reserved

    def reserve(self) -> bool:
        """Promise a room to a run that is about to be created."""
        if self.stopping:
            raise StoreUnavailableError("this Relight is stopping: nothing can be started any more")
        if self.room <= 0:
            return False
        self._reserved += 1
        return True

    def release(self, doubtful: str | None, reserved: bool = True) -> None:
        if reserved and self._reserved:
            self._reserved -= 1
        if doubtful is not None:
            self.doubt([doubtful], crashed=False)

    def doubt(self, run_ids: Sequence[str], *, crashed: bool) -> None:
        """Whether this process owns these runs is unknown; look, once the store answers again."""
        self._doubtful.update(dict.fromkeys(run_ids, crashed))
        self._wanted.set()

    def drive_new(self, row: Run, state: TreeState, flow: Flow[..., object]) -> None:
        self._reserved -= 1
        if not self.services.config.recovery.enabled:
            self._own.add(row.id)
        run = LiveRun(self.services, self, row, row.epoch, state)
        self.drive(run, flow, [])

    def drive(self, run: LiveRun, flow: Flow[..., object], messages: Sequence[Message]) -> None:
        """Put a run into motion."""
        self.live[run.id] = run
        run.main = start_task(self.services.loop, execute.drive(run, flow), None, "relight-run")
        if run.status in (Status.PAUSED, Status.PENDING):
            run.set_running()
        for message in (*_in_effect(run, messages), *self._early.pop(run.id, ())):
            run.deliver(message)
        if run.cancel_reason is not None:
            hold.begin_grace(run)

    # ---- Host: what runs tell

    def ended(self, run: LiveRun) -> None:
        self.live.pop(run.id, None)
        self._own.discard(run.id)
        self.tell(run.id, run.outcome)
        if run.row.parent_id is not None:
            self.listen()  # the parent's message is in the store now
        self._room_is_free()

    def left(self, run: LiveRun) -> None:
        if self.live.get(run.id) is run:
            del self.live[run.id]
        self.tell(run.id, None)
        if run.writer.fenced or self.stopping:
            return
        if run.missed:
            self._unheard[run.id] = run.heard
            self._wanted.set()
        self._room_is_free()

    def offer(self, run_id: str) -> None:
        if not self.services.config.recovery.enabled:
            self._own.add(run_id)
        self._look()

    def wake_at(self, when: float) -> None:
        if self.stopping or (self._timer_at is not None and self._timer_at <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        delay = max(0.0, when - self.services.clock.now())
        self._timer = self.services.clock.call_later(min(delay, 3600.0), self._timer_fired)

    # ---- watching runs

    def watch(self, run_id: str, watcher: Callable[[Run | None], None]) -> Callable[[], None]:
        """Tell `watcher` when the run ends (its final row), or when something about it changed that it should look at
        (None). Returns what takes it back."""
        self._watchers.setdefault(run_id, []).append(watcher)

        def unwatch() -> None:
            watchers = self._watchers.get(run_id, [])
            if watcher in watchers:
                watchers.remove(watcher)
            if not watchers:
                self._watchers.pop(run_id, None)

        return unwatch

    def _tell_watchers(self) -> None:
        """Whoever watches a run that is not in memory here should look at the store."""
        for run_id in [run_id for run_id in self._watchers if run_id not in self.live]:
            self.tell(run_id)

    def tell(self, run_id: str, row: Run | None = None) -> None:
        for watcher in list(self._watchers.get(run_id, ())):
            watcher(row)

    # ---- the wake-ups

    def _timer_fired(self) -> None:
        self._timer = self._timer_at = None
        self._look()

    async def wait_for_room(self) -> None:
        """Until a run can be taken up: for recovery, which must not strand what does not fit at once."""
        while self.room <= 0:
            freed: asyncio.Future[None] = self.services.loop.create_future()
            self._room_waiters.append(freed)
            await freed

    def _room_is_free(self) -> None:
        for waiter in self._room_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._room_waiters.clear()
        if self._look_again:
            self._wanted.set()

    def _look(self) -> None:
        self._look_again = True
        self._wanted.set()

    def listen(self) -> None:
        self._listen_again = True
        self._wanted.set()

    def _changed(self) -> None:
        """Another process has written."""
        self._tell_watchers()
        self._overtaken.others_wrote = True
        self._look_again = self._listen_again = True
        self._wanted.set()

    def flow_registered(self, name: str) -> None:
        """From any thread: runs held for want of this flow can go on."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.services.loop.call_soon_threadsafe(lambda: self.services.background.start(self.free([name]), "free"))

    async def told(self, message: Message) -> None:
        """A message was posted by this process: no need to wait for the store to tell."""
        run = self.live.get(message.run_id)
        if run is not None:
            run.deliver(message)
        else:
            self.listen()

    async def _attend(self) -> None:
        """One pass after the other, whenever something wants one; never two at once."""
        patience = Patience()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._wanted.wait()
            if not self._wanted.is_set():
                self._look_again = self._listen_again = True
                self._tell_watchers()
            self._wanted.clear()
            try:
                await self._resolve_doubts()
                await self._recheck()
                await self._overtaken.look()
                if self._listen_again:
                    self._listen_again = False
                    await self._hear()
                if self._look_again and self.room > 0:
                    self._look_again = False
                    await self._take_due()
            except StoreError as error:
                log(logging.WARNING, Token.RECOVERY_FAILED, f"{error}; looking again in {patience.seconds:.2g}s")
                self._look_again = self._listen_again = True
                self._wanted.set()
                await patience.pause()
            else:
                patience.again()

    def _may_take(self, run_id: str) -> bool:
        """With recovery off nothing is claimed by itself, but for the runs this process has started."""
        if run_id in self.live or run_id in self.taking:
            return False
        return self.services.config.recovery.enabled or run_id in self._own

    async def _take_due(self) -> None:
        """Take up what is due, pass after pass, while there is room; then sleep until the next is."""
        while self.room > 0:
            limit = min(PASS_LIMIT, self.room)
            due = await self.services.store.due(self.services.clock.now(), limit)
            fresh = [row for row in due if self._may_take(row.id)]
            await take_up(self, fresh, crashed=False)
            if len(due) < limit or not fresh:
                break
        else:
            self._look_again = True  # no room: whoever leaves makes us look again
            return
        upcoming = await self.services.store.next_due()
        if upcoming is not None:
            self.wake_at(upcoming)

    async def _hear(self) -> None:
        """Messages that any process has posted since we last looked."""
        while True:
            messages = await self.services.store.messages_after(self._last_message, MESSAGE_LIMIT)
            if not messages:
                return
            await self._route(messages)
            self._last_message = messages[-1].id  # not before: what fails on the way is heard again
            if len(messages) < MESSAGE_LIMIT:
                return

    async def _route(self, messages: list[Message]) -> None:
        parked: dict[str, list[Message]] = {}
        for message in messages:
            if not self._deliver(message):
                parked.setdefault(message.run_id, []).append(message)
        if not parked:
            return
        rows = await self.services.store.get_runs(list(parked))
        for row in rows:
            if row.owner == self.services.owner:
                self._early.setdefault(row.id, []).extend(m for m in parked[row.id] if not self._deliver(m))
        wakened = [row for row in rows if self._may_take(row.id) and _wakes(row, parked[row.id])]
        for start in range(0, len(wakened), PASS_LIMIT):
            await take_up(self, wakened[start : start + PASS_LIMIT], crashed=False)

    def _deliver(self, message: Message) -> bool:
        """To a run in memory, or one about to be: its inbox may have been read just before this message came."""
        run = self.live.get(message.run_id)
        if run is not None:
            run.deliver(message)
        elif message.run_id in self.taking:
            self._early.setdefault(message.run_id, []).append(message)
        return run is not None or message.run_id in self.taking

    def taken(self, run_ids: Sequence[str]) -> None:
        """Taking these up is over, whether they are in memory now or not."""
        self.taking.difference_update(run_ids)
        for run_id in run_ids:
            if self._early.pop(run_id, None):  # it was not driven after all
                self._unheard.setdefault(run_id, set())
                self._wanted.set()

    async def _recheck(self) -> None:
        """Runs that left memory when they were told something they could no longer hear: perhaps it wakes them."""
        unheard = dict(self._unheard)
        if not unheard:
            return
        waiting = await self.services.store.inbox(list(unheard))
        await self._route([message for message in waiting if message.id not in unheard[message.run_id]])
        for run_id, heard in unheard.items():
            if self._unheard.get(run_id) is heard:  # else it has come and gone once more
                del self._unheard[run_id]

    async def free(self, flows: Sequence[str]) -> None:
        """Take up the runs that are held because one of these flows was missing."""
        patience = Patience()
        while not self.stopping:
            try:
                held = await self.services.store.held(Hold.DEFINITION, flows, PASS_LIMIT)
                if held:
                    names = ", ".join(sorted({row.flow for row in held}))
                    log(logging.INFO, Token.DEFINITION_FOUND, f"{len(held)} runs held for want of {names} go on")
                    await take_up(self, held, crashed=False)
            except StoreError as error:
                log(logging.WARNING, Token.RECOVERY_FAILED, f"{error}; looking again in {patience.seconds:.2g}s")
                await patience.pause()
            else:
                if len(held) < PASS_LIMIT:
                    return

    async def _resolve_doubts(self) -> None:
        """Creations and claims that were reported as failed: what is ours after all is driven, or nobody would."""
        if not self._doubtful:
            return
        rows = await self.services.store.get_runs(list(self._doubtful))
        doubtful, self._doubtful = self._doubtful, {}
        for crashed in (False, True):
            ours = [row for row in rows if row.owner == self.services.owner and doubtful[row.id] is crashed]
            await take_up(self, ours, crashed=crashed)


def _in_effect(run: LiveRun, messages: Sequence[Message]) -> list[Message]:
    """What an inbox comes to: of pauses and resumes only the last counts, and only if it is a pause."""
    switches = [message for message in messages if message.kind in (MessageKind.PAUSE, MessageKind.RESUME)]
    if switches and switches[-1].kind is MessageKind.PAUSE:
        switches.pop()
    over = {message.id for message in switches}
    if over:
        run.writer.consume(over)
    return [message for message in messages if message.id not in over]


def _wakes(row: Run, messages: Sequence[Message]) -> bool:
    """Whether a run that is not in memory is taken up for these messages."""
    if row.status is Status.PAUSED:
        # Whoever its owner is: one that claimed it and died before it could go on left it paused, for nobody to recover.
        return any(message.kind in (MessageKind.RESUME, MessageKind.CANCEL) for message in messages)
    return row.status is Status.WAITING and row.owner is None
