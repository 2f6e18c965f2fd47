"""The fold from entries to state: what a run gets back after a crash."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from relight.errors import CorruptionError, UpgradeRequiredError
from relight.model import journal as j
from relight.model.crashes import NO_CRASHES, Crashes
from relight.model.formats import FORMAT
from relight.model.replay import Ending, Open, Outcome, TreeState, encode_state, item_index, item_scope, restore
from relight.testing.conformance.events import journals, kinds

CREATED = j.RunCreated("", "checkout", "hash", Raw(b"{}"), "", 1.0)
ERROR = j.ErrorRecord("builtins:ValueError", "no")


def replay(*events: j.AnyEvent) -> TreeState:
    """The state after these events, through their encoded form."""
    return restore(journal_of(CREATED, *events))


def journal_of(*events: j.AnyEvent, checkpoint: j.Checkpoint | None = None) -> j.Journal:
    first = 1 if checkpoint is None else checkpoint.sequence + 1
    entries = [j.Entry(number, j.encode_event(event)) for number, event in enumerate(events, start=first)]
    return j.Journal("run", checkpoint, entries)


def step(key: str, output: bytes = b"1") -> j.StepCompleted:
    return j.StepCompleted(key, Raw(output), "", "fp", "digest", 1)


def failed(key: str) -> j.StepFailed:
    return j.StepFailed(key, ERROR, "fp", "digest", 3)


def item(foreach: str, index: int, digest: str) -> j.ItemCompleted:
    return j.ItemCompleted(item_scope(foreach, index, digest), foreach, index, digest, Raw(b"1"), "")


# ---- every kind of event


def test_the_generated_journals_hold_every_kind_of_event():
    assert kinds() == set(typing.get_args(j.AnyEvent))


@given(journals())
def test_events_survive_being_encoded(events):
    for event in events:
        again = j.decode_event(j.encode_event(event))
        assert type(again) is type(event)
        assert again == event


@given(journals(), st.data())
def test_checkpoint_and_tail_restore_what_all_entries_replay(events, data):
    whole = journal_of(*events)
    place = data.draw(st.integers(1, len(events)))
    state = restore(j.Journal("run", None, whole.entries[:place]))
    checkpoint = j.Checkpoint(place, encode_state(state))
    restored = restore(j.Journal("run", checkpoint, whole.entries[place:]))
    assert encode_state(restored) == encode_state(restore(whole))
    assert restored == restore(whole)


@given(journals())
def test_what_has_ended_is_not_open_and_stands_in_journal_order(events):
    state = restore(journal_of(*events))
    assert state.sequence == len(events)
    sequences = [outcome.sequence for outcome in state.outcomes.values()]
    assert sequences == sorted(sequences)
    for key in state.outcomes.keys() & state.open.keys():
        assert state.open[key].sequence > state.outcomes[key].sequence, "only what was begun again can be both"


# ---- steps


def test_a_completed_step():
    state = replay(step("charge#1", b'{"ok":true}'))
    assert state.created == CREATED
    assert state.sequence == 2
    assert state.outcomes == {
        "charge#1": Outcome(2, "step", Ending.OK, Raw(b'{"ok":true}'), "", None, "fp", "digest", 1)
    }
    assert state.open == {}


def test_a_step_in_flight_is_open_until_it_ends():
    started = j.StepStarted("charge#1", 1, 5.0, 35.0, True)
    state = replay(started)
    assert state.open == {"charge#1": Open(2, "step", attempt=1, deadline=35.0, fatal=True, at=5.0, began=5.0)}
    assert replay(started, failed("charge#1")).open == {}
    assert replay(started, failed("charge#1")).outcomes["charge#1"].error == ERROR


def test_a_retrying_step_goes_on_with_the_next_attempt_and_is_no_longer_in_flight():
    state = replay(j.StepStarted("charge#1", 2, 5.0, 35.0, True), j.StepRetrying("charge#1", 2, ERROR, 60.0))
    assert state.open == {"charge#1": Open(3, "step", attempt=3, until=60.0, began=5.0, last_error=ERROR)}


def test_a_step_that_was_run_again_keeps_its_place():
    state = replay(step("a#1", b"1"), step("b#1"), step("a#1", b"2"))
    assert list(state.outcomes) == ["a#1", "b#1"]
    assert state.outcomes["a#1"].sequence < state.outcomes["b#1"].sequence, (
        "the flow asks for it there, after a crash too"
    )
    assert state.outcomes["a#1"].output == Raw(b"2")


# ---- runs


def test_a_child_run_is_open_until_it_ends():
    child = j.RunCreated("sub#1", "sub", "", Raw(b"null"), "", 2.0)
    state = replay(child, step("sub#1/a#1"))
    assert state.created == CREATED
    assert state.children == {"sub#1": child}
    assert state.open["sub#1"].kind == "run"
    ended = replay(child, step("sub#1/a#1"), j.RunCompleted("sub#1", Raw(b"7"), "", 3.0))
    assert ended.open == {}
    assert ended.outcomes["sub#1"].output == Raw(b"7")
    assert ended.outcomes["sub#1"].kind == "run"


def test_a_retrying_flow_forgets_what_failed_under_it_and_keeps_what_completed():
    state = replay(
        step("sub#1/ok#1"),
        failed("sub#1/bad#1"),
        failed("sub#10/bad#1"),
        failed("bad#1"),
        j.StepRetrying("sub#1/flaky#1", 1, ERROR, 9.0),
        j.StepRetrying("flaky#1", 1, ERROR, 9.0),
        j.RunRetrying("sub#1", 1, ERROR, 20.0),
    )
    assert set(state.outcomes) == {"sub#1/ok#1", "sub#10/bad#1", "bad#1"}
    assert set(state.open) == {"flaky#1", "sub#1"}
    assert state.open["sub#1"] == Open(8, "run", attempt=2, until=20.0, at=1.0, last_error=ERROR)


def test_a_retrying_root_forgets_every_failure():
    state = replay(step("ok#1"), failed("bad#1"), failed("sub#1/bad#1"), j.RunRetrying("", 1, ERROR, 20.0))
    assert set(state.outcomes) == {"ok#1"}
    assert state.open == {"": Open(5, "run", attempt=2, until=20.0, at=1.0, last_error=ERROR)}


def test_cancellations_are_no_failures_to_forget():
    state = replay(j.OperationCancelled("wait#1"), j.RunRetrying("", 1, ERROR, 20.0))
    assert state.outcomes["wait#1"].ending is Ending.CANCELLED


def test_recoveries_are_counted_until_there_is_progress():
    recovered = j.RunRecovered("", "me", "you", 9.0)
    assert replay(recovered, recovered).crashes.count == 2
    assert replay(recovered, recovered, step("a#1")).crashes == NO_CRASHES
    assert replay(recovered, step("a#1"), recovered).crashes.count == 1


def test_deaths_alone_and_trials_are_folded():
    shared = j.RunRecovered("", "me", "you", 1.0)
    tried = j.RunRecovered("", "me", None, 2.0, tried_with=1, trial_seconds=5.0, died=False)
    alone = j.RunRecovered("", "me", "me", 3.0, alone=True, tried_with=1, trial_seconds=7.0)
    assert replay(shared, shared, tried).crashes == Crashes(2, 0, 1, 5.0, 2.0)
    assert replay(shared, shared, tried, alone).crashes == Crashes(3, 1, 1, 7.0, 3.0)
    passed = j.RunRecovered("", "me", None, 4.0, died=False)
    assert replay(shared, tried, alone, passed).crashes == Crashes(2, 1, 0, 7.0, 3.0)


def test_a_long_step_that_was_begun_again_is_no_progress():
    """The step is announced a second after each crash. If that counted as progress, a run that kills its processes
    would never be held."""
    recovered = j.RunRecovered("", "me", "you", 1.0)
    assert replay(recovered, j.StepStarted("a#1", 1, 5.0, None, False), recovered).crashes.count == 2


def test_times_and_errors_of_a_step_that_is_tried_again():
    started = j.StepStarted("a#1", 2, 20.0, None, False)
    retrying = j.StepRetrying("a#1", 1, ERROR, 19.0, 9_000_000, 4_000_000)
    assert replay(retrying, started).open["a#1"] == Open(3, "step", 2, at=20.0, began=5.0, last_error=ERROR)
    again = replay(retrying, started, started)  # by the next process, after a crash
    assert again.open["a#1"] == Open(4, "step", 2, at=20.0, began=5.0, last_error=ERROR)
    done = j.StepCompleted("a#1", Raw(b"1"), "", "fp", "digest", 2, 30_000_000, 10_000_000)
    ended = replay(retrying, started, done).outcomes["a#1"]
    assert (ended.began, ended.at, ended.attempt, ended.last_error) == (5.0, 30.0, 2, ERROR)
    at_once = replay(msgspec.structs.replace(done, attempt=1)).outcomes["a#1"]
    assert (at_once.began, at_once.at, at_once.last_error) == (20.0, 30.0, None)


def test_entries_of_an_older_version_have_no_times():
    older = j.decode_event(b'["step","a#1",1,"","fp","digest",1]')
    ended = replay(older).outcomes["a#1"]
    assert (ended.began, ended.at) == (0.0, 0.0)


def test_a_requested_cancellation_is_remembered():
    cancelled = replay(j.CancelRequested("", "enough", 5.0), step("clean#1")).cancelled
    assert cancelled is not None
    assert cancelled.reason == "enough"


# ---- waits


def test_a_wait_keeps_its_end_and_its_name():
    state = replay(j.WaitStarted("wait#1", "signal", "approval", 99.0, 5.0))
    assert state.open == {"wait#1": Open(2, "wait", until=99.0, what="signal", name="approval", at=5.0)}


@pytest.mark.parametrize(
    ("event", "ending", "output"),
    [
        (j.TimerFired("wait#1", False, 9.0), Ending.OK, b"null"),
        (j.TimerFired("wait#1", True, 9.0), Ending.TIMED_OUT, b"null"),
        (j.SignalReceived("wait#1", Raw(b'"yes"'), "", 7), Ending.OK, b'"yes"'),
        (j.RunJoined("wait#1", Raw(b"5"), "", None, 7), Ending.OK, b"5"),
        (j.RunJoined("wait#1", Raw(b"null"), "", ERROR, 7), Ending.ERROR, b"null"),
        (j.OperationCancelled("wait#1"), Ending.CANCELLED, b"null"),
    ],
)
def test_how_a_wait_ends(event, ending, output):
    state = replay(j.WaitStarted("wait#1", "signal", "approval", 99.0, 5.0), event)
    assert state.open == {}
    assert (state.outcomes["wait#1"].ending, state.outcomes["wait#1"].output) == (ending, Raw(output))


def test_recorded_values_and_spawned_runs_are_outcomes():
    state = replay(j.ValueRecorded("now#1", Raw(b"1.5")), j.RunSpawned("spawn#1", 'other "run"'))
    assert state.outcomes["now#1"].output == Raw(b"1.5")
    assert msgspec.json.decode(state.outcomes["spawn#1"].output) == 'other "run"'


# ---- foreach


def test_an_items_scope_names_its_place_and_its_content():
    assert item_index("each#1", item_scope("each#1", 12, "abc")) == 12
    assert item_index("each#1", item_scope("each#1", 12, "abc") + "/charge#1") == 12
    assert item_index("each#1", "each#10") is None
    assert item_index("each#1", item_scope("each#10", 1, "a")) is None
    assert item_index("each#1", "charge#1") is None


def test_a_cut_drops_the_items_from_there_on_with_all_their_work():
    within = item_scope("each#1", 2, "c")
    child = j.RunCreated(f"{within}/sub#1", "sub", "", Raw(b"null"), "", 2.0)
    state = replay(
        step("before#1"),
        item("each#1", 0, "a"),
        step(item_scope("each#1", 1, "b") + "/charge#1"),
        item("each#1", 1, "b"),
        child,
        step(f"{within}/sub#1/charge#1"),
        j.StepRetrying(f"{within}/ship#1", 1, ERROR, 9.0),
        item("each#1", 10, "k"),
        item("each#2", 5, "z"),
        j.ForeachCut("each#1", 2),
        item("each#1", 2, "new"),
    )
    kept = [
        "before#1",
        "each#1[0@a]",
        "each#1[1@b]/charge#1",
        "each#1[1@b]",
        "each#2[5@z]",
        "each#1[2@new]",
    ]
    assert list(state.outcomes) == kept
    assert state.open == {}
    assert state.children == {}


def test_a_cut_at_the_first_item_drops_them_all():
    state = replay(item("each#1", 0, "a"), item("each#1", 1, "b"), j.ForeachCut("each#1", 0))
    assert state.outcomes == {}


def test_a_cut_of_a_nested_foreach_leaves_the_outer_items():
    inner = item_scope("each#1", 0, "a") + "/each#1"
    state = replay(item(inner, 0, "x"), item(inner, 1, "y"), item("each#1", 0, "a"), j.ForeachCut(inner, 1))
    assert list(state.outcomes) == ["each#1[0@a]/each#1[0@x]", "each#1[0@a]"]


# ---- forks


def test_a_fork_inherits_what_ended_before_in_the_same_order():
    state = replay(step("a#1"), step("b#1"), step("a#1", b"2"), step("c#1"), step("d#1"))
    kept = state.before(state.outcomes["d#1"].sequence)
    assert list(kept) == ["a#1", "b#1", "c#1"]
    assert [outcome.sequence for outcome in kept.values()] == [-2, -1, 0], "before the fork's own first entry"
    assert kept["a#1"].output == Raw(b"2")
    assert state.outcomes["a#1"].sequence == 2, "the original is left as it was"


def test_a_fork_from_the_beginning_inherits_nothing():
    assert replay(step("a#1")).before(0) == {}


@given(journals(), st.data())
def test_a_fork_of_a_fork_inherits_what_the_fork_did(events, data):
    state = restore(journal_of(*events))
    kept = state.before(data.draw(st.integers(0, len(events) + 1)))
    fork = TreeState(sequence=1, created=CREATED, outcomes=kept)
    again = fork.before(1)
    assert again == kept
    assert list(again) == list(kept)
    assert all(outcome.sequence < 1 for outcome in kept.values())


# ---- damage


@pytest.mark.parametrize("bad", [b"", b"[", b"null", b"[]", b'[7,"k"]', b'["step","k"]', b"\xff"])
def test_an_entry_that_is_no_event_is_named(bad):
    journal = journal_of(CREATED, step("a#1"), step("b#1"))
    journal.entries[1] = j.Entry(2, bad)
    with pytest.raises(CorruptionError) as failure:
        restore(journal)
    assert (failure.value.root_id, failure.value.sequence) == ("run", 2)


@pytest.mark.parametrize("tag", ["2:throttled", "no such event"])
def test_an_event_of_a_newer_version_is_no_damage(tag):
    journal = journal_of(CREATED, step("a#1"), step("b#1"))
    journal.entries[1] = j.Entry(2, msgspec.json.encode([tag, "k", {"any": "thing"}]))
    with pytest.raises(
        UpgradeRequiredError, match=f"entry 2 of run 'run', an event '{tag}'.* was written by a newer version"
    ):
        restore(journal)


@pytest.mark.parametrize("fields", [{}, {"outcomes": "in another form"}, {"something": "new"}])
def test_a_checkpoint_of_a_newer_version_is_no_damage(fields):
    state = msgspec.json.decode(encode_state(replay(step("a#1"))))
    newer = msgspec.json.encode({**state, **fields, "format": FORMAT + 1})
    with pytest.raises(
        UpgradeRequiredError, match="checkpoint 2 of run 'run' is of format 3 and was written by a newer"
    ):
        restore(journal_of(checkpoint=j.Checkpoint(2, newer)))


def test_what_is_new_has_its_format_in_its_name():
    """Names without a number are format 1 for ever. Older versions would misread an addition to such an entry."""
    first = {
        *("created", "completed", "failed", "cancelled", "retrying", "recovered", "resumed", "cancel", "deadlocked"),
        *("started", "retry", "step", "error", "interrupted", "value", "wait", "fired", "signal", "spawned", "joined"),
        *("item", "cut"),
    }
    assert {tag for tag in j.TAGS if ":" not in tag} == first


@pytest.mark.parametrize("bad", [b"", b"null", b'{"outcomes": 7}', b"\xff"])
def test_a_checkpoint_that_is_no_state_is_named(bad):
    with pytest.raises(CorruptionError) as failure:
        restore(journal_of(checkpoint=j.Checkpoint(40, bad)))
    assert (failure.value.root_id, failure.value.sequence) == ("run", 40)


def test_a_gap_is_named():
    journal = journal_of(CREATED, step("a#1"), step("b#1"))
    del journal.entries[1]
    with pytest.raises(CorruptionError, match="gap") as failure:
        restore(journal)
    assert failure.value.sequence == 2


def test_a_gap_after_the_checkpoint_is_named():
    checkpoint = j.Checkpoint(1, encode_state(restore(journal_of(CREATED))))
    journal = journal_of(step("a#1"), step("b#1"), checkpoint=checkpoint)
    del journal.entries[0]
    with pytest.raises(CorruptionError, match="gap") as failure:
        restore(journal)
    assert failure.value.sequence == 2


@pytest.mark.parametrize("events", [[], [step("a#1")]], ids=["empty", "no creation"])
def test_a_journal_without_a_beginning_is_damaged(events):
    with pytest.raises(CorruptionError, match="no beginning"):
        restore(journal_of(*events))
