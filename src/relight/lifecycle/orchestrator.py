"""The orchestrator: which runs are in memory, how they come in and leave, and who is told when one ends.

Runs come in through `start`, through recovery, and because the `lookout` saw that they are due, told something, or freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from relight.errors import StoreUnavailableError
from relight.flow.definitions import Flow
from relight.lifecycle import cancel, continuing, execute, hold
from relight.lifecycle.doubts import Doubts
from relight.lifecycle.lookout import Lookout
from relight.lifecycle.mail import Mail
from relight.lifecycle.overtaken import Overtaken
from relight.lifecycle.row_reads import RowReads
from relight.lifecycle.run import LiveRun
from relight.lifecycle.run_record import RUNNING
from relight.lifecycle.services import Services
from relight.lifecycle.trials import Trials
from relight.lifecycle.watchers import Watcher, Watchers
from relight.model.replay import TreeState
from relight.model.run import Message, Run, Status
from relight.telemetry import Token, log

ARRIVAL_SECONDS = 5.0  # when we stop: for what is being taken up or created, to let go of it with the others


class Orchestrator:
    """Implements `lifecycle.run.Host`."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.live: dict[str, LiveRun] = {}
        self.entered: set[str] = set()  # have come into memory, and not left it in order: as `live`, but for bugs
        self.taking: set[str] = set()  # being claimed and restored right now
        self.stopping = False
        self._reserved = 0  # rooms promised to runs that are being created,
        self._creating: Counter[str] = Counter()  # and these runs, with how many callers of start() want each
        self._arrived = asyncio.Event()  # something that was being taken up or created is in memory now, or will not be
        self._departed = asyncio.Event()  # a run has left memory
        self.own: set[str] = set()  # runs started here; kept only while recovery is off
        self._room_waiters: list[asyncio.Future[None]] = []
        self.watchers = Watchers()
        self.rows = RowReads(services.store, services.background)
        self.mail = Mail(services.store, self.live, self.taking, self._creating)
        self.doubts = Doubts(self, self._creating)
        self.overtaken = Overtaken(services, self.live)
        self.lookout = Lookout(self)
        self.trials = Trials(services, self.lookout.wake)

    # ---- life

    def start(self) -> None:
        self.lookout.start()

    async def stop(self, grace_seconds: float) -> None:
        """Take nothing up any more; let steps in flight finish, within the grace; take every run out of memory."""
        self.stopping = True
        self.trials.stop()
        await self.lookout.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL_SECONDS):
                while self.taking or self._creating:
                    self._arrived.clear()
                    await self._arrived.wait()
        runs = list(self.live.values())
        if runs:
            until = self.services.loop.time() + max(grace_seconds, hold.PARK_GRACE_SECONDS)
            await asyncio.gather(*(self._let_go_at_the_end(run, grace_seconds) for run in runs))
            await self._all_gone(until)
        await self.watchers.last_look()

    async def _let_go_at_the_end(self, run: LiveRun, grace_seconds: float) -> None:
        """Whatever breaks for one run, the others are let go of, and the engine closes."""
        try:
            await self._let_go(run, grace_seconds, "its orchestrator stops")
        except Exception as error:  # noqa: BLE001 - a bug of ours: that run is freed with the session
            log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {run.id}: letting go of it broke: {error!r}", error)
            run.broke(error)

    async def _all_gone(self, until: float) -> None:
        """Runs that were leaving already, to be parked or paused or for a lost lease, do that in their own time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while self.live:
                    self._departed.clear()
                    await self._departed.wait()

    async def _let_go(self, run: LiveRun, grace_seconds: float, why: str) -> None:
        """Take one run out of memory: it is free at once for anybody to take up, and that counts as no crash."""
        if run.next is not None:
            return  # `continued` lets go of its next generation in its place
        if run.blocked:
            await hold.park(run)
            return
        now = self.services.clock.now()

        def write() -> None:
            run.change(Status.PENDING, owner=None, wake_at=now, reason="released")
            run.log(Token.RUN_RELEASED, f"released by {self.services.owner}: {why}")

        await hold.depart(run, why, grace_seconds, write)
        # For ourselves, if the lease was regained before the store had taken this: nobody tells us what we wrote.
        self.lookout.look()

    def _release(self, run: LiveRun, why: str) -> None:
        """Let go of a run whose code has not been called. From now on it hears nothing: a pause that it heard and left memory for
        would hide what was in its inbox before."""
        run.stopping = why
        self.services.background.start(self._let_go(run, 0.0, why), "release", run.broke)

    # ---- the lease

    def let_go_of_all(self) -> None:
        """The lease could not be renewed and lapses in a third of its ttl: stop driving before that. What the store still
        takes is released for others; what it does not take waits in the recorder, and is fenced if others were faster."""
        grace = self.services.config.recovery.lease_ttl_seconds / 6
        for run in list(self.live.values()):
            self.services.background.start(
                self._let_go(run, grace, "its orchestrator could not renew its lease"), "adrift", run.broke
            )

    def take_again(self, lapsed: bool) -> None:
        """The lease is ours again. If it had lapsed, others may have claimed what is still in memory here."""
        self.lookout.listen()
        self.lookout.look_for_lost()
        if lapsed:
            self.overtaken.suspect()
        for run_id in self.live:
            self.services.keeper.attach(run_id)

    # ---- room

    @property
    def crowded(self) -> bool:
        return self.room * 10 < self.services.config.max_concurrent_runs

    @property
    def room(self) -> int:
        """How many more runs may be in memory. Those that are being taken up have their room until they are there."""
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
        # Later, when the run that came of it, if any, is in memory: if none did, somebody may have waited for its room.
        self.services.loop.call_soon(self._released, run_id)
        if run_id in self.doubts:
            self.lookout.attend()

    def _released(self, run_id: str) -> None:
        if run_id not in self.live and run_id not in self.taking and run_id not in self._creating:
            self.mail.forget(run_id)
        self._room_is_free()

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
        if self.lookout.wants_room:
            self.lookout.attend()

    def taken(self, run_ids: Sequence[str]) -> None:
        """Taking these up is over, whether they are in memory now or not. If not, their room is free again."""
        self.taking.difference_update(run_ids)
        self._arrived.set()
        told = [run_id for run_id in run_ids if run_id not in self._creating and self.mail.forget(run_id)]
        if told:
            self.lookout.look()  # they were told something, and are due if nobody has them
        self._room_is_free()

    def doubt(self, run_ids: Sequence[str], *, crashed: bool) -> None:
        self.doubts.add(run_ids, crashed=crashed)
        self.lookout.attend()

    def drive_new(self, row: Run, state: TreeState, flow: Flow[..., object], lapses: int) -> None:
        if (
            row.id in self.live
        ):  # started twice in one tick of the clock: the store took the second for the first, repeated
            return
        if not self.services.config.recovery.enabled:
            self.own.add(row.id)
        run = LiveRun(self.services, self, row, row.epoch, state)
        run.lapses = lapses
        self.drive(run, flow, [])

    def drive(self, run: LiveRun, flow: Flow[..., object], messages: Sequence[Message]) -> None:
        """Put a run into motion."""
        self.enter(run)
        self.services.keeper.attach(run.id)
        if self.stopping:
            # Created a moment too late: its code is not called any more, and `stop` lets go of it. Until then it hears
            # nothing, as in `_release`.
            run.stopping = "its orchestrator stops"
            return
        if not self.services.keeper.held:  # also too late: everything that was in memory has been let go of
            self.mail.forget(run.id)  # it is in the store, for whoever takes the run up
            self._release(run, "its orchestrator has lost its lease")
            return
        if run.status is not RUNNING and run.status in (Status.PAUSED, Status.PENDING):
            run.set_running()
        told, newest = self.mail.opened_for(run, messages)
        for message in told:
            run.deliver(message)
        if run.stopping is None:  # else it has heard what it could
            run.heard = max(run.heard, newest)  # a pause that was taken back must not be heard of once more
        if run.cancel_reason is not None:
            cancel.begin_grace(run)
        execute.drive(run, flow)

    def enter(self, run: LiveRun) -> None:
        """The run is in memory from now on."""
        self.live[run.id] = run
        self.entered.add(run.id)
        self.taking.discard(run.id)  # or it would have two rooms

    # ---- Host: what runs tell

    def ended(self, run: LiveRun) -> None:
        self.live.pop(run.id, None)
        self.entered.discard(run.id)
        self._departed.set()
        self.trials.left(run.id)
        self.services.keeper.detach(run.id)
        run.let_go()
        self.own.discard(run.id)
        self.tell(run.id, run.outcome)
        if run.row.parent_id is not None or run.joined:
            self.listen()  # the message to whoever waits for it is in the store now
        self._room_is_free()

    def continued(self, run: LiveRun) -> None:
        assert run.next is not None
        begun = LiveRun(self.services, self, run.row, run.writer.epoch, run.next)
        continuing.inherit(begun, run)
        self.live[run.id] = begun
        flow = self.services.registry.find(run.row.flow)
        if flow is None or not self.services.keeper.held or self.stopping:
            # Whoever lets go of everything has come in the moment in which it was committed.
            self._release(begun, "its orchestrator stops, or has lost its lease")
        elif self.room <= 0 and self.lookout.wants_room:
            self.services.background.start(self._make_room(begun), "release", begun.broke)
        else:
            execute.drive(begun, flow)

    async def _make_room(self, run: LiveRun) -> None:
        """A run that begins anew and never waits would keep its room for ever: it goes behind those that wait for one."""
        now = self.services.clock.now()
        await hold.depart(run, "others wait for room", 0.0, lambda: run.change(Status.PENDING, wake_at=now))
        self.lookout.look()

    def left(self, run: LiveRun) -> None:
        if self.live.get(run.id) is run:
            del self.live[run.id]
            self.entered.discard(run.id)
            self._departed.set()
            self.trials.left(run.id)
            if not run.writer.fenced:  # else its lease is another's already
                self.services.keeper.detach(run.id)
        run.let_go()
        self.tell(run.id, None)
        if self.stopping:
            return
        if run.writer.lost:
            self.doubt([run.id], crashed=True)  # if it is in our name even so, nobody else will look at it
        elif run.missed:
            self.lookout.look()  # what it missed before it left has made it due
        self._room_is_free()

    def has_left(self, run: LiveRun) -> bool:
        return self.live.get(run.id) is not run

    def offer(self, run_id: str) -> None:
        if not self.services.config.recovery.enabled:
            self.own.add(run_id)
        self.lookout.look()

    def wake_at(self, when: float) -> None:
        self.lookout.wake_at(when)

    def listen(self) -> None:
        self.lookout.listen()

    # ---- watching runs

    def watch(self, run_id: str, watcher: Watcher) -> Callable[[], None]:
        """Be told of a run's end, or to look at it. Returns what takes it back."""
        return self.watchers.add(run_id, watcher)

    def tell(self, run_id: str, row: Run | None = None) -> None:
        self.watchers.tell(run_id, row)

    # ---- asked from outside

    async def told(self, message: Message) -> None:
        """A message was posted by this process: no need to wait for the store to tell."""
        if not self.mail.told(message):
            self.listen()

    def claim_as_own(self, run_id: str) -> None:
        """Somebody asked this process to bring the run back: it may be taken up here also while recovery is off."""
        self.own.add(run_id)
        self.lookout.look()

    def has(self, run_id: str) -> bool:
        """Whether this process drives the run, is about to, or finds out whether it should."""
        return run_id in self.live or run_id in self.taking or run_id in self.doubts or run_id in self._creating

    def may_take(self, run_id: str) -> bool:
        """With recovery off nothing is claimed by itself, but for the runs this process has started."""
        if run_id in self.live or run_id in self.taking:
            return False
        return self.services.config.recovery.enabled or run_id in self.own
