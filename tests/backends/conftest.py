"""Stores on the PostgreSQL server that all tests of a worker share. A test has a schema of its own, or one that is
emptied before."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

from relight.backends.postgres import PostgresStore
from relight.clock import Clock
from tests.servers.postgres import PostgresServer

_names = count(1)

# Making a schema takes the server four times as long as most tests of the conformance suites take in it.
EMPTIED = "emptied"
_DELETE = f"""
DO $$ DECLARE one text; BEGIN
    FOR one IN SELECT tablename FROM pg_tables WHERE schemaname = '{EMPTIED}' AND tablename <> 'relight_schema' LOOP
        EXECUTE format('DELETE FROM {EMPTIED}.%I', one);
    END LOOP;
END $$
"""


async def open_emptied(postgres_server: PostgresServer, clock: Clock) -> PostgresStore:
    """A store on a schema that tests use one after the other. It is empty, but its sequences go on where the last test
    ended."""
    store = PostgresStore(postgres_server.url(), clock=clock, schema=EMPTIED)
    await store.open()
    await store._pool.fetch(_DELETE)
    return store


@pytest.fixture
def postgres_schema(postgres_server):
    """The name of a new schema. It is cheaper than a new database, and goes when the server ends."""
    return f"test_{next(_names)}"


@pytest.fixture
async def open_postgres(postgres_server, postgres_schema):
    """Opens stores on one new schema, and closes them."""
    from relight.testing.conformance import FixedClock

    stores = []

    async def open_postgres(url=None, options=""):
        store = PostgresStore((url or postgres_server.url()) + options, clock=FixedClock(), schema=postgres_schema)
        stores.append(store)
        await store.open()
        return store

    yield open_postgres
    await asyncio.gather(*(store.close() for store in stores))


@pytest.fixture
async def postgres_admin(postgres_server):
    """An administrator's connection. It is made when a test needs it, and made again after a test that restarts the
    server."""
    import asyncpg

    made: list[Any] = []

    class Administrator:
        def __getattr__(self, name):
            async def call(*arguments):
                if not made or made[-1].is_closed():
                    made.append(await asyncpg.connect(postgres_server.url()))
                return await getattr(made[-1], name)(*arguments)

            return call

    yield Administrator()
    for one in made:
        await one.close()
