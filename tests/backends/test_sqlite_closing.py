"""Closing a store while another process has the write lock: closing is bounded, and the commits that waited are not
written."""

from __future__ import annotations

import asyncio

import apsw
import pytest

from relight import Relight
from relight.backends.sqlite import SqliteStore
from relight.errors import StoreUnavailableError
from relight.testing.conformance.build import FixedClock, appending, created, entries_of, new_run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "relight.db"


@pytest.fixture
def other_writer(path):
    """A transaction that is another process's for SQLite. It has the lock until the test ends."""
    db = apsw.Connection(str(path))
    yield db
    if db.in_transaction:
        db.execute("ROLLBACK")
    db.close()


async def test_closing_does_not_wait_for_another_writer(path, other_writer):
    store = SqliteStore(path, clock=FixedClock())
    await store.open()
    run = new_run()
    await created(store, run)
    other_writer.execute("BEGIN IMMEDIATE")
    waiting = [asyncio.ensure_future(store.commit([appending(run, 1, b"2")])) for _ in range(3)]
    await asyncio.sleep(0)  # now they are on their way to the thread
    async with asyncio.timeout(30):  # a commit may wait for two minutes
        await store.close()
    for one in waiting:
        with pytest.raises(StoreUnavailableError, match="nothing of this operation is known to be written"):
            await one
    other_writer.execute("ROLLBACK")
    again = SqliteStore(path, clock=FixedClock())
    await again.open()
    assert await entries_of(again, "run") == [b"created"]
    await again.close()


async def test_an_engine_is_closed_although_another_process_does_not_let_it_write(path, other_writer):
    rl = Relight(path, shutdown_grace="100ms")
    await rl.open()
    other_writer.execute("BEGIN IMMEDIATE")
    async with asyncio.timeout(60):  # well under the two minutes that a commit may wait
        await rl.close()
