"""What recovery does with an unfinished run: a pure function from facts to a decision with a reason.

The recoverer, and whoever explains or plans a recovery, ask the same function, so they cannot disagree.
"""

from __future__ import annotations

import enum

import msgspec

from relight.model.run import Status


class Action(enum.StrEnum):
    """What recovery does."""

    LEAVE = "leave"  # terminal: no recovery ever touches it
    RESUME = "resume"
    FAIL = "fail"
    HOLD_DEFINITION = "hold-definition"
    HOLD_POISON = "hold-poison"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision may depend on."""

    status: Status
    flow: str
    flow_registered: bool
    resumable: bool = True
    crashed: bool  # its owner died while it was in memory; False for a parked run that is due
    crashes_without_progress: int = 0
    max_attempts: int = 10


class Decision(msgspec.Struct, frozen=True):
    """What is done, and why, in one sentence."""

    action: Action
    reason: str


def decide(facts: Facts) -> Decision:
    """In order; the first that applies."""
    if facts.status.terminal:
        return Decision(Action.LEAVE, f"it is {facts.status}")
    if not facts.flow_registered:
        return Decision(
            Action.HOLD_DEFINITION,
            f"flow {facts.flow!r} is not registered in this process; import or register it, and the run goes on by itself",
        )
    if facts.crashed and not facts.resumable:
        return Decision(Action.FAIL, f"flow {facts.flow!r} is marked resumable=False and its process died while it ran")
    if facts.crashed and facts.crashes_without_progress >= facts.max_attempts:
        return Decision(
            Action.HOLD_POISON,
            f"its process died {facts.crashes_without_progress} times in a row without progress of this run; "
            "find out why, then resume() it",
        )
    if facts.crashed:
        return Decision(Action.RESUME, "its owner died; it goes on from the first step without a result")
    return Decision(Action.RESUME, "it is due")
