"""Presence: which owners are alive, by what the lease manager and the store know.

If the manager keeps its leases in the store, an owner that it does not list is dead. A manager that keeps them
elsewhere (etcd) may lose its data and come back empty, while all owners are alive and have a valid lease by their own
clocks. So the store remembers each session, too: while an orchestrator has its lease, it notes itself there every third
of the ttl, in one row. Then

    listed, and not lapsed                    alive, unless its process is known to be gone
    listed as lapsed                          dead: the manager has seen it end. But if this process could not renew its
                                              own lease until a moment ago, the others are given a moment, too: the
                                              server was down, or cut off, for all of them
    not listed                                dead only if the manager has kept its list for a whole ttl, so that every
                                              living owner is in it, and the store has not seen it for a ttl either

The store keeps the last heartbeat that it has seen until the owner has no run left: `stale_timeout` counts from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from relight.clock import Clock
from relight.errors import ConfigError
from relight.model.lease import Process, Session, same_manager
from relight.ownership.heartbeats import Heartbeats
from relight.ports.leases import LeaseManager
from relight.ports.store import Store
from relight.process import is_dead
from relight.supervisor import Supervisor
from relight.ticker import Ticker


class Presence(msgspec.Struct, frozen=True):
    """What is known at one moment."""

    listed: dict[str, Session]  # by the lease manager
    noted: dict[str, Session]  # by the store, where the manager is another
    complete_at: float = 0.0  # from this time on, by the store's clock, every living owner is listed
    renewed_at: float = 0.0  # from this time on, every living owner has renewed its lease after an outage
    now: float = 0.0

    def session(self, owner: str | None) -> Session | None:
        """The last known session of this owner: of two, a fresh one, or the one with the later heartbeat."""
        found = [found for found in (self.listed.get(owner or ""), self.noted.get(owner or "")) if found is not None]
        fresh = [session for session in found if session.fresh]
        return max(fresh or found, key=lambda session: session.heartbeat_at, default=None)

    def is_alive(self, owner: str) -> bool:
        """Whether the owner is alive, or not known to be dead."""
        listed, noted = self.listed.get(owner), self.noted.get(owner)
        if listed is not None and not listed.fresh and self.now < self.renewed_at:
            return not is_dead(listed.process)
        if listed is not None:
            return is_alive(listed)
        if noted is not None and is_dead(noted.process):
            return False
        return self.now < self.complete_at or (noted is not None and noted.fresh)

    def look_again_at(self, owner: str) -> float | None:
        """For an owner without a fresh session that is not known to be dead yet: when to look again. Otherwise None."""
        listed, noted = self.listed.get(owner), self.noted.get(owner)
        if (listed is not None and listed.fresh) or not self.is_alive(owner):
            return None
        if listed is not None:
            return self.renewed_at
        return max(self.complete_at, noted.expires_at if noted is not None else 0.0)


async def presence_of(heartbeats: Heartbeats, store: Store, clock: Clock) -> Presence:
    """Query the lease manager and, if it is not the store, the store as well."""
    listed, since = await heartbeats.call(_listed)
    noted = [] if heartbeats.leases.in_store else await store.sessions()
    now = clock.now()
    return Presence(
        {session.owner: session for session in listed},
        {session.owner: session for session in noted},
        0.0 if heartbeats.leases.in_store else since + heartbeats.ttl_seconds,
        now + heartbeats.others_need_seconds,
        now,
    )


async def _listed(leases: LeaseManager) -> tuple[list[Session], float]:
    since = await leases.listed_since()  # read first: if the list is lost in between, it must not look old
    return await leases.list_orchestrators(), since


def is_alive(session: Session) -> bool:
    """Whether the owner of this session is alive, as far as is known: not lapsed, its process not gone."""
    return session.fresh and not is_dead(session.process)


# ---- being seen


async def appear(
    heartbeats: Heartbeats, store: Store, supervisor: Supervisor, process: Process, *, drives: bool
) -> None:
    """The session has begun, so the lease manager answers. If the leases are not kept in the store, note the session
    there from now on. Then the store may remember this manager. Raises ConfigError if it has another."""
    if drives and not heartbeats.leases.in_store:
        note = partial(store.note_session, heartbeats.owner, process, heartbeats.ttl_seconds)
        await note()
        ticker = Ticker(partial(_note_again, heartbeats, note), heartbeats.ttl_seconds / 3)
        supervisor.keep("presence", ticker.run, essential=False)
    if drives:  # only now: see `_set_manager`
        await _set_manager(store, heartbeats.leases)
    else:
        await check_manager(store, heartbeats.leases, drives=False)  # it may have been set meanwhile


async def _note_again(heartbeats: Heartbeats, note: Callable[[], Awaitable[None]]) -> None:
    if heartbeats.may_drive:
        await note()


# ---- one manager per store


async def check_manager(store: Store, leases: LeaseManager, *, drives: bool) -> None:
    """The store remembers which manager keeps its leases. A process with another manager would take living owners for
    dead, so it is refused. An orchestrator may set another manager when no owner is alive by the old one.

    This is the look before the session begins: it writes nothing. A manager that does not answer, or is a typing error,
    must not become the one that every process has to use.
    """
    known = await store.lease_manager()
    if known is not None:
        await _refuse_another(known, store, leases, drives=drives)


async def _set_manager(store: Store, leases: LeaseManager) -> None:
    """The session of this orchestrator has begun, and others can see it: set its manager, unless it is set already."""
    while True:
        known = await store.lease_manager()
        if known is not None:
            if same_manager(known, leases.name):
                return
            await _refuse_another(known, store, leases, drives=True)
        if not await store.set_lease_manager(leases.name, known):
            continue  # another process has set one in between
        if known is None:
            return
        try:
            # An orchestrator with the old manager may have begun after the look above, and have found its own manager
            # set. Either it finds ours now, or this look finds its session.
            await _refuse_another(known, store, leases, drives=True)
        except ConfigError:
            await store.set_lease_manager(known, leases.name)
            raise
        return


async def _refuse_another(known: str, store: Store, leases: LeaseManager, *, drives: bool) -> None:
    """The store knows the manager `known`. Raise ConfigError if this process may not use `leases`."""
    if same_manager(known, leases.name):
        return
    alive = [
        session.owner
        for session in await store.sessions()
        if is_alive(session) and not same_manager(session.process.leases, leases.name)
    ]
    if drives and not alive:
        return
    if alive:
        what_to_do = (
            "it would take living orchestrators for dead. Set `leases` (RELIGHT_LEASES, --leases) to the same for all; to "
            f"change it, stop every orchestrator first ({alive[0]} is alive)"
        )
    else:
        what_to_do = (
            "they must be the same for all. No orchestrator is alive: start an orchestrator with the right leases, which "
            "the store then remembers, or set `leases` (RELIGHT_LEASES, --leases) of this process"
        )
    raise ConfigError(
        f"the leases of this store are kept by {known!r}, and this process would use {leases.name!r}: {what_to_do}"
    )
