"""Runs that a process releases, or that come into its memory while it stops or has lost its lease."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from relight import Relight
from relight.clock import SYSTEM_CLOCK
from relight.errors import RelightError
from relight.model.run import Status
from relight.orchestrator import orchestrator
from relight.ports.store import Commit, CommitResult
from tests.flows.world import until
from tests.recovery.engines import TTL, Engines, Unreliable, Work, owner_is


async def test_what_was_given_back_is_not_driven_when_the_lease_is_regained(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
):
    """Another process has claimed the run meanwhile. If this process drove it, too, both would execute its step. The
    lease did not lapse, so this process has no reason to ask the store before the step begins."""
    work, claimed, go, back = Work(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    client = await engines.start("c", drive=False)
    a = await engines.start("a")
    store = engines.store
    claim_due, hold, commit = store.claim_due, store.hold, store.commit

    async def claimed_slowly(*args: Any) -> Any:
        rows = await claim_due(*args)
        if rows and not claimed.is_set():
            claimed.set()
            await go.wait()
        return rows

    async def given_back_slowly(*args: Any) -> None:
        await hold(*args)
        engines.leases["a"].cut = False
        await until(owner_is(client, "r", "b"))
        await until(lambda: work.begun == 1)
        await until(lambda: a.services.heartbeats.may_drive)
        back.set()

    async def as_slow_as_a_disk(commits: Sequence[Commit]) -> list[CommitResult]:
        await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=0.01)
        return await commit(commits)

    monkeypatch.setattr(store, "claim_due", claimed_slowly)
    monkeypatch.setattr(store, "hold", given_back_slowly)
    monkeypatch.setattr(store, "commit", as_slow_as_a_disk)
    await client.start(work.flow.with_id("r"))
    await claimed.wait()
    await engines.start("b")
    engines.leases["a"].cut = True
    await until(lambda: not a.services.heartbeats.may_drive)
    go.set()
    await back.wait()
    await a.idle()
    assert a.services.heartbeats.lapses == 0
    assert "r" not in a.orchestrator.live
    assert work.begun == 1


async def test_a_lease_that_is_lost_while_the_engine_closes_ends_the_grace_of_its_steps(engines: Engines):
    """Another process executes these steps as soon as the lease has lapsed."""
    work = Work()
    engines.leases["a"] = Unreliable(engines.store, clock=SYSTEM_CLOCK)
    a = Relight(
        store=engines.store,
        lease_manager=engines.leases["a"],
        orchestrator_id="a",
        recovery={"lease_ttl": f"{TTL}s", "check_interval": "10s"},
        shutdown_grace="60s",
    )
    await a.open()
    await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    await engines.start("b")
    engines.leases["a"].cut = True
    closing = asyncio.create_task(a.close())
    await until(lambda: work.begun == 2)
    assert work.cancelled == 1, "two processes execute the step"
    work.gate.set()
    await closing


@pytest.mark.parametrize("answers", [True, False])
async def test_a_run_that_is_created_while_its_engine_closes_leaves_no_caller_waiting(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    answers: bool,
):
    work, creating, go = Work(), asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(orchestrator, "ARRIVAL_SECONDS", 0.01)
    a = await engines.start("a")
    store = engines.store
    commit = store.commit

    async def slow(commits: Sequence[Commit]) -> list[CommitResult]:
        if any(one.create is not None for one in commits):
            creating.set()
            if not answers:
                await asyncio.Event().wait()
            await go.wait()
        return await commit(commits)

    monkeypatch.setattr(store, "commit", slow)
    running = asyncio.create_task(a.run(work.flow.with_id("r")))
    await creating.wait()
    closing = asyncio.create_task(engines.open.pop("a").close())
    await until(lambda: a.orchestrator.stopping)
    memory = a.orchestrator.memory
    if answers:
        await until(lambda: memory.stopped)  # closing does not wait for the creation any more
        go.set()
    with pytest.raises(RelightError):
        async with asyncio.timeout(60):
            await running
    await closing
    assert work.begun == 0
    if answers:
        assert store.runs["r"].owner is None
        assert store.runs["r"].status is Status.PENDING
