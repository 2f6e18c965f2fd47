"""SqliteLeases does what every lease manager must do."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import apsw
import pytest

from relight.backends.sqlite import SqliteLeases, SqliteStore
from relight.errors import LeasesUnavailableError
from relight.model.lease import Acquired, OwnedBy, Process, Session
from relight.model.run import Status
from relight.ports.store import Committed
from relight.testing import conformance
from relight.testing.conformance.build import START, FixedClock, appending, but, created, ended, ids, new_run, run_of
from relight.testing.conformance.lease_build import DEADLINE_SECONDS, SOME_PROCESS, Watch, pause


@pytest.fixture
async def store(tmp_path):
    store = SqliteStore(tmp_path / "relight.db", clock=FixedClock())
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def leases(store, monkeypatch):
    opened = []
    # Tests should not wait for a second. That a watch does not wait longer is tested in `test_how_long_a_watch_waits`.
    monkeypatch.setattr("relight.backends.sqlite.leases.LOOK_SECONDS", 0.05)

    async def leases(owner, ttl_seconds=60.0, process=SOME_PROCESS):
        manager = SqliteLeases(store.path)
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
    return 2.0  # long enough for all that a test does before a session lapses, also on a busy machine


@pytest.fixture
def lapse():
    async def lapse(manager):
        async with asyncio.timeout(DEADLINE_SECONDS):
            while manager._owner in [session.owner for session in await manager.list_orchestrators() if session.fresh]:
                await pause(0.02)

    return lapse


class TestLeases(conformance.LeaseSuite):
    pass


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


async def test_a_run_that_was_acquired_and_released_takes_its_owners_commits_by_the_epoch_alone(store, leases):
    """The store remembers its roots between commits. Writes of others to the owner column do not disturb that."""
    a, b = await leases("a#1"), await leases("b#1")
    run = new_run(owner="a#1")
    await created(store, run)
    await store.commit([appending(run, 1, b"2")])
    await a.release_lease("run")
    await b.acquire_lease(["run"])
    assert await store.commit([appending(run, 2, b"3")]) == [Committed(3)]


async def test_contenders_in_threads_of_their_own(store, leases, make_runs):
    """Like heartbeat threads: each on its own loop, all at once."""
    run_ids = await make_runs(300)
    together = threading.Barrier(4)

    async def grab(name: str) -> list[str]:
        manager = SqliteLeases(store.path)
        await manager.open(name, Process(), 60.0)
        await manager.heartbeat()
        together.wait(DEADLINE_SECONDS)
        mine = []
        for start in range(0, 300, 10):
            answers = await manager.acquire_lease(run_ids[start : start + 10])
            mine += [run_id for run_id, answer in answers.items() if answer == Acquired()]
        await manager.close()
        return mine

    grabbed = await asyncio.gather(*(asyncio.to_thread(asyncio.run, grab(f"{name}#1")) for name in "abcd"))
    assert sorted(run_id for mine in grabbed for run_id in mine) == sorted(run_ids)


async def test_how_long_a_watch_waits(store, monkeypatch):
    """It waits for at most a second, a third of the ttl, or until the first other session lapses. Its own session does
    not count."""
    waits = []

    def timeout(seconds):
        waits.append(seconds)
        return asyncio.timeout_at(0)  # the session lapses at once

    async def first_wait(ttl_seconds, sessions):
        manager = SqliteLeases(store.path)
        await manager.open("me#1", Process(), ttl_seconds)
        with monkeypatch.context() as patch:
            patch.setattr("relight.backends.sqlite.leases.asyncio.timeout", timeout)
            await manager._wait([session(owner, expires_at) for owner, expires_at in sessions], 100.0)
        await manager.close()
        return waits.pop()

    def session(owner, expires_at):
        return Session(owner=owner, started_at=0, heartbeat_at=0, expires_at=expires_at, fresh=expires_at > 100.0)

    assert await first_wait(30.0, []) == 1.0
    assert await first_wait(0.3, []) == pytest.approx(0.1)
    assert await first_wait(30.0, [("me#1", 100.1), ("a#1", 100.75), ("b#1", 130.0), ("dead#1", 50.0)]) == 0.75
    assert await first_wait(30.0, [("a#1", 130.0)]) == 1.0


async def test_a_session_that_came_and_lapsed_between_two_looks_is_heard_of(leases, lapse, monkeypatch):
    watcher = await leases("watcher#1")
    monkeypatch.setattr("relight.backends.sqlite.leases.LOOK_SECONDS", 0.5)
    watch = Watch(watcher)
    await pause(0.01)
    await lapse(await leases("brief#1", ttl_seconds=0.01))
    assert await watch.hears("brief#1")
    await watch.close()


# ---- the file


async def test_leases_that_are_not_open_say_so(store, tmp_path):
    leases = SqliteLeases(store.path)
    with pytest.raises(LeasesUnavailableError, match="not open"):
        await leases.heartbeat()
    await leases.close()


async def test_a_file_that_is_not_there(tmp_path):
    leases = SqliteLeases(tmp_path / "no.db")
    with pytest.raises(LeasesUnavailableError, match=r"no\.db"):
        await leases.open("a#1", Process(), 60.0)
    assert not (tmp_path / "no.db").exists()
    await leases.close()


async def test_a_busy_file_is_reported_and_passes(store, leases, monkeypatch):
    monkeypatch.setattr("relight.backends.sqlite.leases.BUSY_MILLISECONDS", 20)
    a = await leases("a#1")
    with contextlib.closing(apsw.Connection(str(store.path))) as db:
        db.execute("BEGIN IMMEDIATE")
        with pytest.raises(LeasesUnavailableError, match="BUSY"):
            await a.heartbeat()
        assert await a.list_orchestrators(), "reading waits for nobody"
        db.execute("ROLLBACK")
    await a.heartbeat()


async def test_closing_ends_the_watch(leases):
    a = await leases("a#1")

    async def watch() -> list[str]:
        return [orphaned.owner async for orphaned in a.watch_orphans()]

    watching = asyncio.create_task(watch())
    await pause(0.01)
    await a.close()
    assert await asyncio.wait_for(watching, DEADLINE_SECONDS) == []
