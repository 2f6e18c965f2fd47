"""A root that recovery gave up on: it has ended like any other root, but keeps its inbox and may be resumed by hand."""

from __future__ import annotations

import pytest

from relight.model.run import Hold, Message, MessageKind, Run, RunChange, Status
from relight.ports.store import Committed, Fenced, Store
from relight.testing.conformance.build import (
    START,
    FixedClock,
    Suite,
    appending,
    but,
    changing,
    commit_one,
    created,
    ended,
    entries_of,
    journal_of,
    new_run,
    run_of,
)


def giving_up(run: Run) -> RunChange:
    """The change by which recovery cancels a run."""
    return changing(run, Status.CANCELLED, hold=Hold.RECOVERY, reason="older than max_resume_age")


def bringing_back(run: Run) -> RunChange:
    """The change by which a person resumes the run."""
    return changing(run, Status.PENDING, wake_at=START)


async def given_up(store: Store, run: Run) -> None:
    """Create a root, and give it up by its owner's commit: its journal ends at 2."""
    await created(store, run)
    assert await commit_one(store, appending(run, 1, b"cancelled", changes=[giving_up(run)])) == Committed(2)


class ReopenSuite(Suite):
    """`Commit.reopen` and the inbox of a run that ended with a hold."""

    async def test_a_root_that_recovery_gave_up_on_comes_back(self, store: Store, clock: FixedClock) -> None:
        run = new_run()
        await given_up(store, run)
        clock.time = START + 9
        back = appending(run, 2, b"back", changes=[bringing_back(run)], reopen=True)
        assert await commit_one(store, back) == Committed(3)
        assert await store.get_run("run") == but(
            run, status=Status.PENDING, owner=None, wake_at=START, updated_at=START + 9
        )
        assert await entries_of(store, "run") == [b"created", b"cancelled", b"back"]
        assert [found.id for found in await store.due(START, 10)] == ["run"]
        assert await store.claim({"run": 1}, "me") == {"run": 2}
        assert await commit_one(store, appending(but(run, epoch=2), 3, b"4")) == Committed(4)

    async def test_so_does_one_that_was_held_into_its_end(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        await store.hold({"run": 1}, giving_up(run))
        assert (await run_of(store, "run")).hold is Hold.RECOVERY
        assert await commit_one(store, appending(run, 1, b"late")) == Fenced(1, None)
        back = appending(run, 1, b"back", changes=[bringing_back(run)], reopen=True)
        assert await commit_one(store, back) == Committed(2)
        assert (await run_of(store, "run")).status is Status.PENDING

    async def test_the_answer_that_was_lost_is_given_again(self, store: Store, other: Store) -> None:
        run = new_run()
        await given_up(store, run)
        back = appending(run, 2, b"back", changes=[bringing_back(run)], reopen=True)
        assert await commit_one(store, back) == Committed(3)
        assert await commit_one(other, back) == Committed(3)
        assert await store.claim({"run": 1}, "me") == {"run": 2}
        assert await commit_one(store, back) == Fenced(2, "me")

    async def test_without_reopen_it_is_as_terminal_as_any(self, store: Store) -> None:
        run = new_run()
        await given_up(store, run)
        before = await run_of(store, "run")
        late = appending(run, 2, b"late", changes=[bringing_back(run)])
        assert await commit_one(store, late) == Fenced(1, None)
        assert await store.get_run("run") == before
        assert await store.latest_sequence("run") == 2

    @pytest.mark.parametrize(("epoch", "after"), [(0, 2), (2, 2), (1, 1), (1, 3)])
    async def test_epoch_and_journal_are_compared_as_ever(self, store: Store, epoch: int, after: int) -> None:
        run = new_run()
        await given_up(store, run)
        before = await run_of(store, "run")
        late = appending(but(run, epoch=epoch), after, b"back", changes=[bringing_back(run)], reopen=True)
        assert await commit_one(store, late) == Fenced(1, None)
        assert await store.get_run("run") == before
        assert await store.latest_sequence("run") == 2

    @pytest.mark.parametrize(
        ("status", "hold"),
        [
            (Status.COMPLETED, None),
            (Status.FAILED, None),
            (Status.CANCELLED, None),
            (Status.FAILED, Hold.RECOVERY),
            (Status.CANCELLED, Hold.USER),
        ],
    )
    async def test_no_other_end_is_undone(self, store: Store, other: Store, status: Status, hold: Hold | None) -> None:
        run = new_run()
        await created(store, run)
        await commit_one(store, appending(run, 1, b"end", changes=[changing(run, status, hold=hold)]))
        before = await run_of(store, "run")
        for object_ in (store, other):
            late = appending(run, 2, b"back", changes=[bringing_back(run)], reopen=True)
            assert await commit_one(object_, late) == Fenced(1, None)
        assert await store.get_run("run") == before
        assert await store.latest_sequence("run") == 2

    async def test_reopening_a_run_that_has_not_ended_is_a_commit_like_any_other(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        change = changing(run, Status.WAITING, owner="me")
        assert await commit_one(store, appending(run, 1, b"2", changes=[change], reopen=True)) == Committed(2)
        assert (await run_of(store, "run")).status is Status.WAITING

    async def test_a_run_that_came_back_can_end_for_good(self, store: Store) -> None:
        run = new_run()
        await given_up(store, run)
        await commit_one(store, appending(run, 2, b"back", changes=[bringing_back(run)], reopen=True))
        await ended(store, run, after=3)
        late = appending(run, 4, b"back", changes=[bringing_back(run)], reopen=True)
        assert isinstance(await commit_one(store, late), Fenced)
        assert (await run_of(store, "run")).status is Status.COMPLETED

    async def test_a_journal_that_was_compacted(self, store: Store) -> None:
        run = new_run()
        await given_up(store, run)
        assert await store.checkpoint("run", 1, 2, b"all of it")
        back = appending(run, 2, b"back", changes=[bringing_back(run)], reopen=True)
        assert await commit_one(store, back) == Committed(3)
        assert [entry.event for entry in (await journal_of(store, "run")).entries] == [b"back"]

    async def test_within_one_batch(self, store: Store) -> None:
        a, b, c = new_run("a"), new_run("b"), new_run("c")
        await created(store, a, b, c)
        await given_up(store, d := new_run("d"))
        results = await store.commit(
            [
                appending(a, 1, b"2", changes=[giving_up(a)]),
                appending(b, 1, b"2", changes=[changing(b, Status.FAILED)]),
                appending(c, 1, b"2", changes=[giving_up(c)]),
                appending(a, 2, b"3", changes=[bringing_back(a)], reopen=True),
                appending(b, 2, b"3", changes=[bringing_back(b)], reopen=True),
                appending(c, 2, b"3", changes=[bringing_back(c)]),
                appending(d, 2, b"3", changes=[bringing_back(d)], reopen=True),
                appending(d, 3, b"4", changes=[changing(d, Status.WAITING, owner="me")]),
            ]
        )
        assert results == [
            Committed(2),
            Committed(2),
            Committed(2),
            Committed(3),
            Fenced(1, None),
            Fenced(1, None),
            Committed(3),
            Committed(4),
        ]
        statuses = [(await run_of(store, name)).status for name in "abcd"]
        assert statuses == [Status.PENDING, Status.FAILED, Status.CANCELLED, Status.WAITING]

    # ---- its inbox

    @pytest.mark.parametrize("by", ["commit", "hold"])
    async def test_its_inbox_is_kept(self, store: Store, by: str) -> None:
        run = new_run()
        await created(store, run)
        told = Message(run_id="run", kind=MessageKind.SIGNAL, name="go", dedup="k")
        consumed, kept = await store.post([but_named(told, "first"), told])
        assert consumed is not None
        assert kept is not None
        await commit_one(store, appending(run, 1, b"took", consumed=[consumed]))
        if by == "commit":
            await commit_one(store, appending(run, 2, changes=[giving_up(run)]))
        else:
            await store.hold({"run": 1}, giving_up(run))
        assert [message.id for message in await store.inbox(["run"])] == [kept]
        assert [message.id for message in await store.messages_after(0, 10)] == [kept]
        assert await store.post([Message(run_id="run", kind=MessageKind.SIGNAL)]) == [None], "it has ended all the same"
        await commit_one(store, appending(run, 2, b"back", changes=[bringing_back(run)], reopen=True))
        assert [message.id for message in await store.inbox(["run"])] == [kept]
        assert await store.post([but_named(told, "first"), told]) == [consumed, kept], (
            "what was told before is forgotten"
        )
        await ended(store, run, after=3)
        assert await store.inbox(["run"]) == []
        assert await store.messages_after(0, 10) == []


def but_named(message: Message, name: str) -> Message:
    """The same message with another name, and a dedup of its own."""
    return Message(run_id=message.run_id, kind=message.kind, name=name, dedup=name)
