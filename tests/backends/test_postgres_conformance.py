"""PostgresStore does what every backend must do."""

from __future__ import annotations

import asyncpg
import pytest

from relight.backends.postgres import PostgresStore
from relight.testing import conformance
from tests.backends.conftest import open_emptied


@pytest.fixture
async def store(postgres_server, clock):
    store = await open_emptied(postgres_server, clock)
    yield store
    await store.close()


@pytest.fixture
async def other(store, postgres_server, clock):
    other = PostgresStore(postgres_server.url(), clock=clock, schema=store.schema)
    await other.open()
    yield other
    await other.close()


@pytest.fixture
def corrupt(store, postgres_server):
    async def corrupt(root_id: str, sequence: int) -> None:
        db = await asyncpg.connect(postgres_server.url())
        for table, column in (("journal", "event"), ("checkpoints", "state")):
            await db.execute(
                f"UPDATE {store.schema}.{table} SET {column} = {column} || '!'::bytea"
                f" WHERE sequence = $1 AND run = (SELECT key FROM {store.schema}.runs WHERE id = $2)",
                sequence,
                root_id,
            )
        await db.close()

    return corrupt


class TestCommits(conformance.CommitSuite):
    pass


class TestJournals(conformance.JournalSuite):
    pass


class TestRuns(conformance.RunSuite):
    pass


class TestInboxes(conformance.InboxSuite):
    pass


class TestWakings(conformance.WakingSuite):
    pass


class TestSharing(conformance.SharingSuite):
    pass


class TestContents(conformance.ContentSuite):
    pass


class TestGenerations(conformance.GenerationSuite):
    pass


class TestOwnership(conformance.OwnershipSuite):
    pass


class TestReopening(conformance.ReopenSuite):
    pass


class TestTexts(conformance.TextSuite):
    pass
