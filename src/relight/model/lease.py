"""Leases: who is alive, and who holds which run for how long. A hint about liveness; safety is the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class Process(msgspec.Struct, frozen=True):
    """One process of one machine, so that whoever runs on the same machine can tell whether it is dead."""

    machine: str = ""  # boot and pid namespace; "" when unknown
    pid: int = 0
    started: int = 0  # the system's own start time of that pid: pids are used again
    life: str = ""  # the session's token, for sessions of one process
    trouble: str = ""  # what it says is wrong with it: a part of it that keeps failing


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One life of an orchestrator, from its opening to its end: what its heartbeats keep alive.

    Times are those of the lease manager's clock, and `fresh` was judged by it: never compare them with this machine's.
    """

    owner: str  # "name#token": the name stays across restarts, the token is new for every life
    process: Process = Process()
    started_at: float
    heartbeat_at: float
    expires_at: float
    fresh: bool  # not lapsed when it was read

    @property
    def name(self) -> str:
        return name_of(self.owner)


def session_from(row: Sequence[Any]) -> Session:
    """From a stored row: owner, process as JSON, begun, last heartbeat, end, and what the manager's clock says now."""
    owner, process, started_at, heartbeat_at, expires_at, now = row
    return Session(
        owner=owner,
        process=msgspec.json.decode(process, type=Process),
        started_at=started_at,
        heartbeat_at=heartbeat_at,
        expires_at=expires_at,
        fresh=expires_at > now,
    )


def name_of(owner: str) -> str:
    """The orchestrator's name in an owner."""
    return owner.rpartition("#")[0]


def same_manager(one: str, other: str) -> bool:
    """Whether these names are of one lease manager. Of an etcd the place in it counts: its members come and go."""
    if one.startswith("etcd://") and other.startswith("etcd://"):
        return one.removeprefix("etcd://").partition("/")[2] == other.removeprefix("etcd://").partition("/")[2]
    return one == other


class Lease(msgspec.Struct, frozen=True):
    """A run's lease as it stands: held by `owner` until `expires_at`, unless a heartbeat moves that."""

    run_id: str
    owner: str
    expires_at: float


# ---- answers


class Acquired(msgspec.Struct, frozen=True):
    """The run's lease is ours. Asking again for what we hold gives the same answer."""


class OwnedBy(msgspec.Struct, frozen=True):
    """Somebody else holds it, and is alive as far as the manager's clock tells."""

    owner: str
    expires_at: float


class Released(msgspec.Struct, frozen=True):
    """Nobody holds it any more."""


class NotOwner(msgspec.Struct, frozen=True):
    """Nothing was released: the lease is `owner`'s, or nobody's."""

    owner: str | None


class Orphaned(msgspec.Struct, frozen=True):
    """Pushed: this owner's session has ended or lapsed. `run_ids` are those known to have been its, perhaps not all."""

    owner: str
    run_ids: tuple[str, ...] = ()
