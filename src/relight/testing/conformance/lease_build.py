"""Building blocks of the suites about leases: see `leases` for the fixtures that a backend defines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import pytest

from relight.model.lease import Acquired, Process, Session
from relight.ports.leases import LeaseManager
from relight.testing.conformance.build import Suite

DEADLINE_SECONDS = 60.0  # of every wait; only a failure takes so long
LONG_SECONDS = 60.0  # the ttl of sessions that must not lapse, however busy the machine is
ROUNDING_SECONDS = 1.5  # some servers count in whole seconds
SOME_PROCESS = Process()

MakeRuns = Callable[[int], Awaitable[list[str]]]
Lapse = Callable[[LeaseManager], Awaitable[None]]
Elapse = Callable[[float], Awaitable[None]]
Skewed = Callable[[str, float], Awaitable[LeaseManager]]


class OpenLeases(Protocol):
    """The fixture `leases`."""

    def __call__(
        self, owner: str, ttl_seconds: float = LONG_SECONDS, process: Process = SOME_PROCESS
    ) -> Awaitable[LeaseManager]: ...


async def pause(seconds: float) -> None:
    """Wait, while other tasks and the backing go on."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


class Watch:
    """What a manager's `watch_orphans` has yielded so far, collected by a task."""

    def __init__(self, manager: LeaseManager) -> None:
        self.owners: list[str] = []
        self._task = asyncio.create_task(self._gather(manager))

    async def _gather(self, manager: LeaseManager) -> None:
        async for orphaned in manager.watch_orphans():
            self.owners.append(orphaned.owner)

    async def hears(self, owner: str, seconds: float = DEADLINE_SECONDS) -> bool:
        """Whether the watch yields this owner in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while owner not in self.owners:
                    if self._task.done():
                        await self._task  # raises the task's error
                        pytest.fail("watch_orphans came to its end")
                    await pause(0.005)
        return owner in self.owners

    async def ends(self) -> None:
        """The watch must end once the manager is closed."""
        await self._task

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def end_until_heard(watch: Watch, manager: LeaseManager, owner: str, end: Callable[[], Awaitable[None]]) -> None:
    """Let this manager's session begin and end until the watch yields its owner.

    A watch that polls may miss a session that began and ended between two polls. So the session lives longer each time.
    """
    life_seconds = 0.05
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            await manager.heartbeat()
            await pause(life_seconds)
            await end()
            if await watch.hears(owner, seconds=1.5):
                return
            life_seconds *= 2


class StartWatch(Protocol):
    """The fixture `watch`."""

    def __call__(self, manager: LeaseManager) -> Awaitable[Watch]: ...


async def session_of(manager: LeaseManager, owner: str) -> Session | None:
    """The owner's session, if this manager lists it as fresh."""
    for session in await manager.list_orchestrators():
        if session.owner == owner and session.fresh:
            return session
    return None


async def owner_of(manager: LeaseManager, run_id: str) -> str | None:
    """The owner of a run's lease, as this manager sees it."""
    lease = await manager.get_lease(run_id)
    return None if lease is None else lease.owner


async def take(manager: LeaseManager, run_ids: list[str]) -> None:
    """Acquire runs that must be free."""
    assert await manager.acquire_lease(run_ids) == dict.fromkeys(run_ids, Acquired())


class LeaseBase(Suite):
    """The fixtures that have a default, and `watch`."""

    @pytest.fixture
    def elapse(self) -> Elapse:
        return pause

    @pytest.fixture
    def skewed(self) -> Skewed:
        pytest.skip("whoever shares this backing shares a clock")

    @pytest.fixture
    async def watch(self, leases: OpenLeases) -> AsyncIterator[StartWatch]:
        """Starts watches. A watch has begun for certain once it has yielded a session that began and ended since."""
        watches: list[Watch] = []

        async def start(manager: LeaseManager) -> Watch:
            watch = Watch(manager)
            watches.append(watch)
            name = f"probe-{len(watches)}#1"
            probe = await leases(name)
            await end_until_heard(watch, probe, name, lambda: probe.end_session(name))
            watch.owners.clear()
            return watch

        yield start
        for watch in watches:
            await watch.close()
