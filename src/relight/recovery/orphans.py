"""Orphans: finding the runs whose owner has died, and claiming them, pass after pass, until none is left.

At start our own name's runs come first (a restarted orchestrator finds its work at once), then everybody's; after that every
`check_interval`, when a push tells that somebody's session has ended, and when a lease is due to lapse or a stale_timeout to
pass. A pass is bounded; a full one is followed at once by the next, as far as there is room in memory: limits bound the
burst and strand nothing. What a pass cannot read or write is looked at again in the next: it never fails a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from relight.clock import Timer
from relight.errors import StoreError
from relight.model.decisions import Action, decide
from relight.model.lease import Orphaned, Session, name_of
from relight.model.run import Run
from relight.ownership.liveness import Presence, is_alive, presence_of
from relight.process import is_of_this_machine
from relight.recovery.facts import facts_of
from relight.recovery.memory import RunsInMemory
from relight.recovery.take_up import Death, take_up
from relight.supervisor import Part
from relight.telemetry import Token, log


class OrphanRecovery:
    """One per engine. Implements `ownership.lease_listener.LeaseListener`: told what became of our leases, and of others'."""

    def __init__(self, orchestrator: RunsInMemory) -> None:
        self._orchestrator = orchestrator
        self._services = orchestrator.services
        self._wanted = asyncio.Event()
        self._timer: Timer | None = None
        self._timer_at = float("inf")
        self._part: Part | None = None
        self._starting = True  # no whole round has been made yet
        self._passing = False  # a round is under way, or the first one has not begun
        self._services.idleness.parts.append(lambda: not self._passing and not (self._part and self._wanted.is_set()))
        self._said_dead: set[str] = set()
        self._left_behind: set[str] = (
            set()
        )  # without leases: the owners there were at the opening, until their runs are taken up
        self.caught_up = asyncio.Event()  # a whole round was made and nothing was left to do

    # ---- LeaseListener

    def lease_lost(self) -> None:
        self._services.metrics.leases_lost.inc()
        self._orchestrator.let_go_of_all()

    def lease_regained(self, lapsed: bool) -> None:
        self._wanted.set()
        self._orchestrator.lease_regained(lapsed)

    def orphans(self, orphaned: Orphaned) -> None:
        self._wanted.set()

    # ---- the loop

    def start(self) -> None:
        self._passing = True
        self._part = self._services.supervisor.keep("recovery", self.run)

    async def stop(self) -> None:
        """Claim nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._part is not None:
            await self._part.stop()

    async def run(self, part: Part) -> None:
        """Round after round, whenever something wants one; never two at once."""
        # A claim that failed may leave us a lease without its run; whoever finds that out writes us into the row.
        self._orchestrator.look_for_lost()
        while True:
            self._wanted.clear()
            self._passing = True  # also if it breaks: until one has come to its end
            config = self._services.config.recovery
            limit = config.max_startup_recovery if self._starting else config.max_claims_per_check
            await self.round(limit, starting=self._starting)
            self._starting = False
            self._passing = False
            self._services.idleness.look()
            part.well()
            if not self._wanted.is_set():
                self.caught_up.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.check_interval_seconds):
                    await self._wanted.wait()

    async def round(self, limit: int, *, starting: bool = False) -> int:
        """Everything that is orphaned now, `limit` runs at a time; how many were claimed."""
        if not self._services.heartbeats.may_drive:
            return 0  # whoever cannot renew claims nothing; it is told when it can again
        me = self._services.owner
        presence = await self._presence(starting)
        unlisted = me not in presence.listed
        if unlisted and not (self._services.heartbeats.leases.in_store and (starting or self._left_behind)):
            return 0  # where not even we are listed, nothing follows from who is missing. (Nobody is, without leases.)
        owners = await self._services.store.owners()
        if unlisted:
            if starting:
                self._left_behind = set(owners) - {me}
            self._left_behind.intersection_update(owners)
            owners = sorted(self._left_behind)
        self._said_dead.intersection_update(owners)
        dead = [owner for owner in owners if not presence.is_alive(owner) and owner != me]
        for owner in owners:
            if owner != me and (undecided := presence.look_again_at(owner)) is not None:
                self._look_at(undecided)
        dead.sort(key=lambda owner: name_of(owner) != name_of(me))  # our own name first
        claimed, failure = 0, None
        for owner in dead:
            try:
                claimed += await self._recover(owner, presence.session(owner), limit)
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - raised below: the other owners' runs do not wait for it
                failure = failure or error
        if failure is not None:
            raise failure
        await self._clear_away(presence, owners)
        self._orchestrator.look_for_held()  # whoever held one for want of its flow has told, but that may have been lost
        return claimed

    async def _presence(self, starting: bool) -> Presence:
        """Everybody's session. Those of processes of this machine that are gone are ended first: nobody need wait for them
        to lapse."""
        presence = await presence_of(self._services.heartbeats, self._services.store, self._services.clock)
        for session in presence.listed.values():
            if not session.fresh or session.owner == self._services.owner:
                continue
            if not is_alive(session):
                await self._end_session(session)
            elif starting and session.name == name_of(self._services.owner) and not self._may_share(session):
                self._say_shared(session)
        return presence

    async def _end_session(self, session: Session) -> None:
        log(logging.WARNING, Token.OWNER_DEAD, f"{session.owner}: its process {session.process.pid} is gone")
        self._said_dead.add(session.owner)
        await self._services.heartbeats.call(lambda leases: leases.end_session(session.owner))

    def _may_share(self, session: Session) -> bool:
        """Whether this session may have our name. The workers of one server have one configuration, and so one name. That harms
        nothing on one machine, where a death is seen by the process and not by the name; and without an orchestrator_id the
        name is that of the machine."""
        return self._services.config.orchestrator_id is None or is_of_this_machine(session.process)

    def _say_shared(self, session: Session) -> None:
        log(
            logging.WARNING,
            Token.ORCHESTRATOR_ID_SHARED,
            f"{session.owner} has the same orchestrator_id as {self._services.owner} and seems alive (or died in the last "
            "lease_ttl); they are told apart, but give each its own id, or neither finds its own runs again at once",
        )

    async def _recover(self, owner: str, session: Session | None, limit: int) -> int:
        """One dead owner's runs, pass after pass."""
        claimed, after = 0, None
        while True:
            await self._orchestrator.wait_for_room()
            size = min(limit, self._orchestrator.room)
            rows = await self._services.store.list_active_roots(owner, after, size)
            wanted = [row for row in rows if self._is_stale(row, session)]
            if wanted:
                self._say_dead(owner, session)
                whole = (
                    after is None and len(rows) < size and len(wanted) == len(rows) and owner != self._services.owner
                )
                count = await take_up(self._orchestrator, wanted, crashed=True, death=Death(session, whole))
                self._count_detection(session, count)
                claimed += count
            if len(rows) < size:
                return claimed
            after = rows[-1].id

    def _is_stale(self, row: Run, session: Session | None) -> bool:
        """Asked before anything is claimed or read: with what the row and the lease tell. Of a row that brings out a bug, nothing
        is known: it is left for the next round, and the others go on."""
        try:
            decision = decide(facts_of(self._services, row, crashed=True, session=session))
        except Exception as error:  # noqa: BLE001 - see above
            log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {row.id}: deciding on it broke: {error!r}", error)
            return False
        if decision.until is not None:
            self._look_at(decision.until)
        return decision.action is not Action.LEAVE

    def _say_dead(self, owner: str, session: Session | None) -> None:
        if owner in self._said_dead:
            return
        self._said_dead.add(owner)
        since = "" if session is None else f" (last heartbeat {session.heartbeat_at:.3f})"
        log(logging.WARNING, Token.OWNER_DEAD, f"{owner}: its session has lapsed or ended{since}; recovering its runs")

    def _count_detection(self, session: Session | None, count: int) -> None:
        if session is not None and count:
            waited = max(0.0, self._services.clock.now() - session.expires_at)
            self._services.metrics.detection.observe(waited, count)

    def _look_at(self, when: float) -> None:
        """A stale_timeout passes then. Of several the earliest counts: the look it brings finds the others."""
        if when >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        delay = max(0.0, when - self._services.clock.now())
        self._timer = self._services.clock.call_later(delay, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        self._wanted.set()

    async def _clear_away(self, presence: Presence, owners: Sequence[str]) -> None:
        """Lapsed sessions in whose name no run is left."""
        limit = self._services.config.recovery.max_claims_per_check
        over = [owner for owner, session in presence.listed.items() if not session.fresh and owner not in owners]
        for owner in over[:limit]:
            await self._services.heartbeats.call(lambda leases, owner=owner: leases.forget_session(owner))  # type: ignore[misc]
        over = [owner for owner, session in presence.noted.items() if not session.fresh and owner not in owners]
        for owner in over[:limit]:
            await self._services.store.forget_session(owner)
