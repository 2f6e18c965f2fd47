"""The orchestrator: which runs are in memory, what wakes the others, and who is told when one ends.

Runs come in through `start`, through recovery, and through four wake-ups: a timer at the earliest due time in the store, a
message, the store's hint that another process has written, and room becoming free. All of them end in `take_up`. Every hint
may be lost: the poll at CHECK_SECONDS asks the store again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from relight.clock import Timer
from relight.errors import StoreError, StoreUnavailableError
from relight.flow.definitions import Flow
from relight.flow.scope import start_task
from relight.lifecycle import execute, hold
from relight.lifecycle.blocked import is_blocked
from relight.lifecycle.doubts import Doubts
from relight.lifecycle.mail import Mail
from relight.lifecycle.overtaken import Overtaken
from relight.lifecycle.patience import Patience
from relight.lifecycle.recover import take_up
from relight.lifecycle.run import LiveRun
from relight.lifecycle.services import Services
from relight.lifecycle.watchers import Watcher, Watchers
from relight.model.replay import TreeState
from relight.model.run import Hold, Message, News, Run, Status
from relight.telemetry import Token, log

CHECK_SECONDS = 5.0  # between looks at the store when nothing wakes us
NOT_OURS_SECONDS = 0.25  # before looking again at runs that are due and could not be taken up
ARRIVAL_SECONDS = 5.0  # when we stop: for what is being taken up or created, to let go of it with the others
PASS_LIMIT = 100  # runs per pass; a full pass is followed at once by the next


class Orchestrator:
    """Implements `lifecycle.run.Host`."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.live: dict[str, LiveRun] = {}
        self._overtaken = Overtaken(services, self.live)
        self.taking: set[str] = set()  # being claimed and restored right now
        self._mail = Mail(self)
        self.stopping = False
        self._reserved = 0  # rooms promised to runs that are being created,
        self._creating: Counter[str] = Counter()  # and these runs, with how many callers of start() want each
        self._watchers = Watchers()
        self._timer: Timer | None = None
        self._timer_at: float | None = None
        self._wanted = asyncio.Event()
        self._arrived = asyncio.Event()  # something that was being taken up or created is in memory now, or will not be
        self._look_again = self._listen_again = self._free_again = False  # for due runs; for messages; for held runs
        self._doubts = Doubts(self, self._creating)
        self._own: set[str] = set()  # runs started here; kept only while recovery is off
        self._room_waiters: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    # ---- life

    def start(self) -> None:
        self.services.store.watch(self._changed)
        self._look_again = self._listen_again = self._free_again = True
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL_SECONDS):
                while self.taking or self._creating:
                    self._arrived.clear()
                    await self._arrived.wait()
        runs = list(self.live.values())
        if runs:
            await asyncio.gather(*(self._let_go(run, grace_seconds, "its orchestrator stops") for run in runs))
        await self._watchers.last_look()

    async def _let_go(self, run: LiveRun, grace_seconds: float, why: str) -> None:
        """Take one run out of memory: it is free at once for anybody to take up, and that counts as no crash."""
        if is_blocked(run):
            await hold.park(run)
            return
        now = self.services.clock.now()

        def write() -> None:
            run.change(Status.PENDING, owner=None, wake_at=now, reason="released")
            run.log(Token.RUN_RELEASED, f"released by {self.services.owner}: {why}")

        await hold.depart(run, why, grace_seconds, write)
        self._look()  # for ourselves, if the lease was regained before the store had taken this: nobody tells us what we wrote

    # ---- the lease

    def let_go_of_all(self) -> None:
        """The lease could not be renewed and lapses in a third of its ttl: stop driving before that. What the store still
        takes is released for others; what it does not take waits in the recorder, and is fenced if others were faster."""
        grace = self.services.config.recovery.lease_ttl_seconds / 6
        for run in list(self.live.values()):
            self.services.background.start(
                self._let_go(run, grace, "its orchestrator could not renew its lease"), "adrift"
            )

    def take_again(self, lapsed: bool) -> None:
        """The lease is ours again. If it had lapsed, others may have claimed what is still in memory here."""
        if lapsed:
            self._overtaken.suspect()
        for run_id in self.live:
            self.services.keeper.attach(run_id)
        self._look_again = self._listen_again = True
        self._wanted.set()

    # ---- room

    @property
    def crowded(self) -> bool:
        return self.room * 10 < self.services.config.max_concurrent_runs

    @property
    def room(self) -> int:
        return self.services.config.max_concurrent_runs - len(self.live) - len(self.taking) - self._reserved

    def reserve(self, run_id: str) -> bool:
        """A run is about to be created: whether a room is promised to it. `release` follows in any case."""
        if self.stopping:
            raise StoreUnavailableError("this Relight is stopping: nothing can be started any more")
        self._creating[run_id] += 1
        if self.room <= 0 or not self.services.keeper.held:
            return False
        self._reserved += 1
        return True

    def release(self, run_id: str, reserved: bool) -> None:
        """Creating a run is over, with whatever result."""
        self._reserved -= reserved
        self._creating[run_id] -= 1
        if not self._creating[run_id]:
            del self._creating[run_id]
        self._arrived.set()
        if reserved and (self._room_waiters or self._look_again):
            # Later, when the run that came of it, if any, is in memory: if none did, somebody may have waited for its room.
            self.services.loop.call_soon(self._room_is_free)
        if run_id in self._doubts:
            self._wanted.set()

    def doubt(self, run_ids: Sequence[str], *, crashed: bool) -> None:
        self._doubts.add(run_ids, crashed=crashed)
        self._wanted.set()

    def drive_new(self, row: Run, state: TreeState, flow: Flow[..., object], generation: int) -> None:
        if not self.services.config.recovery.enabled:
            self._own.add(row.id)
        run = LiveRun(self.services, self, row, row.epoch, state)
        run.generation = generation
        self.drive(run, flow, [])

    def drive(self, run: LiveRun, flow: Flow[..., object], messages: Sequence[Message]) -> None:
        """Put a run into motion."""
        self.live[run.id] = run
        self.services.keeper.attach(run.id)
        if self.stopping:
            return  # claimed or created a moment too late: its code is not called any more, and `stop` lets go of it
        run.main = start_task(self.services.loop, execute.drive(run, flow), None, "relight-run")
        if run.status in (Status.PAUSED, Status.PENDING):
            run.set_running()
        for message in self._mail.opened_for(run, messages):
            run.deliver(message)
        if run.cancel_reason is not None:
            hold.begin_grace(run)

    # ---- Host: what runs tell

    def ended(self, run: LiveRun) -> None:
        self.live.pop(run.id, None)
        self.services.keeper.detach(run.id)
        run.let_go()
        self._own.discard(run.id)
        self.tell(run.id, run.outcome)
        if run.row.parent_id is not None or run.joined:
            self.listen()  # the message to whoever waits for it is in the store now
        self._room_is_free()

    def left(self, run: LiveRun) -> None:
        if self.live.get(run.id) is run:
            del self.live[run.id]
            if not run.writer.fenced:  # else its lease is another's already
                self.services.keeper.detach(run.id)
        run.let_go()
        self.tell(run.id, None)
        if self.stopping:
            return
        if run.writer.fenced:
            self.doubt([run.id], crashed=True)  # if it is in our name even so, nobody else will look at it
        elif run.missed:
            self._mail.missed_by(run)
            self._look()  # what it missed before it left has made it due
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

    def watch(self, run_id: str, watcher: Watcher) -> Callable[[], None]:
        """Be told of a run's end, or to look at it. Returns what takes it back."""
        return self._watchers.add(run_id, watcher)

    def tell(self, run_id: str, row: Run | None = None) -> None:
        self._watchers.tell(run_id, row)

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
        if self.room <= 0:
            return
        for waiter in self._room_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._room_waiters.clear()
        if self._look_again or self._free_again:
            self._wanted.set()

    def _look(self) -> None:
        self._look_again = True
        self._wanted.set()

    def listen(self) -> None:
        self._listen_again = True
        self._wanted.set()

    def _changed(self, news: News) -> None:
        """Another process has written."""
        if News.RUNS in news:
            self._watchers.tell_all_but(self.live)
            self._overtaken.others_wrote = True
        self._look_again |= News.DUE in news
        self._listen_again |= News.MAIL in news
        self._free_again |= News.HELD in news
        self._wanted.set()

    def flow_registered(self, name: str) -> None:
        """From any thread: runs held for want of this flow can go on."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.services.loop.call_soon_threadsafe(self.look_for_held)

    def look_for_held(self) -> None:
        """Runs may be held for want of a flow that this process knows."""
        self._free_again = True
        self._wanted.set()

    async def told(self, message: Message) -> None:
        """A message was posted by this process: no need to wait for the store to tell."""
        if not self._mail.told(message):
            self.listen()

    async def _attend(self) -> None:
        """One pass after the other, whenever something wants one; never two at once."""
        patience = Patience()
        loop = self.services.loop
        checked_at = loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(checked_at + CHECK_SECONDS):
                    await self._wanted.wait()
            if loop.time() >= checked_at + CHECK_SECONDS:  # whether or not something wakes us all the time
                checked_at = loop.time()
                self._look_again = self._listen_again = True
                self._watchers.tell_all_but(self.live)
            self._wanted.clear()
            try:
                await self._doubts.resolve()
                await self._mail.recheck()
                await self._overtaken.look()
                if self._listen_again:
                    self._listen_again = False
                    await self._mail.hear()
                if self._look_again and self.room > 0 and self.services.keeper.held:
                    self._look_again = False
                    await self._take_due()
                if self._free_again and self.room > 0 and self.services.keeper.held:
                    self._free_again = False
                    await self._take_held()
            except StoreError as error:
                log(logging.WARNING, Token.RECOVERY_FAILED, f"{error}; looking again in {patience.seconds:.2g}s")
                self._look_again = self._listen_again = self._free_again = True
                self._wanted.set()
                await patience.pause()
            else:
                patience.again()

    def has(self, run_id: str) -> bool:
        """Whether this process drives the run, is about to, or finds out whether it should."""
        return run_id in self.live or run_id in self.taking or run_id in self._doubts or run_id in self._creating

    def claim_as_own(self, run_id: str) -> None:
        """Somebody asked this process to bring the run back: it may be taken up here also while recovery is off."""
        self._own.add(run_id)
        self._look()

    def _may_take(self, run_id: str) -> bool:
        """With recovery off nothing is claimed by itself, but for the runs this process has started."""
        if run_id in self.live or run_id in self.taking:
            return False
        return self.services.config.recovery.enabled or run_id in self._own

    async def _take_due(self) -> None:
        """Take up what is due, pass after pass, while there is room; then sleep until the next is."""
        asked_at = self.services.clock.now()
        while self.room > 0:
            limit = min(PASS_LIMIT, self.room)
            due = await self.services.store.due(asked_at, limit)
            fresh = [row for row in due if self._may_take(row.id)]
            await take_up(self, fresh, crashed=False)
            if len(due) < limit or not fresh:
                # What is being taken up for a message just now may hide what is due behind it: look again once it is here.
                self._look_again |= any(row.id in self.taking for row in due)
                break
        else:
            self._look_again = True  # no room: whoever leaves makes us look again
            return
        upcoming = await self.services.store.next_due()
        if upcoming is not None:
            # What was due when we asked was not for us (others took it, or its lease is not free yet): no hurry then. What
            # has fallen due since, nobody has looked at.
            self.wake_at(upcoming if upcoming > asked_at else self.services.clock.now() + NOT_OURS_SECONDS)

    async def _take_held(self) -> None:
        """Take up runs that were held for want of their flow by a process that did not know it; this one does."""
        if not self.services.config.recovery.enabled:
            return
        while self.room > 0:
            limit = min(PASS_LIMIT, self.room)
            held = await self.services.store.held(Hold.DEFINITION, self.services.registry.names(), limit)
            if held:
                names = ", ".join(sorted({row.flow for row in held}))
                log(logging.INFO, Token.DEFINITION_FOUND, f"{len(held)} runs held for want of {names} go on")
            if not await take_up(self, held, crashed=False) or len(held) < limit:
                return
        self._free_again = True  # no room: whoever leaves makes us look again

    def wake(self, rows: Sequence[Run]) -> None:
        """Take up parked or paused runs for what they were told, as soon as there is room for them."""
        wanted = [row for row in rows if self._may_take(row.id)]
        if wanted:
            self.services.background.start(self._wake(wanted), "wake")

    async def _wake(self, rows: list[Run]) -> None:
        patience = Patience()
        while rows and not self.stopping:
            await self.wait_for_room()
            count = min(PASS_LIMIT, self.room)
            try:
                await take_up(self, rows[:count], crashed=False)
            except StoreUnavailableError as error:
                # Claimed after all, they are in doubt and looked at; if not, the same claim is tried again.
                log(logging.WARNING, Token.RECOVERY_FAILED, f"{error}; trying again in {patience.seconds:.2g}s")
                await patience.pause()
            else:
                rows = rows[count:]

    def taken(self, run_ids: Sequence[str]) -> None:
        """Taking these up is over, whether they are in memory now or not."""
        self.taking.difference_update(run_ids)
        self._arrived.set()
        unheard = [run_id for run_id in run_ids if self._mail.not_opened_for(run_id)]
        if unheard or self._look_again:
            self._wanted.set()
