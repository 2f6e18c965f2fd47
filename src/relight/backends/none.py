"""NoLeases: `leases: none`, for one orchestrator that has its store to itself.

There is no other orchestrator, so this one gets every lease that it requests. Relight does not check that: the user
promises it. With a second orchestrator only the epoch would protect the runs: each could claim the other's live runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from relight.model.lease import Acquired, Lease, NotOwner, Orphaned, OwnedBy, Process, Released, Session
from relight.supervisor import Supervisor


class NoLeases:
    """Grants every lease and stores nothing."""

    name = "none"
    in_store = True

    def __init__(self) -> None:
        self._closed = asyncio.Event()

    async def open(self, owner: str, process: Process, ttl_seconds: float) -> None:
        self._closed = asyncio.Event()  # an Event belongs to one loop: this is the loop that opens the leases

    async def close(self) -> None:
        self._closed.set()

    def report(self, trouble: str) -> None:
        pass

    async def heartbeat(self) -> bool:
        return False

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        return {run_id: Acquired() for run_id in run_ids}

    async def release_lease(self, run_id: str) -> Released | NotOwner:
        return Released()

    async def release_all(self) -> None:
        pass

    async def get_lease(self, run_id: str) -> Lease | None:
        return None

    async def list_orchestrators(self) -> list[Session]:
        return []

    async def listed_since(self) -> float:
        return 0.0

    async def end_session(self, owner: str) -> None:
        pass

    async def forget_session(self, owner: str) -> None:
        pass

    async def watch_orphans(self, supervisor: Supervisor | None = None) -> AsyncIterator[Orphaned]:
        await self._closed.wait()
        none: tuple[Orphaned, ...] = ()
        for orphaned in none:
            yield orphaned
