"""Leases: which orchestrators are alive, and which runs each of them owns.

One heartbeat per orchestrator, every third of the ttl, keeps all its runs: a lease belongs to a session, runs are attached
to it. A lease is a hint about liveness and nothing more. The epoch in the store keeps two owners from both writing.

A manager has its own connection to its server, and lives on the event loop of the heartbeat thread (see
ownership/heartbeats.py), so that a step that blocks the engine's loop for a minute costs no lease. All times are those of the
server; a heartbeat reads no metadata and no journals.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from relight.model.lease import Acquired, Lease, NotOwner, Orphaned, OwnedBy, Process, Released, Session
from relight.supervisor import Supervisor


class LeaseManager(Protocol):
    """Who owns which run. Every method but `close` raises LeasesUnavailableError when the server does not answer."""

    name: str
    """The name under which the store remembers this manager: "store", "none", or its address without a password."""

    in_store: bool
    """Whether a run's lease is the owner column of its row. If so, every transaction that writes that column (a
    creation, a claim of a run without an owner, a parking) acquires or releases the lease as well: it needs no extra
    call."""

    async def open(self, owner: str, process: Process, ttl_seconds: float) -> None:
        """Connect. The session begins with its first heartbeat."""
        ...

    async def close(self) -> None:
        """Disconnect without releasing anything: leases that `release_all` has not released will lapse."""
        ...

    def report(self, trouble: str) -> None:
        """Say what is wrong with this process; "": nothing. Other processes read it in its session (`Process.trouble`)
        after the next heartbeat. This costs nothing, and changes no lease."""
        ...

    async def heartbeat(self) -> bool:
        """Keep the session, and with it all runs attached to it, for another ttl from now. Returns True if the session
        began with this heartbeat: for the first time, or again after it had lapsed or was ended. In the second case
        others may have claimed the runs that were attached to it."""
        ...

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        """Attach runs to this session: runs whose lease is free, is this session's already, or is that of a lapsed
        session. If two sessions try to acquire a lease, exactly one gets it. Runs that the manager knows not to be
        unfinished roots are left out of the answer.

        Many runs at once, in one or a few operations; each run succeeds or fails alone.
        """
        ...

    async def release_lease(self, run_id: str) -> Released | NotOwner:
        """Detach a run. If its lease is another session's, or free, nothing changes and the answer is NotOwner."""
        ...

    async def release_all(self) -> None:
        """End this session and free all its runs, in one operation; other processes learn it at once (`watch_orphans`).
        If the store keeps the leases, a freed run is due at its `wake_at`; at once without one, or with a message."""
        ...

    async def get_lease(self, run_id: str) -> Lease | None:
        """The lease of a run. None: it has no owner, or its session has lapsed."""
        ...

    async def list_orchestrators(self) -> list[Session]:
        """Every session, with this one, as of now by the manager's clock. A lapsed session may be listed, as not fresh,
        or be missing: an owner without a session is as dead as one whose session has lapsed."""
        ...

    async def listed_since(self) -> float:
        """Since when the manager has kept this list, by the clock of `list_orchestrators`. After a loss of its data the
        list is empty, and only a ttl later are all living owners in it again. 0.0 if the list is kept with the runs."""
        ...

    async def end_session(self, owner: str) -> None:
        """End the session of an owner that is known to be dead (its process is gone), as if it had lapsed, and notify
        others. If this manager lists lapsed sessions, it keeps this one: the last heartbeat is needed while it owns
        runs."""
        ...

    async def forget_session(self, owner: str) -> None:
        """Delete what is left of a lapsed session that owns no run any more. A fresh session stays."""
        ...

    def watch_orphans(self, supervisor: Supervisor | None = None) -> AsyncIterator[Orphaned]:
        """Report sessions that end or lapse from now on, as soon as that is known: at least once for each, but not this
        session. After a disconnection some reports may be missing. They only wake: `list_orchestrators` decides.
        If a task listens, the `supervisor` keeps it alive."""
        ...
