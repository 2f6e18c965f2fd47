"""MemoryLeases does what every lease manager must do; NoLeases does what it says."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from relight.backends.memory import MemoryLeases, MemoryStore
from relight.backends.none import NoLeases
from relight.errors import LeasesUnavailableError
from relight.model.lease import Acquired, Released
from relight.model.run import News, Status
from relight.ports.leases import LeaseManager
from relight.testing import conformance
from relight.testing.clock import FakeClock
from relight.testing.conformance.build import START, but, created, ended, ids, new_run
from relight.testing.conformance.lease_build import DEADLINE_SECONDS, SOME_PROCESS, Watch, pause


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(clock):
    return MemoryStore(clock=clock)


@pytest.fixture
async def leases(store, clock):
    opened = []

    async def leases(owner, ttl_seconds=60.0, process=SOME_PROCESS):
        manager = MemoryLeases(store, clock)
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
    return 3.0


@pytest.fixture
def lapse(clock, ttl):
    async def lapse(manager):
        clock.advance(ttl)

    return lapse


class TestLeases(conformance.LeaseSuite):
    @pytest.fixture
    def clock(self, clock):
        return clock

    @pytest.fixture
    def elapse(self, clock):
        async def elapse(seconds):
            clock.advance(seconds)

        return elapse


# ---- the owner and the store


async def test_what_is_released_is_due(store, leases):
    a = await leases("a#1")
    running, waiting = new_run("running", owner="a#1"), new_run("waiting", owner="a#1", status=Status.WAITING)
    timer = new_run("timer", owner="a#1", status=Status.WAITING, wake_at=START + 9)
    paused, theirs = new_run("paused", owner="a#1", status=Status.PAUSED), new_run("theirs", owner="b#1")
    await created(store, running, waiting, timer, paused, theirs)
    await a.release_lease("running")
    assert await store.get_run("running") == but(running, owner=None, status=Status.PENDING, wake_at=START)
    await a.release_all()
    assert sorted(ids(await store.due(START, 10))) == ["paused", "running", "waiting"]
    assert sorted(ids(await store.due(START + 9, 10))) == ["paused", "running", "timer", "waiting"]
    assert await store.get_run("paused") == but(paused, owner=None, status=Status.PENDING, wake_at=START)
    assert await store.get_run("theirs") == theirs


async def test_acquiring_touches_nothing_but_the_owner(store, leases):
    a = await leases("a#1")
    free = new_run("free", status=Status.WAITING, owner=None, wake_at=START + 9, reason="why")
    await created(store, free)
    await a.acquire_lease(["free"])
    assert await store.get_run("free") == but(free, owner="a#1")


# ---- heartbeats come from threads of their own


@pytest.fixture
def hasty():
    """Make threads interrupt each other all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
async def test_contenders_in_threads_of_their_own(store, clock, make_runs):
    run_ids = await make_runs(2000)
    together = threading.Barrier(4)

    async def grab(owner: str) -> list[str]:
        manager = MemoryLeases(store, clock)
        await manager.open(owner, SOME_PROCESS, 60.0)
        await manager.heartbeat()
        together.wait(DEADLINE_SECONDS)
        answers = await manager.acquire_lease(run_ids)
        return [run_id for run_id, answer in answers.items() if answer == Acquired()]

    grabbed = await asyncio.gather(*(asyncio.to_thread(asyncio.run, grab(f"{name}#1")) for name in "abcd"))
    assert sorted(run_id for mine in grabbed for run_id in mine) == sorted(run_ids)


@pytest.mark.usefixtures("hasty")
async def test_heartbeat_threads_in_other_threads_and_an_engine_that_writes(store, clock):
    """Two threads acquire and release without a pause while runs are created and ended."""
    done = threading.Event()
    turns = {"a#1": 0, "b#1": 0}

    async def keep(owner: str) -> None:
        manager = MemoryLeases(store, clock)
        await manager.open(owner, SOME_PROCESS, 60.0)
        while not done.is_set():
            await manager.heartbeat()
            wanted = [f"free-{n}" for n in range(0, 200, 10)]
            await manager.acquire_lease(wanted)
            for run_id in wanted[::7]:
                await manager.release_lease(run_id)
            await manager.list_orchestrators()
            await manager.release_all()
            turns[owner] += 1

    heartbeat_threads = [asyncio.create_task(asyncio.to_thread(asyncio.run, keep(owner))) for owner in turns]
    try:
        for n in range(300):
            run = new_run(f"run-{n}")
            await created(store, new_run(f"free-{n}", owner=None, status=Status.PENDING), run)
            await ended(store, run)
            await pause(0)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while min(turns.values()) < 20 and not any(one.done() for one in heartbeat_threads):
                await pause(0.01)
    finally:
        done.set()
        await asyncio.gather(*heartbeat_threads)
    assert await store.owners() == []


async def test_a_release_in_another_thread_is_heard_here(store, clock, leases):
    """The engine hears it, whose runs are due now, and so does a heartbeat thread on this loop."""
    asyncio.get_running_loop().set_debug(True)  # refuses calls from other threads that would not wake this loop
    news = asyncio.Event()
    heard = []

    def changed(what: News) -> None:
        heard.append(asyncio.get_running_loop())
        news.set()

    store.watch(changed)
    store.watch(lambda what: None)
    await created(store, new_run(owner="b#1"))
    await pause(0)
    news.clear()
    heard.clear()
    watcher = await leases("a#1")
    watch = Watch(watcher)
    await pause(0.01)

    async def leave() -> None:
        manager = MemoryLeases(store, clock)
        await manager.open("b#1", SOME_PROCESS, 60.0)
        await manager.heartbeat()
        await manager.release_all()

    await asyncio.to_thread(asyncio.run, leave())
    await asyncio.wait_for(news.wait(), DEADLINE_SECONDS)
    assert heard == [asyncio.get_running_loop()]
    assert await watch.hears("b#1")
    await watch.close()


async def test_a_manager_that_is_not_open_says_so(store, clock):
    manager = MemoryLeases(store, clock)
    with pytest.raises(LeasesUnavailableError, match="not open"):
        await manager.heartbeat()


async def test_closing_ends_the_watch(leases):
    a = await leases("a#1")

    async def watch() -> list[str]:
        return [orphaned.owner async for orphaned in a.watch_orphans()]

    watching = asyncio.create_task(watch())
    await pause(0.01)
    await a.close()
    assert await asyncio.wait_for(watching, DEADLINE_SECONDS) == []


# ---- no manager keeps the leases


async def test_without_leases_each_lease_is_granted_and_no_session_is_known():
    manager: LeaseManager = NoLeases()
    await manager.open("a#1", SOME_PROCESS, 60.0)
    await manager.heartbeat()
    assert await manager.acquire_lease(["x", "y"]) == {"x": Acquired(), "y": Acquired()}
    assert await manager.get_lease("x") is None
    assert await manager.release_lease("x") == Released()
    assert await manager.list_orchestrators() == []
    await manager.end_session("b#1")
    await manager.release_all()
    watch = Watch(manager)
    assert not await watch.hears("b#1", seconds=0.01)
    await manager.close()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await watch.ends()
