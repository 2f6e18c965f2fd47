"""Stores on the PostgreSQL server that all tests of a worker share: a schema for each test."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

_names = count(1)


@pytest.fixture
def postgres_schema(postgres_server):
    """A new schema's name: cheaper than a new database, and left to the server's end."""
    return f"test_{next(_names)}"


@pytest.fixture
async def open_postgres(postgres_server, postgres_schema):
    """Opens stores on one new schema, and closes them."""
    from relight.backends.postgres import PostgresStore
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
    """An administrator's connection; made when it is needed, and again, since some tests restart the server."""
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
