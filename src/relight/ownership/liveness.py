"""Presence: who is alive, as far as the lease manager and the store together can tell.

A manager that keeps its leases in the store is believed: whoever it does not list is dead. One that keeps them elsewhere (etcd)
may lose its data and come back empty, while everybody lives on and holds a valid lease by their own clocks. So the store
remembers each session, too: an orchestrator notes itself there every third of the ttl, one row, while its lease is held. Then

    listed, and not lapsed                    alive, unless its process is known to be gone
    listed as lapsed                          dead: the manager has seen it end
    not listed                                dead only if the manager's list has been kept for a whole ttl, so that whoever
                                              lives would be in it by now, and the store, too, has not seen it for a ttl

The last heartbeat that the store has seen outlives the session, until no run is left in its name: `stale_timeout` counts from it.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from relight.supervisor import Part, Supervisor


class Presence(msgspec.Struct, frozen=True):
    """What is known at one moment."""

    listed: dict[str, Session]  # by the lease manager
    noted: dict[str, Session]  # by the store, where the manager is another
    complete_at: float = 0.0  # from then on, by the store's clock, whoever lives is listed
    now: float = 0.0

    def session(self, owner: str | None) -> Session | None:
        """The last that is known of this owner: of two, the one that was heard of last."""
        found = [found for found in (self.listed.get(owner or ""), self.noted.get(owner or "")) if found is not None]
        fresh = [session for session in found if session.fresh]
        return max(fresh or found, key=lambda session: session.heartbeat_at, default=None)

    def is_alive(self, owner: str) -> bool:
        """Or not known to be dead."""
        listed, noted = self.listed.get(owner), self.noted.get(owner)
        if listed is not None:
            return is_alive(listed)
        if noted is not None and is_dead(noted.process):
            return False
        return self.now < self.complete_at or (noted is not None and noted.fresh)

    def look_again_at(self, owner: str) -> float | None:
        """When somebody who is not listed, and not known to be dead yet, is worth another look."""
        if owner in self.listed or not self.is_alive(owner):
            return None
        noted = self.noted.get(owner)
        return max(self.complete_at, noted.expires_at if noted is not None else 0.0)


async def presence_of(heartbeats: Heartbeats, store: Store, clock: Clock) -> Presence:
    """Ask both."""
    listed, since = await heartbeats.call(_listed)
    if heartbeats.leases.in_store:
        return Presence({session.owner: session for session in listed}, {})
    noted = await store.sessions()
    return Presence(
        {session.owner: session for session in listed},
        {session.owner: session for session in noted},
        since + heartbeats.ttl_seconds,
        clock.now(),
    )


async def _listed(leases: LeaseManager) -> tuple[list[Session], float]:
    since = await leases.listed_since()  # first: a list that was lost in between is not taken for an old one
    return await leases.list_orchestrators(), since


def is_alive(session: Session) -> bool:
    """Whether the owner of this session lives, as far as can be known: it has not lapsed, nor is its process gone."""
    return session.fresh and not is_dead(session.process)


# ---- being seen


async def appear(
    heartbeats: Heartbeats, store: Store, supervisor: Supervisor, process: Process, *, drives: bool
) -> None:
    """The session has begun: from now on the store sees it, where its leases are kept elsewhere."""
    await agree_on_manager(store, heartbeats.leases, drives=False)  # two may have begun at once, with two
    if drives and not heartbeats.leases.in_store:
        note = partial(store.note_session, heartbeats.owner, process, heartbeats.ttl_seconds)
        await note()
        supervisor.keep("presence", partial(_keep_noting, heartbeats, note), essential=False)


async def _keep_noting(heartbeats: Heartbeats, note: Callable[[], Awaitable[None]], part: Part) -> None:
    """Every third of the ttl, while the lease is held."""
    never = asyncio.Event()
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(heartbeats.ttl_seconds / 3):
                await never.wait()
        if heartbeats.may_drive:
            await note()
        part.well()


# ---- one manager per store


async def agree_on_manager(store: Store, leases: LeaseManager, *, drives: bool) -> None:
    """The store remembers who keeps its leases. Whoever asks another would take living owners for dead, so it is refused;
    an orchestrator may bring another one in once nobody lives by the old one."""
    while True:
        known = await store.lease_manager()
        if known is not None and same_manager(known, leases.name):
            return
        if known is None and not drives:
            return  # nobody has driven anything here yet
        if known is not None:
            alive = [session.owner for session in await store.sessions() if is_alive(session)]
            if alive or not drives:
                raise ConfigError(
                    f"the leases of this store are kept by {known!r}, and this process is to ask {leases.name!r}: it would take "
                    "living orchestrators for dead. Set `leases` (RELIGHT_LEASES, --leases) to the same for all; to change it, "
                    "stop every orchestrator first" + (f" ({alive[0]} is alive)" if alive else "")
                )
        if await store.set_lease_manager(leases.name, known):
            return
