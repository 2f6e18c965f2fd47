"""Tasks are cancelled and networks are cut under a PostgresStore: nothing hangs, no connection is left broken, news
comes back."""

from __future__ import annotations

import asyncio

import pytest

from relight.backends.postgres import pool
from relight.errors import StoreUnavailableError
from relight.model.run import News, Status
from relight.ports.store import Committed
from relight.testing.conformance.build import appending, changing, created, creation, entries_of, new_run
from relight.testing.conformance.lease_build import DEADLINE_SECONDS
from tests.backends.test_postgres_faults import locked, until, until_it_works, waiters
from tests.servers.proxy import TcpProxy

# ---- tasks that are cancelled, networks that are cut


async def test_a_cancelled_task_leaves_no_poisoned_connection(open_postgres, postgres_admin):
    store = await open_postgres()
    run = new_run()
    await created(store, run)
    async with locked(postgres_admin, store):
        committing = asyncio.create_task(store.commit([appending(run, 1, b"2")]))
        reading = asyncio.create_task(store.checkpoint("run", 1, 1, b"state"))
        await until(waiters(postgres_admin))
        for task in (committing, reading):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await store.get_run("run")
    # The server may still make the cancelled commit, or not. As always, repeating the commit settles it.
    assert await until_it_works(lambda: store.commit([appending(run, 1, b"2")])) == [Committed(2)]
    assert (await store.read_from("run", 1, 10)).entries[0].event == b"2"


async def test_a_network_that_is_silent(open_postgres, postgres_server, monkeypatch):
    """Nothing arrives and nothing is closed: only a deadline shows it."""
    monkeypatch.setattr(pool, "CLOSE_SECONDS", 0.1)
    with TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        store = await open_postgres(f"postgresql://postgres@{proxy.address}/postgres")
        # Set before they connect. A busy machine may be silent for as long, so the test repeats every call that has to
        # work.
        store._rest._command_seconds = store._committing[0]._command_seconds = 0.3
        run = new_run()
        await until_it_works(lambda: store.commit([creation(run)]))
        await until_it_works(lambda: store.get_run("run"))
        proxy.stall()
        async with asyncio.timeout(DEADLINE_SECONDS):
            results = await asyncio.gather(
                store.commit([appending(run, 1, b"2")]), store.get_run("run"), return_exceptions=True
            )
        assert [type(result) for result in results] == [StoreUnavailableError] * 2
        proxy.heal()
        assert await until_it_works(lambda: store.commit([appending(run, 1, b"2")])) == [Committed(2)]
        assert await until_it_works(lambda: entries_of(store, "run")) == [b"created", b"2"]
        await store.close()


async def test_a_network_that_is_cut(open_postgres, postgres_server):
    with TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        store = await open_postgres(f"postgresql://postgres@{proxy.address}/postgres")
        run = new_run()
        await created(store, run)
        proxy.cut()
        with pytest.raises(StoreUnavailableError):
            await store.commit([appending(run, 1, b"2")])
        proxy.heal()
        assert await store.commit([appending(run, 1, b"2")]) == [Committed(2)]
        await store.close()


async def test_a_listener_that_was_cut_off_says_that_anything_may_have_happened(open_postgres, postgres_admin):
    store, other = await open_postgres(), await open_postgres()
    heard: asyncio.Queue[News] = asyncio.Queue()
    store.watch(heard.put_nowait)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await heard.get() is News.ANYTHING
        listening = await postgres_admin.fetchval("SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
        await postgres_admin.fetchval("SELECT pg_terminate_backend($1)", listening)
        assert await heard.get() is News.ANYTHING
        await created(other, new_run(owner=None, status=Status.PENDING, wake_at=1.0))
        assert await heard.get() is News.DUE


# ---- PgBouncer's mode, without PgBouncer


async def test_without_anything_that_outlives_a_transaction(open_postgres):
    store = await open_postgres(options="?pgbouncer=true")
    heard: asyncio.Queue[News] = asyncio.Queue()
    store.watch(heard.put_nowait)
    run = new_run()
    await created(store, run)
    batch = [appending(run, 1, b"2"), appending(run, 2, b"3", changes=[changing(run, Status.WAITING, wake_at=1.0)])]
    assert await store.commit(batch) == [Committed(2), Committed(3)]
    assert await store.commit(batch) == [Committed(2), Committed(3)]
    assert [found.id for found in await store.due(1.0, 10)] == ["run"]
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await heard.get() is News.ANYTHING
    assert await store._pool.fetch("SELECT name FROM pg_prepared_statements WHERE name <> ''") == []
