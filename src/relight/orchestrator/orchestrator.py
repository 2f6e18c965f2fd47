"""The orchestrator: which runs are in memory, how they come in and leave, and who waits for their end.

Runs come in through `start`, through recovery, and through the `Waker`: it finds runs that are due, have a message, or
are free to go on after a hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from relight.errors import StoreUnavailableError
from relight.flow.definitions import Flow
from relight.model.replay import TreeState
from relight.model.run import RESUMED_BY_HAND, Message, Run, Status
from relight.orchestrator.claimed_elsewhere import ClaimedElsewhere
from relight.orchestrator.delivery import Delivery
from relight.orchestrator.memory import Memory
from relight.orchestrator.row_reads import RowReads
from relight.orchestrator.uncertain_runs import UncertainRuns
from relight.orchestrator.waking import Waker
from relight.orchestrator.watchers import Watcher, Watchers
from relight.recovery.memory import SeeksRoom
from relight.recovery.take_up import take_up as _take_up
from relight.recovery.take_up import take_up_claimed
from relight.recovery.trials import Trials
from relight.run import cancel, execute, leaving, next_generation
from relight.run.live_run import LiveRun
from relight.run.phase import DRIVEN
from relight.run.recording import RUNNING
from relight.run.services import Services
from relight.telemetry import Token, log

# How long `stop` waits, beyond the grace, for runs that are being taken up or created; then for commits that release runs.
ARRIVAL_SECONDS = 5.0
LAST_COMMIT_SECONDS = 3.0


class Orchestrator:
    """Implements `recovery.memory.RunsInMemory`, and so `run.services.Host`."""

    def __init__(self, services: Services) -> None:
        config = services.config
        self.services = services
        self.memory = memory = Memory(config.max_concurrent_runs, takes_all=config.recovery.enabled)
        self.live = memory.live
        self.taking = memory.taking
        take_up = partial(_take_up, self)
        self.watchers = Watchers()
        self.rows = RowReads(services.store, services.background)
        self.delivery = Delivery(services.store, memory.live, memory.taking, memory.creating)
        self.uncertain = UncertainRuns(services, memory, take_up)
        self.claimed_elsewhere = ClaimedElsewhere(services, memory.live)
        self.waker = Waker(
            services,
            memory,
            take_up,
            partial(take_up_claimed, self),
            self.uncertain,
            self.delivery,
            self.claimed_elsewhere,
            self.watchers,
        )
        self.seeks_room(self.waker)
        self.trials = Trials(services, self.waker.wake)
        services.idleness.parts.append(self._is_idle)

    # ---- life

    def start(self) -> None:
        self.waker.start()

    async def stop(self, grace_seconds: float, *rounds: Callable[[float], Awaitable[None]]) -> None:
        """Take up no more runs; let steps in flight finish, within the grace; take every run out of memory. `rounds` are
        called to end other parts that take up runs, within a number of seconds."""
        self.memory.stopping = True
        self.trials.stop()
        loop = self.services.loop
        until = loop.time() + max(grace_seconds, leaving.PARK_GRACE_SECONDS)
        runs = list(self.live.values())
        arrivals = self._arrivals_over(grace_seconds + ARRIVAL_SECONDS, self.waker.stop, *rounds)
        await asyncio.gather(arrivals, *(self._let_go_at_the_end(run, grace_seconds) for run in runs))
        await self._all_gone(max(until, loop.time() + LAST_COMMIT_SECONDS))
        self.memory.stopped = True
        await self.watchers.last_look()

    async def _arrivals_over(self, seconds: float, *rounds: Callable[[float], Awaitable[None]]) -> None:
        """Wait for the runs that are being taken up or created: `drive` releases them. The recorder gives up on a creation
        that the store does not answer, a little after the grace."""
        until = self.services.loop.time() + seconds
        await asyncio.gather(*(end(min(seconds, ARRIVAL_SECONDS)) for end in rounds))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while self.taking or self.memory.creating:
                    self.memory.arrived.clear()
                    await self.memory.arrived.wait()

    async def _let_go_at_the_end(self, run: LiveRun, grace_seconds: float) -> None:
        """An error in one run must not keep the other runs in memory, nor keep the engine from closing."""
        try:
            await self._let_go(run, grace_seconds, "its orchestrator stops")
        except Exception as error:  # noqa: BLE001 - a bug of ours: the end of the session frees that run
            log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {run.id}: letting go of it broke: {error!r}", error)
            run.broke(error)

    async def _all_gone(self, until: float) -> None:
        """Wait for the runs that were leaving already, because they are parked or paused or the lease was lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while self.live:
                    self.memory.departed.clear()
                    await self.memory.departed.wait()

    async def _let_go(self, run: LiveRun, grace_seconds: float, why: str, reason: str = "released") -> None:
        """Take one run out of memory. Any orchestrator may take it up at once, and this does not count as a crash."""
        if run.next is not None:
            return  # `continued` lets go of the next generation instead
        if run.blocked:
            await leaving.park(run)
            return
        now = self.services.clock.now()

        def write() -> None:
            run.change(Status.PENDING, owner=None, wake_at=now, reason=reason)
            run.log(Token.RUN_RELEASED, f"released by {self.services.owner}: {why}")

        await leaving.depart(run, why, grace_seconds, write)
        # If the lease was regained before this commit, this process may take the run up again. The store sends a
        # process no hint about its own writes.
        self.waker.look_for_due()

    def _release(self, run: LiveRun, why: str) -> None:
        """Let go of a run whose code has not been called. From now on it receives no messages: if it received a pause
        and left memory for that, the older messages in its inbox would count as received."""
        leaving.stop(run, why)
        # With recovery off, only this reason lets another process go on with what a person has resumed.
        reason = RESUMED_BY_HAND if run.row.reason == RESUMED_BY_HAND else "released"
        self.services.background.start(self._let_go(run, 0.0, why, reason), "release", run.broke)

    # ---- the lease

    def let_go_of_all(self) -> None:
        """The lease could not be renewed and lapses in a third of its ttl: stop driving before that. Runs whose release
        the store accepts are free for others. Other releases wait in the recorder. They are fenced if another process
        has claimed the run meanwhile."""
        grace = self.services.config.recovery.lease_ttl_seconds / 6
        for run in list(self.live.values()):
            leaving.hurry(run, grace)  # if it is leaving already, with a longer grace perhaps
            self.services.background.start(
                self._let_go(run, grace, "its orchestrator could not renew its lease"), "let-go", run.broke
            )

    def lease_regained(self, lapsed: bool) -> None:
        """This process has its lease again. If it had lapsed, others may have claimed runs that are in memory here."""
        self.waker.look_for_messages()
        self.waker.look_for_lost()
        if lapsed:
            self.claimed_elsewhere.look_soon()
        for run_id in self.live:
            self.services.heartbeats.attach(run_id)

    # ---- room

    @property
    def stopping(self) -> bool:
        return self.memory.stopping

    @property
    def stopped(self) -> bool:
        return self.memory.stopped

    @property
    def crowded(self) -> bool:
        return self.memory.crowded

    @property
    def room(self) -> int:
        return self.memory.room

    def no_room(self) -> None:
        self.waker.no_room()

    def seeks_room(self, seeker: SeeksRoom) -> None:
        self.memory.seekers.append(seeker)

    def room_for(self, seeker: SeeksRoom) -> int:
        return self.memory.room_for(seeker)

    def looked(self, seeker: SeeksRoom, *, had_room: bool) -> None:
        self.memory.looked(seeker, had_room=had_room)

    def reserve(self, run_id: str) -> bool:
        """A run is about to be created: whether room is reserved for it. The caller calls `release` in any case."""
        if self.memory.stopping:
            raise StoreUnavailableError("this Relight is stopping: nothing can be started any more")
        self.memory.creating[run_id] += 1
        if self.room <= 0 or not self.services.heartbeats.may_drive:
            return False
        self.memory.reserved += 1
        return True

    def release(self, run_id: str, reserved: bool) -> None:
        """Creating a run has succeeded or failed."""
        self.memory.created(run_id, reserved)
        # Called later, when the new run is in memory. If the creation failed, another run may be waiting for the room.
        self.services.loop.call_soon(self._released, run_id)
        if run_id in self.uncertain:
            self.waker.wake_up()

    def _released(self, run_id: str) -> None:
        if not self.memory.is_arriving(run_id):
            self.delivery.forget(run_id)
        self._room_is_free()

    def _is_idle(self) -> bool:
        """Whether no run is on its way into memory, and every run in memory only waits."""
        memory, bodies = self.memory, self.services.bodies
        return not (memory.taking or memory.creating or bodies.queue or bodies.looking) and all(
            run.blocked and run.writer.idle and run.phase is DRIVEN for run in memory.live.values()
        )

    def _room_is_free(self) -> None:
        self.services.idleness.look()
        self.memory.offer_room()

    def taken_up(self, run_ids: Sequence[str]) -> None:
        """These runs are in memory now, or could not be taken up. In the second case their room is free again."""
        self.memory.taken_up(run_ids)
        posted = [run_id for run_id in run_ids if run_id not in self.memory.creating and self.delivery.forget(run_id)]
        if posted:
            self.waker.look_for_due()  # messages were posted to these runs, so those without an owner are due
        self._room_is_free()

    def check_ownership(self, run_ids: Sequence[str], *, crashed: bool) -> None:
        if not self.services.config.drive:
            return  # a client has no session: what it has claimed is an orphan, and any orchestrator recovers it
        self.uncertain.add(run_ids, crashed=crashed)
        self.waker.wake_up()

    def drive_new(self, row: Run, state: TreeState, flow: Flow[..., object], lapses: int) -> None:
        if row.id in self.live:
            # The run was started twice in one tick of the clock: to the store, the second start repeated the first.
            return
        self.memory.started_here(row.id)
        run = LiveRun(self.services, self, row, row.epoch, state)
        run.lapses = lapses
        self.drive(run, flow, [])

    def drive(self, run: LiveRun, flow: Flow[..., object], messages: Sequence[Message]) -> None:
        """Begin to drive a run."""
        self.enter(run)
        self.services.heartbeats.attach(run.id)
        if self.memory.stopping:  # created or taken up a moment too late
            self._release(run, "its orchestrator stops")
            return
        if not self.services.heartbeats.may_drive:  # too late as well: all runs that were in memory have been let go of
            self.delivery.forget(run.id)  # its messages are in the store, for the process that takes the run up
            self._release(run, "its orchestrator has lost its lease")
            return
        if run.status is not RUNNING and run.status in (Status.PAUSED, Status.PENDING):
            run.set_running()
        to_deliver, newest = self.delivery.opened_for(run, messages)
        for message in to_deliver:
            run.deliver(message)
        if run.stopping is None:  # a run that stops keeps the number of the last message that it received
            run.inbox.heard = max(run.inbox.heard, newest)  # a pause that was taken back must not be delivered again
        if run.cancel_reason is not None:
            cancel.begin_grace(run)
        execute.drive(run, flow)

    def enter(self, run: LiveRun) -> None:
        self.memory.enter(run)

    # ---- Host: what runs report

    def ended(self, run: LiveRun) -> None:
        self.memory.leave(run)
        self.trials.left(run.id)
        self.services.heartbeats.detach(run.id)
        run.let_go()
        self.memory.own.discard(run.id)
        self.notify_watchers(run.id, run.departure.outcome)
        if run.departure.tells_others:
            self.look_for_messages()  # the store now has the messages to the runs that wait for this one
        self._room_is_free()

    def continued(self, run: LiveRun) -> None:
        assert run.next is not None
        begun = LiveRun(self.services, self, run.row, run.writer.epoch, run.next)
        next_generation.inherit(begun, run)
        self.live[run.id] = begun
        flow = self.services.registry.find(run.row.flow)
        if flow is None or not self.services.heartbeats.may_drive or self.memory.stopping:
            # `stop` or `let_go_of_all` was called while the next generation was being committed, and skipped this run.
            self._release(begun, "its orchestrator stops, or has lost its lease")
        elif self.room <= 0 and self.memory.room_is_wanted:
            self.services.background.start(self._make_room(begun), "release", begun.broke)
        else:
            execute.drive(begun, flow)

    async def _make_room(self, run: LiveRun) -> None:
        """A run that begins generation after generation would keep its room for ever: runs that wait go first."""
        now = self.services.clock.now()
        await leaving.depart(run, "others wait for room", 0.0, lambda: run.change(Status.PENDING, wake_at=now))
        self.waker.look_for_due()

    def left(self, run: LiveRun) -> None:
        if self.memory.leave(run):
            self.trials.left(run.id)
            if not run.writer.fenced:  # the lease of a fenced run belongs to its new owner
                self.services.heartbeats.detach(run.id)
        run.let_go()
        self.notify_watchers(run.id, None)
        if self.memory.stopping:
            return
        if run.writer.lost:
            self.check_ownership([run.id], crashed=True)  # if we own it in the store, no other process claims it
        elif run.inbox.missed:
            self.waker.look_for_due()  # a message came too late for the run in memory, and has made the run due
        self._room_is_free()

    def has_left(self, run: LiveRun) -> bool:
        return self.live.get(run.id) is not run

    def offer(self, run_id: str) -> None:
        self.memory.started_here(run_id)
        self.waker.look_for_due()

    def wake_at(self, when: float) -> None:
        self.waker.wake_at(when)

    def look_for_messages(self) -> None:
        self.waker.look_for_messages()

    # ---- watching runs

    def watch(self, run_id: str, watcher: Watcher) -> Callable[[], None]:
        """Be notified of a run's end, or of a possible change. Returns a function that ends the watching."""
        return self.watchers.add(run_id, watcher)

    def notify_watchers(self, run_id: str, row: Run | None = None) -> None:
        self.watchers.notify(run_id, row)

    # ---- called from outside

    async def message_posted(self, message: Message) -> None:
        """This process has posted a message, and need not wait for the store's hint to deliver it."""
        if not self.delivery.deliver_posted(message):
            self.look_for_messages()

    def look_for_held(self) -> None:
        self.waker.look_for_held()

    def look_for_lost(self) -> None:
        self.waker.look_for_lost()

    def has(self, run_id: str) -> bool:
        """Whether this process drives the run, is about to drive it, or is finding out whether it owns the run."""
        return self.memory.is_arriving(run_id) or run_id in self.uncertain
