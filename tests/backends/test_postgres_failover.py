"""A primary and its standby, both real: the store finds the server that takes writes, and acknowledged commits outlive
a server."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from relight.backends.postgres import PostgresLeases, PostgresStore, connection, listen
from relight.errors import LeasesUnavailableError, StoreUnavailableError
from relight.model.lease import Process
from relight.model.run import Message, MessageKind, News, Status
from relight.ports.store import Committed, Fenced
from relight.testing.conformance.build import FixedClock, appending, commit_one, created, creation, entries_of, new_run
from relight.testing.conformance.lease_build import DEADLINE_SECONDS, pause
from tests.backends.test_postgres_faults import until, until_it_works, waiters
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import TcpProxy
from tests.servers.replica import Pair, set_option


@pytest.fixture
def pair(postgres_server, request):
    with Pair(postgres_server, synchronous=getattr(request, "param", "") != "asynchronous") as made:
        yield made


@pytest.fixture
def address(pair):
    """A store that is connected to the primary."""
    with TcpProxy("127.0.0.1", pair.primary.port) as proxy:
        yield proxy


@pytest.fixture
async def opened():
    """Opens stores by their urls, and closes them."""
    stores = []

    async def opened(url):
        store = PostgresStore(url, clock=FixedClock())
        stores.append(store)
        await store.open()
        return store

    yield opened
    await asyncio.gather(*(store.close() for store in stores))


def swapped(url):
    """The same servers, in the other order."""
    front, _, database = url.rpartition("/")
    start, _, addresses = front.rpartition("@")
    return f"{start}@{','.join(reversed(addresses.split(',')))}/{database}"


def at(server: PostgresServer | TcpProxy, url):
    """The URL of the same database, at this address only."""
    return f"postgresql://postgres@127.0.0.1:{server.port}/{url.rpartition('/')[2]}"


async def wait_for_the_standby(server: PostgresServer, tasks):
    """Wait until so many commits wait for the standby. None of them may be acknowledged before."""
    query = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"

    async def seen():
        assert not any(task.done() for task in tasks), f"acknowledged without the standby: {tasks}"
        return await asyncio.to_thread(server.sql, query) == str(len(tasks))

    await until(seen)


async def all_fail(tasks):
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} == {StoreUnavailableError}, results


# ---- finding the server that takes writes


@pytest.mark.soak_ci
async def test_the_primary_is_found_behind_its_standby(pair, opened):
    url = swapped(pair.create_database())
    store = await opened(url)
    run = new_run()
    await created(store, run)
    leases = PostgresLeases(url)
    await leases.open("a#1", Process(), 60.0)
    assert await leases.heartbeat()
    alone = at(pair.standby, url)
    with pytest.raises(StoreUnavailableError, match=rf"{pair.standby.port}.*takes no writes.*25006"):
        await opened(alone)
    with pytest.raises(LeasesUnavailableError, match="takes no writes"):
        await PostgresLeases(alone).open("a#1", Process(), 60.0)
    await asyncio.to_thread(pair.primary.kill)
    with pytest.raises(StoreUnavailableError) as raised:
        await opened(url)
    assert f"{pair.standby.port}: the server takes no writes" in str(raised.value)
    assert f"{pair.primary.port}: [Errno 111]" in str(raised.value)
    await asyncio.to_thread(pair.standby.promote)
    assert await until_it_works(lambda: commit_one(store, appending(run, 1, b"2"))) == Committed(2)
    assert not await leases.heartbeat(), "the session goes on"
    assert await entries_of(await opened(alone), "run") == [b"created", b"2"]
    await leases.close()


async def test_a_machine_that_is_switched_off_answers_nothing(opened, postgres_server, monkeypatch):
    """The store asks the next server in time."""
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 1.0)
    with TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        proxy.stall()
        url = postgres_server.create_database().replace("@", f"@{proxy.address},")
        await created(await opened(url), new_run())


async def test_a_primary_that_does_not_know_the_user_yet(opened, postgres_server, postgres_admin):
    """The same happens while a password is being changed. A store that was connected before asks again."""
    await postgres_admin.execute("DROP ROLE IF EXISTS known; CREATE ROLE known LOGIN SUPERUSER")
    store = await opened(postgres_server.create_database().replace("//postgres:", "//known:"))
    run = new_run()
    await created(store, run)
    await postgres_admin.execute("ALTER ROLE known NOLOGIN")
    await postgres_admin.fetchval(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'known'"
    )

    async def refuses():
        try:
            await store.commit([appending(run, 1, b"2")])
        except StoreUnavailableError as error:
            return "28000" in str(error)

    await until(refuses)
    await postgres_admin.execute("ALTER ROLE known LOGIN")
    assert await until_it_works(lambda: commit_one(store, appending(run, 1, b"2"))) == Committed(2)


@pytest.mark.soak_ci
async def test_a_standby_is_read_where_that_is_asked_for(pair, opened):
    url = pair.create_database()
    await created(await opened(url), new_run())
    store = await until_it_works(lambda: opened(f"{at(pair.standby, url)}?target_session_attrs=any"))  # soon there

    async def there():
        return await store.get_run("run") is not None

    await until(there)
    with pytest.raises(StoreUnavailableError, match="25006"):
        await store.claim({"run": 1}, "you")


# ---- commits that are under way


async def test_commits_go_on_after_a_failover(pair, opened):
    """A process tries each commit again until it works. Each entry is there exactly once, and no acknowledged entry is
    lost."""
    url = pair.create_database()
    store, other = await opened(url), await opened(url)
    runs = [new_run(f"run-{n}") for n in range(20)]
    await created(store, *runs)
    heard: asyncio.Queue[News] = asyncio.Queue()
    other.watch(heard.put_nowait)
    acknowledged = [1] * len(runs)
    refused = stopping = False

    async def drive(n):
        nonlocal refused
        while not stopping:
            batch = [appending(runs[n], acknowledged[n], b"%d" % acknowledged[n])]
            try:
                assert await store.commit(batch) == [Committed(acknowledged[n] + 1)]
            except StoreUnavailableError:
                refused = True
                await pause(0.01)
            else:
                acknowledged[n] += 1

    driving = [asyncio.create_task(drive(n)) for n in range(len(runs))]

    async def go_on():
        before = sum(acknowledged)

        async def more():
            assert not any(task.done() for task in driving), driving
            return sum(acknowledged) > before + 100

        await until(more)

    async def cannot():
        return refused

    await go_on()
    await asyncio.to_thread(pair.primary.kill)
    await until(cannot)
    await asyncio.to_thread(pair.standby.promote)
    await go_on()
    stopping = True
    await asyncio.gather(*driving)
    for run, last in zip(runs, acknowledged, strict=True):
        assert await entries_of(store, run.id) == [b"created", *(b"%d" % n for n in range(1, last))]
    # News is pushed again, from the new primary.
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert [await heard.get(), await heard.get()] == [News.ANYTHING] * 2
        await created(store, new_run("due", owner=None, status=Status.PENDING, wake_at=1.0))
        assert await heard.get() is News.DUE


async def test_a_commit_whose_answer_is_lost_with_the_primary(pair, address, opened):
    """The standby has the commit: so it was made, and is not made again."""
    database = pair.create_database().rpartition("/")[2]
    store = await opened(f"postgresql://postgres@{address.address},127.0.0.1:{pair.standby.port}/{database}")
    run = new_run()
    await created(store, run)
    admin = await asyncpg.connect(pair.primary.url(database))
    await admin.execute("BEGIN; SELECT FROM relight.heads FOR UPDATE")
    committing = asyncio.create_task(store.commit([appending(run, 1, b"2")]))
    await until(waiters(admin))
    address.stall()
    await admin.execute("COMMIT")
    await admin.close()

    async def replicated():  # otherwise the test would not notice
        return await asyncio.to_thread(pair.primary.sql, "select count(*) from relight.journal", database) == "2"

    await until(replicated)
    await asyncio.to_thread(pair.primary.kill)
    address.cut()
    await all_fail([committing])
    await asyncio.to_thread(pair.standby.promote)
    assert await store.commit([appending(run, 1, b"2")]) == [Committed(2)]
    assert await entries_of(store, "run") == [b"created", b"2"]


async def test_what_only_the_primary_has_is_not_acknowledged(pair, opened):
    """The standby is down. The primary dies and comes back, with commits on its disk that it never acknowledged."""
    url = pair.create_database()
    store = await opened(url)
    run, new = new_run("run"), new_run("new")
    signal = Message(run_id="run", kind=MessageKind.SIGNAL, name="go", dedup="1")
    await created(store, run)

    def give():
        calls = (store.commit([appending(run, 1, b"2")]), store.commit([creation(new)]), store.post([signal]))
        return [asyncio.create_task(call) for call in calls]

    await asyncio.to_thread(pair.standby.stop)
    tasks = give()
    await wait_for_the_standby(pair.primary, tasks)
    await asyncio.to_thread(pair.primary.kill)
    await all_fail(tasks)
    await asyncio.to_thread(pair.primary.start)
    assert pair.primary.sql("select count(*) from relight.runs", url.rpartition("/")[2]) == "2"
    tasks = give()
    await wait_for_the_standby(pair.primary, tasks)
    # Now the primary dies for good. The standby never got the commit, so the commit was never made.
    await asyncio.to_thread(pair.primary.kill)
    await all_fail(tasks)
    await asyncio.to_thread(pair.standby.start)
    await asyncio.to_thread(pair.standby.promote)
    assert await store.get_run("new") is None
    assert await asyncio.gather(*give()) == [[Committed(2)], [Committed(1)], [1]]
    assert await entries_of(store, "run") == [b"created", b"2"]
    assert [message.dedup for message in await store.inbox(["run"])] == ["1"]


@pytest.mark.soak_ci
async def test_a_wait_for_the_standby_that_an_operator_breaks_off(pair, opened):
    """The server then answers as if all were well, and only adds a warning."""
    store = await opened(pair.create_database())
    run = new_run()
    signal = Message(run_id="run", kind=MessageKind.SIGNAL, name="go", dedup="1")
    await created(store, run)

    def give():
        return [asyncio.create_task(call) for call in (store.commit([appending(run, 1, b"2")]), store.post([signal]))]

    await asyncio.to_thread(pair.standby.stop)
    tasks = give()
    await wait_for_the_standby(pair.primary, tasks)
    pair.primary.sql("select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'")
    await all_fail(tasks)
    tasks = give()
    await wait_for_the_standby(pair.primary, tasks)
    await asyncio.to_thread(pair.standby.start)
    assert await asyncio.gather(*tasks) == [[Committed(2)], [1]]
    assert await entries_of(store, "run") == [b"created", b"2"]


# ---- an address that another server has taken over, while the old one still answers


@pytest.mark.soak_ci
async def test_connections_to_a_server_that_was_made_read_only(pair, address, opened):
    """The server would never refuse a request of a connection that only reads or listens."""
    url = at(address, pair.create_database())
    store, reader = await opened(url), await opened(url)
    run = new_run()
    await created(store, run)
    assert await reader.get_run("run") == run
    heard: asyncio.Queue[News] = asyncio.Queue()
    reader.watch(heard.put_nowait)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await heard.get() is News.ANYTHING
        set_option(pair.primary, "default_transaction_read_only", "on")
        await asyncio.to_thread(pair.standby.promote)
        address.switch("127.0.0.1", pair.standby.port)
        assert await until_it_works(lambda: commit_one(store, appending(run, 1, b"2"))) == Committed(2)
        assert await until_it_works(lambda: entries_of(reader, "run")) == [b"created", b"2"]
        assert await heard.get() is News.ANYTHING
        await created(store, new_run("due", owner=None, status=Status.PENDING, wake_at=1.0))
        assert await heard.get() is News.DUE


async def test_a_listener_finds_out_by_itself(pair, address, opened, monkeypatch):
    """No other request goes to the store meanwhile."""
    monkeypatch.setattr(listen, "PROBE_SECONDS", 0.2)
    url = at(address, pair.create_database())
    store = await opened(url)
    heard: asyncio.Queue[News] = asyncio.Queue()
    store.watch(heard.put_nowait)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await heard.get() is News.ANYTHING
        set_option(pair.primary, "default_transaction_read_only", "on")
        await asyncio.to_thread(pair.standby.promote)
        address.switch("127.0.0.1", pair.standby.port)
        assert await heard.get() is News.ANYTHING
        await created(
            await opened(at(pair.standby, url)), new_run("due", owner=None, status=Status.PENDING, wake_at=1.0)
        )
        assert await heard.get() is News.DUE


@pytest.mark.soak_ci
async def test_connections_to_a_server_that_does_not_know_of_its_successor(pair, address, opened):
    """The old primary is alive, and answers reads. Its commits wait for a standby that does not follow it any more."""
    url = at(address, pair.create_database())
    store = await opened(url)
    store._committing[0]._command_seconds = 0.5  # set before the store connects; a busy machine may take as long
    run = new_run()
    await until_it_works(lambda: store.commit([creation(run)]))
    heard: asyncio.Queue[News] = asyncio.Queue()
    store.watch(heard.put_nowait)
    assert await store.get_run("run") == run
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await heard.get() is News.ANYTHING
        await asyncio.to_thread(pair.standby.promote)
        address.switch("127.0.0.1", pair.standby.port)
        assert await until_it_works(lambda: commit_one(store, appending(run, 1, b"2"))) == Committed(2)
        assert await entries_of(store, "run") == [b"created", b"2"]
        assert await heard.get() is News.ANYTHING
    assert await entries_of(await opened(at(pair.standby, url)), "run") == [b"created", b"2"]


# ---- without synchronous replication


@pytest.mark.parametrize("pair", ["asynchronous"], indirect=True)
async def test_acknowledged_commits_that_vanish(pair, opened):
    """The owner that made them is fenced. And the server assigns keys again that it had assigned before: they lead to
    other runs."""
    url = pair.create_database()
    store = await opened(url)
    kept, lost = new_run("kept"), new_run("lost")
    await asyncio.to_thread(pair.until_level)  # the standby has the schema
    await asyncio.to_thread(pair.standby.stop)
    await created(store, lost)
    assert await commit_one(store, appending(lost, 1, b"of lost")) == Committed(2)
    await asyncio.to_thread(pair.primary.kill)
    await asyncio.to_thread(pair.standby.start)
    await asyncio.to_thread(pair.standby.promote)
    other = await opened(url)
    runs = [new_run(f"other-{n}") for n in range(3)]
    await created(other, *runs)
    for run in runs:
        assert await commit_one(other, appending(run, 1, b"of others")) == Committed(2)
    assert await commit_one(store, appending(lost, 2, b"more of lost")) == Fenced(None, None)
    await created(store, kept)
    assert await entries_of(store, "kept") == [b"created"]
    for run in runs:
        assert await entries_of(store, run.id) == [b"created", b"of others"]
