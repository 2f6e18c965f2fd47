"""The servers that backends are tested against: one of each per session, started when the first test asks for it."""

from __future__ import annotations

import asyncio
import os
from itertools import count
from typing import Any

import pytest

_names = count(1)


@pytest.fixture(scope="session")
def postgres_server():
    from relight.testing.servers.postgres import PostgresServer, ServerMissingError

    try:
        server = PostgresServer()
    except ServerMissingError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    with server:
        yield server


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
