"""Reading journals: pages, checkpoints, compaction, damage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relight.errors import CorruptionError
from relight.model.journal import AnyEvent, Entry, Journal, encode_event
from relight.model.replay import encode_state, restore
from relight.model.run import Status
from relight.ports.store import Committed, Store
from relight.testing.conformance.build import (
    Suite,
    appending,
    but,
    changing,
    commit_one,
    created,
    creation,
    ended,
    entries_of,
    journal_of,
    new_run,
)
from relight.testing.conformance.events import journals

_examples = count()

Corrupt = Callable[[str, int], Awaitable[None]]


class JournalSuite(Suite):
    """`read`, `read_from`, `latest_sequence`, `checkpoint`, `get_checkpoint`."""

    async def test_journals_come_in_the_order_asked(self, store: Store) -> None:
        await created(store, new_run("a"), new_run("b"))
        found = await store.read(["b", "nobody", "a", "b"])
        full = [Entry(1, b"created")]
        assert found == [
            Journal("b", None, full),
            Journal("nobody", None, []),
            Journal("a", None, full),
            Journal("b", None, full),
        ]
        assert await store.read([]) == []

    async def test_many_journals_at_once(self, store: Store) -> None:
        runs = [new_run(f"run-{n}") for n in range(300)]
        await store.commit([creation(run, *[b"%d" % n] * (1 + n % 3)) for n, run in enumerate(runs)])
        found = await store.read([run.id for run in runs])
        for n, journal in enumerate(found):
            assert isinstance(journal, Journal)
            assert [entry.event for entry in journal.entries] == [b"%d" % n] * (1 + n % 3)

    async def test_reading_in_pages(self, store: Store) -> None:
        run = new_run()
        await commit_one(store, creation(run, *[b"%d" % n for n in range(1, 8)]))
        assert (await store.read_from("run", 0, 3)).entries == [Entry(1, b"1"), Entry(2, b"2"), Entry(3, b"3")]
        assert (await store.read_from("run", 5, 3)).entries == [Entry(6, b"6"), Entry(7, b"7")]
        assert (await store.read_from("run", 7, 3)).entries == []
        assert (await store.read_from("nobody", 0, 3)).entries == []

    async def test_the_latest_sequence(self, store: Store) -> None:
        assert await store.latest_sequence("nobody") == 0
        run = new_run()
        await commit_one(store, creation(run, b"1", b"2", b"3"))
        assert await store.latest_sequence("run") == 3
        assert await store.checkpoint("run", 1, 3, b"state")
        assert await store.latest_sequence("run") == 3, "compaction lowered it"
        assert await commit_one(store, appending(run, 3, b"4")) == Committed(4)
        assert await store.latest_sequence("run") == 4

    async def test_a_checkpoint_stands_for_the_entries_it_drops(self, store: Store) -> None:
        run = new_run()
        await commit_one(store, creation(run, b"1", b"2", b"3"))
        assert await store.get_checkpoint("run") is None
        assert await store.get_checkpoint("nobody") is None
        assert await store.journal_bytes("run") == 3
        assert await store.checkpoint("run", 1, 2, b"\x00state\xff")
        assert await store.journal_bytes("run") == 7 + 1
        assert await store.journal_bytes("nobody") == await store.journal_bytes("\0") == 0
        assert await store.get_checkpoint("run") == 2
        journal = await journal_of(store, "run")
        assert journal.checkpoint is not None
        assert (journal.checkpoint.sequence, journal.checkpoint.state) == (2, b"\x00state\xff")
        assert journal.entries == [Entry(3, b"3")]
        assert (await store.read_from("run", 0, 10)).entries == [Entry(3, b"3")]

    async def test_a_later_checkpoint_replaces_the_earlier(self, store: Store) -> None:
        run = new_run()
        await commit_one(store, creation(run, b"1", b"2"))
        assert await store.checkpoint("run", 1, 1, b"one")
        assert await store.checkpoint("run", 1, 2, b"two")
        assert await commit_one(store, appending(run, 2, b"3")) == Committed(3)
        journal = await journal_of(store, "run")
        assert journal.checkpoint is not None
        assert (journal.checkpoint.sequence, journal.checkpoint.state) == (2, b"two")
        assert journal.entries == [Entry(3, b"3")]

    async def test_a_checkpoint_that_is_fenced_old_or_too_new_is_refused(self, store: Store) -> None:
        run = new_run()
        await commit_one(store, creation(run, b"1", b"2", b"3"))
        assert not await store.checkpoint("run", 2, 3, b"other epoch")
        assert not await store.checkpoint("run", 1, 4, b"beyond the journal")
        assert not await store.checkpoint("nobody", 1, 1, b"nobody's")
        assert await entries_of(store, "run") == [b"1", b"2", b"3"]
        assert await store.checkpoint("run", 1, 2, b"kept")
        assert not await store.checkpoint("run", 1, 2, b"the same again")
        assert not await store.checkpoint("run", 1, 1, b"older")
        journal = await journal_of(store, "run")
        assert journal.checkpoint is not None
        assert journal.checkpoint.state == b"kept"

    async def test_fencing_and_retries_go_on_after_compaction(self, store: Store, other: Store) -> None:
        run = new_run()
        await commit_one(store, creation(run, b"1", b"2", b"3"))
        assert await other.checkpoint("run", 1, 2, b"state")
        assert await commit_one(store, appending(run, 2, b"3")) == Committed(3)
        compacted = await commit_one(store, appending(run, 1, b"2"))
        assert not isinstance(compacted, Committed), "what was dropped cannot be compared"
        assert await commit_one(store, appending(run, 3, b"4")) == Committed(4)
        assert await other.checkpoint("run", 1, 4, b"all")
        assert await commit_one(store, appending(run, 4, b"5")) == Committed(5)

    async def test_a_finished_runs_journal_stays(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        await ended(store, run)
        assert await entries_of(store, "run") == [b"created", b"end"]

    @settings(
        max_examples=40,
        deadline=None,  # a disk may be slow
        database=None,  # an example that failed on one backend need not fail on the next
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,  # each example has a root of its own in the one store
            HealthCheck.differing_executors,  # the suite is there for many backends
        ],
    )
    @given(events=journals(), data=st.data())
    async def test_checkpoint_and_tail_restore_what_all_entries_replay(
        self, store: Store, events: list[AnyEvent], data: st.DataObject
    ) -> None:
        """Checked at every stage: after each of a few commits, and after each of a few checkpoints between them."""
        run = new_run(f"example-{next(_examples)}")
        encoded = [encode_event(event) for event in events]
        whole = Journal(run.id, None, [Entry(n, event) for n, event in enumerate(encoded, start=1)])
        written = data.draw(st.integers(1, len(encoded)))
        assert await commit_one(store, creation(run, *encoded[:written])) == Committed(written)
        while True:
            expected = encode_state(restore(Journal(run.id, None, whole.entries[:written])))
            assert encode_state(restore(await journal_of(store, run.id))) == expected
            checkpoint = await store.get_checkpoint(run.id) or 0
            if checkpoint < written and data.draw(st.booleans()):
                place = data.draw(st.integers(checkpoint + 1, written))
                state = encode_state(restore(Journal(run.id, None, whole.entries[:place])))
                assert await store.checkpoint(run.id, run.epoch, place, state)
                assert encode_state(restore(await journal_of(store, run.id))) == expected
            assert await store.latest_sequence(run.id) == written
            if written == len(encoded):
                return
            more = data.draw(st.integers(1, len(encoded) - written))
            result = await commit_one(store, appending(run, written, *encoded[written : written + more]))
            written += more
            assert result == Committed(written)

    # ---- damage

    async def test_a_damaged_entry_hides_only_its_own_root(self, store: Store, corrupt: Corrupt) -> None:
        runs = [new_run(name) for name in ("a", "b", "c")]
        await store.commit([creation(run, b"1", b"2", b"3") for run in runs])
        await corrupt("b", 2)
        a, b, c = await store.read(["a", "b", "c"])
        assert isinstance(a, Journal)
        assert isinstance(c, Journal)
        assert isinstance(b, CorruptionError)
        assert (b.root_id, b.sequence) == ("b", 2)
        with pytest.raises(CorruptionError) as failure:
            await store.read_from("b", 0, 10)
        assert (failure.value.root_id, failure.value.sequence) == ("b", 2)
        assert (await store.read_from("b", 2, 10)).entries == [Entry(3, b"3")]

    async def test_a_damaged_checkpoint_hides_only_its_own_root(self, store: Store, corrupt: Corrupt) -> None:
        runs = [new_run("a"), new_run("b")]
        await store.commit([creation(run, b"1", b"2") for run in runs])
        assert await store.checkpoint("a", 1, 1, b"state")
        assert await store.checkpoint("b", 1, 1, b"state")
        await corrupt("a", 1)
        a, b = await store.read(["a", "b"])
        assert isinstance(b, Journal)
        assert isinstance(a, CorruptionError)
        assert (a.root_id, a.sequence) == ("a", 1)

    async def test_a_run_whose_journal_is_damaged_can_be_held(self, store: Store, corrupt: Corrupt) -> None:
        run = new_run()
        await created(store, run)
        await corrupt("run", 1)
        await store.hold({"run": 1}, changing(run, Status.PAUSED, reason="damaged"))
        held = await store.get_run("run")
        assert held is not None
        assert held == but(run, status=Status.PAUSED, owner=None, reason="damaged")
