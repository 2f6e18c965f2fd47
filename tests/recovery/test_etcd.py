"""Recovery with leases in etcd: etcd forgets lapsed sessions, and yet it is known how long their owners have been silent."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from relight import Handle, Relight
from relight.backends.memory import MemoryStore
from relight.clock import SYSTEM_CLOCK, SystemClock
from relight.model.journal import RunRecovered, decode_event
from tests.harness.cluster import until
from tests.recovery.engines import Work
from tests.servers.etcd import EtcdServer

TTL = 3.0
_prefixes = count(1)


class Behind(SystemClock):
    """A machine whose clock is an hour behind."""

    def now(self) -> float:
        return super().now() - 3600.0


class Engines:
    """Engines on one file, with their leases in etcd. They look for orphans once an hour, so they learn of deaths only
    by pushes."""

    def __init__(self, path: Path, leases: str) -> None:
        self._path = path
        self._leases = leases
        self.opened: list[Relight] = []

    async def open(self, name: str, recovery: dict[str, Any] | None = None, **options: Any) -> Relight:
        rl = Relight(
            self._path,
            leases=self._leases,
            orchestrator_id=name,
            recovery={"lease_ttl": TTL, "check_interval": "1h", **(recovery or {})},
            shutdown_grace="100ms",
            **options,
        )
        await rl.open()
        self.opened.append(rl)
        return rl


@pytest.fixture
async def engines(etcd_server: EtcdServer, tmp_path: Path) -> AsyncIterator[Engines]:
    engines = Engines(tmp_path / "relight.db", f"etcd://{etcd_server.endpoint}/recovery{next(_prefixes)}")
    yield engines
    for rl in engines.opened:
        await rl.close()


async def recovered(rl: Relight, run: Handle[Any]) -> float:
    """Wait until the run is claimed. Returns when that was."""

    async def found() -> float:
        entries = (await rl.services.store.read_from(run.id, 0, 100)).entries
        events = [decode_event(entry.event) for entry in entries]
        return next((event.at for event in events if isinstance(event, RunRecovered)), 0.0)

    at: float = await until(found, "the run to be recovered", within=60)
    return at


async def test_how_long_a_lapse_went_unnoticed_is_measured(engines: Engines):
    work = Work()
    a, b = await engines.open("a"), await engines.open("b")
    run = await a.start(work.flow)
    a.services.heartbeats.stop_now()
    await recovered(b, run)
    await until(lambda: b.metrics.value("relight_recovery_detection_seconds_count") == 1)
    assert 0 <= b.metrics.value("relight_recovery_detection_seconds_sum") < 60  # not since the run's start, or for ever
    work.gate.set()
    assert await (await b.get(run.id)).result(timeout="60s") == 7


async def test_stale_timeout_counts_from_the_last_heartbeat(engines: Engines):
    """It does not count from the run's start, which was an hour ago by the clock of its owner."""
    work, stale = Work(), 8.0
    b = await engines.open("b", {"stale_timeout": stale})
    a = await engines.open("a", clock=Behind())
    run = await a.start(work.flow)
    silent = time.time()
    a.services.heartbeats.stop_now()
    at = await recovered(b, run)
    assert stale - TTL < at - silent < stale + 60
    work.gate.set()
    assert await (await b.get(run.id)).result(timeout="60s") == 7


class Ahead(MemoryStore):
    """A store on a machine whose clock is an hour ahead of this one."""

    async def now(self) -> float:
        return SYSTEM_CLOCK.now() + 3600.0


async def test_times_of_sessions_are_told_by_the_stores_clock(etcd_server: EtcdServer):
    """etcd has no times. They are compared with the store's times: for `stale_timeout`, and to tell how long an owner
    is silent."""
    leases = f"etcd://{etcd_server.endpoint}/recovery{next(_prefixes)}"
    async with Relight(store=Ahead(clock=SYSTEM_CLOCK), leases=leases, recovery={"lease_ttl": TTL}) as rl:
        (session,) = await rl.services.heartbeats.call(lambda leases: leases.list_orchestrators())
        assert 0 < session.expires_at - rl.services.clock.now() < TTL + 1
