"""A lease manager that crashes at a planned operation: see `crashpoints` for the whole.

Its operations share their numbers with those of the store, so that a plan can name any operation of a process. It runs
on the heartbeat thread. Heartbeats are numbered, too: with a ttl that is longer than the trial there is only the first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from relight.errors import LeasesUnavailableError
from relight.model.lease import Acquired, Lease, NotOwner, Orphaned, OwnedBy, Process, Released, Session
from relight.ports.leases import LeaseManager
from relight.supervisor import Supervisor
from relight.testing.crashing_store import CrashPoints

T = TypeVar("T")


class CrashingLeases:
    """Numbers the operations on another lease manager and crashes at the planned one; `stall` has no effect here."""

    def __init__(self, inner: LeaseManager, points: CrashPoints) -> None:
        self._inner = inner
        self.in_store = inner.in_store
        self.name = inner.name
        self._points = points

    async def _do(self, name: str, operation: Coroutine[Any, Any, T]) -> T:
        try:
            mode = self._points.arrive(name, LeasesUnavailableError)
        except BaseException:
            operation.close()
            raise
        result = await operation
        self._points.leave(mode, name, LeasesUnavailableError)
        return result

    def watch_orphans(self, supervisor: Supervisor | None = None) -> AsyncIterator[Orphaned]:
        return self._inner.watch_orphans(supervisor)

    # ---- the port, method by method, as in CrashingStore

    async def open(self, owner: str, process: Process, ttl_seconds: float) -> None:
        await self._do("leases.open", self._inner.open(owner, process, ttl_seconds))

    async def close(self) -> None:
        await self._do("leases.close", self._inner.close())

    def report(self, trouble: str) -> None:
        self._inner.report(trouble)

    async def heartbeat(self) -> bool:
        return await self._do("leases.heartbeat", self._inner.heartbeat())

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        return await self._do("leases.acquire_lease", self._inner.acquire_lease(run_ids))

    async def release_lease(self, run_id: str) -> Released | NotOwner:
        return await self._do("leases.release_lease", self._inner.release_lease(run_id))

    async def release_all(self) -> None:
        await self._do("leases.release_all", self._inner.release_all())

    async def get_lease(self, run_id: str) -> Lease | None:
        return await self._do("leases.get_lease", self._inner.get_lease(run_id))

    async def listed_since(self) -> float:
        return await self._do("leases.listed_since", self._inner.listed_since())

    async def forget_session(self, owner: str) -> None:
        await self._do("leases.forget_session", self._inner.forget_session(owner))

    async def list_orchestrators(self) -> list[Session]:
        return await self._do("leases.list_orchestrators", self._inner.list_orchestrators())

    async def end_session(self, owner: str) -> None:
        await self._do("leases.end_session", self._inner.end_session(owner))
