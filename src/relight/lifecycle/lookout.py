"""The lookout: what makes an orchestrator look at the store, and what it takes up then.

Four things wake it: a timer at the earliest due time in the store, a message, the store's hint that another process has
written, and room becoming free. All of them end in `take_up`. Every hint may be lost: the poll at CHECK_SECONDS asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relight.clock import Timer
from relight.errors import StoreError, StoreUnavailableError
from relight.lifecycle.background import start_task
from relight.lifecycle.patience import Patience
from relight.lifecycle.recover import take_up
from relight.model.run import Hold, News, Run
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.lifecycle.orchestrator import Orchestrator

CHECK_SECONDS = 5.0  # between looks at the store when nothing wakes us
NOT_OURS_SECONDS = 0.25  # before looking again at runs that are due and could not be taken up
PASS_LIMIT = 100  # runs per pass; a full pass is followed at once by the next


class Lookout:
    """One per orchestrator."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._services = orchestrator.services
        self._wanted = asyncio.Event()
        self._look_again = self._listen_again = self._free_again = False  # for due runs; for messages; for held runs
        self._timer: Timer | None = None
        self._timer_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._services.store.watch(self._changed)
        self._changed(News.DUE | News.MAIL | News.HELD)
        self._task = start_task(self._services.loop, self._passes(), "lookout")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._timer is not None:
            self._timer.cancel()

    # ---- the wake-ups

    def attend(self) -> None:
        """There is something to do: a pass, as soon as the one under way is over."""
        self._wanted.set()

    def look(self) -> None:
        """Runs may be due."""
        self._look_again = True
        self.attend()

    def listen(self) -> None:
        """Messages may have been posted."""
        self._listen_again = True
        self.attend()

    def look_for_held(self) -> None:
        """Runs may be held for want of a flow that this process knows."""
        self._free_again = True
        self.attend()

    def flow_registered(self, name: str) -> None:
        """From any thread: runs held for want of this flow can go on."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._services.loop.call_soon_threadsafe(self.look_for_held)

    @property
    def wants_room(self) -> bool:
        """Whether runs may be waiting for a room to become free."""
        return self._look_again or self._free_again

    def wake_at(self, when: float) -> None:
        """A run is due at this time."""
        if self._orchestrator.stopping or (self._timer_at is not None and self._timer_at <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        delay = max(0.0, when - self._services.clock.now())
        self._timer = self._services.clock.call_later(min(delay, 3600.0), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = self._timer_at = None
        self.look()

    def _changed(self, news: News) -> None:
        """Another process has written."""
        if News.RUNS in news:
            self._orchestrator.watchers.tell_all_but(self._orchestrator.live)
            self._orchestrator.overtaken.others_wrote = True
        self._look_again |= News.DUE in news
        self._listen_again |= News.MAIL in news
        self._free_again |= News.HELD in news
        self.attend()

    # ---- the passes

    async def _passes(self) -> None:
        """One pass after the other, whenever something wants one; never two at once."""
        patience = Patience()
        orchestrator, loop = self._orchestrator, self._services.loop
        checked_at = loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(checked_at + CHECK_SECONDS):
                    await self._wanted.wait()
            if loop.time() >= checked_at + CHECK_SECONDS:  # whether or not something wakes us all the time
                checked_at = loop.time()
                self._look_again = self._listen_again = True
                orchestrator.watchers.tell_all_but(orchestrator.live)
            self._wanted.clear()
            try:
                await orchestrator.doubts.resolve()
                await orchestrator.mail.recheck()
                await orchestrator.overtaken.look()
                if self._listen_again:
                    self._listen_again = False
                    await orchestrator.mail.hear()
                if self._look_again and orchestrator.room > 0 and self._services.keeper.held:
                    self._look_again = False
                    await self._take_due()
                if self._free_again and orchestrator.room > 0 and self._services.keeper.held:
                    self._free_again = False
                    await self._take_held()
            except StoreError as error:
                log(logging.WARNING, Token.RECOVERY_FAILED, f"{error}; looking again in {patience.seconds:.2g}s")
                self._look_again = self._listen_again = self._free_again = True
                self._wanted.set()
                await patience.pause()
            else:
                patience.again()

    async def _take_due(self) -> None:
        """Take up what is due, pass after pass, while there is room; then sleep until the next is."""
        asked_at = self._services.clock.now()
        while self._orchestrator.room > 0:
            limit = min(PASS_LIMIT, self._orchestrator.room)
            due = await self._services.store.due(asked_at, limit)
            fresh = [row for row in due if self._orchestrator.may_take(row.id)]
            await take_up(self._orchestrator, fresh, crashed=False)
            if len(due) < limit or not fresh:
                # What is being taken up for a message just now may hide what is due behind it: look again once it is here.
                self._look_again |= any(row.id in self._orchestrator.taking for row in due)
                break
        else:
            self._look_again = True  # no room: whoever leaves makes us look again
            return
        upcoming = await self._services.store.next_due()
        if upcoming is not None:
            # What was due when we asked was not for us (others took it, or its lease is not free yet): no hurry then. What
            # has fallen due since, nobody has looked at.
            self.wake_at(upcoming if upcoming > asked_at else self._services.clock.now() + NOT_OURS_SECONDS)

    async def _take_held(self) -> None:
        """Take up runs that were held for want of their flow by a process that did not know it; this one does."""
        if not self._services.config.recovery.enabled:
            return
        while self._orchestrator.room > 0:
            limit = min(PASS_LIMIT, self._orchestrator.room)
            held = await self._services.store.held(Hold.DEFINITION, self._services.registry.names(), limit)
            if held:
                names = ", ".join(sorted({row.flow for row in held}))
                log(logging.INFO, Token.DEFINITION_FOUND, f"{len(held)} runs held for want of {names} go on")
            if not await take_up(self._orchestrator, held, crashed=False) or len(held) < limit:
                return
        self._free_again = True  # no room: whoever leaves makes us look again

    def wake(self, rows: Sequence[Run]) -> None:
        """Take up parked or paused runs for what they were told, as soon as there is room for them."""
        wanted = [row for row in rows if self._orchestrator.may_take(row.id)]
        if wanted:
            self._services.background.start(self._wake(wanted), "wake")

    async def _wake(self, rows: list[Run]) -> None:
        patience = Patience()
        while rows and not self._orchestrator.stopping:
            await self._orchestrator.wait_for_room()
            count = min(PASS_LIMIT, self._orchestrator.room)
            try:
                await take_up(self._orchestrator, rows[:count], crashed=False)
            except StoreUnavailableError as error:
                # Claimed after all, they are in doubt and looked at; if not, the same claim is tried again.
                log(logging.WARNING, Token.RECOVERY_FAILED, f"{error}; trying again in {patience.seconds:.2g}s")
                await patience.pause()
            else:
                rows = rows[count:]
