"""MemoryStore does what every backend must do."""

from __future__ import annotations

import asyncio

import pytest

from relight.backends.memory import MemoryStore
from relight.model.run import News
from relight.testing import conformance
from relight.testing.conformance.build import created, new_run


@pytest.fixture
async def store(clock):
    return MemoryStore(clock=clock)


@pytest.fixture
async def other(store):
    return store  # its data can be reached only through the one object


@pytest.fixture
def corrupt(store):
    async def corrupt(root_id: str, sequence: int) -> None:
        tree = store.trees[root_id]
        row = tree.state if sequence == tree.base else tree.entries[sequence - tree.base - 1]
        row.data += b"!"

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


class TestSharingOfDueRuns(conformance.SharingSuite):
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


class TestSharing(conformance.Suite):
    async def test_objects_that_share_a_store_hear_of_each_other(self, store):
        heard = []
        store.watch(lambda news: heard.append(("first", news)))
        await created(store, new_run("a"))
        await asyncio.sleep(0)
        assert heard == [], "there is nobody else whose writing could be heard"
        store.watch(lambda news: heard.append(("second", news)))
        await created(store, new_run("b"))
        assert heard == [], "the writer is called back while it still writes"
        await asyncio.sleep(0)
        assert heard == [("first", News.ANYTHING), ("second", News.ANYTHING)]

    async def test_data_outlives_the_engine_that_closes_the_store(self, store):
        await created(store, new_run())
        await store.close()
        await store.open()
        assert await store.get_run("run") == new_run()
