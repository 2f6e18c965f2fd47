"""Waking: when an orchestrator reads the store, and which runs it takes up then.

Four things wake it: a timer at the earliest due time in the store, a message, the store's hint that another process has
written, and room becoming free. All of them end in `take_up`. Every hint may be lost, so the store is read every
CHECK_SECONDS in any case. A run that is due stays due in the store until an orchestrator has claimed it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable

from relight.clock import EarliestTimer
from relight.model.run import Hold, News, Run
from relight.orchestrator.claimed_elsewhere import ClaimedElsewhere
from relight.orchestrator.delivery import Delivery
from relight.orchestrator.memory import Memory
from relight.orchestrator.uncertain_runs import TakeUp, UncertainRuns
from relight.orchestrator.watchers import Watchers
from relight.recovery.upgrades import Freed
from relight.run.services import Services
from relight.supervisor import Part
from relight.telemetry import Token, log
from relight.ticker import Ticker

CHECK_SECONDS = 5.0  # between looks at the store when nothing wakes us
NOT_OURS_SECONDS = 0.25  # before looking again at runs that are due and could not be taken up
LOST_SECONDS = 30.0  # between looks for runs that this process owns in the store and does not have in memory
PASS_LIMIT = 100  # runs per pass; a full pass is followed at once by the next


class Waker:
    """One per orchestrator."""

    def __init__(
        self,
        services: Services,
        memory: Memory,
        take_up: TakeUp,
        take_up_claimed: Callable[[list[Run], int], Awaitable[None]],
        uncertain: UncertainRuns,
        delivery: Delivery,
        claimed_elsewhere: ClaimedElsewhere,
        watchers: Watchers,
    ) -> None:
        self._services = services
        self._memory = memory
        self._take_up = take_up
        self._take_up_claimed = take_up_claimed
        self._uncertain = uncertain
        self._delivery = delivery
        self._claimed_elsewhere = claimed_elsewhere
        self._watchers = watchers
        self._ticker = Ticker(self.run_once, CHECK_SECONDS, round_over=services.idleness.look)
        self._complete = False  # the last pass has come to its end
        self._looking = False  # a pass that has room is under way: nobody may fill all of it before this pass has
        self._checked_at = self._lost_at = services.loop.time()  # when everything, and lost runs, were last looked for
        # What the next pass looks for: due runs; messages; held runs; runs that we own and that are not in memory.
        self._look_again = self._listen_again = self._free_again = self._lost_again = False
        self._early: list[Run] = []  # suspects whose turn has come: they are taken up before they are due
        self._upgraded = Freed(self._services)
        self._timer = EarliestTimer(services.clock, self.look_for_due)
        self._part: Part | None = None
        self._services.idleness.parts.append(lambda: self._complete and self._ticker.resting)

    def start(self) -> None:
        self._services.store.watch(self._changed, self._services.supervisor)
        self.wake_up()
        self._part = self._services.supervisor.keep("waker", self._ticker.run)

    async def stop(self, within_seconds: float) -> None:
        """Make no more passes. The one under way may end: runs that it has claimed are released, not left behind."""
        self._timer.cancel()
        self._ticker.finish()
        if self._part is not None:
            await self._part.over(within_seconds)

    # ---- the wake-ups

    def wake_up(self) -> None:
        """Make a pass, as soon as the one under way is over."""
        self._ticker.wake()

    def look_for_due(self) -> None:
        """Runs may be due."""
        self._look_again = True
        self.wake_up()

    def look_for_messages(self) -> None:
        """Messages may have been posted to runs in memory here, or to other runs, which are due then."""
        self._look_again = self._listen_again = True
        self.wake_up()

    def wake(self, rows: list[Run]) -> None:
        """Take these runs up now. If that fails, nothing is lost: they become due a little later."""
        self._early = rows
        self.wake_up()

    def look_for_lost(self) -> None:
        """This process may own runs in the store that it does not have in memory."""
        self._lost_again = True
        self.wake_up()

    def look_for_held(self) -> None:
        """Runs may be held because other processes did not know their flow, and this one does."""
        self._free_again = True
        self.wake_up()

    def flow_registered(self, name: str) -> None:
        """From any thread: runs that were held because this flow was unknown can go on."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._services.loop.call_soon_threadsafe(self.look_for_held)

    def no_room(self) -> None:
        """Runs were found, and the room for them was filled before they could be claimed: look for them again."""
        self._look_again = self._free_again = True

    @property
    def wants_room(self) -> bool:
        """Whether runs may be waiting for room in memory."""
        return self._looking or self._look_again or self._free_again or bool(self._uncertain)

    def wake_at(self, when: float) -> None:
        """A run is due at this time."""
        if not self._memory.stopping:
            self._timer.set(when)

    def _changed(self, news: News) -> None:
        """Another process has written."""
        if News.RUNS in news:
            self._watchers.notify_all_but(self._memory.live)
            self._claimed_elsewhere.others_wrote = True
        self._look_again |= News.DUE in news or News.MAIL in news
        self._listen_again |= News.MAIL in news
        self._free_again |= News.HELD in news
        self.wake_up()

    # ---- the passes

    def _poll(self) -> None:
        """Every hint may be lost, and a pass that broke may have cleared the flag of something that it had not done."""
        now = self._services.loop.time()
        if not self._complete:
            self._look_again = self._listen_again = self._free_again = self._lost_again = True
        if self._ticker.timed or now >= self._checked_at + CHECK_SECONDS:  # also when wake-ups come all the time
            self._checked_at = now
            self._look_again = self._listen_again = True
            self._watchers.notify_all_but(self._memory.live)
        if now >= self._lost_at + LOST_SECONDS:
            self._lost_at = now
            self._lost_again = True

    async def run_once(self) -> None:
        """One pass: do everything that is wanted now."""
        self._poll()
        self._complete = False
        memory, may_drive = self._memory, self._services.heartbeats.may_drive
        if self._lost_again and may_drive:
            await self._uncertain.look_for_lost()
            self._lost_again = False
        await self._uncertain.resolve()
        await self._claimed_elsewhere.look()
        if self._listen_again:
            self._listen_again = False
            await self._delivery.deliver_new()
        self._looking = may_drive and memory.room_for(self) > 0
        if self._early and self._looking:
            early, self._early = self._early[: memory.room_for(self)], []
            await self._take_up([row for row in early if memory.may_take_up(row.id)], crashed=False)
        if self._look_again and self._looking and memory.room_for(self) > 0:
            self._look_again = False
            await self._take_due()
        if self._free_again and self._looking and memory.room_for(self) > 0:
            self._free_again = False
            await self._take_held()
            await self._take_upgraded()
        if self._looking:
            self._looking = False
            memory.looked(self, had_room=True)
        if self._uncertain and memory.room > 0 and may_drive:  # otherwise `lease_regained` wakes this
            self.wake_at(self._services.clock.now() + NOT_OURS_SECONDS)
        self._complete = True

    async def _take_due(self) -> None:
        """Take up due runs, pass after pass, while there is room. Then set the timer for the next due time."""
        if not self._services.config.recovery.enabled:
            await self._take_own()
            return
        looked_at = self._services.clock.now()
        upcoming = await self._services.store.next_due()
        if upcoming is None or upcoming > looked_at:  # nearly always: claiming would be a write for nothing
            if upcoming is not None:
                self.wake_at(upcoming)
            return
        while (room := self._memory.room_for(self)) > 0 and not self._memory.stopping:
            limit = min(PASS_LIMIT, room)
            if await self._claim_due(looked_at, limit) < limit:
                break
        else:
            self._look_again = True  # no room: the next run that leaves memory makes us look again
            return
        upcoming = await self._services.store.next_due()
        if upcoming is not None:
            # A run that was due at `looked_at` and still is was not for us (another process claims it, or its lease is
            # not free yet): look again after a pause. A run that fell due later is still to be looked at.
            self.wake_at(upcoming if upcoming > looked_at else self._services.clock.now() + NOT_OURS_SECONDS)

    async def _claim_due(self, now: float, limit: int) -> int:
        """Claim due runs; of those that have just fallen due only our share. A moment later anybody may claim them."""
        memory, owner = self._memory, self._services.owner
        leaving = [run_id for run_id, run in memory.live.items() if run.stopping is not None]
        but = [*memory.taking, *leaving]
        lapses = self._services.heartbeats.lapses
        memory.claiming = limit  # this process must drive what is claimed: nothing else may fill that room meanwhile
        try:
            rows = await self._services.store.claim_due(owner, now, now - NOT_OURS_SECONDS, limit, but)
        finally:
            memory.claiming = 0
        if rows:
            await self._take_up_claimed(rows, lapses)
        # Runs that are being taken up or are leaving memory may be due: look again when they have arrived or left.
        self._look_again |= bool(but)
        return len(rows)

    async def _take_own(self) -> None:
        """While recovery is off: take up the due runs that this process has started, and those that a person has resumed or
        cancelled, from any process. Others stay due, and are none of our business."""
        memory, looked_at = self._memory, self._services.clock.now()
        own, due, claimed = list[Run](), list[Run](), 0
        while (room := memory.room_for(self)) > 0:
            limit = min(PASS_LIMIT, room)
            freed = await self._services.store.due(looked_at, PASS_LIMIT, freed=True)
            memory.own.update(row.id for row in freed if not self._has(row.id) and self._is_for_us(row, looked_at))
            own = await self._own_rows()
            due = [row for row in own if row.wake_at is not None and row.wake_at <= looked_at]
            claimed = await self._take_up(due[:limit], crashed=False)
            if not claimed or (len(due) <= limit and len(freed) < PASS_LIMIT):
                # Runs that are being taken up fill this page, and may hide others behind them: look again afterwards.
                self._look_again |= any(row.id in memory.taking for row in freed)
                break
        else:
            self._look_again = True  # no room: the next run that leaves memory makes us look again
            return
        if due and not claimed:  # another process claims them, or their leases are not free yet
            self.wake_at(self._services.clock.now() + NOT_OURS_SECONDS)
        later = [row.wake_at for row in own if row.wake_at is not None and row.wake_at > looked_at]
        if later:
            self.wake_at(min(later))

    def _is_for_us(self, row: Run, now: float) -> bool:
        """Whether this process knows the run's flow. If it does not, another process may: it is given time to take the run up."""
        waits_since = now if row.wake_at is None else row.wake_at
        late = now - waits_since > self._services.config.recovery.check_interval_seconds
        return late or self._services.registry.find(row.flow) is not None

    async def _own_rows(self) -> list[Run]:
        """The runs of this process that have no owner. They are read by id, because other runs may be due earlier."""
        own = self._memory.own
        wanted = [run_id for run_id in own if not self._has(run_id)]
        rows = await self._services.store.get_runs(wanted) if wanted else []
        ended = set(wanted).difference(row.id for row in rows if not row.status.terminal)
        own.difference_update(run_id for run_id in ended if not self._has(run_id))  # or were never created
        free = (row for row in rows if row.owner is None and row.id in own and not row.newer)
        return sorted(free, key=lambda row: row.wake_at or 0.0)

    def _has(self, run_id: str) -> bool:
        return self._memory.is_arriving(run_id) or run_id in self._uncertain

    async def _take_held(self) -> None:
        """Take up runs that another process has held because it did not know their flow; this process does."""
        if not self._services.config.recovery.enabled:
            return
        while (room := self._memory.room_for(self)) > 0:
            limit = min(PASS_LIMIT, room)
            held = await self._services.store.list_held(Hold.DEFINITION, self._services.registry.names(), limit)
            if held:
                names = ", ".join(sorted({row.flow for row in held}))
                log(logging.INFO, Token.DEFINITION_FOUND, f"{len(held)} runs held because {names} was unknown go on")
            if not await self._take_up(held, crashed=False) or len(held) < limit:
                return
        self._free_again = True  # no room: the next run that leaves memory makes us look again

    async def _take_upgraded(self) -> None:
        """Take up runs that an older version has held because it did not understand them; this version does."""
        if not self._services.config.recovery.enabled:
            return
        while (room := self._memory.room_for(self)) > 0:
            found, more = await self._upgraded.look(min(PASS_LIMIT, room))
            if found:
                log(logging.INFO, Token.UPGRADE_FOUND, f"{len(found)} runs held for a newer version of Relight go on")
            if (found and not await self._take_up(found, crashed=False)) or not more:
                return
        self._free_again = True  # no room: the next run that leaves memory makes us look again
