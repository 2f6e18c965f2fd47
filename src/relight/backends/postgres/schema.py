"""The schema: created, migrated and checked. Ten processes may start at once: one migrates, the others wait for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from zlib import crc32

import asyncpg

from relight.backends.postgres.connection import Connection, Target, connect, refused, unavailable
from relight.backends.postgres.queries import SCHEMA_NAME, migrations
from relight.errors import ConfigError, StoreFormatError, StoreUnavailableError
from relight.model.formats import compatible_since
from relight.retry_pause import real_pause

LOCK_CLASS = 1382370420  # "ReLt"; the migrations use the same
LOCK_SECONDS = 1.0  # a migration waits so long for each table, then lets other processes go first and tries again
MOST_TRIES = 120  # of a migration
MIGRATE_SECONDS = 600.0  # for a migration of a large table, and for waiting until another process has migrated

_COLUMN = """
SELECT EXISTS (SELECT FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relname = 'relight_schema' AND a.attname = 'compatible')
"""
_TABLES = """
SELECT count(*), count(*) FILTER (WHERE c.relname = 'relight_schema')
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = $1
"""


def check_name(schema: str) -> str:
    """Return the name if it is a plain one, which SQL can write without quotes unless it is a keyword."""
    if not SCHEMA_NAME.fullmatch(schema):
        raise ConfigError(
            f"schema {schema!r}: use up to 31 small letters, digits and underscores, not a digit nor pg_ first"
        )
    return schema


async def prepare(target: Target, schema: str, *, migrate: bool) -> None:
    """Migrate the schema if `migrate`. Raise StoreFormatError for a schema that is another program's, too new for this
    version, or, without `migrate`, missing or old."""
    async with _connected(target, schema) as connection:
        await _prepare(connection, target, schema, migrate=migrate)


@contextlib.asynccontextmanager
async def _connected(target: Target, schema: str) -> AsyncIterator[Connection]:
    """A connection for one use. Its errors become those of opening a store."""
    try:
        connection = await connect(target)
    except asyncpg.PostgresError as error:
        if refused(error):
            raise StoreFormatError(f"{target.name} cannot be opened: {error}") from error
        raise
    try:
        yield connection
    except asyncpg.InsufficientPrivilegeError as error:
        raise StoreFormatError(
            f"{target.name}: {error}: let this user create the schema {schema}, or run `relight migrate` as one who may"
        ) from error
    except Exception as error:
        if (passing := unavailable(error, target)) is not None:
            raise passing from error
        raise
    finally:
        connection.terminate()


async def _prepare(connection: Connection, target: Target, schema: str, *, migrate: bool) -> None:
    scripts = migrations(schema)
    where = f"{target.name}, schema {schema}"
    tries = 0
    while True:
        async with connection.transaction():
            found = await _version(connection, where, schema, len(scripts))
        if found >= len(scripts):  # if greater: a newer version has migrated it in a way that this version can use
            return
        if not migrate:
            state = "is missing" if found == 0 else f"has version {found} of {len(scripts)}"
            raise StoreFormatError(f"{where} {state}: run `relight migrate`")
        try:
            async with connection.transaction():
                if await _migrate(connection, where, schema, found):
                    return
        except asyncpg.LockNotAvailableError as error:
            tries += 1
            if tries == MOST_TRIES:
                why = "a transaction that does not end stands in the way"
                raise StoreUnavailableError(f"{where} could not be migrated: {why}: {error}") from error
            await real_pause(LOCK_SECONDS)


async def _migrate(connection: Connection, where: str, schema: str, found: int) -> bool:
    """Called in a transaction. False if another process has migrated while this one waited for the lock. Then the
    caller begins again in a new transaction, because in this one the server may still see no such schema."""
    scripts = migrations(schema)
    lock = crc32(schema.encode()) - (1 << 31)
    await connection.execute("SELECT pg_advisory_xact_lock($1, $2)", LOCK_CLASS, lock, timeout=MIGRATE_SECONDS)
    if found == 0:
        tables, _ = await _tables(connection, schema)
        unchanged = tables == 0
    else:
        unchanged = await _version(connection, where, schema, len(scripts)) == found
    if unchanged:
        # Processes of other versions use these tables. While this one waits for a table's lock, later statements wait
        # behind it. The timeout keeps that short.
        await connection.execute(f"SET LOCAL lock_timeout = '{round(LOCK_SECONDS * 1000)}ms'")
        await _apply(connection, schema, scripts, found)
    return unchanged


async def _apply(connection: Connection, schema: str, scripts: tuple[str, ...], found: int) -> None:
    if found == 0:
        await connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        await connection.execute(
            f'CREATE TABLE "{schema}".relight_schema (version integer PRIMARY KEY, applied_at timestamptz NOT NULL)'
        )
    for number, script in enumerate(scripts[found:], start=found + 1):
        await connection.execute(script, timeout=MIGRATE_SECONDS)
        await connection.execute(
            f'INSERT INTO "{schema}".relight_schema (version, applied_at) VALUES ($1, now())',  # noqa: S608 - a checked name
            number,
        )
    if await _says_compatible(connection, schema):  # false only in a test that applies some of the migrations
        for number, script in enumerate(scripts[found:], start=found + 1):
            await connection.execute(
                f'UPDATE "{schema}".relight_schema SET compatible = $2 WHERE version = $1',  # noqa: S608 - as above
                number,
                compatible_since(script, number),
            )


async def _says_compatible(connection: Connection, schema: str) -> bool:
    """Whether the schema is new enough to record with which versions it can be shared."""
    return bool(await connection.fetchval(_COLUMN, schema))


async def _needed(connection: Connection, schema: str, known: int) -> int:
    """The schema version that a process must know to use a schema with migrations newer than `known`."""
    if not await _says_compatible(connection, schema):
        return sys.maxsize
    needed: int = await connection.fetchval(
        f'SELECT max(coalesce(compatible, version)) FROM "{schema}".relight_schema WHERE version > $1',  # noqa: S608 - as above
        known,
    )
    return needed


async def version_of(target: Target, schema: str) -> int:
    """How many migrations have been applied; 0 for a missing schema. Writes nothing. Raises the errors of opening."""
    async with _connected(target, schema) as connection, connection.transaction():
        return await _version(connection, f"{target.name}, schema {schema}", schema, len(migrations(schema)))


async def _tables(connection: Connection, schema: str) -> tuple[int, int]:
    """How many tables, indexes and the like there are, and whether `relight_schema` is among them (1 or 0)."""
    row = await connection.fetchrow(_TABLES, schema)
    assert row is not None
    return row[0], row[1]


async def _version(connection: Connection, where: str, schema: str, newest: int) -> int:
    """How many migrations have been applied; 0 for a missing or empty schema. The name is checked: it has no quotes."""
    tables, ours = await _tables(connection, schema)
    if not tables:
        return 0
    if not ours:
        raise StoreFormatError(f"{where} is another program's: choose another schema or database")
    version: int = await connection.fetchval(f'SELECT coalesce(max(version), 0) FROM "{schema}".relight_schema')  # noqa: S608
    if version > newest and await _needed(connection, schema, newest) > newest:
        raise StoreFormatError(f"{where} has version {version}, this Relight knows {newest}: upgrade Relight")
    return version
