"""What recovery does with an unfinished run: a pure function from facts to a decision with a reason.

The recoverer, the dry run (`relight recovery plan`) and the explanation (`relight explain`) ask the same function, so they
cannot disagree. The recoverer asks it twice: before it has claimed the run, when only the row and the lease are known (the
journal's facts are then at their defaults, which decide nothing), and again once it holds the run and has read its journal.

Suspects
--------
A process that dies takes all its runs with it, and any of them may have killed it. A run whose processes died SUSPECTED_AFTER
times in a row without progress of it is a suspect. Suspects are tried apart from each other, per orchestrator: half of those
that come together, then half of those, until one is alone; the others wait, each for a bounded time. A trial ends with the
next progress of those who are tried, or when they have lived for `trial_seconds`: longer than it took the last process to die.
Only deaths in which it was the only suspect count towards `max_attempts`. Runs that are no suspects go on beside all this.
"""

from __future__ import annotations

import enum

import msgspec

from relight.model.run import Hold, Status

SUSPECTED_AFTER = 3  # deaths in a row without progress; max_attempts, if that is less
SHORTEST_TRIAL_SECONDS = 2.0
LONGEST_TRIAL_SECONDS = 300.0


class Action(enum.StrEnum):
    """What recovery does."""

    LEAVE = "leave"  # nothing: terminal, alive elsewhere, waiting, held, or not stale yet
    RESUME = "resume"
    WAIT = "wait"  # a suspect, while others are tried; free for any orchestrator when its time has come
    FINISH = "finish"  # its end is journaled already: only the row is brought up to that
    CANCEL = "cancel"  # given up, with a reason; resumable by hand
    FAIL = "fail"
    HOLD_POISON = "hold-poison"
    HOLD_DEFINITION = "hold-definition"
    HOLD_VERSION = "hold-version"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says about recovery. Zero seconds: no such limit."""

    enabled: bool = True
    auto_resume: bool = True
    stale_timeout_seconds: float = 0.0
    max_resume_age_seconds: float = 0.0
    max_attempts: int = 10
    version_mismatch: str = "warn"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision may depend on. Times are the store's."""

    # the row
    status: Status
    flow: str
    owner: str | None = None
    hold: Hold | None = None
    reason: str = ""
    newer: str = ""  # what stands in its row that this version does not understand
    wake_at: float | None = None
    started_at: float = 0.0
    now: float = 0.0
    # the lease
    owner_alive: bool = False  # its session is fresh, or somebody else holds the run's lease
    last_heartbeat: float | None = None  # None: nothing is left of its owner's session
    # the code of this process
    flow_registered: bool = True
    resumable: bool = True
    # the journal
    ended: Status | None = None  # a final entry is there
    crashes_without_progress: int = 0  # in a row, this one included
    crashes_alone: int = 0  # of them those in which it was the only suspect, this one included
    lived_seconds: float = 0.0  # from its last recovery to the death of its process
    trial_seconds: float = 0.0  # what was decided with its last death
    changed_steps: tuple[str, ...] = ()  # recorded steps whose code is another today
    refused_input: str = ""  # why today's flow does not take the arguments of its generation, as far as that is known
    # the other suspects
    on_trial: int = 0  # how many are tried by this process now,
    trial_ends_at: float = 0.0  # and until when, at the latest
    suspects: int = 1  # how many come together with this one, itself included,
    turn: int = 0  # and its place among them
    # who asks
    by_hand: bool = False  # somebody has freed it, or this process may go on with it: also while recovery is off
    crashed: bool = False  # its owner died while it was in memory; False for a parked run that is due
    woken: bool = False  # it was told something, or what held it is gone
    resumed: bool = False  # a person has asked for it to go on
    policy: Policy = Policy()


class Decision(msgspec.Struct, frozen=True):
    """What is done, and why, in one sentence; `until` is when a run that is left alone is worth another look."""

    action: Action
    reason: str
    until: float | None = None
    tried_with: int = 0  # of a suspect: how many are tried together, itself included; 0: it waits,
    trial_seconds: float = 0.0  # and how long it has to live to pass


def decide(facts: Facts) -> Decision:
    """In order; the first that applies."""
    left = _left_alone(facts)
    if left is not None:
        return left
    if facts.ended is not None:
        return Decision(Action.FINISH, f"its journal ends with {facts.ended}; only its row is brought up to that")
    if facts.crashed:
        given_up = _recovery_gave_up(facts)
        if given_up is not None:
            return given_up
    if not facts.flow_registered:
        return Decision(
            Action.HOLD_DEFINITION,
            f"flow {facts.flow!r} is not registered in this process; import or register it, and the run goes on by itself",
        )
    if facts.refused_input:
        return Decision(Action.HOLD_VERSION, facts.refused_input)
    if facts.changed_steps and facts.policy.version_mismatch == "fail":
        return Decision(
            Action.HOLD_VERSION,
            f"step {_some(facts.changed_steps)}: code or options changed since it was recorded; restore the old code, or set "
            "version_mismatch to warn or rerun, then resume() the run",
        )
    if is_suspect(facts):
        return _try(facts)
    if facts.crashed:
        return Decision(
            Action.RESUME, "its owner died; it keeps the results of its finished steps and goes on after them"
        )
    return Decision(Action.RESUME, "it is due")


def is_suspect(facts: Facts) -> bool:
    """Whether it may be what kills its processes, and has to be tried apart from others."""
    if facts.resumed and not facts.crashed:
        return False
    return facts.crashes_without_progress >= min(SUSPECTED_AFTER, facts.policy.max_attempts)


def _try(facts: Facts) -> Decision:
    """Half of the suspects that come together are tried, one at least, once no others are."""
    seconds = 2 * facts.lived_seconds if facts.crashed else facts.trial_seconds
    seconds = min(max(seconds, SHORTEST_TRIAL_SECONDS), LONGEST_TRIAL_SECONDS)
    tried = 0 if facts.on_trial else max(facts.suspects // 2, 1)
    suspected = f"{_died(facts)}: suspected"
    if facts.turn >= tried:
        until = max(facts.trial_ends_at, facts.now) if facts.on_trial else facts.now + seconds
        return Decision(Action.WAIT, f"{suspected}, tried next; other suspects are tried before it", until, 0, seconds)
    how = "alone" if tried == 1 else f"with {tried - 1} of {facts.suspects - 1} other suspects"
    return Decision(Action.RESUME, f"{suspected}, tried {how} next", None, tried, seconds)


def _died(facts: Facts) -> str:
    return f"its process died {facts.crashes_without_progress} times in a row without progress of this run"


def _left_alone(facts: Facts) -> Decision | None:
    """Whether there is nothing to recover (yet)."""
    if facts.status.terminal:
        return Decision(Action.LEAVE, f"it is {facts.status}")
    if facts.owner is not None and facts.owner_alive:
        return Decision(Action.LEAVE, f"it is active: {facts.owner} holds it and is alive")
    if facts.newer:
        return Decision(Action.LEAVE, facts.newer)
    # With an owner, that one died when it was about to go on.
    paused = facts.status is Status.PAUSED and facts.owner is None
    if not facts.policy.enabled and not facts.by_hand and not paused:
        return Decision(
            Action.LEAVE,
            "recovery is off (recovery.enabled): only the process that has started it goes on with it; "
            "`relight recovery resume` frees it for any other",
        )
    if facts.woken:
        return None
    if paused:
        by_request = facts.reason.startswith("paused by request")
        return Decision(Action.LEAVE, f"it is {facts.reason}" if by_request else f"it is paused: {facts.reason}")
    if facts.owner is None:
        return _waits(facts)
    stale_at = (facts.started_at if facts.last_heartbeat is None else facts.last_heartbeat) + (
        facts.policy.stale_timeout_seconds
    )
    if facts.policy.stale_timeout_seconds > 0 and facts.now < stale_at:
        return Decision(
            Action.LEAVE,
            f"its owner {facts.owner} is silent, but stale_timeout ({facts.policy.stale_timeout_seconds:g}s) has not passed",
            stale_at,
        )
    return None


def _waits(facts: Facts) -> Decision | None:
    """Of a run that nobody holds: whether it is not due yet."""
    if facts.wake_at is None:
        return Decision(Action.LEAVE, "it waits for a message or for another run, which wakes it")
    if facts.wake_at <= facts.now:
        return None
    if facts.status is Status.PENDING and is_suspect(facts):
        why = f"{_died(facts)}: suspected, tried alone next; other suspects are tried before it"
        return Decision(Action.LEAVE, why, facts.wake_at)
    return Decision(Action.LEAVE, "it waits for a time that has not come", facts.wake_at)


def _recovery_gave_up(facts: Facts) -> Decision | None:
    """Whether policy forbids to resume a run whose owner died."""
    policy = facts.policy
    age = facts.now - facts.started_at
    if policy.max_resume_age_seconds > 0 and age > policy.max_resume_age_seconds:
        return Decision(
            Action.CANCEL,
            f"exceeded max resume age: it was started {age:.0f}s ago and max_resume_age is {policy.max_resume_age_seconds:g}s",
        )
    if facts.flow_registered and not facts.resumable:
        return Decision(Action.FAIL, f"flow {facts.flow!r} is marked resumable=False and its process died while it ran")
    if not policy.auto_resume:
        return Decision(
            Action.CANCEL, "its owner died and auto_resume is off; `relight recovery resume` brings it back"
        )
    if facts.crashes_alone >= policy.max_attempts:
        shared = facts.crashes_without_progress > facts.crashes_alone
        alone = f", {facts.crashes_alone} of them while it was the only suspect" if shared else ""
        return Decision(Action.HOLD_POISON, f"{_died(facts)}{alone}; find out why, then resume() it")
    return None


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
