"""The single fenced write: fencing, atomicity, retries after a lost answer, the rows that one commit may change."""

from __future__ import annotations

import pytest

from relight.model.run import (
    SERVER_LOG,
    TERMINAL,
    UNFINISHED,
    ItemResult,
    LogLine,
    Message,
    MessageKind,
    RunChange,
    Status,
)
from relight.ports.store import Commit, Committed, Exists, Extras, Fenced, Store
from relight.testing.conformance.build import (
    START,
    FixedClock,
    Suite,
    appending,
    but,
    changing,
    child_of,
    commit_one,
    created,
    creation,
    ended,
    entries_of,
    journal_of,
    new_run,
    run_of,
    spawned_by,
)


class CommitSuite(Suite):
    """`Store.commit`, and what it promises to a run's owner."""

    # ---- creation

    async def test_a_created_run_reads_back_as_it_was_given(self, store: Store) -> None:
        run = new_run(
            "full",
            flow_hash="abc",
            parent_id="someone",
            wake_at=START + 0.1234567,
            created_at=START + 0.7654321,
            reason="why",
            input=b'{"a": "\xc3\xa4"}',
            input_blob="blob",
        )
        assert await commit_one(store, creation(run, b"first")) == Committed(1)
        assert await store.get_run("full") == run
        assert await entries_of(store, "full") == [b"first"]

    async def test_creating_a_taken_id_answers_with_the_run_that_is_there(self, store: Store) -> None:
        run = new_run(input=b"1")
        await created(store, run)
        other = new_run(input=b"2")
        assert await commit_one(store, creation(other, b"other", blobs={"d": b"blob"})) == Exists(run)
        assert await entries_of(store, "run") == [b"created"]
        assert await store.get_blob("d") is None

    async def test_a_finished_run_keeps_its_id(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        await ended(store, run)
        result = await commit_one(store, creation(but(run, created_at=START + 1)))
        assert isinstance(result, Exists)
        assert result.run.status is Status.COMPLETED

    async def test_two_creations_of_one_id_in_a_batch_make_one_run(self, store: Store) -> None:
        run = new_run()
        assert await store.commit([creation(run), creation(run)]) == [Committed(1), Exists(run)]
        assert await entries_of(store, "run") == [b"created"]

    async def test_a_childs_id_is_taken_too(self, store: Store) -> None:
        run = new_run()
        child = child_of(run, "sub")
        await commit_one(store, creation(run, runs=[child]))
        assert await commit_one(store, creation(new_run(child.id))) == Exists(child)

    async def test_repeating_a_creation_whose_answer_was_lost(self, store: Store) -> None:
        commit = creation(new_run(), b"a", b"b")
        assert await commit_one(store, commit) == Committed(2)
        assert await commit_one(store, commit) == Committed(2)
        assert await entries_of(store, "run") == [b"a", b"b"]

    async def test_a_fork_begins_with_a_checkpoint_for_its_entries(self, store: Store) -> None:
        run = new_run()
        commit = creation(run, b"created", state=b"state")
        assert await commit_one(store, commit) == Committed(1)
        assert await commit_one(store, commit) == Committed(1)
        assert await commit_one(store, appending(run, 1, b"next")) == Committed(2)
        journal = await journal_of(store, "run")
        assert journal.checkpoint is not None
        assert (journal.checkpoint.sequence, journal.checkpoint.state) == (1, b"state")
        assert [(entry.sequence, entry.event) for entry in journal.entries] == [(2, b"next")]

    async def test_a_fork_brings_the_rows_of_what_it_inherits(self, store: Store) -> None:
        run = new_run()
        child = child_of(run, "sub", status=Status.COMPLETED, output=b"7")
        item = ItemResult(run_id=child.id, key="sub/f", index=0, digest="d", output=b"1")
        commit = creation(run, b"created", state=b"state", runs=[child], items=[item])
        assert await commit_one(store, commit) == Committed(1)
        assert await commit_one(store, commit) == Committed(1)
        assert await run_of(store, child.id) == child
        assert await store.item_results(child.id) == [item]
        again = child_of(run, "sub")  # replay may call the child run again: its row is there already
        assert await commit_one(store, appending(run, 1, b"next", runs=[again])) == Committed(2)
        assert await run_of(store, child.id) == child

    # ---- sequences and fencing

    async def test_each_root_has_its_own_sequence(self, store: Store) -> None:
        a, b = new_run("a"), new_run("b")
        await created(store, a, b)
        assert await store.commit([appending(a, 1, b"a2", b"a3"), appending(b, 1, b"b2")]) == [
            Committed(3),
            Committed(2),
        ]
        assert await entries_of(store, "a") == [b"created", b"a2", b"a3"]
        assert await entries_of(store, "b") == [b"created", b"b2"]

    async def test_commits_of_one_root_in_a_batch_follow_each_other(self, store: Store) -> None:
        run = new_run()
        batch = [creation(run), appending(run, 1, b"2", b"3"), appending(run, 3, b"4")]
        assert await store.commit(batch) == [Committed(1), Committed(3), Committed(4)]
        assert await entries_of(store, "run") == [b"created", b"2", b"3", b"4"]

    async def test_bytes_come_back_as_they_were_given(self, store: Store) -> None:
        run = new_run()
        events = [b"", b"\x00", b"\xff\xfe:\x00,", "ä€😀".encode(), b"x" * 100_000, b'["step"]']
        await commit_one(store, creation(run, *events))
        assert await entries_of(store, "run") == events

    @pytest.mark.parametrize("epoch", [0, 2])
    async def test_another_epoch_is_fenced(self, store: Store, epoch: int) -> None:
        run = new_run()
        kept = ItemResult(run_id="run", key="kept", index=0, digest="d")
        await commit_one(store, creation(run, items=[kept]))
        refused = Commit(
            root_id="run",
            epoch=epoch,
            after=1,
            entries=[b"late"],
            extras=Extras(
                runs=[child_of(run, "sub")],
                changes=[changing(run, Status.FAILED)],
                blobs={"digest": b"data"},
                items=[ItemResult(run_id="run", key="each", index=0, digest="d")],
                cut_items=[("run", "kept", 0)],
                log=[LogLine(run_id="run", at=START, text="late")],
            ),
        )
        assert await commit_one(store, refused) == Fenced(1, "me")
        assert await store.get_run("run") == run
        assert await store.get_run("run/sub") is None
        assert await store.get_blob("digest") is None
        assert await store.item_results("run") == [kept]
        assert await store.read_log("run", SERVER_LOG, 0, 10) == []
        assert await entries_of(store, "run") == [b"created"]

    async def test_an_unknown_run_is_fenced(self, store: Store) -> None:
        assert await commit_one(store, appending(new_run("nobody"), 0, b"x")) == Fenced(None, None)
        assert await store.get_run("nobody") is None

    async def test_a_child_has_no_journal_of_its_own(self, store: Store) -> None:
        run = new_run()
        child = child_of(run, "sub")
        await commit_one(store, creation(run, runs=[child]))
        assert await commit_one(store, Commit(root_id=child.id, epoch=0, entries=[b"x"])) == Fenced(None, None)

    async def test_a_writer_that_is_ahead_or_behind_is_fenced(self, store: Store) -> None:
        run = new_run()
        await commit_one(store, creation(run, b"1", b"2", b"3"))
        assert await commit_one(store, appending(run, 4, b"5")) == Fenced(1, "me")
        assert await commit_one(store, appending(run, 1, b"other")) == Fenced(1, "me")
        assert await commit_one(store, appending(run, 2, b"3", b"4")) == Fenced(1, "me")
        assert await entries_of(store, "run") == [b"1", b"2", b"3"]

    async def test_refusals_do_not_fail_the_others_of_a_batch(self, store: Store) -> None:
        fine, stalled, taken = new_run("fine"), new_run("stalled"), new_run("taken")
        await created(store, fine, stalled, taken)
        await store.claim({"stalled": 1}, "you")
        results = await store.commit(
            [
                appending(stalled, 1, b"late"),
                appending(fine, 1, b"2"),
                creation(but(taken, input=b"other")),
                creation(new_run("new")),
                appending(new_run("nobody"), 0, b"x"),
                appending(fine, 2, b"3"),
            ]
        )
        assert results == [
            Fenced(2, "you"),
            Committed(2),
            Exists(taken),
            Committed(1),
            Fenced(None, None),
            Committed(3),
        ]
        assert await entries_of(store, "fine") == [b"created", b"2", b"3"]
        assert await entries_of(store, "stalled") == [b"created"]
        assert await entries_of(store, "new") == [b"created"]

    async def test_what_another_object_claimed_is_fenced_here(self, store: Store, other: Store) -> None:
        run = new_run()
        await created(store, run)
        assert await commit_one(store, appending(run, 1, b"2")) == Committed(2)
        assert await other.claim({"run": 1}, "you") == {"run": 2}
        assert await commit_one(store, appending(run, 2, b"late")) == Fenced(2, "you")
        assert await commit_one(other, appending(but(run, epoch=2), 2, b"3")) == Committed(3)
        assert await store.claim({"run": 2}, "me") == {"run": 3}
        assert await commit_one(other, appending(but(run, epoch=2), 3, b"late")) == Fenced(3, "me")
        assert await commit_one(store, appending(but(run, epoch=3), 3, b"4")) == Committed(4)
        assert await entries_of(other, "run") == [b"created", b"2", b"3", b"4"]

    async def test_a_large_batch(self, store: Store) -> None:
        runs = [new_run(f"run-{n:04}", created_at=START + n) for n in range(1500)]
        await created(store, *runs)
        results = await store.commit([appending(run, 1, *[b"x"] * (n % 4)) for n, run in enumerate(runs)])
        assert results == [Committed(1 + n % 4) for n in range(1500)]
        endings = [
            appending(run, 1 + n % 4, b"end", changes=[changing(run, Status.COMPLETED)]) for n, run in enumerate(runs)
        ]
        assert await store.commit(endings) == [Committed(2 + n % 4) for n in range(1500)]
        assert {run.status for run in await store.get_runs([run.id for run in runs])} == {Status.COMPLETED}
        assert await store.list_active_roots("me", None, 10) == []

    async def test_an_empty_batch(self, store: Store) -> None:
        assert await store.commit([]) == []

    async def test_a_commit_without_entries_leaves_the_journal(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        assert await commit_one(store, appending(run, 1, changes=[changing(run, Status.WAITING)])) == Committed(1)
        assert (await run_of(store, "run")).status is Status.WAITING
        assert await entries_of(store, "run") == [b"created"]

    # ---- a lost answer

    async def test_repeating_a_batch_whose_answer_was_lost(self, store: Store) -> None:
        a, b = new_run("a"), new_run("b")
        await created(store, a, b)
        waiting = changing(a, Status.WAITING, wake_at=START + 9)
        batch = [
            appending(a, 1, b"a2", changes=[waiting], messages=[Message(run_id="b", kind=MessageKind.SIGNAL)]),
            appending(b, 1, b"b2", b"b3"),
            appending(a, 2, b"a3", changes=[changing(a, Status.RUNNING, owner="me")]),
        ]
        first = await store.commit(batch)
        assert first == [Committed(2), Committed(3), Committed(3)]
        assert await store.commit(batch) == first
        assert await entries_of(store, "a") == [b"created", b"a2", b"a3"]
        assert await entries_of(store, "b") == [b"created", b"b2", b"b3"]
        assert (await run_of(store, "a")).status is Status.RUNNING, "an old change was applied again"
        assert len(await store.inbox(["b"])) == 1, "a message was told again"

    async def test_a_repetition_is_noticed_by_another_object_too(self, store: Store, other: Store) -> None:
        run = new_run()
        await created(store, run)
        commit = appending(run, 1, b"2")
        assert await commit_one(store, commit) == Committed(2)
        assert await commit_one(other, commit) == Committed(2)
        assert await entries_of(store, "run") == [b"created", b"2"]

    async def test_a_repetition_under_an_old_epoch_is_fenced(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        commit = appending(run, 1, b"2")
        await commit_one(store, commit)
        await store.claim({"run": 1}, "you")
        assert await commit_one(store, commit) == Fenced(2, "you")

    # ---- runs of the tree, and spawned ones

    async def test_child_runs_are_inserted_once(self, store: Store) -> None:
        run = new_run()
        child = child_of(run, "sub")
        await commit_one(store, creation(run, runs=[child]))
        again = but(child, input=b"other")
        assert await commit_one(store, appending(run, 1, b"2", runs=[again, again])) == Committed(2)
        assert await store.get_run(child.id) == child

    async def test_spawned_runs_begin_with_their_first_entry(self, store: Store) -> None:
        parent = new_run("parent")
        spawn = spawned_by(parent, "spawn")
        await commit_one(store, creation(parent, runs=[spawn], spawned=[("spawn", b"born")]))
        assert await store.get_run("spawn") == spawn
        assert await entries_of(store, "spawn") == [b"born"]
        assert await store.claim({"spawn": 0}, "me") == {"spawn": 1}
        assert await commit_one(store, appending(but(spawn, epoch=1), 1, b"2")) == Committed(2)

    async def test_a_spawned_run_that_exists_is_left_alone(self, store: Store) -> None:
        parent = new_run("parent")
        await created(store, parent, new_run("spawn"))
        spawn = spawned_by(parent, "spawn")
        commit = appending(parent, 1, b"2", runs=[spawn], spawned=[("spawn", b"born")])
        assert await commit_one(store, commit) == Committed(2)
        assert (await run_of(store, "spawn")).owner == "me"
        assert await entries_of(store, "spawn") == [b"created"]

    # ---- changes of rows

    async def test_a_change_replaces_every_field_and_takes_the_stores_time(
        self, store: Store, clock: FixedClock
    ) -> None:
        run = new_run(reason="old", wake_at=START)
        await created(store, run)
        clock.time = START + 60.125
        change = RunChange(
            run_id="run", status=Status.COMPLETED, output=b"1", output_blob="blob", error=b"{}", reason="new"
        )
        await commit_one(store, appending(run, 1, b"end", changes=[change]))
        assert await store.get_run("run") == but(
            run,
            status=Status.COMPLETED,
            owner=None,
            wake_at=None,
            reason="new",
            output=b"1",
            output_blob="blob",
            error=b"{}",
            updated_at=START + 60.125,
        )

    @pytest.mark.parametrize("terminal", sorted(TERMINAL))
    async def test_nothing_leaves_a_terminal_status(self, store: Store, terminal: Status) -> None:
        run = new_run()
        await created(store, run)
        await ended(store, run, status=terminal)
        before = await store.get_run("run")
        for status in Status:
            commit = appending(run, 2, b"late", changes=[changing(run, status, owner="me")])
            assert isinstance(await commit_one(store, commit), Fenced)
            assert await store.get_run("run") == before
        assert await store.latest_sequence("run") == 2  # nothing is ever added after the end

    async def test_the_answer_to_an_end_that_was_lost_is_given_again(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        end = appending(run, 1, b"end", changes=[changing(run, Status.COMPLETED)])
        assert await store.commit([end]) == [Committed(2)]
        assert await store.commit([end]) == [Committed(2)]

    async def test_a_childs_row_may_leave_a_terminal_status(self, store: Store) -> None:
        run = new_run()
        child = child_of(run, "sub")
        await created(store, run)
        await commit_one(store, appending(run, 1, b"2", runs=[child], changes=[changing(child, Status.FAILED)]))
        await commit_one(store, appending(run, 2, b"3", changes=[changing(child, Status.COMPLETED)]))
        assert (await run_of(store, child.id)).status is Status.COMPLETED

    async def test_the_last_change_of_a_batch_counts_but_never_after_an_end(self, store: Store) -> None:
        a, b = new_run("a"), new_run("b")
        await created(store, a, b)
        await store.commit(
            [
                appending(a, 1, b"2", changes=[changing(a, Status.WAITING, owner="me")]),
                appending(b, 1, b"2", changes=[changing(b, Status.FAILED)]),
                appending(a, 2, b"3", changes=[changing(a, Status.RUNNING, owner="me")]),
                appending(b, 2, b"3", changes=[changing(b, Status.RUNNING, owner="me")]),
            ]
        )
        assert [(await run_of(store, name)).status for name in "ab"] == [Status.RUNNING, Status.FAILED]

    async def test_a_commit_changes_rows_of_its_own_tree_only(self, store: Store) -> None:
        mine, theirs = new_run("mine"), new_run("theirs")
        child = child_of(mine, "sub")
        await store.commit([creation(mine, runs=[child]), creation(theirs)])
        changes = [changing(theirs, Status.FAILED), changing(child, Status.COMPLETED, output=b"1")]
        await commit_one(store, appending(mine, 1, b"2", changes=changes))
        assert await store.get_run("theirs") == theirs
        assert (await run_of(store, child.id)).status is Status.COMPLETED
        assert await store.get_run("mine") == mine

    async def test_every_unfinished_status_can_be_written(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        for status in UNFINISHED:
            await commit_one(store, appending(run, 1, changes=[changing(run, status, owner="me")]))
            assert (await run_of(store, "run")).status is status
