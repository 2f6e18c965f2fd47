"""The SQLite file itself: which files are refused, how a file is upgraded, what it keeps, how a store notices writes of
others."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import apsw
import apsw.ext
import pytest

from relight.backends.sqlite import SqliteStore
from relight.backends.sqlite.connection import APPLICATION_ID, connect, migrations, prepare
from relight.errors import CorruptionError, StoreError, StoreFormatError, StoreUnavailableError
from relight.model.journal import Journal
from relight.model.run import SERVER_LOG, LogLine, News, RunFilter
from relight.ports.store import Committed
from relight.testing.conformance.build import (
    START,
    FixedClock,
    appending,
    created,
    creation,
    entries_of,
    new_run,
)

DEADLINE_SECONDS = 60


@pytest.fixture
def path(tmp_path):
    return tmp_path / "relight.db"


@pytest.fixture
async def store(path):
    store = SqliteStore(path, clock=FixedClock())
    await store.open()
    yield store
    await store.close()


def content_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


async def refused(path: Path) -> str:
    """The line with which opening `path` is refused. The file must stay as it is."""
    before = content_of(path)
    store = SqliteStore(path, clock=FixedClock())
    with pytest.raises(StoreFormatError) as failure:
        await store.open()
    await store.close()
    assert content_of(path) == before
    message = str(failure.value)
    assert str(path) in message
    assert "\n" not in message
    return message


# ---- files that are refused


async def test_a_directory(tmp_path):
    assert "is a directory" in await refused(tmp_path)


async def test_no_file_at_all(tmp_path):
    assert "memory backend" in await refused(tmp_path / ":memory:")


async def test_a_missing_folder(tmp_path):
    message = await refused(tmp_path / "no" / "such" / "relight.db")
    assert f"make the folder {tmp_path / 'no' / 'such'}" in message
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("content", [b"hello\n" * 500, b"x", b"SQLite format 3\x00" + b"\xff" * 4080])
async def test_a_file_that_is_no_database(path, content):
    path.write_bytes(content)
    assert "use another path" in await refused(path)


async def test_another_programs_database(path):
    db = apsw.Connection(str(path))
    db.execute("CREATE TABLE theirs (a)")
    db.close()
    assert "another program" in await refused(path)


async def test_a_database_with_another_application_id(path):
    db = apsw.Connection(str(path))
    db.pragma("application_id", 7)
    db.close()
    assert "another program" in await refused(path)


async def test_a_newer_schema(store, path):
    newest = len(migrations())
    await store.close()
    db = apsw.Connection(str(path))
    db.pragma("user_version", newest + 1)
    db.close()
    message = await refused(path)
    assert f"version {newest + 1}" in message
    assert "upgrade Relight" in message


async def test_an_empty_file_becomes_a_store(path):
    path.touch()
    store = SqliteStore(path, clock=FixedClock())
    await store.open()
    await created(store, new_run())
    await store.close()


OPEN_AS_A_USER = """
import asyncio, sys
from relight.backends.sqlite import SqliteStore
from relight.clock import SystemClock
from relight.errors import StoreFormatError

store = SqliteStore(sys.argv[1], clock=SystemClock())
try:
    asyncio.run(store.open())
except StoreFormatError as error:
    print(error)
else:
    print("opened")
"""


def open_as_a_user(path: Path) -> str:
    """What opening prints for a user that, unlike root, is bound by permission bits."""
    command = [sys.executable, "-c", OPEN_AS_A_USER, str(path)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root ignores permission bits, and there is no setpriv to take that power away")
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True)
    return done.stdout.strip()


async def test_a_read_only_file(store, path):
    await store.close()
    path.chmod(0o444)
    message = open_as_a_user(path)
    assert message.startswith(f"{path} is read-only")
    assert "write permission" in message


@pytest.mark.parametrize("present", [True, False], ids=["existing file", "new file"])
async def test_a_read_only_folder(store, path, present):
    await store.close()
    if not present:
        path.unlink()
    path.parent.chmod(0o555)
    try:
        message = open_as_a_user(path)
    finally:
        path.parent.chmod(0o755)
    assert str(path.parent) in message
    assert "write permission" in message
    assert "\n" not in message


# ---- the schema and its upgrades

# A change such as the next release may bring, so that upgrading is tested before it is needed.
NEXT_MIGRATION = """
ALTER TABLE runs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
CREATE INDEX runs_by_priority ON runs (priority) WHERE status = 'pending';
"""


def schema_of(path: Path) -> list[tuple[object, ...]]:
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return db.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name").fetchall()
    finally:
        db.close()


def upgrade(path: Path, scripts: Sequence[str]) -> None:
    db = connect(path, create=True)
    try:
        prepare(db, path, scripts)
        assert db.pragma("user_version") == len(scripts)
        assert db.pragma("application_id") == APPLICATION_ID
        assert db.pragma("integrity_check") == "ok"
    finally:
        db.close()


@pytest.mark.parametrize("version", range(len(migrations()) + 1))
def test_every_earlier_version_is_upgraded_with_its_data(tmp_path, version):
    scripts = [*migrations(), NEXT_MIGRATION]
    old, fresh = tmp_path / "old.db", tmp_path / "fresh.db"
    upgrade(fresh, scripts)
    if version:
        upgrade(old, scripts[:version])
        db = apsw.Connection(str(old))
        db.execute(
            "INSERT INTO runs (id, flow, flow_hash, status, epoch, reason, created_at, updated_at, input,"
            " input_blob, output_blob) VALUES ('kept', 'f', '', 'pending', 0, '', 0, 0, x'31', '', '')"
        )
        db.close()
    upgrade(old, scripts)
    upgrade(old, scripts)  # a second time: nothing is left to do
    assert schema_of(old) == schema_of(fresh)
    if version:
        db = apsw.Connection(str(old))
        assert db.execute("SELECT id, input, priority FROM runs").fetchall() == [("kept", b"1", 0)]
        db.close()


async def test_a_file_of_the_first_version_is_upgraded_and_goes_on(path):
    """Today's queries find runs, owners, journals and inboxes as they were."""
    upgrade(path, migrations()[:1])
    db = apsw.Connection(str(path))
    for key, run_id, status, owner in (
        (1, "mine", "running", "me"),
        (2, "yours", "waiting", "you"),
        (3, "done", "failed", None),
    ):
        db.execute(
            "INSERT INTO runs (key, id, flow, flow_hash, status, owner, epoch, reason, created_at, updated_at, input,"
            " input_blob, output_blob) VALUES (?, ?, 'checkout', '', ?, ?, 1, '', ?, ?, x'6e756c6c', '', '')",
            (key, run_id, status, owner, START, START),
        )
        db.execute(
            "INSERT INTO journal (run, sequence, event, crc) VALUES (?, 1, ?, ?)", (key, b"first", crc32(b"first", 1))
        )
    db.execute(
        "INSERT INTO inbox (run, kind, name, payload, payload_blob, at) VALUES (1, 'signal', 'go', x'31', '', 0)"
    )
    db.close()
    store = SqliteStore(path, clock=FixedClock())
    await store.open()
    assert await store.owners() == ["me", "you"]
    (mine,) = await store.list_active_roots("me", None, 10)
    assert mine == new_run("mine")
    line = LogLine(run_id="mine", at=START, text="recovered")
    assert await store.commit([appending(mine, 1, b"2", log=[line])]) == [Committed(2)]
    assert await entries_of(store, "mine") == [b"first", b"2"]
    assert [message.name for message in await store.inbox(["mine"])] == ["go"]
    assert [found.text for found in await store.read_log("mine", SERVER_LOG, 0, 10)] == ["recovered"]
    await store.close()


def test_a_migration_that_fails_leaves_the_file_as_it_was(path):
    upgrade(path, migrations())
    before = schema_of(path)
    db = connect(path, create=False)
    with pytest.raises(apsw.SQLError):
        prepare(db, path, [*migrations(), NEXT_MIGRATION, "DROP TABLE blobs; SELECT no_such_thing;"])
    assert not db.in_transaction
    db.close()
    assert schema_of(path) == before
    upgrade(path, migrations())


async def test_many_open_a_new_file_at_once(path):
    stores = [SqliteStore(path, clock=FixedClock()) for _ in range(12)]
    await asyncio.gather(*(store.open() for store in stores))
    for number, store in enumerate(stores):
        await created(store, new_run(f"run-{number}"))
    assert len((await stores[0].list_runs(RunFilter())).runs) == 12
    await asyncio.gather(*(store.close() for store in stores))


# ---- what the file remembers


async def test_everything_is_there_after_closing_and_opening(store, path):
    run = new_run()
    await created(store, run)
    await store.commit([appending(run, 1, b"2")])
    await store.close()
    again = SqliteStore(path, clock=FixedClock())
    await again.open()
    assert await again.get_run("run") == run
    assert await entries_of(again, "run") == [b"created", b"2"]
    assert await again.commit([appending(run, 2, b"3")]) == [Committed(3)]
    await again.close()


async def test_closing_finishes_what_was_asked_before(path):
    store = SqliteStore(path, clock=FixedClock())
    await store.open()
    commits = [asyncio.ensure_future(store.commit([creation(new_run(f"run-{n}"))])) for n in range(50)]
    await asyncio.sleep(0)
    await store.close()
    assert [await commit for commit in commits] == [[Committed(1)]] * 50
    await store.close()


@pytest.mark.parametrize("state", ["new", "closed"])
async def test_a_store_that_is_not_open_says_so(path, state):
    store = SqliteStore(path, clock=FixedClock())
    if state == "closed":
        await store.open()
        await store.close()
    for call in (store.get_run("run"), store.commit([creation(new_run())]), store.claim({"run": 1}, "me")):
        with pytest.raises(StoreUnavailableError, match="not open"):
            await call
    with pytest.raises(StoreUnavailableError, match="not open"):
        store.watch(lambda news: None)


async def test_a_caller_that_is_cancelled_disturbs_no_other_caller(store):
    calls = [asyncio.ensure_future(store.commit([creation(new_run(f"run-{n}"))])) for n in range(20)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert results[1::2] == [[Committed(1)]] * 10
    assert len((await store.list_runs(RunFilter())).runs) == 20


async def test_damaged_pages_hide_only_the_roots_on_them(store, path):
    runs = [new_run(f"run-{n:02}") for n in range(20)]
    await store.commit([creation(run, b"first", run.id.encode() * 300) for run in runs])
    await store.close()
    content = bytearray(path.read_bytes())
    place = content.index(b"run-07run-07run-07") // 4096 * 4096
    content[place : place + 4096] = b"\xff" * 4096
    path.write_bytes(content)
    again = SqliteStore(path, clock=FixedClock())
    await again.open()
    found = await again.read([run.id for run in runs])
    damaged = [error.root_id for error in found if isinstance(error, CorruptionError)]
    assert "run-07" in damaged
    assert len(damaged) < 6
    assert sum(isinstance(journal, Journal) for journal in found) == 20 - len(damaged)
    assert await again.commit([creation(new_run("new"))]) == [Committed(1)], "the others can go on"
    await again.close()


# ---- hearing other processes


async def test_another_objects_writing_is_heard_and_ones_own_is_not(store, path):
    heard = asyncio.Event()
    calls = []

    def changed(news: News) -> None:
        calls.append((asyncio.get_running_loop(), news))
        heard.set()

    other = SqliteStore(path, clock=FixedClock())
    await other.open()
    await created(store, new_run("mine"))
    store.watch(changed)
    for number in range(5):
        await created(store, new_run(f"mine-{number}"))
        await store._write(store._poll)
    assert calls == []
    await created(other, new_run("theirs"))
    await asyncio.wait_for(heard.wait(), DEADLINE_SECONDS)
    assert calls == [(asyncio.get_running_loop(), News.ANYTHING)]
    await other.close()


async def test_what_was_written_between_opening_and_watching_is_heard(store, path):
    other = SqliteStore(path, clock=FixedClock())
    await other.open()
    await created(other, new_run("theirs"))
    heard = asyncio.Event()
    store.watch(lambda news: heard.set())
    await asyncio.wait_for(heard.wait(), DEADLINE_SECONDS)
    await other.close()


async def test_a_store_that_is_never_idle_hears_others_too(store, path):
    other = SqliteStore(path, clock=FixedClock())
    await other.open()
    run = new_run()
    await created(store, run)
    heard = asyncio.Event()
    store.watch(lambda news: heard.set())
    await store._write(store._poll)
    store._writer._idle = None  # as if the store were never idle
    await created(other, new_run("theirs"))
    await store.commit([appending(run, 1, b"2")])
    await asyncio.wait_for(heard.wait(), DEADLINE_SECONDS)
    await other.close()


async def test_a_file_that_was_replaced_while_open_is_noticed(store, path):
    await store._write(lambda db: store._writer._disconnect())
    for name in (path, path.with_name("relight.db-wal"), path.with_name("relight.db-shm")):
        name.unlink(missing_ok=True)
    with pytest.raises(StoreError):
        await store.commit([creation(new_run())])
    assert not path.exists(), "an empty database was made in its place"
    path.touch()
    with pytest.raises(StoreError, match="replaced"):
        await store.commit([creation(new_run())])


async def test_without_leave_to_migrate_nothing_is_made_or_upgraded(tmp_path):
    clock = FixedClock()
    path = tmp_path / "relight.db"
    with pytest.raises(StoreError):
        await SqliteStore(path, clock=clock, migrate=False).open()
    assert not path.exists()
    old = apsw.Connection(str(path))
    prepare(old, path, migrations()[:1])
    old.close()
    with pytest.raises(StoreFormatError, match=r"has schema version 1 of .: run `relight migrate`"):
        await SqliteStore(path, clock=clock, migrate=False).open()
    store = SqliteStore(path, clock=clock)
    await store.open()
    await store.close()
    store = SqliteStore(path, clock=clock, migrate=False)
    await store.open()
    await store.close()
