"""Which indexes answer the queries: a query that an orchestrator repeats must not cost more because of old runs."""

from __future__ import annotations

from typing import Any

import apsw
import apsw.ext
import pytest

from relight.backends.sqlite import SqliteStore
from relight.backends.sqlite.queries import MAX_STATEMENT_CHARS, SQL, many, most
from relight.model.run import Hold, Message, MessageKind, RunFilter, Status
from relight.testing.conformance.build import START, FixedClock, appending, changing, created, new_run


@pytest.fixture
async def store(tmp_path):
    store = SqliteStore(tmp_path / "relight.db", clock=FixedClock())
    await store.open()
    yield store
    await store.close()


def test_statements_for_many_rows_stay_within_the_statement_cache():
    repeated = [name for name, sql in SQL.items() if "VALUES (?" in sql]
    assert {"append_entries", "insert_runs", "change_runs", "put_messages"} <= set(repeated)
    for name in repeated:
        assert most(name) >= 256
        assert len(many(name, most(name))) <= MAX_STATEMENT_CHARS


async def test_as_many_statements_are_cached_as_are_used(store):
    """Preparing a statement for 500 rows takes longer than running it."""

    async def use(turn: str) -> None:
        for size in (1, 3, 500, 700):
            runs = [new_run(f"run-{turn}-{size}-{n}") for n in range(size)]
            await created(store, *runs)
            await store.commit([appending(run, 1, b"end", changes=[changing(run, Status.FAILED)]) for run in runs])

    await use("first")
    before = await store._write(lambda db: db.cache_stats())
    await use("second")
    after = await store._write(lambda db: db.cache_stats())
    assert after["misses"] == before["misses"]
    assert after["too_big"] == before["too_big"] == 0


async def plan(store: SqliteStore, sql: str) -> list[str]:
    def explain(db: apsw.Connection) -> list[str]:
        bindings = [None] * apsw.ext.query_info(db, sql).bindings_count
        rows: list[Any] = db.execute("EXPLAIN QUERY PLAN " + sql, bindings).fetchall()
        return [row[3] for row in rows]

    return await store._read(explain)


# Tables are searched, never scanned. A query reads from end to end only what the statement itself brings (the ids that
# it was given, the rows that it writes, the owners that it has found so far) and the sessions, which are few.
BROUGHT_ALONG = (
    "SCAN wanted VIRTUAL TABLE",
    "SCAN json_each VIRTUAL TABLE",
    "SCAN v",
    "SCAN each",
    "SCAN there",
    "SCAN CONSTANT ROW",
)
FEW = "SCAN orchestrators"


@pytest.mark.parametrize("name", sorted(SQL))
async def test_no_query_goes_through_a_table(store, name):
    for line in await plan(store, SQL[name]):
        assert not line.startswith("SCAN") or line.startswith(BROUGHT_ALONG) or line == FEW, f"{name}: {line}"
        assert "AUTOMATIC" not in line, f"{name}: {line}"


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("active_roots", "SEARCH runs USING INDEX runs_owned (owner=? AND (created_at,id)>(?,?))"),
        ("owners", "SEARCH r USING INDEX runs_owned (owner>?)"),
        ("release_all", "SEARCH runs USING INDEX runs_owned (owner=?)"),
        ("read_log", "SEARCH l USING INDEX logs_order (run=? AND stream=? AND id>?)"),
        ("cut_items", "SEARCH i USING PRIMARY KEY (run_id=? AND key=? AND index>?)"),
        ("due", "SEARCH runs USING INDEX runs_due (wake_at>? AND wake_at<?)"),
        ("next_due", "SEARCH runs USING INDEX runs_due (wake_at>?)"),
        ("held", "SEARCH runs USING INDEX runs_held (hold=? AND flow=?)"),
        ("messages_after", "SEARCH i USING INDEX inbox_news (id>?)"),
        ("inbox", "SEARCH i USING INDEX inbox_open (run=?)"),
        ("list_runs", "SEARCH runs USING INDEX runs_by_creation (created_at>? AND (created_at,id)<(?,?))"),
        (
            "list_runs_by_status",
            "SEARCH runs USING INDEX runs_by_status (status=? AND created_at>? AND (created_at,id)<(?,?))",
        ),
        (
            "list_runs_by_flow",
            "SEARCH runs USING INDEX runs_by_flow (flow=? AND status=? AND created_at>? AND (created_at,id)<(?,?))",
        ),
        (
            "list_runs_by_parent",
            "SEARCH runs USING INDEX runs_by_parent (parent_id=? AND created_at>? AND (created_at,id)<(?,?))",
        ),
    ],
)
async def test_listings_go_straight_to_their_place(store, name, index):
    lines = await plan(store, SQL[name])
    assert any(line.startswith(index) for line in lines), lines
    if name != "inbox":  # the messages of a few roots are sorted; all other rows are in order already
        assert not any("TEMP B-TREE" in line for line in lines), lines


async def steps(store: SqliteStore, call) -> int:
    """How many steps SQLite's virtual machine takes for `call`: a measure of work that does not depend on how busy the
    machine is."""
    total = 0

    def profile(event) -> None:
        nonlocal total
        total += event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]

    await store._read(lambda db: db.trace_v2(apsw.SQLITE_TRACE_PROFILE, profile))
    await call()
    await store._read(lambda db: db.trace_v2(0))
    return total


async def test_finished_runs_cost_recovery_and_timers_nothing(store):
    live = [
        new_run(f"live-{n}", status=Status.WAITING, wake_at=START + n, owner="me" if n % 2 else None) for n in range(10)
    ]
    held = new_run("held", status=Status.PAUSED, hold=Hold.DEFINITION, owner=None)
    await created(store, *live, held)
    await store.post([Message(run_id="live-1", kind=MessageKind.SIGNAL)])
    calls = {
        "list_active_roots": lambda: store.list_active_roots("me", None, 100),
        "owners": store.owners,
        "due": lambda: store.due(START + 100, 100),
        "next_due": store.next_due,
        "held": lambda: store.list_held(Hold.DEFINITION, ["checkout"], 100),
        "messages_after": lambda: store.messages_after(0, 100),
        "inbox": lambda: store.inbox([run.id for run in live]),
        "read": lambda: store.read([run.id for run in live]),
        "list_runs of a status": lambda: store.list_runs(RunFilter(status=(Status.PAUSED,))),
    }
    empty = {name: await steps(store, call) for name, call in calls.items()}
    for part in range(10):
        runs = [new_run(f"done-{part}-{n}", created_at=START - n) for n in range(500)]
        await created(store, *runs)
        ends = [appending(run, 1, b"end", changes=[changing(run, Status.COMPLETED)]) for run in runs]
        await store.commit(ends)
    full = {name: await steps(store, call) for name, call in calls.items()}
    assert {name: count for name, count in full.items() if count > empty[name] + 5} == {}


async def test_listing_owners_costs_by_their_number_not_by_their_runs(store):
    await created(store, *[new_run(f"{n}-first", owner=f"owner-{n}") for n in range(5)])
    few = await steps(store, store.owners)
    for part in range(5):
        await created(store, *[new_run(f"{part}-{n}", owner=f"owner-{n % 5}") for n in range(500)])
    assert await store.owners() == [f"owner-{n}" for n in range(5)]
    assert await steps(store, store.owners) <= few + 5


async def test_listing_ones_roots_costs_nothing_for_others(store):
    await created(store, new_run("mine"))
    alone = await steps(store, lambda: store.list_active_roots("me", None, 100))
    await created(store, *[new_run(f"theirs-{n}", owner=f"owner-{n % 5}") for n in range(1000)])
    assert await steps(store, lambda: store.list_active_roots("me", None, 100)) <= alone + 5
