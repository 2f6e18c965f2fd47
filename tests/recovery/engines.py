"""Engines on one store, each with a lease that can be cut off, and work that blocks until a test lets it go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from relight import Relight, flow, step
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.backends.sqlite.store import SqliteStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import LeasesUnavailableError
from relight.model.run import Status

TTL = 3.0  # an engine sends a heartbeat every second: no machine is so busy that its lease lapses


async def make_database(path: Path) -> Path:
    """An empty database, as `relight migrate` makes it: a client makes none."""
    store = SqliteStore(path, clock=SYSTEM_CLOCK)
    await store.open()
    await store.close()
    return path


class Unreliable(MemoryLeases):
    """A lease manager from which a test can cut its engine off."""

    cut = False

    async def heartbeat(self) -> bool:
        if self.cut:
            raise LeasesUnavailableError("cut off")
        return await super().heartbeat()


class Engines:
    """Engines on one store, by name. Each has a machine of its own, so that an engine knows of the others only by their
    leases."""

    def __init__(self) -> None:
        self.store = MemoryStore(clock=SYSTEM_CLOCK)
        self.leases: dict[str, Unreliable] = {}
        self.open: dict[str, Relight] = {}

    async def start(self, name: str, **config: Any) -> Relight:
        self.leases[name] = Unreliable(self.store, clock=SYSTEM_CLOCK)
        recovery = {"lease_ttl": f"{TTL}s", "check_interval": "10s", **config.pop("recovery", {})}
        rl = Relight(
            store=self.store,
            lease_manager=self.leases[name],
            orchestrator_id=name,
            recovery=recovery,
            **{"shutdown_grace": "100ms", **config},
        )
        await rl.open()
        self.open[name] = rl
        return rl

    async def end(self) -> None:
        for rl in self.open.values():
            await rl.close()


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    made = Engines()
    yield made
    await made.end()


class Work:
    """A run whose step blocks until the gate is opened. Counts how often the step began and was cancelled."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = 0
        self.cancelled = 0

        @step
        async def hard() -> int:
            self.begun += 1
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return 7

        @flow
        async def work() -> int:
            return await hard()

        self.flow = work


def owner_is(rl: Relight, run_id: str, name: str | None) -> Callable[[], Any]:
    async def look() -> bool:
        owner = (await rl.row(run_id)).owner
        return owner is None if name is None else (owner or "").startswith(f"{name}#")

    return look


def is_cancelled(rl: Relight) -> Callable[[], Any]:
    async def look() -> bool:
        return (await rl.row("r")).status is Status.CANCELLED

    return look
