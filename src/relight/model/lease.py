"""Leases: which owners are alive, and which runs each of them owns. A hint about liveness; the epoch gives safety."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class Process(msgspec.Struct, frozen=True, rename={"session": "life"}):
    """One process of one machine, so that other processes on the same machine can find out whether it is dead."""

    machine: str = ""  # boot and pid namespace; "" when unknown
    pid: int = 0
    started: int = 0  # the system's own start time of that pid: pids are used again
    session: str = ""  # its owner, "name#token", to tell the sessions of one process apart; stored as "life"
    trouble: str = ""  # what the process reports to be wrong with itself: parts that keep failing
    leases: str = ""  # the name of its lease manager; "" of a process that is too old to say


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The time from one opening of an orchestrator to its end. Its heartbeats keep it alive.

    Times are those of the lease manager's clock, and `fresh` was judged by it: never compare them with this machine's.
    """

    owner: str  # "name#token": the name stays across restarts, the token is new for every session
    process: Process = Process()
    started_at: float
    heartbeat_at: float
    expires_at: float
    fresh: bool  # not lapsed when it was read

    @property
    def name(self) -> str:
        return name_of(self.owner)


def session_from(row: Sequence[Any]) -> Session:
    """From a stored row: owner, process as JSON, begin, last heartbeat, end, and the manager's time now."""
    owner, process, started_at, heartbeat_at, expires_at, now = row
    return Session(
        owner=owner,
        process=msgspec.json.decode(process, type=Process),
        started_at=started_at,
        heartbeat_at=heartbeat_at,
        expires_at=expires_at,
        fresh=expires_at > now,
    )


def ended_sessions(before: Sequence[Session], after: Sequence[Session]) -> set[str]:
    """The owners of the sessions that have ended or lapsed between two readings, also of those that began after the
    first. A session that began again is another session."""
    gone = _begun(before, fresh=True) - _begun(after, fresh=True)
    lapsed = _begun(after, fresh=False) - _begun(before, fresh=False)
    return {owner for owner, _ in gone | lapsed}


def _begun(sessions: Sequence[Session], *, fresh: bool) -> set[tuple[str, float]]:
    return {(session.owner, session.started_at) for session in sessions if session.fresh is fresh}


def name_of(owner: str) -> str:
    """The orchestrator's name in an owner."""
    return owner.rpartition("#")[0]


def same_manager(one: str, other: str) -> bool:
    """Whether these are names of the same lease manager. For etcd only the prefix counts: its members come and go."""
    if one.startswith("etcd://") and other.startswith("etcd://"):
        return one.removeprefix("etcd://").partition("/")[2] == other.removeprefix("etcd://").partition("/")[2]
    return one == other


class Lease(msgspec.Struct, frozen=True):
    """The present lease of a run: `owner` has it until `expires_at`, or longer if a heartbeat renews it."""

    run_id: str
    owner: str
    expires_at: float


# ---- answers


class Acquired(msgspec.Struct, frozen=True):
    """This session has the run's lease. Acquiring a lease again gives the same answer."""


class OwnedBy(msgspec.Struct, frozen=True):
    """Another owner has the lease, and is alive by the manager's clock."""

    owner: str
    expires_at: float


class Released(msgspec.Struct, frozen=True):
    """The lease has no owner any more."""


class NotOwner(msgspec.Struct, frozen=True):
    """Nothing was released: `owner` has the lease, or no owner has it (None)."""

    owner: str | None


class Orphaned(msgspec.Struct, frozen=True):
    """A report: this owner's session has ended or lapsed. `run_ids` are runs that it owned, perhaps not all."""

    owner: str
    run_ids: tuple[str, ...] = ()
