"""What must be true at the end of a trial, for shapes that may end otherwise than an undisturbed run."""

from __future__ import annotations

from collections import Counter

from relight.testing.crashpoints import Trial


def _ended(trial: Trial) -> set[str]:
    return {line.label for line in trial.lines if line.what == "end"}


def values_stay(trial: Trial) -> None:
    """Every execution of a step got the same values as the first execution that could have been recorded."""
    result = trial.outcome.value["result"]
    assert result[1] == result[2], f"the step worked with {result[1]}, the flow has {result[2]}"
    assert set(result) <= _ended(trial), "a result that no step has worked for"
    for key in {line.key for line in trial.lines if line.what == "start"}:
        labels = {line.label for line in trial.lines if line.what == "start" and line.key == key}
        assert len(labels) == 1, f"step {key} was repeated with other values: {labels}"


def _items(trial: Trial, done: str, changed: str) -> None:
    """The result has all of the old items or all of the new ones. It has the old ones only if nothing was left to do."""
    result = trial.outcome.value["result"]
    resumed = any(line.what == "start" and line.life > 1 for line in trial.lines)
    wanted = [done.format(item=item) for item in ("a", "b", changed if resumed else "c", "d", "e")]
    assert result == [*wanted, "after"], result


def items_in_turn(trial: Trial) -> None:
    _items(trial, "prepare {item}, ship {item}", "changed")
    # A changed item also invalidates the items after it: their work and its own work are done again.
    if any(line.what == "start" and line.label == "prepare changed" for line in trial.lines):
        for label in ("ship changed", "ship d", "ship e"):
            assert any(line.what == "end" and line.label == label and line.life > 1 for line in trial.lines), label


def items_at_once(trial: Trial) -> None:
    _items(trial, "prepare {item}, ship {item}", "changed")


def items_as_steps(trial: Trial) -> None:
    _items(trial, "{item}", "changed")


def never_twice(trial: Trial) -> None:
    """Not even a step in flight is repeated. Exactly the steps whose outcome is unknown are reported as interrupted."""
    starts = Counter(line.effect for line in trial.lines if line.what == "start" and line.label.startswith("once"))
    assert set(starts.values()) <= {1}, starts
    result = trial.outcome.value["result"]
    interrupted = [place for place, found in enumerate(result) if found == "interrupted"]
    assert len(interrupted) <= trial.kills, f"{interrupted} were interrupted by {trial.kills} kills"
    for place, found in enumerate(result[:3]):
        assert found in ("interrupted", f"once {place}")
        if found != "interrupted":
            assert f"once {place}" in _ended(trial)
    assert result[3] == "after"


_CLEAN_UP = {"close", "leaf tidy", "report"}


def cancelled(trial: Trial) -> None:
    """The run ends as cancelled, and has closed all that it had opened."""
    assert trial.outcome.value == {"status": "cancelled", "reason": "enough"}, trial.outcome.value
    assert {"open"} | _CLEAN_UP <= _ended(trial), _ended(trial)


def cancelled_somewhere(trial: Trial) -> None:
    """The run ends as cancelled. The clean-up belongs to the `try`: all of it is done, or none if the flow did not get there."""
    assert trial.outcome.value == {"status": "cancelled", "reason": "enough"}, trial.outcome.value
    assert _ended(trial) & _CLEAN_UP in (set(), _CLEAN_UP), _ended(trial)


def cancelled_together(trial: Trial) -> None:
    parent, spawned = trial.outcome.value
    assert parent == spawned == {"status": "cancelled", "reason": "enough"}, trial.outcome.value
    assert {"family", "open"} | _CLEAN_UP <= _ended(trial), _ended(trial)


CHECKS = {
    "recorded_values": values_stay,
    "sequential_items": items_in_turn,
    "concurrent_items": items_at_once,
    "step_items": items_as_steps,
    "never_twice": never_twice,
    "cancelled_in_step": cancelled,
    "cancelled_at_once": cancelled_somewhere,
    "cancelled_family": cancelled_together,
}
