"""Leases: which orchestrators are alive, and which runs each of them holds.

One heartbeat per orchestrator, every third of the ttl, keeps all its runs: a lease belongs to a session, runs are attached
to it. A lease is a hint about liveness and nothing more. What keeps two owners from both writing is the epoch in the store.

A manager has its own connection to whatever backs it, and lives on the event loop of the heartbeat thread (see
ownership/heartbeats.py), so that a step that blocks the engine's loop for a minute costs no lease. All times are those of the
backing server; no method reads metadata or journals on a heartbeat.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from relight.model.lease import Acquired, Lease, NotOwner, Orphaned, OwnedBy, Process, Released, Session


class LeaseManager(Protocol):
    """Who holds what. Every method but `close` raises LeasesUnavailableError when the backing server does not answer."""

    name: str
    """What the store remembers it by: "store", "none", or where it is, without a password."""

    in_store: bool
    """A run's lease is the owner column of its row. Then whatever writes that column (a creation, a claim of a run without
    owner, a parking) acquires or releases the lease in the same transaction, and nobody has to do it again."""

    async def open(self, owner: str, process: Process, ttl_seconds: float) -> None:
        """Connect. The session begins with its first heartbeat."""
        ...

    async def close(self) -> None:
        """Disconnect, without releasing anything: what `release_all` has not released lapses."""
        ...

    def report(self, trouble: str) -> None:
        """What is wrong with this process; "": nothing. Others read it in its session (`Process.trouble`) after the next
        heartbeat. Costs nothing, and changes nothing in who holds what."""
        ...

    async def heartbeat(self) -> bool:
        """Keep the session, and with it all runs attached to it, for another ttl from now. True if it began with this: for
        the first time, or again after it had lapsed or was ended, when the runs that were attached to it may be others'."""
        ...

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        """Attach runs to this session: those that nobody holds, that are held already by us, or by a session that has
        lapsed. Of two contenders exactly one gets it. Runs that the manager knows to be no unfinished roots are left out.

        Many at once, in one or a few operations; each stands alone.
        """
        ...

    async def release_lease(self, run_id: str) -> Released | NotOwner:
        """Detach a run. One that is another's, or nobody's, is NotOwner, and stays as it is."""
        ...

    async def release_all(self) -> None:
        """End this session and free all its runs, in one operation; others are told at once (`watch_orphans`). Where the store
        keeps the leases, a run that is freed is due at its own time, or at once if it has none, or a message."""
        ...

    async def get_lease(self, run_id: str) -> Lease | None:
        """Who holds a run. None: nobody, or a session that has lapsed."""
        ...

    async def list_orchestrators(self) -> list[Session]:
        """Every session, ours included, as of now by the manager's clock. Lapsed ones may be listed, as not fresh, or be
        gone: an owner without a session is as dead as one whose session has lapsed."""
        ...

    async def listed_since(self) -> float:
        """Since when this list has been kept, by the clock of `list_orchestrators`: a manager that has lost its data begins
        anew, and whoever lives is in its list again only a ttl later. 0.0 where the list is kept with the runs."""
        ...

    async def end_session(self, owner: str) -> None:
        """End the session of an owner that is known to be dead (its process is gone), as if it had lapsed, and tell others.
        Where lapsed sessions are listed, this one is: its last heartbeat is asked for as long as runs are in its name."""
        ...

    async def forget_session(self, owner: str) -> None:
        """Clear away what is left of a lapsed session, once no run is left in its name. One that is fresh stays."""
        ...

    def watch_orphans(self) -> AsyncIterator[Orphaned]:
        """Whose session has ended or lapsed, from now on, as soon as it is known. At least once for each, ours left out;
        after a disconnection some may be missing: this only wakes, `list_orchestrators` decides."""
        ...
