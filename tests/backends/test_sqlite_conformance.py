"""SqliteStore does what every backend must do."""

from __future__ import annotations

import apsw
import pytest

from relight.backends.sqlite import SqliteStore
from relight.testing import conformance


@pytest.fixture
async def store(tmp_path, clock):
    store = SqliteStore(tmp_path / "relight.db", clock=clock)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def other(store, clock):
    other = SqliteStore(store.path, clock=clock)
    await other.open()
    yield other
    await other.close()


@pytest.fixture
def corrupt(store):
    async def corrupt(root_id: str, sequence: int) -> None:
        db = apsw.Connection(str(store.path))
        for table, column in (("journal", "event"), ("checkpoints", "state")):
            db.execute(
                f"UPDATE {table} SET {column} = CAST({column} || '!' AS BLOB)"
                " WHERE sequence = ? AND run = (SELECT key FROM runs WHERE id = ?)",
                (sequence, root_id),
            )
        db.close()

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
