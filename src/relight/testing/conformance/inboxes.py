"""Messages to runs: posted once, read in order, consumed by the commit of the entry that records them."""

from __future__ import annotations

import msgspec
import pytest

from relight.model.run import ENDS_PAUSE, Hold, Message, MessageKind, Status
from relight.ports.store import Committed, Fenced, Store
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
    ids,
    new_run,
    run_of,
    spawned_by,
)


def signal(run_id: str, name: str = "go", dedup: str | None = None, payload: bytes = b"null") -> Message:
    """A signal, posted at START."""
    return Message(run_id=run_id, kind=MessageKind.SIGNAL, name=name, dedup=dedup, payload=payload, at=START)


def pausing(run_id: str) -> Message:
    """A request to pause, posted at START."""
    return Message(run_id=run_id, kind=MessageKind.PAUSE, at=START)


def joining(run_id: str, by: str) -> Message:
    """A join: the run `by` wants to be notified of the end of `run_id`. Posted at START."""
    return Message(run_id=run_id, kind=MessageKind.JOIN, name=by, dedup=f"join:{by}", at=START)


class InboxSuite(Suite):
    """`post`, `inbox`, `messages_after` and the messages of a commit."""

    async def test_a_message_reads_back_as_it_was_posted(self, store: Store) -> None:
        await created(store, new_run("a"))
        message = Message(
            run_id="a",
            kind=MessageKind.ENDED,
            name="spawn",
            payload=b'{"x": "\xc3\xa4"}',
            payload_blob="blob",
            dedup="once",
            at=START + 0.1234567,
        )
        (message_id,) = await store.post([message])
        assert message_id is not None
        assert await store.inbox(["a"]) == [msgspec.structs.replace(message, id=message_id)]

    async def test_messages_are_read_oldest_first(self, store: Store) -> None:
        await created(store, new_run("a"), new_run("b"), new_run("c"))
        posted = await store.post([signal("b", "1"), signal("a", "2"), signal("c", "3"), signal("a", "4")])
        numbers = [number for number in posted if number is not None]
        assert numbers == sorted(set(numbers))
        assert len(numbers) == 4
        assert [message.name for message in await store.inbox(["a", "b"])] == ["1", "2", "4"]
        assert [message.name for message in await store.messages_after(0, 10)] == ["1", "2", "3", "4"]
        assert [message.name for message in await store.messages_after(0, 3)] == ["1", "2", "3"]
        assert [message.name for message in await store.messages_after(numbers[1], 10)] == ["3", "4"]
        assert await store.messages_after(numbers[3], 10) == []
        assert await store.inbox([]) == []

    async def test_the_same_dedup_is_told_once_per_run(self, store: Store) -> None:
        await created(store, new_run("a"), new_run("b"))
        first, again, elsewhere = await store.post(
            [signal("a", "1", "k"), signal("a", "2", "k"), signal("b", "3", "k")]
        )
        assert first == again != elsewhere
        assert await store.post([signal("a", "4", "k")]) == [first]
        assert [message.name for message in await store.inbox(["a", "b"])] == ["1", "3"]

    async def test_without_dedup_each_is_told(self, store: Store) -> None:
        await created(store, new_run("a"))
        await store.post([signal("a"), signal("a")])
        await store.post([signal("a")])
        assert len(await store.inbox(["a"])) == 3

    async def test_unknown_finished_and_child_runs_are_told_nothing(self, store: Store) -> None:
        run, done = new_run("a"), new_run("done")
        child = child_of(run, "sub")
        await store.commit([creation(run, runs=[child]), creation(done)])
        await ended(store, done)
        posted = await store.post([signal("nobody"), signal("done", dedup="k"), signal("a"), signal(child.id)])
        assert [number is None for number in posted] == [True, True, False, True]
        assert [message.run_id for message in await store.messages_after(0, 10)] == ["a"]

    async def test_consuming_takes_messages_out_and_remembers_their_dedup(self, store: Store) -> None:
        run = new_run("a")
        await created(store, run)
        one, two = await store.post([signal("a", "1", "k"), signal("a", "2")])
        assert one is not None
        assert two is not None
        assert await commit_one(store, appending(run, 1, b"took 1", consumed=[one])) == Committed(2)
        assert [message.id for message in await store.inbox(["a"])] == [two]
        assert [message.id for message in await store.messages_after(0, 10)] == [two]
        assert await store.post([signal("a", "1", "k")]) == [one]
        assert [message.id for message in await store.inbox(["a"])] == [two]

    async def test_a_fenced_commit_consumes_nothing(self, store: Store) -> None:
        run = new_run("a")
        await created(store, run)
        (one,) = await store.post([signal("a")])
        assert one is not None
        stale = appending(but(run, epoch=0), 1, b"took", consumed=[one])
        assert await commit_one(store, stale) == Fenced(1, "me")
        assert len(await store.inbox(["a"])) == 1

    async def test_only_the_runs_own_messages_are_consumed(self, store: Store) -> None:
        a, b = new_run("a"), new_run("b")
        await created(store, a, b)
        one, two, three = await store.post([signal("a"), signal("b"), signal("b")])
        assert one is not None
        assert two is not None
        assert three is not None
        await store.commit([appending(a, 1, b"took", consumed=[one, two]), appending(b, 1, b"took", consumed=[three])])
        assert [message.id for message in await store.messages_after(0, 10)] == [two]

    async def test_an_ended_runs_inbox_is_gone_and_no_id_is_used_again(self, store: Store) -> None:
        a, b = new_run("a"), new_run("b")
        await created(store, a, b)
        one, two = await store.post([signal("a", dedup="k"), signal("a")])
        assert two is not None
        await ended(store, a)
        assert await store.inbox(["a"]) == []
        assert await store.messages_after(0, 10) == []
        assert await store.post([signal("a", dedup="k")]) == [None]
        (three,) = await store.post([signal("b")])
        assert three is not None
        assert three > two
        assert one is not None

    async def test_messages_of_a_commit(self, store: Store) -> None:
        teller, told, done = new_run("teller"), new_run("told"), new_run("done")
        await created(store, teller, told, done)
        await ended(store, done)
        messages = [
            signal("told", "1", "k"),
            signal("done"),
            signal("nobody"),
            signal("told", "2", "k"),
            signal("told", "3"),
        ]
        assert await commit_one(store, appending(teller, 1, b"2", messages=messages)) == Committed(2)
        assert [(message.run_id, message.name) for message in await store.messages_after(0, 10)] == [
            ("told", "1"),
            ("told", "3"),
        ]
        stale = but(teller, epoch=0)
        await commit_one(store, appending(stale, 2, b"3", messages=[signal("told", "late")]))
        assert len(await store.inbox(["told"])) == 2

    async def test_a_message_to_a_run_of_the_same_batch(self, store: Store) -> None:
        teller, born, ending = new_run("teller"), new_run("born"), new_run("ending")
        await created(store, teller, ending)
        await store.commit(
            [
                creation(born),
                appending(teller, 1, b"2", messages=[signal("born"), signal("ending")]),
                appending(ending, 1, b"end", changes=[changing(ending, Status.FAILED)]),
            ]
        )
        assert [message.run_id for message in await store.messages_after(0, 10)] == ["born"]

    async def test_cancelling_reaches_every_unfinished_run_spawned_from_the_tree(self, store: Store) -> None:
        root, lookalike = new_run("root"), new_run("root0")
        child = child_of(root, "sub")
        spawns = [
            spawned_by(root, "by-root"),
            spawned_by(child, "by-child"),
            spawned_by(root, "done"),
            spawned_by(lookalike, "by-other"),
        ]
        await store.commit([creation(root, runs=[child, *spawns]), creation(lookalike)])
        claimed = await store.claim({"done": 0}, "me")
        await ended(store, but(spawns[2], epoch=claimed["done"]), after=0)
        for after in (1, 2):
            cancel = appending(root, after, b"cancelling", cancel_spawned="enough")
            assert await commit_one(store, cancel) == Committed(after + 1)
        told = await store.messages_after(0, 10)
        assert sorted(message.run_id for message in told) == ["by-child", "by-root"]
        assert {(message.kind, message.payload) for message in told} == {(MessageKind.CANCEL, b'"enough"')}

    async def test_cancelling_goes_by_parentage_and_not_by_ids(self, store: Store) -> None:
        """Also through runs that have ended, and not to a run whose id only looks as if it belonged to the tree."""
        root, stranger = new_run("root"), new_run("root/stranger")
        between, below = spawned_by(root, "between"), spawned_by(new_run("between"), "below")
        deeper = spawned_by(child_of(below, "sub"), "deeper")
        other = spawned_by(stranger, "other")
        await store.commit([creation(root, runs=[between]), creation(stranger, runs=[other])])
        claimed = await store.claim({"between": 0}, "me")
        between = but(between, epoch=claimed["between"])
        assert await commit_one(store, appending(between, 0, b"spawning", runs=[below])) == Committed(1)
        below = but(below, epoch=(await store.claim({"below": 0}, "me"))["below"])
        await commit_one(store, appending(below, 0, b"spawning", runs=[child_of(below, "sub"), deeper]))
        await ended(store, between, after=1)
        await commit_one(store, appending(root, 1, b"cancelling", cancel_spawned="enough"))
        told = await store.messages_after(0, 10)
        assert sorted(message.run_id for message in told if message.kind is MessageKind.CANCEL) == ["below", "deeper"]

    async def test_whoever_has_joined_a_run_is_told_when_it_ends(self, store: Store, clock: FixedClock) -> None:
        runs = [new_run(run_id) for run_id in ("awaited", "other", "first", "second", "done")]
        await created(store, *runs)
        for run_id in ("first", "second", "done", "nobody"):
            (asked,) = await store.post([joining("awaited", run_id)])
            assert await store.post([joining("awaited", run_id)]) == [asked], "asked again after a crash"
        await ended(store, runs[-1])
        await ended(store, runs[1])
        assert await store.inbox(["first", "second"]) == []
        clock.time = START + 7
        await ended(store, runs[0])
        for run_id in ("first", "second"):
            (told,) = await store.inbox([run_id])
            assert (told.kind, told.name, told.at) == (MessageKind.ENDED, "awaited", START + 7)
            by_itself = Message.end_of("awaited", 1, START, to=run_id)
            assert await store.post([by_itself]) == [told.id], "as an ended run tells whoever spawned it"
        assert await store.post([joining("awaited", "first")]) == [None]

    async def test_a_run_that_is_held_into_its_end_tells_whoever_has_joined_it(self, store: Store) -> None:
        awaited, waiting = new_run("awaited"), new_run("waiting")
        await created(store, awaited, waiting)
        await store.post([joining("awaited", "waiting")])
        await store.hold({"awaited": 1}, changing(awaited, Status.CANCELLED, reason="enough"))
        assert [message.name for message in await store.inbox(["waiting"])] == ["awaited"]

    async def test_a_run_that_recovery_gives_up_on_tells_too_and_tells_again_of_its_next_end(
        self, store: Store
    ) -> None:
        awaited, waiting = new_run("awaited"), new_run("waiting")
        await created(store, awaited, waiting)
        await store.post([joining("awaited", "waiting")])
        given_up = changing(awaited, Status.CANCELLED, hold=Hold.RECOVERY, reason="too old")
        assert await commit_one(store, appending(awaited, 1, b"end", changes=[given_up])) == Committed(2)
        (told,) = await store.inbox(["waiting"])
        back = appending(awaited, 2, b"back", changes=[changing(awaited, Status.PENDING)], reopen=True)
        assert await commit_one(store, back) == Committed(3)
        claimed = await store.claim({"awaited": 1}, "me")
        await ended(store, but(awaited, epoch=claimed["awaited"]), after=3)
        first, second = await store.inbox(["waiting"])
        assert first == told
        assert (second.kind, second.name) == (MessageKind.ENDED, "awaited")

    async def test_a_fenced_end_tells_nobody(self, store: Store) -> None:
        awaited, waiting = new_run("awaited"), new_run("waiting")
        await created(store, awaited, waiting)
        await store.post([joining("awaited", "waiting")])
        await store.claim({"awaited": 1}, "you")
        end = appending(awaited, 1, b"end", changes=[changing(awaited, Status.COMPLETED)])
        assert isinstance(await commit_one(store, end), Fenced)
        assert await store.inbox(["waiting"]) == []

    async def test_a_run_parked_with_a_message_it_has_not_heard_is_due_at_once(
        self, store: Store, clock: FixedClock
    ) -> None:
        run = new_run()
        await created(store, run)
        heard, unheard = await store.post([signal("run", "heard"), signal("run", "unheard")])
        assert heard is not None
        assert unheard is not None
        clock.time = START + 7
        parked = changing(run, Status.WAITING, wake_at=START + 1000, heard=heard)
        assert await commit_one(store, appending(run, 1, b"w", changes=[parked])) == Committed(2)
        assert (await run_of(store, "run")).wake_at == START + 7
        assert ids(await store.due(START + 7, 10)) == ["run"]

    async def test_a_run_parked_with_messages_that_it_has_heard_waits(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        (heard,) = await store.post([signal("run", "heard")])
        assert heard is not None
        parked = changing(run, Status.WAITING, heard=heard)
        assert await commit_one(store, appending(run, 1, b"w", changes=[parked])) == Committed(2)
        assert (await run_of(store, "run")).wake_at is None

    async def test_a_run_parked_while_it_consumes_its_newest_message_waits(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        first, second = await store.post([signal("run", "first"), signal("run", "second")])
        assert first is not None
        assert second is not None
        parked = changing(run, Status.WAITING, heard=second)
        taken = appending(run, 1, b"w", changes=[parked], consumed=[first, second])
        assert await commit_one(store, taken) == Committed(2)
        assert (await run_of(store, "run")).wake_at is None

    @pytest.mark.parametrize("kind", sorted(ENDS_PAUSE))
    async def test_a_run_paused_with_an_unheard_message_that_ends_the_pause_is_pending_and_due(
        self, store: Store, clock: FixedClock, kind: MessageKind
    ) -> None:
        """Other processes have left that message to the owner, which may die before it reads the inbox again."""
        run = new_run()
        await created(store, run)
        heard, unheard = await store.post([pausing("run"), Message(run_id="run", kind=kind, at=START)])
        assert heard is not None
        clock.time = START + 7
        paused = changing(run, Status.PAUSED, hold=Hold.USER, reason="paused", heard=heard)
        pause = appending(run, 1, b"w", changes=[paused], consumed=[heard])
        assert await commit_one(store, pause) == Committed(2)
        row = await run_of(store, "run")
        assert (row.status, row.hold, row.reason, row.wake_at) == (Status.PENDING, None, "", START + 7)
        assert ids(await store.due(START + 7, 10)) == ["run"]
        assert [message.id for message in await store.inbox(["run"])] == [unheard]

    async def test_a_run_paused_with_other_unheard_messages_is_paused(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        (heard, *_) = await store.post([pausing("run"), signal("run"), pausing("run")])
        paused = changing(run, Status.PAUSED, hold=Hold.USER, reason="paused", heard=heard)
        assert await commit_one(store, appending(run, 1, b"w", changes=[paused])) == Committed(2)
        row = await run_of(store, "run")
        assert (row.status, row.hold, row.reason, row.wake_at) == (Status.PAUSED, Hold.USER, "paused", None)

    async def test_holding_a_run_with_an_unheard_message_that_ends_the_hold(self, store: Store) -> None:
        told, quiet = new_run("told"), new_run("quiet")
        await created(store, told, quiet)
        heard, _ = await store.post([signal("quiet"), Message(run_id="told", kind=MessageKind.CANCEL, at=START)])
        change = changing(told, Status.PAUSED, hold=Hold.CORRUPT, reason="row 3", heard=heard)
        await store.hold({"told": 1, "quiet": 1}, change)
        assert (await run_of(store, "quiet")).hold is Hold.CORRUPT
        row = await run_of(store, "told")
        assert (row.status, row.hold, row.owner) == (Status.PENDING, None, None)
        assert row.wake_at is not None

    async def test_the_newest_message(self, store: Store) -> None:
        assert await store.newest_message() == 0
        await created(store, new_run("a"))
        (first, second) = await store.post([signal("a"), signal("a")])
        assert first is not None
        assert await store.newest_message() == second
