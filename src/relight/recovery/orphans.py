"""Orphans: finding the runs whose owner has died, and claiming them, pass after pass, until none is left.

The runs of dead owners with this orchestrator's name come first (a restarted orchestrator finds its work at once), then
all others. Recovery looks at start, then every `check_interval`, when the lease manager reports that a session has
ended, and when a lease is due to lapse or a stale_timeout to pass. A pass is bounded, and a full pass is followed at
once by the next, as far as there is room in memory: the limit bounds the burst, and leaves no run behind. If orphans
are left for lack of room, the round ends, and the next begins when there is room. If a pass cannot read or write
something, the next pass tries again: that never fails a run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from relight.clock import EarliestTimer
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
from relight.ticker import Ticker


class OrphanRecovery:
    """One per engine. Implements `ownership.lease_listener.LeaseListener`: the heartbeat thread reports to it."""

    def __init__(self, orchestrator: RunsInMemory) -> None:
        self._orchestrator = orchestrator
        self._services = orchestrator.services
        every = self._services.config.recovery.check_interval_seconds
        self._ticker = Ticker(self.run_once, every, round_over=self._round_over)
        self._timer = EarliestTimer(self._services.clock, self._ticker.wake)  # a lease lapses, a stale_timeout passes
        self._part: Part | None = None
        self._starting = True  # the first round is not complete yet
        self._complete = False  # the last round has come to its end
        self.wants_room = False  # the last round has left orphans behind for lack of room
        self._in_part: set[str] = set()  # dead owners of whose runs only some were taken up at once
        orchestrator.seeks_room(self)
        self._services.idleness.parts.append(lambda: self._part is None or (self._complete and self._ticker.resting))
        self._said_dead: set[str] = set()
        # Used without leases: the owners that the store had at the start, until their runs are taken up.
        self._left_behind: set[str] = set()
        self.caught_up = asyncio.Event()  # a round is complete, and nothing was left to do
        # (A round that waited for room inside itself would keep the engine from being idle, and a fake clock from moving,
        # while the runs in memory wait for a time.)

    # ---- LeaseListener

    def lease_lost(self) -> None:
        self._services.metrics.leases_lost.inc()
        self._orchestrator.let_go_of_all()

    def lease_regained(self, lapsed: bool) -> None:
        self._ticker.wake()
        self._orchestrator.lease_regained(lapsed)

    def orphans(self, orphaned: Orphaned) -> None:
        self._ticker.wake()

    # ---- SeeksRoom

    def wake_up(self) -> None:
        self._ticker.wake()

    # ---- the loop

    def start(self) -> None:
        self._ticker.wake()
        self._part = self._services.supervisor.keep("recovery", self._ticker.run)

    async def stop(self, within_seconds: float) -> None:
        """Claim no more runs. The round under way may end: runs that it has claimed are released, not left behind."""
        self._timer.cancel()
        self._ticker.finish()
        if self._part is not None:
            await self._part.over(within_seconds)

    async def run_once(self) -> int:
        """One round. Returns how many runs were claimed."""
        if not self._complete:
            # A claim that failed may leave this process with a lease but not the run. A process that finds this out writes
            # this one as the owner into the row (`correct_owner`), so look for such runs.
            self._orchestrator.look_for_lost()
        self._complete = False
        config = self._services.config.recovery
        limit = config.max_startup_recovery if self._starting else config.max_claims_per_check
        try:
            claimed = await self.round(limit, starting=self._starting)
        except BaseException:
            self._give_way()
            raise
        self._starting = False
        self._complete = True
        return claimed

    def _round_over(self) -> None:
        self._services.idleness.look()
        if self._ticker.resting and not self.wants_room:
            self.caught_up.set()

    async def round(self, limit: int, *, starting: bool = False) -> int:
        """Recover all runs that are orphaned now, `limit` runs at a time. Returns how many were claimed."""
        if not self._services.heartbeats.may_drive:
            return 0  # without its lease this process claims nothing; `lease_regained` wakes the next round
        me = self._services.owner
        presence = await self._presence(starting)
        unlisted = me not in presence.listed
        if unlisted and not (self._services.heartbeats.leases.in_store and (starting or self._left_behind)):
            self._give_way()
            return 0  # a list without this process says nothing of who died. (Without leases it is empty.)
        owners = await self._services.store.owners()
        if unlisted:
            if starting:
                self._left_behind = set(owners) - {me}
            self._left_behind.intersection_update(owners)
            owners = sorted(self._left_behind)
        self._said_dead.intersection_update(owners)
        self._in_part.intersection_update(owners)
        dead = await self._end_dead_sessions(presence, owners)
        for owner in owners:
            if owner != me and (undecided := presence.look_again_at(owner)) is not None:
                self._timer.set(undecided)
        claimed, left, failure = 0, False, None
        for owner in dead:
            try:
                count, short = await self._recover(owner, presence.session(owner), limit)
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - raised below, after the other owners' runs were recovered
                failure = failure or error
            else:
                claimed, left = claimed + count, left or short
        if failure is not None:
            raise failure
        self._looked(claimed, left)
        await self._clear_away(presence, owners)
        self._orchestrator.look_for_held()  # the hint from a process that held a run may have been lost
        return claimed

    def _looked(self, claimed: int, left: bool) -> None:
        """This round has looked for all orphans. `left`: some are left for lack of room."""
        self.wants_room = left
        self._orchestrator.looked(self, had_room=claimed > 0 or not left)
        if left and self._orchestrator.room_for(self) > 0:
            self.wake_up()  # a run has left memory after the last look, when it was not known yet that room is wanted

    def _give_way(self) -> None:
        """This round could not look. It is made again in any case, and until then the waker need not leave room for it."""
        self.wants_room = False
        self._orchestrator.looked(self, had_room=True)

    async def _presence(self, starting: bool) -> Presence:
        """All sessions. At the start, warns of a living one that has our name."""
        presence = await presence_of(self._services.heartbeats, self._services.store, self._services.clock)
        me = self._services.owner
        for session in presence.listed.values() if starting else ():
            shared = session.name == name_of(me) and session.owner != me
            if shared and is_alive(session) and not self._may_share(session):
                self._say_shared(session)
        return presence

    async def _end_dead_sessions(self, presence: Presence, owners: Sequence[str]) -> list[str]:
        """The dead among the owners; former sessions with our own name come first. If the process of a session was on this
        machine and is gone, the session is ended first, so that no process waits until it lapses. Both follow from one
        look at the processes: a process may die at any time, and the leases of a session that goes on are refused."""
        me = self._services.owner
        dead = {owner for owner in {*presence.listed, *owners} if owner != me and not presence.is_alive(owner)}
        for owner in dead.intersection(presence.listed):
            if presence.listed[owner].fresh:
                await self._end_session(presence.listed[owner])
        return sorted(dead.intersection(owners), key=lambda owner: (name_of(owner) != name_of(me), owner))

    async def _end_session(self, session: Session) -> None:
        log(logging.WARNING, Token.OWNER_DEAD, f"{session.owner}: its process {session.process.pid} is gone")
        self._said_dead.add(session.owner)
        await self._services.heartbeats.call(lambda leases: leases.end_session(session.owner))

    def _may_share(self, session: Session) -> bool:
        """Whether this session may have the same name as ours. The workers of one server share a configuration, and so
        a name. On one machine that is harmless: there, a death is seen by the process, not by the name. Without an
        orchestrator_id the name is that of the machine."""
        return self._services.config.orchestrator_id is None or is_of_this_machine(session.process)

    def _say_shared(self, session: Session) -> None:
        log(
            logging.WARNING,
            Token.ORCHESTRATOR_ID_SHARED,
            f"{session.owner} has the same orchestrator_id as {self._services.owner} and seems alive (or died in the last "
            "lease_ttl); each has its own session, but give each its own id, or neither finds its runs again at once",
        )

    async def _recover(self, owner: str, session: Session | None, limit: int) -> tuple[int, bool]:
        """Recover one dead owner's runs, pass after pass. Returns how many were claimed, and whether some are left for
        lack of room. To find that out, a pass reads one run more than there is room for."""
        claimed, after = 0, None
        while True:
            if self._orchestrator.stopping:
                return claimed, False
            size = min(limit, self._orchestrator.room_for(self) + 1)
            rows = await self._services.store.list_active_roots(owner, after, size)
            wanted = [row for row in rows if self._is_stale(row, session)]
            fit = wanted[: self._orchestrator.room_for(self)]  # the room may have been filled during the read
            whole = after is None and len(rows) < size and len(fit) == len(rows) and owner not in self._in_part
            if rows and not whole:
                self._in_part.add(owner)
            if wanted:
                self._say_dead(owner, session)
            if wanted and not fit:
                return claimed, True
            if fit:
                count = await take_up(self._orchestrator, fit, crashed=True, death=Death(session, whole))
                self._count_detection(session, count)
                claimed += count
            if len(fit) < len(wanted):
                after = fit[-1].id
            elif len(rows) < size:
                return claimed, False
            else:
                after = rows[-1].id

    def _is_stale(self, row: Run, session: Session | None) -> bool:
        """Whether the run should be taken up, by its row and its lease alone, before anything is claimed or read. A run
        whose row triggers a bug is left for the next round, and the others go on."""
        try:
            decision = decide(facts_of(self._services, row, crashed=True, session=session))
        except Exception as error:  # noqa: BLE001 - a bug of ours, in one run
            log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {row.id}: deciding on it broke: {error!r}", error)
            return False
        if decision.until is not None:
            self._timer.set(decision.until)
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

    async def _clear_away(self, presence: Presence, owners: Sequence[str]) -> None:
        """Forget lapsed sessions that own no run any more."""
        limit = self._services.config.recovery.max_claims_per_check
        over = [owner for owner, session in presence.listed.items() if not session.fresh and owner not in owners]
        for owner in over[:limit]:
            await self._services.heartbeats.call(lambda leases, owner=owner: leases.forget_session(owner))  # type: ignore[misc]
        over = [owner for owner, session in presence.noted.items() if not session.fresh and owner not in owners]
        for owner in over[:limit]:
            await self._services.store.forget_session(owner)
