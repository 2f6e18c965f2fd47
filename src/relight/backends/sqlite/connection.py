"""Opening the file: what is refused and why, pragmas, migrations, and SQLite's errors as Relight's.

One connection belongs to one thread. Two processes may have the file open: each write transaction begins with
BEGIN IMMEDIATE, so that it waits for its turn at the start and is never refused in the middle.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import apsw

from relight.backends.sql_files import numbered_scripts
from relight.errors import StoreError, StoreFormatError, StoreUnavailableError
from relight.model.formats import compatible_since

APPLICATION_ID = 0x52654C74  # "ReLt"

# A writer waits for other processes' transactions by trying again and again. SQLite's own busy timeout sleeps longer
# each time, up to 100 ms. Then a process that commits without a pause always comes first: of four processes, one waited
# for 5 s. With a try every millisecond each process gets its share (none waited over 0.2 s).
BUSY_RETRY_SECONDS = 0.001
# This is long, because transactions are short and a refused commit stops a run's progress.
BUSY_RETRIES = 120_000
# With fewer pages, checkpoints copy the same hot pages more often; with more, the WAL is larger (4,000 are 16 MB).
CHECKPOINT_PAGES = 4_000
# While readers keep the WAL from starting over, it may grow beyond this. Later it is truncated to this size.
WAL_LIMIT_BYTES = 64_000_000

SMALLEST_DATABASE_BYTES = 512

DAMAGED = "damaged: restore a backup of it"

_FLAGS = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOMUTEX


def migrations() -> tuple[str, ...]:
    """The migration scripts in order."""
    return numbered_scripts(__package__)


def connect(
    path: Path,
    *,
    create: bool,
    vfs: str | None = None,
    busy_retries: int = BUSY_RETRIES,
    give_up: threading.Event | None = None,
) -> apsw.Connection:
    """A connection with Relight's pragmas. Raises apsw's errors: see `opening_error` and `runtime_error`.

    Only the first connection may `create` the file: if the file has vanished since, a later one would go on with an
    empty database. Once `give_up` is set, the connection does not wait for other processes.
    """
    stop = give_up or threading.Event()
    flags = _FLAGS | apsw.SQLITE_OPEN_CREATE if create else _FLAGS
    if create:
        create_private(path)
    # apsw's statement cache is a ring of executions, not of statements: a small one would drop the group commit's own.
    connection = apsw.Connection(str(path), flags=flags, vfs=vfs, statementcachesize=1000)
    try:
        connection.set_busy_handler(lambda retries: not stop.wait(BUSY_RETRY_SECONDS) and retries < busy_retries)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.pragma("journal_size_limit", WAL_LIMIT_BYTES)
        connection.wal_autocheckpoint(CHECKPOINT_PAGES)
    except BaseException:
        connection.close(True)
        raise
    return connection


def create_private(path: Path) -> None:
    """Create the file if it is missing. Only its owner may read it, because it contains all inputs of flows. SQLite
    gives the `-wal` and `-shm` files the same permissions. A user may change them, once, to let others read it."""
    with contextlib.suppress(OSError):  # the file exists; or it cannot be created, and SQLite says why
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def prepare(
    connection: apsw.Connection, path: Path, scripts: Sequence[str], *, migrate: bool = True, create: bool = True
) -> None:
    """Make the file a Relight database, if `create`, and bring it up to date, if `migrate`. Refuse a file that is another
    program's, too new for this version, or not writable."""
    with snapshot(connection):
        version = refuse_foreign(connection, path, len(scripts))
    if version == 0 and not create:
        raise _no_database(path, "is empty")
    if version < len(scripts) and not migrate:
        state = "is empty" if version == 0 else f"has schema version {version} of {len(scripts)}"
        raise StoreFormatError(f"{path} {state}: run `relight migrate`")
    if connection.readonly("main"):
        raise StoreFormatError(f"{path} is read-only: give this user write permission, or use another path")
    enter_wal(connection, path)
    with transaction(connection):
        # Check again, now that no other process can write: two processes may have seen the same new file empty.
        version = refuse_foreign(connection, path, len(scripts))
        for number, script in enumerate(scripts[version:], start=version + 1):
            connection.execute(script).fetchall()
            connection.pragma("user_version", number)
        _say_compatible(connection, scripts, version)
        if version == 0:
            connection.pragma("application_id", APPLICATION_ID)


def refuse_foreign(connection: apsw.Connection, path: Path, newest: int) -> int:
    """The schema's version, 0 for an empty file. Call it in a transaction, because it makes three queries."""
    application = connection.pragma("application_id")
    version: int = connection.pragma("user_version")
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()[0][0]
    if application == 0 and version == 0 and tables == 0:
        return 0
    if application != APPLICATION_ID:
        raise StoreFormatError(f"{path} is a database of another program: use another path")
    if version > newest and _needed(connection, newest) > newest:
        raise StoreFormatError(f"{path} has schema version {version}, this Relight knows {newest}: upgrade Relight")
    return version


def _has_versions(connection: apsw.Connection) -> bool:
    found = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'schema_versions'").fetchall()
    return bool(found)


def _say_compatible(connection: apsw.Connection, scripts: Sequence[str], before: int) -> None:
    """Record, for each migration just applied, with which version the file can be shared: see model/formats.py."""
    if not _has_versions(connection):
        return  # only in a test that applies some of the migrations
    for number, script in enumerate(scripts[before:], start=before + 1):
        row = (number, compatible_since(script, number))
        connection.execute("INSERT INTO schema_versions (version, compatible) VALUES (?, ?)", row)


def _needed(connection: apsw.Connection, known: int) -> int:
    """The schema version that a process must know to use a file with migrations newer than `known`."""
    if not _has_versions(connection):
        return sys.maxsize
    found = connection.execute("SELECT max(compatible) FROM schema_versions WHERE version > ?", (known,)).fetchall()
    needed = found[0][0]
    return sys.maxsize if needed is None else int(needed)


def version_of(path: Path) -> int:
    """The version of the file's schema, 0 if it is missing or empty. Writes nothing. Raises the errors of opening."""
    refuse_path(path)
    if not path.exists():
        return 0
    try:
        connection = connect(path, create=False)
    except apsw.Error as error:
        raise opening_error(error, path) from error
    try:
        with snapshot(connection):
            return refuse_foreign(connection, path, len(migrations()))
    except apsw.Error as error:
        raise opening_error(error, path) from error
    finally:
        connection.close()


def check_same(connection: apsw.Connection, path: Path, newest: int) -> None:
    """Raise if the file was replaced. Called for a second connection, and for a new one after an error."""
    with snapshot(connection):
        if refuse_foreign(connection, path, newest) < newest:  # if greater: a newer version has migrated it meanwhile
            raise StoreUnavailableError(f"{path} was replaced while in use: open the store again")


def data_version(connection: apsw.Connection) -> int:
    """A number that changes when any other connection has written."""
    version: int = connection.execute("PRAGMA data_version").fetchall()[0][0]  # type: ignore[assignment]
    return version


def enter_wal(connection: apsw.Connection, path: Path) -> None:
    """Switch to write-ahead logging: readers and the writer do not block each other, and a commit is one sync."""
    mode = connection.pragma("journal_mode", "wal")
    if mode != "wal":
        raise StoreFormatError(f"{path} cannot use write-ahead logging (it stays {mode!r}): use a local disk")


def rollback(connection: apsw.Connection) -> None:
    """Leave no transaction open: the next commit on this connection would become part of it and be lost with it."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


@contextmanager
def transaction(connection: apsw.Connection) -> Iterator[None]:
    """A write transaction. It waits for its turn at the beginning, and is rolled back after an error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        rollback(connection)
        raise


@contextmanager
def snapshot(connection: apsw.Connection) -> Iterator[None]:
    """All queries inside see the same state of the file."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        rollback(connection)


# ---- SQLite's errors as Relight's


def refuse_path(path: Path) -> None:
    """Raise for what is visible without opening the file: SQLite would only say 'unable to open database file'."""
    if path.name == ":memory:":
        raise StoreFormatError(f"{path} is no file: for a store that forgets, use the memory backend")
    if path.is_dir():
        raise StoreFormatError(f"{path} is a directory: name a file in it, such as {path / 'relight.db'}")
    if not path.parent.is_dir():
        raise StoreFormatError(f"{path} cannot be made: make the folder {path.parent} first")
    # SQLite treats so short a file as empty, and would overwrite it. Relight cannot read its content instead: to close
    # the file would release the locks of every connection that this process has to it.
    if path.exists() and 0 < path.stat().st_size < SMALLEST_DATABASE_BYTES:
        raise StoreFormatError(
            f"{path} is not a Relight database (it is too short for one): use another path; if it was one, it has been cut "
            "off: restore a backup"
        )


def refuse_missing(path: Path) -> None:
    """Raise if there is no file, before SQLite or the first connection makes one."""
    if not path.exists():
        raise _no_database(path, "does not exist")


def _no_database(path: Path, why: str) -> StoreFormatError:
    return StoreFormatError(
        f"{path} {why}, and a process that drives no runs (drive=False) makes no database: give the path of the one that "
        "the orchestrators use, start an orchestrator first, or run `relight migrate`"
    )


def opening_error(error: apsw.Error, path: Path) -> StoreError:
    """Why a file cannot be opened, in one line."""
    if isinstance(error, apsw.CorruptError):  # a database, by its first bytes
        return StoreFormatError(f"{path} is {DAMAGED} ({cause_of(error)}); or use another path")
    if isinstance(error, apsw.NotADBError):
        return StoreFormatError(f"{path} is not a Relight database ({cause_of(error)}): use another path")
    if isinstance(error, apsw.ReadOnlyError | apsw.CantOpenError | apsw.PermissionsError | apsw.AuthError):
        return StoreFormatError(
            f"{path} cannot be opened for writing ({cause_of(error)}): "
            f"give this user write permission to the file and to the folder {path.parent}"
        )
    return runtime_error(error, path)


def runtime_error(error: apsw.Error, path: Path) -> StoreUnavailableError:
    """The error for an open file, in one line."""
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        damaged = StoreUnavailableError(f"{path} is {DAMAGED} ({cause_of(error)})")
        damaged.damaged = True
        return damaged
    return StoreUnavailableError(f"{path}: {cause_of(error)}")


def cause_of(error: apsw.Error) -> str:
    """SQLite's message, with the name of its code."""
    code = getattr(error, "extendedresult", 0)
    name = apsw.mapping_extended_result_codes.get(code) or apsw.mapping_result_codes.get(code & 0xFF, "")
    return f"{str(error).rstrip('.')} [{name}]" if name else str(error)
