"""The schema: made, upgraded and checked. Ten processes may start at once: one migrates, the others wait for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from zlib import crc32

import asyncpg

from relight.backends.postgres.connection import Connection, Target, connect, refused, unavailable
from relight.backends.postgres.listen import wait
from relight.backends.postgres.queries import SCHEMA_NAME, migrations
from relight.errors import ConfigError, StoreFormatError, StoreUnavailableError
from relight.model.formats import compatible_since

LOCK_CLASS = 1382370420  # "ReLt"; the migrations use the same
LOCK_SECONDS = 1.0  # a migration waits for each table, then lets everybody else go first, and tries again,
MOST_TRIES = 120  # so often
MIGRATE_SECONDS = 600.0  # a migration of a large table takes its time, and so does waiting for another process's

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
    """The name, if it is one that people need not quote, but for SQL's own words."""
    if not SCHEMA_NAME.fullmatch(schema):
        raise ConfigError(
            f"schema {schema!r}: use up to 31 small letters, digits and underscores, not a digit nor pg_ first"
        )
    return schema


async def prepare(target: Target, schema: str, *, migrate: bool) -> None:
    """Raise StoreFormatError for a schema that is not ours, newer than us or (unless it may be migrated) missing or old."""
    async with _connected(target, schema) as connection:
        await _prepare(connection, target, schema, migrate=migrate)


@contextlib.asynccontextmanager
async def _connected(target: Target, schema: str) -> AsyncIterator[Connection]:
    """A connection of its own, with the errors of opening."""
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
        if found >= len(scripts):  # more: a newer version has added what this one can go on with
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
            await wait(LOCK_SECONDS)


async def _migrate(connection: Connection, where: str, schema: str, found: int) -> bool:
    """In a transaction. False if another process has migrated while we waited for our turn: then we look again from the
    beginning, in a new one, since within this one the server may go on believing that there is no such schema."""
    scripts = migrations(schema)
    lock = crc32(schema.encode()) - (1 << 31)
    await connection.execute("SELECT pg_advisory_xact_lock($1, $2)", LOCK_CLASS, lock, timeout=MIGRATE_SECONDS)
    if found == 0:
        tables, _ = await _tables(connection, schema)
        unchanged = tables == 0
    else:
        unchanged = await _version(connection, where, schema, len(scripts)) == found
    if unchanged:
        # Other versions are at work on these tables. Whoever comes while we wait for one of them waits behind us: not for long.
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
    if await _says_compatible(connection, schema):  # else, in a test, only some of the migrations were applied
        for number, script in enumerate(scripts[found:], start=found + 1):
            await connection.execute(
                f'UPDATE "{schema}".relight_schema SET compatible = $2 WHERE version = $1',  # noqa: S608 - as above
                number,
                compatible_since(script, number),
            )


async def _says_compatible(connection: Connection, schema: str) -> bool:
    """Whether the schema has come so far that it says with what it can be shared."""
    return bool(await connection.fetchval(_COLUMN, schema))


async def _needed(connection: Connection, schema: str, known: int) -> int:
    """Which version of the schema a process must know that does not know all of its migrations."""
    if not await _says_compatible(connection, schema):
        return sys.maxsize
    needed: int = await connection.fetchval(
        f'SELECT max(coalesce(compatible, version)) FROM "{schema}".relight_schema WHERE version > $1',  # noqa: S608 - as above
        known,
    )
    return needed


async def version_of(target: Target, schema: str) -> int:
    """How many migrations have been applied; 0 for a schema that is missing. Nothing is written; raises what opening would."""
    async with _connected(target, schema) as connection, connection.transaction():
        return await _version(connection, f"{target.name}, schema {schema}", schema, len(migrations(schema)))


async def _tables(connection: Connection, schema: str) -> tuple[int, int]:
    """How many tables, indexes and the like there are, and whether our own is among them."""
    row = await connection.fetchrow(_TABLES, schema)
    assert row is not None
    return row[0], row[1]


async def _version(connection: Connection, where: str, schema: str, newest: int) -> int:
    """How many migrations have been applied; 0 for a schema that is missing or empty. A checked name holds no quotes."""
    tables, ours = await _tables(connection, schema)
    if not tables:
        return 0
    if not ours:
        raise StoreFormatError(f"{where} is another program's: choose another schema or database")
    version: int = await connection.fetchval(f'SELECT coalesce(max(version), 0) FROM "{schema}".relight_schema')  # noqa: S608
    if version > newest and await _needed(connection, schema, newest) > newest:
        raise StoreFormatError(f"{where} has version {version}, this Relight knows {newest}: upgrade Relight")
    return version
