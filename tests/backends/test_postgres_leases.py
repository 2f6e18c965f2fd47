"""PostgresLeases does what every lease manager must do."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import asyncpg
import pytest

from relight.backends.postgres import PostgresLeases
from relight.errors import LeasesUnavailableError, StoreFormatError
from relight.model.lease import Acquired, OwnedBy, Process
from relight.model.run import News, Status
from relight.ports.store import Committed
from relight.testing import conformance
from relight.testing.conformance.build import START, FixedClock, appending, but, created, ended, ids, new_run, run_of
from relight.testing.conformance.lease_build import DEADLINE_SECONDS, SOME_PROCESS, pause
from tests.backends.conftest import open_emptied
from tests.servers.proxy import TcpProxy

PATIENT_TTL = 9.0


@pytest.fixture
async def store(postgres_server):
    store = await open_emptied(postgres_server, FixedClock())
    yield store
    await store.close()


@pytest.fixture
async def leases(store, postgres_server):
    opened = []

    async def leases(owner, ttl_seconds=60.0, process=SOME_PROCESS):
        manager = PostgresLeases(postgres_server.url(), schema=store.schema)
        opened.append(manager)
        await manager.open(owner, process, ttl_seconds)
        await manager.heartbeat()
        return manager

    yield leases
    for manager in opened:
        await manager.close()


@pytest.fixture
def make_runs(store):
    async def make_runs(n):
        runs = [new_run(f"run-{number}", status=Status.PENDING, owner=None) for number in range(n)]
        await created(store, *runs)
        return [run.id for run in runs]

    return make_runs


@pytest.fixture
def ttl():
    return 3.0  # a call may take a third of it: no machine is so busy


@pytest.fixture
def lapse():
    async def lapse(manager):
        fresh = True
        async with asyncio.timeout(DEADLINE_SECONDS):
            while fresh:
                await pause(0.02)
                with contextlib.suppress(LeasesUnavailableError):  # one round has a third of the ttl, and is repeated
                    sessions = await manager.list_orchestrators()
                    fresh = any(session.fresh for session in sessions if session.owner == manager._owner)

    return lapse


class TestLeases(conformance.LeaseSuite):
    @pytest.fixture
    def skewed(self, leases, monkeypatch):
        async def skewed(owner, skew_seconds):
            real = time.time
            monkeypatch.setattr(time, "time", lambda: real() + skew_seconds)
            return await leases(owner)

        return skewed


# ---- the owner column and the store


async def test_a_lease_is_the_owner_column(store, leases):
    """What the store writes there acquires or releases a lease. Acquiring a lease changes nothing else."""
    a, b = await leases("a#1"), await leases("b#1")
    started = new_run("started", owner="a#1")
    free = new_run("free", status=Status.WAITING, owner=None, wake_at=START + 9, reason="why")
    await created(store, started, free)
    assert isinstance((await b.acquire_lease(["started"]))["started"], OwnedBy)
    assert await b.acquire_lease(["free"]) == {"free": Acquired()}
    assert await store.get_run("free") == but(free, owner="b#1")
    assert await store.due(START + 9, 10) == []
    await ended(store, started)
    assert await a.get_lease("started") is None
    assert await a.acquire_lease(["started"]) == {}


async def test_what_is_released_is_due(store, leases):
    a = await leases("a#1")
    running, waiting = new_run("running", owner="a#1"), new_run("waiting", owner="a#1", status=Status.WAITING)
    timer = new_run("timer", owner="a#1", status=Status.WAITING, wake_at=START + 9)
    paused = new_run("paused", owner="a#1", status=Status.PAUSED)
    theirs, done = new_run("theirs", owner="b#1"), new_run("done", owner="a#1")
    await created(store, running, waiting, timer, paused, theirs, done)
    await ended(store, done)
    await a.release_lease("running")
    assert await store.get_run("running") == but(running, owner=None, status=Status.PENDING, wake_at=START)
    await a.release_lease("paused")
    assert await store.get_run("paused") == but(paused, owner=None, status=Status.PENDING, wake_at=START)
    await a.release_all()
    assert sorted(ids(await store.due(START, 10))) == ["paused", "running", "waiting"]
    assert sorted(ids(await store.due(START + 9, 10))) == ["paused", "running", "timer", "waiting"]
    assert await store.get_run("theirs") == theirs
    assert (await run_of(store, "done")).status is Status.COMPLETED
    assert await store.claim({"running": 1}, "b#1") == {"running": 2}


async def test_a_release_wakes_stores_that_look_for_due_runs(store, leases):
    a = await leases("a#1")
    await created(store, new_run("run", owner="a#1"))
    heard: asyncio.Queue[News] = asyncio.Queue()
    store.watch(heard.put_nowait)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await heard.get() is News.ANYTHING  # the store listens
        await a.release_lease("run")
        assert await heard.get() is News.DUE


async def test_the_epoch_decides_not_the_owner(store, leases):
    a, b = await leases("a#1"), await leases("b#1")
    run = new_run(owner="a#1")
    await created(store, run)
    await store.commit([appending(run, 1, b"2")])
    await a.release_lease("run")
    await b.acquire_lease(["run"])
    assert await store.commit([appending(run, 2, b"3")]) == [Committed(3)]


async def test_contenders_in_threads_of_their_own(store, make_runs, postgres_server):
    """Like heartbeat threads: each on its own loop, all at once."""
    run_ids = await make_runs(200)
    together = threading.Barrier(4)

    async def grab(name: str) -> list[str]:
        manager = PostgresLeases(postgres_server.url(), schema=store.schema)
        await manager.open(name, Process(), 60.0)
        await manager.heartbeat()
        together.wait(DEADLINE_SECONDS)
        mine = []
        for start in range(0, 200, 10):
            answers = await manager.acquire_lease(run_ids[start : start + 10])
            mine += [run_id for run_id, answer in answers.items() if answer == Acquired()]
        await manager.close()
        return mine

    grabbed = await asyncio.gather(*(asyncio.to_thread(asyncio.run, grab(f"{name}#1")) for name in "abcd"))
    assert sorted(run_id for mine in grabbed for run_id in mine) == sorted(run_ids)


async def test_a_session_that_began_while_the_contender_waited_for_a_lock_counts(store, leases, postgres_server):
    """A contender waits for the winner's transaction. After that it must see the winner's session, however new that
    is."""
    b = await leases("b#1")
    await created(store, new_run("run", owner=None, status=Status.PENDING))
    winner = await asyncpg.connect(postgres_server.url())
    async with asyncio.timeout(DEADLINE_SECONDS):
        transaction = winner.transaction()
        await transaction.start()
        await winner.execute(f"UPDATE {store.schema}.runs SET owner = 'a#1'")
        contender = asyncio.create_task(b.acquire_lease(["run"]))
        while not await winner.fetchval("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            await pause(0.005)
        await winner.execute(f"SELECT {store.schema}.heartbeat('a#1', '{{}}', 60)")
        await transaction.commit()
        answer = (await contender)["run"]
    assert isinstance(answer, OwnedBy)
    assert answer.owner == "a#1"
    await winner.close()


# ---- the server


async def test_leases_that_are_not_open_say_so(postgres_server):
    manager = PostgresLeases(postgres_server.url())
    with pytest.raises(LeasesUnavailableError, match="not open"):
        await manager.heartbeat()
    await manager.close()


async def test_leases_without_their_schema(postgres_server):
    manager = PostgresLeases(postgres_server.url(), schema="never_made")
    with pytest.raises(StoreFormatError, match="relight migrate"):
        await manager.open("a#1", Process(), 60.0)
    await manager.close()


async def test_a_server_that_is_gone_is_reported_and_comes_back(store, leases, postgres_server):
    a = await leases("a#1")
    postgres_server.stop()
    try:
        with pytest.raises(LeasesUnavailableError):
            await a.heartbeat()
    finally:
        postgres_server.start()
    await a.heartbeat()
    assert [session.owner for session in await a.list_orchestrators()] == ["a#1"]


async def test_a_server_that_does_not_answer_costs_a_third_of_the_ttl(store, postgres_server):
    with TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        url = f"postgresql://postgres@{proxy.address}/postgres"
        a = PostgresLeases(url, schema=store.schema)
        await a.open("a#1", Process(), PATIENT_TTL)
        await a.heartbeat()
        proxy.stall()
        began = time.monotonic()
        with pytest.raises(LeasesUnavailableError):
            await a.heartbeat()
        assert time.monotonic() - began < PATIENT_TTL
        proxy.heal()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                try:
                    await a.heartbeat()
                    break
                except LeasesUnavailableError:
                    await pause(0.01)
        await a.close()


async def test_closing_ends_the_watch(leases):
    a = await leases("a#1")

    async def watch() -> list[str]:
        return [orphaned.owner async for orphaned in a.watch_orphans()]

    watching = asyncio.create_task(watch())
    await pause(0.01)
    await a.close()
    assert await asyncio.wait_for(watching, DEADLINE_SECONDS) == []


async def test_a_quiet_watch_looks_once_per_two_thirds_of_the_ttl(leases, monkeypatch):
    waits = []
    a = await leases("a#1", 30.0)
    await leases("b#1", 30.0)

    def timeout(seconds):
        waits.append(seconds)
        return asyncio.timeout_at(0)  # the session lapses at once

    sessions, now = await a._look()
    with monkeypatch.context() as patch:
        patch.setattr("relight.backends.postgres.leases.asyncio.timeout", timeout)
        await a._wait(asyncio.Event(), sessions, now)
        await a._wait(asyncio.Event(), sessions, sessions[1].expires_at - 3)
        await a._wait(asyncio.Event(), sessions, sessions[1].expires_at)
    assert waits == [pytest.approx(20), pytest.approx(3), pytest.approx(0.01)]
