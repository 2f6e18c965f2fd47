"""Waking: what makes an orchestrator look at the store, and what it takes up then.

Four things wake it: a timer at the earliest due time in the store, a message, the store's hint that another process has
written, and room becoming free. All of them end in `take_up`. Every hint may be lost: the poll at CHECK_SECONDS asks again,
and what is due stays due in the store until somebody has claimed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from relight.clock import Timer
from relight.model.run import ENDS_PAUSE, RESUMED_BY_HAND, Hold, News, Run
from relight.orchestrator.claimed_elsewhere import ClaimedElsewhere
from relight.orchestrator.delivery import Delivery
from relight.orchestrator.memory import Memory
from relight.orchestrator.uncertain_runs import TakeUp, UncertainRuns
from relight.orchestrator.watchers import Watchers
from relight.recovery.upgrades import Freed
from relight.run.services import Services
from relight.supervisor import Part
from relight.telemetry import Token, log

CHECK_SECONDS = 5.0  # between looks at the store when nothing wakes us
NOT_OURS_SECONDS = 0.25  # before looking again at runs that are due and could not be taken up
LOST_SECONDS = 30.0  # between looks for runs that are ours in the store and not in memory
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
        self._wanted = asyncio.Event()
        # What the next pass looks for: due runs; messages; held runs; runs of ours that are not in memory.
        self._look_again = self._listen_again = self._free_again = self._lost_again = False
        self._early: list[Run] = []  # not due yet, and yet to be taken up: suspects whose turn has come
        self._upgraded = Freed(self._services)
        self._timer: Timer | None = None
        self._timer_at: float | None = None
        self._part: Part | None = None
        self._passing = True  # a pass is under way, or the first one has not begun
        self._services.idleness.parts.append(lambda: not self._passing and not self._wanted.is_set())

    def start(self) -> None:
        self._services.store.watch(self._changed, self._services.supervisor)
        self._part = self._services.supervisor.keep("waker", self._passes)

    async def stop(self) -> None:
        if self._part is not None:
            await self._part.stop()
        if self._timer is not None:
            self._timer.cancel()

    # ---- the wake-ups

    def wake_up(self) -> None:
        """There is something to do: a pass, as soon as the one under way is over."""
        self._wanted.set()

    def look_for_due(self) -> None:
        """Runs may be due."""
        self._look_again = True
        self.wake_up()

    def look_for_messages(self) -> None:
        """Messages may have been posted: to runs in memory here, or to others, which are due then."""
        self._look_again = self._listen_again = True
        self.wake_up()

    def wake(self, rows: list[Run]) -> None:
        """These may be taken up now. What comes of it may be forgotten: they are due in a while."""
        self._early = rows
        self.wake_up()

    def look_for_lost(self) -> None:
        """Runs may be ours in the store that are not in memory."""
        self._lost_again = True
        self.wake_up()

    def look_for_held(self) -> None:
        """Runs may be held for want of a flow that this process knows."""
        self._free_again = True
        self.wake_up()

    def flow_registered(self, name: str) -> None:
        """From any thread: runs held for want of this flow can go on."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._services.loop.call_soon_threadsafe(self.look_for_held)

    @property
    def wants_room(self) -> bool:
        """Whether runs may be waiting for a room to become free."""
        return self._look_again or self._free_again or bool(self._uncertain)

    def wake_at(self, when: float) -> None:
        """A run is due at this time."""
        if self._memory.stopping or (self._timer_at is not None and self._timer_at <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        delay = max(0.0, when - self._services.clock.now())
        self._timer = self._services.clock.call_later(min(delay, 3600.0), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = self._timer_at = None
        self.look_for_due()

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

    async def _passes(self, part: Part) -> None:
        """One pass after the other, whenever something wants one; never two at once. Begun again after an error, it looks at
        everything: whatever woke it may have been forgotten half-way."""
        loop = self._services.loop
        self._look_again = self._listen_again = self._free_again = self._lost_again = True
        self._wanted.set()
        checked_at = lost_at = loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(checked_at + CHECK_SECONDS):
                    await self._wanted.wait()
            if loop.time() >= checked_at + CHECK_SECONDS:  # whether or not something wakes us all the time
                checked_at = loop.time()
                self._look_again = self._listen_again = True
                self._watchers.notify_all_but(self._memory.live)
            if loop.time() >= lost_at + LOST_SECONDS:
                lost_at = loop.time()
                self._lost_again = True
            self._wanted.clear()
            self._passing = True  # also if it breaks: until one has come to its end
            await self.run_once()
            self._passing = False
            self._services.idleness.look()
            part.well()

    async def run_once(self) -> None:
        """One pass: whatever is wanted now."""
        memory, held = self._memory, self._services.heartbeats.may_drive
        if self._lost_again and held:
            await self._uncertain.look_for_lost()
            self._lost_again = False
        await self._uncertain.resolve()
        await self._claimed_elsewhere.look()
        if self._listen_again:
            self._listen_again = False
            await self._delivery.deliver_new()
        if self._early and memory.room > 0 and held:
            early, self._early = self._early[: memory.room], []
            await self._take_up([row for row in early if memory.may_take_up(row.id)], crashed=False)
        if self._look_again and memory.room > 0 and held:
            self._look_again = False
            await self._take_due()
        if self._free_again and memory.room > 0 and held:
            self._free_again = False
            await self._take_held()
            await self._take_upgraded()
        if self._uncertain and memory.room > 0:
            self.wake_at(self._services.clock.now() + NOT_OURS_SECONDS)

    async def _take_due(self) -> None:
        """Take up what is due, pass after pass, while there is room; then sleep until the next is."""
        asked_at = self._services.clock.now()
        upcoming = await self._services.store.next_due()
        if upcoming is None or upcoming > asked_at:  # nearly always: then it is not worth a write
            if upcoming is not None:
                self.wake_at(upcoming)
            return
        while self._memory.room > 0:
            limit = min(PASS_LIMIT, self._memory.room)
            if self._services.config.recovery.enabled:
                if await self._claim_due(asked_at, limit) < limit:
                    break
                continue
            due = await self._services.store.due(asked_at, limit)
            fresh = await self._own_due(asked_at) + await self._freed_by_hand(due)
            taken = await self._take_up(fresh, crashed=False)
            if len(due) < limit or not taken:
                # What is being taken up just now may hide what is due behind it: look again once it is here.
                self._look_again |= any(row.id in self._memory.taking for row in due)
                break
        else:
            self._look_again = True  # no room: whoever leaves makes us look again
            return
        upcoming = await self._services.store.next_due()
        if upcoming is not None:
            # What was due when we asked was not for us (others took it, or its lease is not free yet): no hurry then. What
            # has fallen due since, nobody has looked at.
            self.wake_at(upcoming if upcoming > asked_at else self._services.clock.now() + NOT_OURS_SECONDS)

    async def _claim_due(self, now: float, limit: int) -> int:
        """Claim what is due, of what has just fallen due our share; what nobody has taken a moment later is anybody's."""
        memory, owner = self._memory, self._services.owner
        leaving = [run_id for run_id, run in memory.live.items() if run.stopping is not None]
        but = [*memory.taking, *leaving]
        lapses = self._services.heartbeats.lapses
        rows = await self._services.store.claim_due(owner, now, now - NOT_OURS_SECONDS, limit, but)
        if rows:
            await self._take_up_claimed(rows, lapses)
        # What is being taken up, or leaves, may be due: look again once it is here, or gone.
        self._look_again |= bool(but)
        return len(rows)

    async def _own_due(self, now: float) -> list[Run]:
        """While recovery is off: those that this process has started. Asked for by id: others' may be due before them."""
        wanted = [run_id for run_id in self._memory.own if self._memory.may_take_up(run_id)]
        rows = await self._services.store.get_runs(wanted) if wanted else []
        return [row for row in rows if row.owner is None and row.wake_at is not None and row.wake_at <= now]

    async def _freed_by_hand(self, due: Sequence[Run]) -> list[Run]:
        """While recovery is off: those that somebody has resumed, or asked to end, wherever that was. They are ours then."""
        others = [row for row in due if not self._memory.may_take_up(row.id) and not self._has(row.id)]
        told = await self._services.store.inbox([row.id for row in others]) if others else []
        ended = {message.run_id for message in told if message.kind in ENDS_PAUSE}
        freed = [row for row in others if row.reason == RESUMED_BY_HAND or row.id in ended]
        for row in freed:
            self._memory.own.add(row.id)
        if freed:
            self.look_for_due()
        return freed

    def _has(self, run_id: str) -> bool:
        return self._memory.is_arriving(run_id) or run_id in self._uncertain

    async def _take_held(self) -> None:
        """Take up runs that were held for want of their flow by a process that did not know it; this one does."""
        if not self._services.config.recovery.enabled:
            return
        while self._memory.room > 0:
            limit = min(PASS_LIMIT, self._memory.room)
            held = await self._services.store.list_held(Hold.DEFINITION, self._services.registry.names(), limit)
            if held:
                names = ", ".join(sorted({row.flow for row in held}))
                log(logging.INFO, Token.DEFINITION_FOUND, f"{len(held)} runs held for want of {names} go on")
            if not await self._take_up(held, crashed=False) or len(held) < limit:
                return
        self._free_again = True  # no room: whoever leaves makes us look again

    async def _take_upgraded(self) -> None:
        """Take up runs that an older version has held because it did not understand them; this one does."""
        if not self._services.config.recovery.enabled:
            return
        while self._memory.room > 0:
            found, more = await self._upgraded.look(min(PASS_LIMIT, self._memory.room))
            if found:
                log(logging.INFO, Token.UPGRADE_FOUND, f"{len(found)} runs held for a newer version of Relight go on")
            if (found and not await self._take_up(found, crashed=False)) or not more:
                return
        self._free_again = True  # no room: whoever leaves makes us look again
