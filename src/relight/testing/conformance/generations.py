"""A run that begins its next generation (`Commit.next`): what is kept, what is deleted, and which writes are fenced."""

from __future__ import annotations

from typing import Any

from relight.model.journal import Entry
from relight.model.run import Message, Run
from relight.ports.store import KEPT_DEDUPS, Commit, Committed, Fenced, NextGeneration, Store
from relight.testing.conformance.build import (
    START,
    Suite,
    appending,
    child_of,
    commit_one,
    created,
    ended,
    journal_of,
    new_run,
    spawned_by,
)
from relight.testing.conformance.contents import item, line, texts
from relight.testing.conformance.inboxes import joining, signal


def continuing(run: Run, after: int, state: bytes = b"state", children: str = "run/", **parts: Any) -> Commit:
    """The commit with which a run's generation ends and the next begins."""
    trim = parts.pop("trim_inbox", False)
    begun = NextGeneration(state=state, children=children, trim_inbox=trim)
    return appending(run, after, b"continued", next=begun, **parts)


async def shown(store: Store, root_id: str = "run") -> tuple[int, bytes, list[Entry]]:
    """The sequence and the state of a root's checkpoint, and the entries after it."""
    journal = await journal_of(store, root_id)
    assert journal.checkpoint is not None
    return journal.checkpoint.sequence, journal.checkpoint.state, journal.entries


class GenerationSuite(Suite):
    """A journal that begins anew, and what happens to child runs, items, logs and the inbox."""

    async def test_a_checkpoint_takes_the_place_of_the_journal(self, store: Store, other: Store) -> None:
        run = new_run()
        await created(store, run)
        await commit_one(store, appending(run, 1, b"2", b"3"))
        assert await commit_one(store, continuing(run, 3)) == Committed(4)
        assert await shown(store) == (4, b"state", [])
        assert await store.latest_sequence("run") == 4
        assert await commit_one(store, appending(run, 4, b"5")) == Committed(5)
        assert await shown(other) == (4, b"state", [Entry(5, b"5")])

    async def test_again_and_again(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        assert await store.checkpoint("run", 1, 1, b"an ordinary one")
        for turn in range(2, 12, 2):
            assert await commit_one(store, appending(run, turn - 1, b"entry")) == Committed(turn)
            assert await commit_one(store, continuing(run, turn, b"%d" % turn)) == Committed(turn + 1)
            assert await shown(store) == (turn + 1, b"%d" % turn, [])

    async def test_repeating_one_whose_answer_was_lost(self, store: Store, other: Store) -> None:
        run = new_run()
        await created(store, run)
        commit = continuing(run, 1, log=[line("continued")])
        assert await commit_one(store, commit) == Committed(2)
        assert await commit_one(store, commit) == Committed(2)
        assert await commit_one(other, commit) == Committed(2)
        assert await shown(store) == (2, b"state", [])
        assert await texts(store, "run") == ["continued"]

    async def test_another_one_in_its_place_is_fenced(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        await commit_one(store, continuing(run, 1))
        assert await commit_one(store, continuing(run, 1, b"other")) == Fenced(1, "me")
        assert await commit_one(store, appending(run, 1, b"continued")) == Fenced(1, "me")
        assert await shown(store) == (2, b"state", [])

    async def test_one_that_is_fenced_drops_nothing(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        parts: dict[str, Any] = {"runs": [child_of(run, "sub")], "items": [item("each", 0)]}
        await commit_one(store, appending(run, 1, b"2", **parts))
        assert await store.claim({"run": 1}, "you") == {"run": 2}
        others = new_run("others")
        await created(store, others)
        batch = [continuing(run, 2), appending(others, 1, b"2")]
        assert await store.commit(batch) == [Fenced(2, "you"), Committed(2)]
        journal = await journal_of(store, "run")
        assert journal.checkpoint is None
        assert [entry.event for entry in journal.entries] == [b"created", b"2"]
        assert await store.get_run("run/sub") is not None
        assert len(await store.item_results("run")) == 1

    async def test_child_runs_go_and_spawned_ones_stay(self, store: Store) -> None:
        run, similar = new_run(), new_run("run0")
        await created(store, run, similar)
        child, spawned = child_of(run, "sub"), spawned_by(run, "run/$spawn.ship")
        below = child_of(run, "sub/deep", parent_id=child.id)
        everything: dict[str, Any] = {
            "runs": [child, below, spawned],
            "spawned": [(spawned.id, b"created")],
            "items": [item("each", 0), item("each", 0, run_id=child.id)],
            "log": [line("root"), line("child", child.id), line("spawned", spawned.id)],
        }
        await commit_one(store, appending(run, 1, b"2", **everything))
        await commit_one(store, appending(similar, 1, b"2", runs=[child_of(similar, "sub")]))
        late = child_of(run, "late")
        assert await commit_one(store, continuing(run, 2, runs=[late])) == Committed(3)
        left = await store.get_runs([child.id, below.id, late.id, spawned.id, "run", "run0/sub"])
        assert {one.id for one in left} == {spawned.id, "run", "run0/sub"}
        assert await store.item_results("run") == await store.item_results(child.id) == []
        assert (await texts(store, "run"), await texts(store, spawned.id)) == (["root"], ["spawned"])
        assert await store.latest_sequence(spawned.id) == 1

    async def test_only_the_child_runs_of_its_own_generation_are_looked_for(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        children = [child_of(run, key) for key in ("@2/sub", "@20/sub", "@3/sub")]
        await commit_one(store, appending(run, 1, b"2", runs=children))
        assert await commit_one(store, continuing(run, 2, children="run/@2/")) == Committed(3)
        left = await store.get_runs([child.id for child in children])
        assert {one.id for one in left} == {"run/@20/sub", "run/@3/sub"}

    async def test_what_follows_in_the_same_batch_stays(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        parts: dict[str, Any] = {"runs": [child_of(run, "@2/sub")], "items": [item("@2/each", 0)]}
        batch = [appending(run, 1, b"2"), continuing(run, 2), appending(run, 3, b"4", **parts)]
        assert await store.commit(batch) == [Committed(2), Committed(3), Committed(4)]
        assert await shown(store) == (3, b"state", [Entry(4, b"4")])
        assert await store.get_run("run/@2/sub") is not None
        assert [one.key for one in await store.item_results("run")] == ["@2/each"]

    async def test_two_runs_in_one_batch(self, store: Store) -> None:
        a, b = new_run("a"), new_run("b")
        await created(store, a, b)
        batch = [continuing(a, 1, b"of a", "a/"), continuing(b, 1, b"of b", "b/")]
        assert await store.commit(batch) == [Committed(2), Committed(2)]
        assert (await shown(store, "a"), await shown(store, "b")) == ((2, b"of a", []), (2, b"of b", []))

    async def test_an_older_checkpoint_is_refused(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        await commit_one(store, appending(run, 1, b"2"))
        await commit_one(store, continuing(run, 2))
        assert not await store.checkpoint("run", 1, 2, b"of the last generation")
        assert await shown(store) == (3, b"state", [])

    async def test_its_inbox_stays(self, store: Store) -> None:
        run, waiting = new_run(), new_run("waiting")
        await created(store, run, waiting)
        taken, unread, _ = await store.post(
            [signal("run"), signal("run", "later", dedup="2"), joining("run", "waiting")]
        )
        assert taken is not None
        await commit_one(store, continuing(run, 1, consumed=[taken], trim_inbox=True))
        found = await store.inbox(["run"])
        assert [message.id for message in found][:1] == [unread]
        assert len(found) == 2, "whoever has joined it still waits for its end"
        assert await store.post([signal("run", "later", dedup="2")]) == [unread]

    async def test_consumed_messages_are_forgotten_but_for_the_newest_dedups(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        signals = [signal("run", dedup=f"{n}") for n in range(KEPT_DEDUPS + 5)]
        told = [message_id for message_id in await store.post(signals) if message_id is not None]
        await commit_one(store, appending(run, 1, b"2", consumed=told))
        assert await commit_one(store, continuing(run, 2, trim_inbox=True)) == Committed(3)
        oldest, newest = await store.post([signal("run", dedup="0"), signal("run", dedup=f"{KEPT_DEDUPS + 4}")])
        assert newest == told[-1], "it was told before"
        assert oldest is not None
        assert oldest > told[-1], "so long ago that it counts as new"
        assert [message.id for message in await store.inbox(["run"])] == [oldest]

    async def test_ends_of_other_runs_do_not_count_among_those(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        first = await store.post([signal("run", dedup="signal")])
        ends = [Message.end_of(f"other-{n}", 1, START, to="run") for n in range(KEPT_DEDUPS + 1)]
        told = [message_id for message_id in [*first, *await store.post(ends)] if message_id is not None]
        await commit_one(store, appending(run, 1, b"2", consumed=told))
        assert await commit_one(store, continuing(run, 2, trim_inbox=True)) == Committed(3)
        assert await store.post([signal("run", dedup="signal")]) == first

    async def test_joins_of_runs_that_have_ended_go(self, store: Store) -> None:
        run, waiting, over = new_run(), new_run("waiting"), new_run("over")
        await created(store, run, waiting, over)
        await store.post([joining("run", "waiting"), joining("run", "over"), joining("run", "unknown")])
        await ended(store, over)
        await commit_one(store, continuing(run, 1, trim_inbox=True))
        assert [message.name for message in await store.inbox(["run"])] == ["waiting"]

    async def test_a_checkpoint_forgets_them_as_well(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        told = await store.post([signal("run", dedup=f"{n}") for n in range(KEPT_DEDUPS + 1)])
        consumed = [message_id for message_id in told if message_id is not None]
        await commit_one(store, appending(run, 1, b"2", consumed=consumed))
        assert await store.post([signal("run", dedup="0")]) == [told[0]]
        assert await store.checkpoint("run", 1, 2, b"state")
        assert await store.post([signal("run", dedup="0")]) != [told[0]]
        assert await store.post([signal("run", dedup="1")]) == [told[1]]
