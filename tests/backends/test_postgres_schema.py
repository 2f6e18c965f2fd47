"""The schema of a PostgresStore: made, upgraded, refused. And the plans of the queries that are repeated all the
time."""

from __future__ import annotations

import asyncio
import sys

import asyncpg
import pytest

from relight.backends.postgres import PostgresStore, schema
from relight.backends.postgres.connection import connect, parse
from relight.backends.postgres.queries import migrations, queries
from relight.errors import ConfigError, StoreFormatError, StoreUnavailableError
from relight.model.run import Run, Status
from relight.ports.store import Commit, Extras
from relight.testing.conformance.build import START, FixedClock, appending, commit_one, created, ended, new_run, run_of

OPEN = """
import asyncio, sys
from relight.backends.postgres import PostgresStore
from relight.clock import SYSTEM_CLOCK

async def main():
    store = PostgresStore(sys.argv[1], clock=SYSTEM_CLOCK, schema=sys.argv[2])
    print("ready", flush=True)
    sys.stdin.readline()
    await store.open()
    assert await store.next_due() is None
    await store.close()

asyncio.run(main())
"""


# ---- the schema


async def test_ten_processes_that_start_at_once_migrate_once(postgres_server, postgres_schema, postgres_admin):
    command = [sys.executable, "-c", OPEN, postgres_server.url(), postgres_schema]
    pipe = asyncio.subprocess.PIPE
    children = [await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe) for _ in range(10)]
    for child in children:
        assert child.stdout is not None
        assert child.stderr is not None
        assert await child.stdout.readline() == b"ready\n", await child.stderr.read()
    outcomes = await asyncio.gather(*(child.communicate(b"go\n") for child in children))
    assert [(error, child.returncode) for child, (_, error) in zip(children, outcomes, strict=True)] == [(b"", 0)] * 10
    versions = await postgres_admin.fetch(f"SELECT version FROM {postgres_schema}.relight_schema ORDER BY version")
    assert [row[0] for row in versions] == list(range(1, len(migrations(postgres_schema)) + 1))


async def test_a_schema_that_is_missing_or_old_is_named_with_what_to_do(
    postgres_server, postgres_schema, postgres_admin
):
    store = PostgresStore(postgres_server.url(), clock=FixedClock(), schema=postgres_schema, migrate=False)
    with pytest.raises(StoreFormatError, match=rf"{postgres_schema} is missing: run `relight migrate`"):
        await store.open()
    await store.migrate()
    await store.open()
    await store.close()
    newest = len(migrations(postgres_schema))
    await postgres_admin.execute(f"DELETE FROM {postgres_schema}.relight_schema WHERE version = $1", newest)
    with pytest.raises(StoreFormatError, match=rf"has version {newest - 1} of {newest}: run `relight migrate`"):
        await store.open()
    with pytest.raises(StoreUnavailableError, match="not open"):
        await store.next_due()


async def test_a_newer_schema_is_refused(open_postgres, postgres_schema, postgres_admin):
    await open_postgres()
    await postgres_admin.execute(f"INSERT INTO {postgres_schema}.relight_schema VALUES (99, now())")
    with pytest.raises(StoreFormatError, match=r"version 99.*upgrade Relight"):
        await open_postgres()


async def test_another_programs_schema_is_refused_and_left_alone(open_postgres, postgres_schema, postgres_admin):
    await postgres_admin.execute(f"CREATE SCHEMA {postgres_schema}; CREATE TABLE {postgres_schema}.orders (id integer)")
    with pytest.raises(StoreFormatError, match="another program's"):
        await open_postgres()
    tables = await postgres_admin.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1", postgres_schema)
    assert [row[0] for row in tables] == ["orders"]


async def test_an_empty_schema_that_exists_already_is_used(open_postgres, postgres_schema, postgres_admin):
    await postgres_admin.execute(f"CREATE SCHEMA {postgres_schema}")
    await open_postgres()


async def test_a_user_that_may_not_create_it_is_told(postgres_server, postgres_schema, postgres_admin):
    await postgres_admin.execute(
        "DROP ROLE IF EXISTS reader; CREATE ROLE reader LOGIN; REVOKE CREATE ON DATABASE postgres FROM PUBLIC"
    )
    store = PostgresStore(postgres_server.url(user="reader"), clock=FixedClock(), schema=postgres_schema)
    with pytest.raises(StoreFormatError, match="relight migrate"):
        await store.open()


async def test_a_database_that_does_not_exist(postgres_server):
    store = PostgresStore(postgres_server.url("nowhere"), clock=FixedClock())
    with pytest.raises(StoreFormatError, match='"nowhere" does not exist'):
        await store.open()


@pytest.mark.parametrize("schema", ["", "Relight", "9lives", "a-b", 'x"; drop table y; --', "a" * 32])
def test_names_that_no_schema_may_have(schema):
    with pytest.raises(ConfigError, match="schema"):
        PostgresStore("postgresql://localhost/x", clock=FixedClock(), schema=schema)


@pytest.mark.parametrize("url", ["mysql://localhost/x", "postgresql://localhost/x?pgbouncer=perhaps"])
def test_urls_that_are_none(url):
    with pytest.raises(ConfigError, match="store"):
        PostgresStore(url, clock=FixedClock())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("work_mem=much", 'invalid value for parameter "work_mem"'),
        ("options=-c%20pool_size=5", 'unrecognized configuration parameter "pool_size"'),
        ("options=-c%20shared_buffers=1MB", "cannot be changed"),
        ("sslmode=perhaps", "sslmode"),
    ],
)
async def test_a_setting_that_the_server_refuses(postgres_server, options, problem):
    store = PostgresStore(f"{postgres_server.url()}?{options}", clock=FixedClock())
    with pytest.raises(ConfigError, match=problem):
        await store.open()


async def test_settings_of_a_session_and_the_time_to_connect(postgres_server):
    options = "connect_timeout=7&search_path=public&options=-c%20geqo=off&my.own=1&application_name=mine"
    target = parse(f"{postgres_server.url()}?{options}")
    assert target.connect_seconds == 7
    made = await connect(target)
    try:
        names = ("search_path", "geqo", "my.own", "application_name", "jit")
        assert [await made.fetchval(f"SHOW {name}") for name in names] == ["public", "off", "1", "mine", "off"]
    finally:
        await made.close()


async def test_two_schemas_of_one_database_know_nothing_of_each_other(open_postgres, postgres_server, postgres_schema):
    one = await open_postgres()
    two = PostgresStore(postgres_server.url(), clock=FixedClock(), schema=f"{postgres_schema}_b")
    await two.open()
    await created(one, new_run())
    assert await two.get_run("run") is None
    await created(two, new_run())
    await ended(two, new_run())
    assert (await run_of(one, "run")).status is Status.RUNNING
    await two.close()


# ---- plans


async def test_the_roots_of_an_owner_are_read_from_its_own_index_alone(open_postgres, postgres_admin):
    store = await open_postgres()
    runs = [
        new_run(f"{owner}-{n}", owner=f"owner-{owner}", created_at=START + n)
        for owner in range(100)
        for n in range(100)
    ]
    for start in range(0, len(runs), 1000):
        await created(store, *runs[start : start + 1000])
    await postgres_admin.execute(f"ANALYZE {store.schema}.runs")
    sql = queries(store.schema)
    await postgres_admin.execute("SET plan_cache_mode = force_generic_plan")
    plan = await explain(postgres_admin, sql["active_roots"], "'owner-7', '', 10")
    assert "runs_active" in plan
    assert "rows=10.00" in plan or "rows=10 " in plan
    assert "Rows Removed" not in plan
    plan = await explain(postgres_admin, sql["owners"], "")
    assert "Seq Scan" not in plan
    assert len(await store.owners()) == 100
    buffers = [int(line.split("hit=")[1].split()[0]) for line in plan.splitlines() if "hit=" in line]
    assert max(buffers) < 1000, plan


async def explain(postgres_admin, statement, arguments):
    await postgres_admin.execute(f"PREPARE it AS {statement}")
    rows = await postgres_admin.fetch(f"EXPLAIN (ANALYZE, BUFFERS) EXECUTE it{f'({arguments})' if arguments else ''}")
    await postgres_admin.execute("DEALLOCATE it")
    return "\n".join(row[0] for row in rows)


@pytest.mark.parametrize(
    ("name", "arguments", "index"),
    [
        ("list_runs", "'infinity', '', '-infinity', false, 10", "runs_by_creation"),
        ("list_runs_by_status", "'infinity', '', '-infinity', false, 10, '{failed,completed}'", "runs_by_status"),
        ("list_runs_by_flow", "'infinity', '', '-infinity', false, 10, '{failed}', 'checkout'", "runs_by_flow"),
        ("due", "5, 10", "runs_due"),
        ("next_due", "", "runs_due"),
        ("held", "'user', '{checkout}', 10", "runs_held"),
        ("messages_after", "0, 10", "inbox_news"),
    ],
)
async def test_what_is_asked_for_over_and_over_reads_an_index(open_postgres, postgres_admin, name, arguments, index):
    store = await open_postgres()
    for first, last, status, hold, flow in (
        (1, 20_000, "completed", None, "checkout"),
        (20_001, 20_500, "paused", "definition", "other"),
        (20_501, 20_510, "failed", None, "checkout"),
    ):
        await postgres_admin.execute(
            f"INSERT INTO {store.schema}.runs SELECT n, 'run-' || n, NULL, NULL, $5, '', $3, NULL, 1, NULL, $4,"
            " '', n, n, '', '', NULL, '', NULL FROM generate_series($1::integer, $2::integer) AS n",
            first,
            last,
            status,
            hold,
            flow,
        )
    await postgres_admin.execute(f"ANALYZE {store.schema}.runs")
    await postgres_admin.execute("SET plan_cache_mode = force_generic_plan")
    plan = await explain(postgres_admin, queries(store.schema)[name], arguments)
    assert index in plan, plan
    assert "Seq Scan on runs" not in plan, plan


async def test_most_commits_write_no_index_of_heads(open_postgres, postgres_admin):
    store = await open_postgres()
    run = new_run()
    await created(store, run)
    for sequence in range(1, 30):
        await commit_one(store, appending(run, sequence, b"x"))
    await store._committing[0].fetch("SELECT pg_stat_force_next_flush()")
    row = await postgres_admin.fetchrow(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'heads' AND schemaname = $1",
        store.schema,
    )
    assert row[0] == 29
    assert row[1] == row[0]


def test_the_model_fits_the_rows():
    """A change that adds a field to Run or Commit must also add it to the columns here."""
    assert len(Run.__struct_fields__) == 19  # `newer` is made when a row is read
    assert len(Commit.__struct_fields__) == 9
    assert len(Extras.__struct_fields__) == 10


async def test_a_migration_that_has_to_wait_for_a_table_lets_others_go_first(
    postgres_server, postgres_schema, postgres_admin, monkeypatch
):
    """A statement that waits for a lock makes later statements wait, too. If a transaction lasts for minutes, all
    orchestrators would stop for as long."""
    monkeypatch.setattr(schema, "LOCK_SECONDS", 0.2)
    store = PostgresStore(postgres_server.url(), clock=FixedClock(), schema=postgres_schema)
    await store.migrate()
    table = f"{postgres_schema}.relight_schema"
    next_one = f"ALTER TABLE {table} ADD COLUMN another integer"
    monkeypatch.setattr(schema, "migrations", lambda name: (*migrations(name), next_one))
    newest = len(migrations(postgres_schema)) + 1
    other = await asyncpg.connect(postgres_server.url())
    try:
        async with other.transaction():
            await other.execute(f"LOCK TABLE {table} IN ACCESS SHARE MODE")
            migrating = asyncio.create_task(store.migrate())
            for _ in range(3):  # these would wait for the end of the transaction if the migration did
                async with asyncio.timeout(20):
                    await postgres_admin.fetchval(f"SELECT count(*) FROM {table}")
                await asyncio.sleep(0.1)
            assert not migrating.done()
        await migrating
    finally:
        await other.close()
    assert await postgres_admin.fetchval(f"SELECT max(version) FROM {table}") == newest
