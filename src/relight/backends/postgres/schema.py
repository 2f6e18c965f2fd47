"""The schema: made, upgraded and checked. Ten processes may start at once: one migrates, the others wait for it."""

from __future__ import annotations

from zlib import crc32

import asyncpg

from relight.backends.postgres.connection import Connection, Target, connect, refused, unavailable
from relight.backends.postgres.queries import SCHEMA_NAME, migrations
from relight.errors import ConfigError, StoreFormatError

LOCK_CLASS = 1382370420  # "ReLt"; the migrations use the same
MIGRATE_SECONDS = 600.0  # a migration of a large table takes its time, and so does waiting for another process's

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
    try:
        connection = await connect(target)
    except asyncpg.PostgresError as error:
        if refused(error):
            raise StoreFormatError(f"{target.name} cannot be opened: {error}") from error
        raise
    try:
        await _prepare(connection, target, schema, migrate=migrate)
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
    while True:
        async with connection.transaction():
            found = await _version(connection, where, schema, len(scripts))
        if found == len(scripts):
            return
        if not migrate:
            state = "is missing" if found == 0 else f"has version {found} of {len(scripts)}"
            raise StoreFormatError(f"{where} {state}: run `relight migrate`")
        async with connection.transaction():
            lock = crc32(schema.encode()) - (1 << 31)
            await connection.execute("SELECT pg_advisory_xact_lock($1, $2)", LOCK_CLASS, lock, timeout=MIGRATE_SECONDS)
            # Another process may have migrated while we waited. Then we look again from the beginning, in a new transaction:
            # within this one the server may go on believing that there is no such schema.
            if found == 0:
                tables, _ = await _tables(connection, schema)
                unchanged = tables == 0
            else:
                unchanged = await _version(connection, where, schema, len(scripts)) == found
            if unchanged:
                await _apply(connection, schema, scripts, found)
                return


async def _apply(connection: Connection, schema: str, scripts: tuple[str, ...], found: int) -> None:
    if found == 0:
        await connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        await connection.execute(
            f'CREATE TABLE "{schema}".relight_schema (version integer PRIMARY KEY, applied_at timestamptz NOT NULL)'
        )
    for number, script in enumerate(scripts[found:], start=found + 1):
        await connection.execute(script, timeout=MIGRATE_SECONDS)
        await connection.execute(f'INSERT INTO "{schema}".relight_schema VALUES ($1, now())', number)  # noqa: S608


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
    if version > newest:
        raise StoreFormatError(f"{where} has version {version}, this Relight knows {newest}: upgrade Relight")
    return version
