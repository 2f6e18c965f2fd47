"""Disks that are full, or fail to sync or to read. Nothing is half-written, the error is clear, and the store works
afterwards."""

from __future__ import annotations

import asyncio

import apsw
import pytest

from relight.backends.sqlite import SqliteLeases, SqliteStore
from relight.errors import LeasesUnavailableError, StoreError, StoreUnavailableError
from relight.model.lease import Acquired, Process
from relight.model.run import Message, MessageKind, Status
from relight.ports.store import Committed
from relight.testing.conformance.build import (
    START,
    FixedClock,
    appending,
    changing,
    created,
    creation,
    entries_of,
    new_run,
    run_of,
)


class FaultyDisk(apsw.VFS):
    """The system's disk, until `faults` says which operation fails and how."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.faults: dict[str, int] = {}  # operation → SQLite's result code
        self.syncs = 0
        super().__init__(name, "")

    def xOpen(self, name, flags):  # noqa: N802 - SQLite's name
        self.check("open")
        return FaultyFile(self, name, flags)

    def check(self, operation: str) -> None:
        if operation in self.faults:
            raise apsw.exception_for(self.faults[operation])


class FaultyFile(apsw.VFSFile):
    def __init__(self, disk: FaultyDisk, name, flags) -> None:
        self.disk = disk
        super().__init__("", name, flags)

    def xSync(self, flags):  # noqa: N802 - SQLite's name
        self.disk.syncs += 1
        self.disk.check("sync")
        super().xSync(flags)

    def xWrite(self, data, offset):  # noqa: N802 - SQLite's name
        self.disk.check("write")
        super().xWrite(data, offset)

    def xRead(self, amount, offset):  # noqa: N802 - SQLite's name
        self.disk.check("read")
        return super().xRead(amount, offset)


@pytest.fixture
def disk(request):
    disk = FaultyDisk(f"faulty-{id(request)}")
    yield disk
    disk.unregister()


@pytest.fixture
async def store(tmp_path, disk):
    store = SqliteStore(tmp_path / "relight.db", clock=FixedClock(), vfs=disk.name)
    await store.open()
    yield store
    disk.faults.clear()
    await store.close()


FAULTS = {
    "disk full": ("write", apsw.SQLITE_FULL, "SQLITE_FULL"),
    "failing write": ("write", apsw.SQLITE_IOERR_WRITE, "SQLITE_IOERR_WRITE"),
    "failing sync": ("sync", apsw.SQLITE_IOERR_FSYNC, "SQLITE_IOERR_FSYNC"),
}


@pytest.mark.parametrize(("operation", "code", "name"), FAULTS.values(), ids=FAULTS)
async def test_a_commit_fails_as_a_whole_and_can_be_repeated(store, disk, operation, code, name):
    run = new_run()
    await created(store, run)
    ending = appending(run, 1, b"2", changes=[changing(run, Status.COMPLETED)], blobs={"d": b"x"})
    batch = [ending, creation(new_run("new"))]
    for _ in range(3):
        disk.faults[operation] = code
        with pytest.raises(StoreUnavailableError) as failure:
            await store.commit(batch)
        message = str(failure.value)
        assert str(store.path) in message
        assert name in message
        assert "\n" not in message
        disk.faults.clear()
        assert await store.get_run("run") == run
        assert await store.get_run("new") is None
        assert await store.get_blob("d") is None
        assert await entries_of(store, "run") == [b"created"]
    assert await store.commit(batch) == [Committed(2), Committed(1)]
    assert (await run_of(store, "run")).status is Status.COMPLETED
    assert await entries_of(store, "run") == [b"created", b"2"]


@pytest.mark.parametrize(("operation", "code", "name"), FAULTS.values(), ids=FAULTS)
async def test_every_other_write_fails_as_clearly(store, disk, operation, code, name):
    run = new_run()
    await created(store, run)
    writes = {
        "claim": lambda: store.claim({"run": 1}, "you"),
        "hold": lambda: store.hold({"run": 1}, changing(run, Status.PAUSED)),
        "post": lambda: store.post([Message(run_id="run", kind=MessageKind.SIGNAL, at=START)]),
        "put_blob": lambda: store.put_blob(b"data"),
        "checkpoint": lambda: store.checkpoint("run", 1, 1, b"state"),
    }
    disk.faults[operation] = code
    for call in writes.values():
        with pytest.raises(
            StoreUnavailableError, match=rf"{name}\]; nothing of this operation is known to be written$"
        ):
            await call()
    disk.faults.clear()
    assert await store.get_run("run") == run
    assert await store.inbox(["run"]) == []
    assert await store.get_checkpoint("run") is None
    assert await store.claim({"run": 1}, "you") == {"run": 2}


async def test_a_database_that_may_not_grow_is_full(store):
    """By SQLite's own limit. SQLite reports a full disk at another place than a write that fails."""
    run = new_run()
    await created(store, run)

    await store._write(lambda db: db.pragma("max_page_count", db.pragma("page_count")))
    with pytest.raises(StoreUnavailableError, match="full"):
        await store.commit([appending(run, 1, b"x" * 100_000)])
    await store._write(lambda db: db.pragma("max_page_count", 1_000_000))
    assert await store.commit([appending(run, 1, b"x" * 100_000)]) == [Committed(2)]


async def test_a_file_that_cannot_be_read_is_reported_and_read_again(store, disk):
    await created(store, *[new_run(f"run-{n}", input=b"x" * 4000) for n in range(50)])
    await store.close()
    again = SqliteStore(store.path, clock=FixedClock(), vfs=disk.name)
    await again.open()
    disk.faults["read"] = apsw.SQLITE_IOERR_READ
    with pytest.raises(StoreUnavailableError, match=r"SQLITE_IOERR_READ\]$"):  # nothing of what is written: it reads
        await again.get_run("run-7")
    with pytest.raises(StoreUnavailableError):
        await again.read([f"run-{n}" for n in range(50)])
    disk.faults.clear()
    assert await again.get_run("run-7") == new_run("run-7", input=b"x" * 4000)
    await again.close()


async def test_a_connection_that_cannot_be_made_again_is_tried_again(store, disk):
    await created(store, new_run())
    disk.faults |= {"sync": apsw.SQLITE_IOERR_FSYNC, "open": apsw.SQLITE_CANTOPEN}
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            await store.commit([creation(new_run("new"))])
    disk.faults.clear()
    assert await store.commit([creation(new_run("new"))]) == [Committed(1)]


async def test_opening_on_a_full_disk_can_be_tried_again(tmp_path, disk):
    path = tmp_path / "relight.db"
    disk.faults["write"] = apsw.SQLITE_FULL
    store = SqliteStore(path, clock=FixedClock(), vfs=disk.name)
    with pytest.raises(StoreError, match="SQLITE_FULL"):
        await store.open()
    disk.faults.clear()
    again = SqliteStore(path, clock=FixedClock(), vfs=disk.name)
    await again.open()
    await created(again, new_run())
    await again.close()


async def test_polling_a_broken_disk_disturbs_no_commit(store):
    loop, tried, times = asyncio.get_running_loop(), asyncio.Event(), []

    def poll(db: apsw.Connection) -> None:
        times.append(db)
        if len(times) == 5:
            loop.call_soon_threadsafe(tried.set)
        raise apsw.exception_for(apsw.SQLITE_IOERR_READ)

    store._writer.on_idle(poll, 0.001)
    await asyncio.wait_for(tried.wait(), 60)
    assert await store.commit([creation(new_run())]) == [Committed(1)]


async def test_each_commit_is_one_sync(store, disk):
    """A second sync would halve the speed of a single run. Without any sync, acknowledged commits could be lost."""
    runs = [new_run(f"run-{n}") for n in range(100)]
    await created(store, *runs)
    before = disk.syncs
    await store.commit([appending(run, 1, b"2", changes=[changing(run, Status.FAILED)]) for run in runs])
    assert disk.syncs == before + 1


async def test_leases_on_a_disk_that_fails_say_so_and_go_on_afterwards(store, disk):
    await created(store, new_run("free", owner=None, status=Status.PENDING))
    leases = SqliteLeases(store.path, vfs=disk.name)
    await leases.open("a#1", Process(), 60.0)
    await leases.heartbeat()
    for operation, code in (("write", apsw.SQLITE_FULL), ("sync", apsw.SQLITE_IOERR_FSYNC)):
        disk.faults[operation] = code
        with pytest.raises(LeasesUnavailableError) as failure:
            await leases.acquire_lease(["free"])
        assert "\n" not in str(failure.value)
        with pytest.raises(LeasesUnavailableError):
            await leases.heartbeat()
        disk.faults.clear()
        await leases.heartbeat()
        assert await leases.get_lease("free") is None, "what was refused is written all the same"
    assert await leases.acquire_lease(["free"]) == {"free": Acquired()}
    await leases.close()
