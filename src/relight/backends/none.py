"""NoLeases: `leases: none`, for one orchestrator that has its store to itself.

Nobody else is there to compete, so everything is ours for the asking; that nobody else is there is the user's word, and
what a second orchestrator would do to it is undone by the epoch alone: each could claim the other's live runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from relight.model.lease import Acquired, Lease, NotOwner, Orphaned, OwnedBy, Process, Released, Session


class NoLeases:
    """Says yes to everything and keeps nothing."""

    name = "none"
    in_store = True

    def __init__(self) -> None:
        self._closed = asyncio.Event()

    async def open(self, owner: str, process: Process, ttl_seconds: float) -> None:
        self._closed = asyncio.Event()  # of the loop that opens it

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

    async def watch_orphans(self) -> AsyncIterator[Orphaned]:
        await self._closed.wait()
        nobody: tuple[Orphaned, ...] = ()
        for orphaned in nobody:
            yield orphaned
