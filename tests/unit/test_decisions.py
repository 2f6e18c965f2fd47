"""What recovery decides, as a table: every branch, its reason, and which branch comes first if several apply."""

from itertools import combinations
from typing import Any

import pytest

from relight.model.decisions import Action, Facts, Policy, decide
from relight.model.run import TERMINAL, UNFINISHED, Hold, Status

NOW = 1000.0


def facts(**given: Any) -> Facts:
    """The facts of a running run whose owner's session is gone. It was started at 900, and now it is 1000."""
    policy = {k: given.pop(k) for k in list(given) if k in Policy.__struct_fields__}
    base: dict[str, Any] = {
        "status": Status.RUNNING,
        "flow": "f",
        "owner": "a#1",
        "crashed": True,
        "started_at": 900.0,
        "now": NOW,
        "policy": Policy(**policy),
    }
    return Facts(**{**base, **given})


ORPHANS: list[tuple[dict[str, Any], Action, str]] = [
    ({}, Action.RESUME, "its owner died"),
    # active
    ({"owner_alive": True}, Action.LEAVE, "a#1 owns it and is alive"),
    # of a newer version, whatever the other facts are
    ({"newer": "its status was written by a newer version"}, Action.LEAVE, "its status was written by a newer version"),
    ({"newer": "a newer version", "woken": True, "ended": Status.COMPLETED}, Action.LEAVE, "a newer version"),
    ({"newer": "a newer version", "owner_alive": True}, Action.LEAVE, "a#1 owns it and is alive"),
    # stale_timeout: from the last heartbeat, else from the start; 0 = at once
    ({"stale_timeout_seconds": 0.0, "last_heartbeat": 999.9}, Action.RESUME, "its owner died"),
    ({"stale_timeout_seconds": 60.0, "last_heartbeat": 941.0}, Action.LEAVE, "stale_timeout (60s) has not passed"),
    ({"stale_timeout_seconds": 60.0, "last_heartbeat": 940.0}, Action.RESUME, "its owner died"),
    ({"stale_timeout_seconds": 101.0}, Action.LEAVE, "stale_timeout (101s) has not passed"),
    ({"stale_timeout_seconds": 100.0}, Action.RESUME, "its owner died"),
    # max_resume_age, whatever auto_resume says
    ({"max_resume_age_seconds": 99.0}, Action.CANCEL, "exceeded max resume age"),
    ({"max_resume_age_seconds": 99.0, "auto_resume": False}, Action.CANCEL, "exceeded max resume age"),
    ({"max_resume_age_seconds": 100.0}, Action.RESUME, "its owner died"),
    ({"max_resume_age_seconds": 0.0}, Action.RESUME, "its owner died"),
    # not resumable
    ({"resumable": False}, Action.FAIL, "resumable=False"),
    ({"resumable": False, "auto_resume": False}, Action.FAIL, "resumable=False"),
    # auto_resume off
    ({"auto_resume": False}, Action.CANCEL, "auto_resume is off"),
    # poison: max_attempts crashes as the only suspect, this one included
    ({"crashes_without_progress": 2}, Action.RESUME, "its owner died"),
    (
        {"crashes_without_progress": 9, "crashes_alone": 9},
        Action.RESUME,
        "9 times in a row without progress of this run: suspected",
    ),
    ({"crashes_without_progress": 99, "crashes_alone": 9}, Action.RESUME, "suspected, tried alone next"),
    ({"crashes_without_progress": 10, "crashes_alone": 10}, Action.HOLD_POISON, "died 10 times in a row"),
    (
        {"crashes_without_progress": 3, "crashes_alone": 3, "max_attempts": 3},
        Action.HOLD_POISON,
        "died 3 times in a row",
    ),
    (
        {"crashes_without_progress": 7, "crashes_alone": 3, "max_attempts": 3},
        Action.HOLD_POISON,
        "7 times in a row without progress of this run, 3 of them while it was the only suspect",
    ),
    # definition
    ({"flow_registered": False, "why_unknown": "two flows"}, Action.HOLD_DEFINITION, "two flows, and the run goes on"),
    # fingerprints
    ({"changed_steps": ("a",)}, Action.RESUME, "its owner died"),
    ({"changed_steps": ("a",), "version_mismatch": "rerun"}, Action.RESUME, "its owner died"),
    ({"changed_steps": ("a",), "version_mismatch": "fail"}, Action.HOLD_VERSION, "step 'a': code or options changed"),
    # arguments that today's flow does not accept, under every policy
    ({"refused_input": "its flow does not take it"}, Action.HOLD_VERSION, "its flow does not take it"),
    # the journal has its end
    ({"ended": Status.COMPLETED}, Action.FINISH, "its journal ends with completed"),
]


@pytest.mark.parametrize(("given", "action", "reason"), ORPHANS)
@pytest.mark.parametrize("status", [Status.PENDING, Status.RUNNING, Status.WAITING])
def test_orphans(status: Status, given: dict[str, Any], action: Action, reason: str):
    decision = decide(facts(status=status, **given))
    assert (decision.action, reason in decision.reason) == (action, True), decision


# In the order of the questions. If two apply, the first decides.
IN_ORDER: list[tuple[dict[str, Any], Action]] = [
    ({"status": Status.COMPLETED}, Action.LEAVE),
    ({"owner_alive": True}, Action.LEAVE),
    ({"stale_timeout_seconds": 500.0}, Action.LEAVE),
    ({"ended": Status.FAILED}, Action.FINISH),
    ({"max_resume_age_seconds": 1.0}, Action.CANCEL),
    ({"resumable": False}, Action.FAIL),
    ({"auto_resume": False}, Action.CANCEL),
    ({"crashes_without_progress": 10, "crashes_alone": 10}, Action.HOLD_POISON),
    ({"flow_registered": False}, Action.HOLD_DEFINITION),
    ({"refused_input": "its flow does not take it"}, Action.HOLD_VERSION),
    ({"changed_steps": ("a",), "version_mismatch": "fail"}, Action.HOLD_VERSION),
    ({"crashes_without_progress": 3, "on_trial": 1}, Action.WAIT),
]


@pytest.mark.parametrize(("first", "second"), list(combinations(IN_ORDER, 2)))
def test_the_first_that_applies_decides(first: tuple[dict[str, Any], Action], second: tuple[dict[str, Any], Action]):
    if first[0].get("resumable") is False and "flow_registered" in second[0]:
        pytest.skip("an unknown flow cannot be known to be not resumable")
    alone = decide(facts(**first[0]))
    assert alone.action is first[1]
    both = decide(facts(**{**second[0], **first[0]}))
    assert both == alone


@pytest.mark.parametrize("status", sorted(TERMINAL))
@pytest.mark.parametrize(("given", "_action", "_reason"), ORPHANS)
def test_terminal_runs_are_left_alone(status: Status, given: dict[str, Any], _action: Action, _reason: str):
    asked: dict[str, Any]
    for asked in ({}, {"crashed": False}, {"woken": True}):
        decision = decide(facts(**{**given, **asked, "status": status}))
        assert decision.action is Action.LEAVE, asked
        assert status in decision.reason, asked


@pytest.mark.parametrize("hold", list(Hold))
def test_what_is_held_stays_held(hold: Hold):
    decision = decide(facts(status=Status.PAUSED, hold=hold, reason="because", owner=None, crashed=False))
    assert (decision.action, decision.reason) == (Action.LEAVE, "it is paused: because")


def test_a_paused_run_whose_owner_died_was_about_to_go_on():
    held = facts(status=Status.PAUSED, hold=Hold.USER, reason="because", owner="dead#1")
    assert decide(held).action is Action.RESUME


@pytest.mark.parametrize("status", [Status.WAITING, Status.PENDING])
def test_a_run_without_an_owner_is_resumed_at_its_time(status: Status):
    free = {"status": status, "owner": None, "crashed": False}
    assert decide(facts(**free, wake_at=NOW)).action is Action.RESUME
    assert decide(facts(**free, wake_at=NOW + 1)).until == NOW + 1
    assert "which wakes it" in decide(facts(**free)).reason


@pytest.mark.parametrize("status", UNFINISHED)
@pytest.mark.parametrize("policy", [{"auto_resume": False}, {"max_resume_age_seconds": 1.0}, {"crashes_alone": 10}])
def test_policy_is_about_crashes_only(status: Status, policy: dict[str, Any]):
    woken = decide(facts(status=status, owner=None, crashed=False, woken=True, **policy))
    assert (woken.action, woken.reason) == (Action.RESUME, "it is due")


def test_when_to_look_again():
    assert decide(facts(stale_timeout_seconds=60.0, last_heartbeat=990.0)).until == 1050.0
    assert decide(facts(stale_timeout_seconds=150.0)).until == 1050.0
    assert decide(facts(owner_alive=True)).until is None


def test_reasons_name_what_frees_the_run():
    assert "import it, and the run" in decide(facts(flow_registered=False, why_unknown="import it")).reason
    assert "resume()" in decide(facts(crashes_alone=10)).reason
    assert "relight recovery resume" in decide(facts(auto_resume=False)).reason
    assert "restore the old code" in decide(facts(changed_steps=("a",), version_mismatch="fail")).reason


# ---- suspects


def suspect(**given: Any) -> Facts:
    return facts(**{"crashes_without_progress": 3, **given})


@pytest.mark.parametrize(("together", "tried"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (100, 50)])
def test_half_of_the_suspects_that_come_together_are_tried(together: int, tried: int):
    decisions = [decide(suspect(suspects=together, turn=turn)) for turn in range(together)]
    assert [one.action for one in decisions] == [Action.RESUME] * tried + [Action.WAIT] * (together - tried)
    assert {one.tried_with for one in decisions[:tried]} == {tried}
    assert {one.tried_with for one in decisions[tried:]} <= {0}
    assert all(one.until == NOW + one.trial_seconds for one in decisions[tried:])
    assert all("suspected, tried" in one.reason for one in decisions)


def test_while_some_are_tried_the_others_wait_until_that_is_over():
    decision = decide(suspect(on_trial=1, trial_ends_at=NOW + 7))
    assert (decision.action, decision.until) == (Action.WAIT, NOW + 7)
    assert decide(suspect(on_trial=1, trial_ends_at=NOW - 7)).until == NOW


@pytest.mark.parametrize(("lived", "seconds"), [(0.0, 2.0), (0.9, 2.0), (10.0, 20.0), (1000.0, 300.0)])
def test_a_trial_lasts_longer_than_the_last_process_lived_within_bounds(lived: float, seconds: float):
    assert decide(suspect(lived_seconds=lived)).trial_seconds == seconds


def test_a_run_is_suspected_after_max_attempts_if_that_is_less():
    assert decide(facts(crashes_without_progress=1, max_attempts=1, on_trial=1)).action is Action.WAIT
    assert decide(facts(crashes_without_progress=2, on_trial=1)).action is Action.RESUME


def test_a_suspect_that_is_due_is_tried_for_as_long_as_was_decided_when_its_process_died():
    due = {"owner": None, "crashed": False, "wake_at": NOW, "status": Status.PENDING}
    assert decide(suspect(**due, trial_seconds=30.0)).trial_seconds == 30.0
    waiting = decide(suspect(**{**due, "wake_at": NOW + 1}))
    assert (waiting.action, waiting.until) == (Action.LEAVE, NOW + 1)
    assert "suspected, tried alone next" in waiting.reason
    assert decide(suspect(**due, resumed=True)).reason == "it is due"
