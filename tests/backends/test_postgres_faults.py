"""The server dies, restarts, refuses, stalls and interrupts: nothing is lost, nothing is written twice, nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib

import asyncpg
import pytest

from relight.backends.postgres import PostgresStore, connection, pool
from relight.backends.writing import NOTHING_KNOWN
from relight.errors import StoreUnavailableError
from relight.model.run import RunChange, RunFilter, Status
from relight.ports.store import Committed
from relight.supervisor import Supervisor
from relight.testing.conformance.build import (
    FixedClock,
    appending,
    changing,
    commit_one,
    created,
    creation,
    entries_of,
    new_run,
    run_of,
)
from relight.testing.conformance.lease_build import DEADLINE_SECONDS, pause
from tests.servers.proxy import TcpProxy


async def until(condition):
    """Wait for a condition of the server or the store."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await condition():
            await pause(0.01)


async def until_it_works(action):
    """Try again while the store says that it is unavailable, as its callers do."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            try:
                return await action()
            except StoreUnavailableError:
                await pause(0.01)


@contextlib.asynccontextmanager
async def locked(postgres_admin, store, table="heads"):
    """Another connection has locked all rows of a table."""
    await postgres_admin.execute("BEGIN")
    await postgres_admin.execute(f"SELECT FROM {store.schema}.{table} FOR UPDATE")
    try:
        yield
    finally:
        with contextlib.suppress(asyncpg.PostgresError, OSError):
            await postgres_admin.execute("ROLLBACK")


def waiters(postgres_admin):
    async def waiters():
        return await postgres_admin.fetchval(
            "SELECT array_agg(pid) FROM pg_stat_activity WHERE application_name = 'relight' AND wait_event_type = 'Lock'"
        )

    return waiters


# ---- connections that end


@pytest.mark.parametrize("kind", ["entry", "everything"])
async def test_a_backend_that_is_ended_in_the_middle_of_a_commit(open_postgres, postgres_admin, kind):
    store = await open_postgres()
    runs = [new_run(f"run-{n}") for n in range(5)]
    await created(store, *runs)
    parts = {} if kind == "entry" else {"blobs": {"digest": b"data"}}
    batch = [appending(run, 1, b"2", **parts) for run in runs]
    async with locked(postgres_admin, store):
        committing = asyncio.create_task(store.commit(batch))
        await until(waiters(postgres_admin))
        await postgres_admin.fetchval("SELECT pg_terminate_backend($1)", (await waiters(postgres_admin)())[0])
        with pytest.raises(StoreUnavailableError, match="terminating connection"):
            await committing
    assert await store.commit(batch) == [Committed(2)] * 5
    assert [await entries_of(store, run.id) for run in runs] == [[b"created", b"2"]] * 5


async def test_an_answer_that_is_lost(open_postgres, monkeypatch):
    """The commit was made, and the connection broke before the answer came. The store recognises the commit when it is
    repeated."""
    store = await open_postgres()
    runs = [new_run(f"run-{n}") for n in range(3)]
    real = asyncpg.Connection.fetch

    async def lose(self, statement, *arguments, **keywords):
        rows = await real(self, statement, *arguments, **keywords)
        if "_batch" in statement:
            raise ConnectionResetError("cut")
        return rows

    waiting = changing(runs[0], Status.WAITING, wake_at=9.0)
    for batch in (
        [creation(run) for run in runs],
        [appending(run, 1, b"2") for run in runs],
        [appending(runs[0], 2, b"3", changes=[waiting]), appending(runs[1], 2, b"3", b"4")],
    ):
        with monkeypatch.context() as patch:
            patch.setattr(asyncpg.Connection, "fetch", lose)
            with pytest.raises(StoreUnavailableError):
                await store.commit(batch)
        assert await store.commit(batch) == [Committed(commit.after + len(commit.entries)) for commit in batch]
        assert await store.commit(batch) == [Committed(commit.after + len(commit.entries)) for commit in batch]
    assert await entries_of(store, "run-0") == [b"created", b"2", b"3"]
    assert await entries_of(store, "run-1") == [b"created", b"2", b"3", b"4"]
    assert (await run_of(store, "run-0")).status is Status.WAITING


@pytest.mark.parametrize("how", ["restart", "kill"])
async def test_a_server_that_goes_away_while_commits_are_made(open_postgres, postgres_server, how):
    """A process tries each commit again until it works. Each entry is there exactly once, and no acknowledged entry is
    lost."""
    store = await open_postgres()
    runs = [new_run(f"run-{n}") for n in range(20)]
    await created(store, *runs)
    acknowledged = 1
    stopping = False

    async def drive():
        nonlocal acknowledged
        while not stopping:
            batch = [appending(run, acknowledged, b"%d" % acknowledged) for run in runs]
            assert await until_it_works(lambda: store.commit(batch)) == [Committed(acknowledged + 1)] * 20
            acknowledged += 1

    driving = asyncio.create_task(drive())

    async def goes_on():
        before = acknowledged

        async def more():
            assert not driving.done(), driving.result()
            return acknowledged >= before + 3

        await until(more)

    await goes_on()
    for _ in range(3):
        if how == "kill":
            await asyncio.to_thread(postgres_server.kill)
            await asyncio.to_thread(postgres_server.start)
        else:
            await asyncio.to_thread(postgres_server.restart)
        await goes_on()
    stopping = True
    await driving
    expected = [b"created", *(b"%d" % n for n in range(1, acknowledged))]
    assert [await until_it_works(lambda: entries_of(store, run.id)) for run in runs] == [expected] * 20


async def test_a_listener_that_gets_no_connection_reports_an_outage(
    open_postgres, postgres_server, postgres_schema, caplog
):
    """To its supervisor, which logs an outage once; it has no log of its own."""
    outages: list[tuple[int, str]] = []
    supervisor = Supervisor(lambda part, error, seconds: outages.append((part.outages, str(error))))
    store = await open_postgres()
    news = asyncio.Event()
    store.watch(lambda _: news.set(), supervisor)
    await news.wait()
    part = supervisor.parts[f"listen-{postgres_schema}.news"]
    postgres_server.stop()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(outages) < 4:
                await pause(0.01)
        assert part.health.failing
    finally:
        postgres_server.start()
    assert [number for number, _ in outages[:4]] == [1, 2, 3, 4]
    assert all("postgresql://" in why and "written" not in why for _, why in outages)
    async with asyncio.timeout(DEADLINE_SECONDS):
        while part.failing:
            await pause(0.01)
    assert part.failures == 0
    assert not [record for record in caplog.records if "listen" in record.getMessage()]


async def test_everything_says_so_while_the_server_is_away(open_postgres, postgres_server):
    store = await open_postgres()
    run = new_run()
    await created(store, run)
    postgres_server.stop()
    try:
        for call in (
            lambda: store.get_run("run"),
            lambda: store.list_runs(RunFilter()),
            lambda: store.read(["run"]),
            store.now,
        ):
            with pytest.raises(StoreUnavailableError) as read_failed:
                await call()
            assert NOTHING_KNOWN not in str(read_failed.value)  # a read writes nothing anyway
        for call in (
            lambda: store.claim({"run": 1}, "you"),
            lambda: store.commit([appending(run, 1, b"2")]),
            lambda: store.put_blob(b"blob"),
            lambda: store.hold({"run": 1}, RunChange(run_id="run", status=Status.PAUSED)),
            lambda: store.checkpoint("run", 1, 1, b"{}"),
        ):
            with pytest.raises(StoreUnavailableError) as write_failed:
                await call()
            assert str(write_failed.value).count(NOTHING_KNOWN) == 1
        other = PostgresStore(postgres_server.url(), clock=FixedClock())
        with pytest.raises(StoreUnavailableError):
            await other.open()
    finally:
        postgres_server.start()
    assert await store.get_run("run") == run


# ---- refusals that pass


async def test_a_server_that_has_become_read_only(open_postgres, postgres_admin):
    """After a failover the old primary takes no writes. The store drops its connections, so that it finds the new
    primary."""
    store = await open_postgres()
    run = new_run()
    await created(store, run)
    await store.get_run("run")
    await postgres_admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
    try:
        await postgres_admin.fetchval("SELECT pg_reload_conf()")

        async def refuses():
            try:
                await store.claim({"run": 99}, "you")
            except StoreUnavailableError as error:
                return "25006" in str(error)
            return False

        await until(refuses)
        assert store._rest._idle == []
        with pytest.raises(StoreUnavailableError, match="25006"):
            await store.commit([appending(run, 1, b"2")])
    finally:
        await postgres_admin.execute("SET default_transaction_read_only = off")
        await postgres_admin.execute("ALTER SYSTEM RESET default_transaction_read_only")
        await postgres_admin.fetchval("SELECT pg_reload_conf()")
    assert await until_it_works(lambda: commit_one(store, appending(run, 1, b"2"))) == Committed(2)


def test_the_server_that_takes_writes_is_looked_for():
    target = connection.parse("postgresql://u:secret@a:1,b:2/d?jit=on")
    assert (target.attributes, target.primary, target.name) == ("read-write", True, "postgresql://a:1,b:2/d")
    assert [(server.address, server.dsn) for server in target.servers] == [
        ("a:1", "postgresql://u:secret@a:1/d?jit=on"),
        ("b:2", "postgresql://u:secret@b:2/d?jit=on"),
    ]
    assert connection.parse("postgresql://a/d").primary
    assert not connection.parse("postgresql://a:1,b:2/d?target_session_attrs=any").primary
    assert connection.parse("postgresql://a/d?pgbouncer=true").attributes is None  # PgBouncer knows its servers itself


async def test_the_server_that_takes_writes_is_found(open_postgres, postgres_server):
    """The first address does not answer."""
    with TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        proxy.cut()
        store = await open_postgres(f"postgresql://postgres@{proxy.address},127.0.0.1:{postgres_server.port}/postgres")
        await created(store, new_run())


async def test_too_many_connections(open_postgres, postgres_admin, postgres_server, postgres_schema):
    await postgres_admin.execute("DROP ROLE IF EXISTS app")
    await postgres_admin.execute("CREATE ROLE app LOGIN SUPERUSER")
    store = await open_postgres(postgres_server.url(user="app"))
    run = new_run()
    await created(store, run)
    await postgres_admin.execute("ALTER ROLE app NOSUPERUSER CONNECTION LIMIT 1")
    await postgres_admin.execute(f"GRANT ALL ON SCHEMA {postgres_schema} TO app")
    with pytest.raises(StoreUnavailableError, match="53300"):
        await store.get_run("run")
    assert await commit_one(store, appending(run, 1, b"2")) == Committed(2), "the open connection goes on"
    await postgres_admin.execute("ALTER ROLE app SUPERUSER CONNECTION LIMIT -1")
    assert await store.get_run("run") == run


async def test_a_store_uses_few_connections(open_postgres, postgres_admin):
    store = await open_postgres()
    store.watch(lambda news: None)
    runs = [new_run(f"run-{n}") for n in range(30)]
    await created(store, *runs)
    await asyncio.gather(
        *(store.get_run(run.id) for run in runs),
        *(store.commit([appending(run, 1, b"2")]) for run in runs),
        *(store.now() for _ in range(30)),
    )
    assert (
        await postgres_admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'relight'") <= 5
    )


async def test_a_statement_that_is_cancelled_by_the_server(open_postgres, postgres_admin):
    run = new_run()
    await created(await open_postgres(), run)
    store = await open_postgres()
    async with locked(postgres_admin, store):
        committing = asyncio.create_task(store.commit([appending(run, 1, b"2")]))
        await until(waiters(postgres_admin))
        await postgres_admin.execute(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'relight' AND wait_event_type = 'Lock'"
        )
        with pytest.raises(StoreUnavailableError, match="57014"):
            await committing
    assert await until_it_works(lambda: store.commit([appending(run, 1, b"2")])) == [Committed(2)]


@pytest.mark.parametrize("code", ["53100", "53200", "58030", "57P03", "55P03"])
async def test_other_troubles_of_the_server(open_postgres, postgres_admin, code):
    """Disk full, out of memory, input/output error, starting up, a lock timeout."""
    store = await open_postgres()
    run = new_run()
    await created(store, run)
    await postgres_admin.execute(
        f"CREATE FUNCTION {store.schema}.fail() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN RAISE EXCEPTION 'trouble' USING ERRCODE = '{code}'; END $$;"
        f"CREATE TRIGGER fail BEFORE INSERT ON {store.schema}.journal EXECUTE FUNCTION {store.schema}.fail()"
    )
    with pytest.raises(StoreUnavailableError, match=rf"trouble \[{code}\]"):
        await store.commit([appending(run, 1, b"2")])
    await postgres_admin.execute(f"DROP TRIGGER fail ON {store.schema}.journal")
    assert await store.commit([appending(run, 1, b"2")]) == [Committed(2)]


async def test_a_bug_is_not_taken_for_trouble(open_postgres, postgres_admin):
    store = await open_postgres()
    run = new_run()
    await created(store, run)
    await postgres_admin.execute(f"DROP TABLE {store.schema}.journal")
    with pytest.raises(asyncpg.UndefinedTableError):
        await store.commit([appending(run, 1, b"2")])
    with pytest.raises(asyncpg.DataError):
        await store.claim({"run": "one"}, "you")
    assert await store.get_run("run") == run


# ---- deadlocks and serialization failures


async def test_a_deadlock_is_tried_again(open_postgres, postgres_admin):
    store = await open_postgres()
    a, b = new_run("a"), new_run("b")
    await created(store, a)
    await created(store, b)
    keys = await postgres_admin.fetch(f"SELECT key FROM {store.schema}.runs ORDER BY id")
    lock = f"SELECT FROM {store.schema}.heads WHERE run = $1 FOR UPDATE"
    await postgres_admin.execute(
        "SET deadlock_timeout = '1min'"
    )  # the store's session detects the deadlock, so the server ends that one
    await postgres_admin.execute("BEGIN")
    await postgres_admin.fetch(lock, keys[1][0])
    committing = asyncio.create_task(store.commit([appending(b, 1, b"2"), appending(a, 1, b"2")]))
    await until(waiters(postgres_admin))
    before = await postgres_admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'relight'")
    async with asyncio.timeout(DEADLINE_SECONDS):
        await postgres_admin.fetch(lock, keys[0][0])  # returns only after the server has ended the store's transaction
        await postgres_admin.execute("COMMIT")
        assert await committing == [Committed(2), Committed(2)]
    assert (
        await postgres_admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'relight'")
        == before
    )
    assert await entries_of(store, "a") == [b"created", b"2"]


@pytest.mark.parametrize(("failures", "passes"), [(pool.ATTEMPTS - 1, True), (pool.ATTEMPTS, False)])
async def test_serialization_failures_are_tried_again_a_few_times(open_postgres, postgres_admin, failures, passes):
    store = await open_postgres()
    run = new_run()
    await created(store, run)
    await postgres_admin.execute(
        f"CREATE SEQUENCE {store.schema}.failures;"
        f"CREATE FUNCTION {store.schema}.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF nextval('{store.schema}.failures') <= {failures} THEN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END IF;"
        f" RETURN NULL; END $$;"
        f"CREATE TRIGGER fail BEFORE INSERT ON {store.schema}.journal EXECUTE FUNCTION {store.schema}.fail()"
    )
    if passes:
        assert await store.commit([appending(run, 1, b"2")]) == [Committed(2)]
    else:
        with pytest.raises(StoreUnavailableError, match="40001"):
            await store.commit([appending(run, 1, b"2")])
        assert await store.commit([appending(run, 1, b"2")]) == [Committed(2)]
    assert await entries_of(store, "run") == [b"created", b"2"]


async def test_the_isolation_that_the_functions_count_on_is_not_the_databases(open_postgres, postgres_admin):
    await postgres_admin.execute("ALTER DATABASE postgres SET default_transaction_isolation = 'serializable'")
    await postgres_admin.execute("ALTER DATABASE postgres SET synchronous_commit = off")
    try:
        store = await open_postgres()
        settings = "SELECT current_setting('transaction_isolation'), current_setting('synchronous_commit')"
        assert tuple((await store._pool.fetch(settings))[0]) == ("read committed", "on")
        behind = await open_postgres(options="?pgbouncer=true")
        assert tuple((await behind._pool.fetch(settings))[0]) == ("read committed", "on")
    finally:
        await postgres_admin.execute("ALTER DATABASE postgres RESET ALL")
