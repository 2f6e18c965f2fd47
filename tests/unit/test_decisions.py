"""What recovery decides, as a table."""

from typing import Any

import pytest

from relight.model.decisions import Action, Facts, decide
from relight.model.run import TERMINAL, UNFINISHED, Status


def facts(**given: Any) -> Facts:
    return Facts(**{"status": Status.RUNNING, "flow": "f", "flow_registered": True, "crashed": True, **given})


@pytest.mark.parametrize(
    ("given", "action", "reason"),
    [
        ({}, Action.RESUME, "its owner died"),
        ({"crashed": False}, Action.RESUME, "it is due"),
        ({"flow_registered": False}, Action.HOLD_DEFINITION, "flow 'f' is not registered"),
        ({"flow_registered": False, "crashed": False}, Action.HOLD_DEFINITION, "flow 'f' is not registered"),
        ({"resumable": False}, Action.FAIL, "resumable=False"),
        ({"resumable": False, "crashed": False}, Action.RESUME, "it is due"),
        ({"crashes_without_progress": 9}, Action.RESUME, "its owner died"),
        ({"crashes_without_progress": 10}, Action.HOLD_POISON, "died 10 times in a row"),
        ({"crashes_without_progress": 10, "crashed": False}, Action.RESUME, "it is due"),
        ({"crashes_without_progress": 3, "max_attempts": 3}, Action.HOLD_POISON, "died 3 times in a row"),
        # several at once: what has to be settled first comes first
        ({"flow_registered": False, "crashes_without_progress": 10}, Action.HOLD_DEFINITION, "not registered"),
        ({"resumable": False, "crashes_without_progress": 10}, Action.FAIL, "resumable=False"),
        ({"resumable": False, "flow_registered": False}, Action.HOLD_DEFINITION, "not registered"),
    ],
)
@pytest.mark.parametrize("status", UNFINISHED)
def test_unfinished_runs(status: Status, given: dict[str, Any], action: Action, reason: str):
    decision = decide(facts(status=status, **given))
    assert decision.action is action
    assert reason in decision.reason


@pytest.mark.parametrize("status", sorted(TERMINAL))
@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("flow_registered", [False, True])
@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("crashes", [0, 10])
def test_terminal_runs_are_left_alone(
    status: Status, crashed: bool, flow_registered: bool, resumable: bool, crashes: int
):
    decision = decide(
        facts(
            status=status,
            crashed=crashed,
            flow_registered=flow_registered,
            resumable=resumable,
            crashes_without_progress=crashes,
        )
    )
    assert decision.action is Action.LEAVE
    assert status in decision.reason


def test_a_hold_names_what_frees_it():
    assert "register it" in decide(facts(flow_registered=False)).reason
    assert "resume()" in decide(facts(crashes_without_progress=10)).reason
