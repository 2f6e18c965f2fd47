"""Long-lived tasks that end with CancelledError: of their own, which is a failure as any other, or because the program cancels
them; and parts that live in a backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from relight import Relight, Retry, current_step, flow, step
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.model.lease import Orphaned
from relight.supervisor import Part, Supervisor
from tests.flows.world import until
from tests.servers.postgres import PostgresServer


class Cancelling(MemoryLeases):
    """Some calls end with a CancelledError that nobody has asked for, as those of a driver do that loses an answer."""

    heartbeats_to_cancel = watches_to_cancel = heartbeats = watches = 0

    async def heartbeat(self) -> bool:
        self.heartbeats += 1
        if self.heartbeats_to_cancel:
            self.heartbeats_to_cancel -= 1
            raise asyncio.CancelledError
        return await super().heartbeat()

    async def watch_orphans(self, supervisor: Supervisor | None = None) -> AsyncIterator[Orphaned]:
        self.watches += 1
        if self.watches_to_cancel:
            self.watches_to_cancel -= 1
            raise asyncio.CancelledError
        async for orphaned in super().watch_orphans(supervisor):
            yield orphaned


@pytest.mark.parametrize("part", ["heartbeat", "orphan-watch"])
async def test_a_cancellation_from_inside_does_not_end_a_part(part: str, caplog: pytest.LogCaptureFixture):
    """Without heartbeats the process would go on beyond its lease, and nothing would tell it that it had lost it."""
    store = MemoryStore(clock=SYSTEM_CLOCK)
    leases = Cancelling(store, clock=SYSTEM_CLOCK)
    if part == "orphan-watch":
        leases.watches_to_cancel = 1
    async with Relight(store=store, lease_manager=leases, recovery={"lease_ttl": "1.5s"}) as rl:
        if part == "heartbeat":
            leases.heartbeats_to_cancel = 1
        await until(lambda: leases.heartbeats >= 4 and not leases.heartbeats_to_cancel)
        await until(lambda: leases.watches >= (2 if part == "orphan-watch" else 1))
        await until(lambda: rl.health().ok)
        (found,) = [one for one in rl.health().parts if one.name == part]
        assert (found.failures, found.broken) == (1, False)
        assert "cancellation came from inside" in found.error
    assert f"[INTERNAL_ERROR] {part} broke" in caplog.text


async def test_a_part_that_the_program_has_cancelled_is_shown(caplog: pytest.LogCaptureFixture):
    """The program ends, probably. If it does not, nobody would know why a wake-up is late."""
    broken: list[str] = []
    kept = Supervisor(lambda part, error, seconds: None)
    kept.on_broken = lambda part: broken.append(part.name)

    async def rests(part: Part) -> None:
        await asyncio.Event().wait()

    wakes, drives = kept.keep("wakes", rests, essential=False), kept.keep("drives", rests)
    assert not kept.failing
    for part in (wakes, drives):
        assert part.task is not None
        part.task.cancel()
        await asyncio.wait([part.task])
    assert [part.health.broken for part in (wakes, drives)] == [True, True]
    assert "wakes fails: its task was cancelled by the program" in kept.failing
    assert broken == ["drives"], "only an essential part makes the process let go of its lease"
    assert "wakes" not in kept.trouble


async def test_what_listens_for_sessions_on_postgresql_is_kept_alive_as_all_else(postgres_server: PostgresServer):
    url = postgres_server.create_database()
    async with Relight(url) as rl:
        await until(lambda: {"listen-relight.news", "listen-relight.sessions"} <= {p.name for p in rl.health().parts})


async def test_an_attempt_after_its_back_off_may_have_been_in_flight(caplog: pytest.LogCaptureFixture):
    """Its beginning is not journaled: only the end of its back-off says that it may have begun."""
    caplog.set_level(logging.INFO, logger="relight")
    attempts: list[int] = []
    gate = asyncio.Event()

    @step(retry=Retry(attempts=5, delay="10ms"))
    async def tries() -> int:
        attempts.append(current_step().attempt)
        if current_step().attempt == 1:
            raise ValueError("first")
        await gate.wait()
        return 1

    @flow
    async def trying() -> int:
        return await tries()

    store = MemoryStore(clock=SYSTEM_CLOCK)
    dead = Relight(store=store, flows=[trying])
    await dead.open()
    await dead.start(trying.with_id("r"))
    await until(lambda: attempts == [1, 2])
    async with Relight(store=store, flows=[trying]) as rl:  # without leases, every other owner is dead
        await until(lambda: attempts == [1, 2, 2])
        assert rl.metrics.value("relight_steps_repeated_total") == 1
        gate.set()
        assert await (await rl.get("r")).result(timeout="60s") == 1
        assert "STEP_REPEATED" in [line.token for line in (await rl.explain("r")).events]
    await dead.close()
