"""What recovery does with an unfinished run: a pure function from facts to a decision with a reason.

Recovery, the dry run (`relight recovery plan`) and the explanation (`relight explain`) call the same function, so they
cannot disagree. Recovery calls it twice. The first time is before the claim, when only the row and the lease are known:
the journal's facts then have their defaults, which decide nothing. The second time is after the claim, when the journal
has been read.

Suspects
--------
A process that dies stops all its runs, and any of them may have killed it. A run whose processes died SUSPECTED_AFTER
times in a row without progress of the run is a suspect. Each orchestrator tries its suspects apart from each other:
half of those that come together, then half of that half, until one is alone. The others wait, each for a bounded time.
A trial ends when the runs on trial have made progress, or when they have lived for `trial_seconds`: longer than it took
the last process to die. Only deaths in which a run was the only suspect count towards `max_attempts`. Runs that are not
suspects go on meanwhile.
"""

from __future__ import annotations

import enum

import msgspec

from relight.model.run import RESUME_IT, Hold, Status

SUSPECTED_AFTER = 3  # deaths in a row without progress; max_attempts, if that is less
SHORTEST_TRIAL_SECONDS = 2.0
LONGEST_TRIAL_SECONDS = 300.0


class Action(enum.StrEnum):
    """What recovery does."""

    LEAVE = "leave"  # nothing: terminal, alive elsewhere, waiting, held, or not stale yet
    RESUME = "resume"
    WAIT = "wait"  # a suspect waits while others are tried; any orchestrator may take it up when its time has come
    FINISH = "finish"  # its end is journaled already: only the row is updated
    CANCEL = "cancel"  # recovery gives up on it, with a reason; it can be resumed by hand
    FAIL = "fail"
    HOLD_POISON = "hold-poison"
    HOLD_DEFINITION = "hold-definition"
    HOLD_VERSION = "hold-version"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says about recovery. Zero seconds mean that there is no such limit."""

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
    newer: str = ""  # what this version does not understand in the row
    wake_at: float | None = None
    started_at: float = 0.0
    now: float = 0.0
    # the lease
    owner_alive: bool = False  # the owner is alive, or not known to be dead
    last_heartbeat: float | None = None  # of its owner's session; None: nothing is known of that session
    # the code of this process
    flow_registered: bool = True
    why_unknown: str = ""  # why no flow of its name is registered, and what to do
    resumable: bool = True
    # the journal
    ended: Status | None = None  # how the run ended, if its journal has a final entry
    crashes_without_progress: int = 0  # in a row, with the present one
    crashes_alone: int = 0  # those of them in which the run was the only suspect, with the present one
    lived_seconds: float = 0.0  # from its last recovery to the death of its process
    trial_seconds: float = 0.0  # the length of a trial, as it was decided after its last death
    changed_steps: tuple[str, ...] = ()  # recorded steps whose code has changed since
    refused_input: str = ""  # why the flow does not accept the arguments of the run's generation, as far as is known
    # the other suspects
    on_trial: int = 0  # how many suspects this process tries now
    trial_ends_at: float = 0.0  # when that trial ends, at the latest
    suspects: int = 1  # how many suspects come together, this one included
    turn: int = 0  # the place of this one among them
    # who decides, and why now
    by_hand: bool = False  # a person has freed the run, or this process may go on with it even while recovery is off
    crashed: bool = False  # its owner died while it was in memory; False for a parked run that is due
    woken: bool = False  # it is already decided that the run may be taken up
    resumed: bool = False  # a person has resumed the run
    policy: Policy = Policy()


class Decision(msgspec.Struct, frozen=True):
    """What is done, and why, in one sentence. If a run is left alone, `until` is the time to look at it again."""

    action: Action
    reason: str
    until: float | None = None
    tried_with: int = 0  # of a suspect: how many are tried together, itself included; 0: it waits
    trial_seconds: float = 0.0  # of a suspect: it passes if its process does not die for so long


def decide(facts: Facts) -> Decision:
    """The rules in order: the first that applies decides."""
    left = _left_alone(facts)
    if left is not None:
        return left
    if facts.ended is not None:
        return Decision(Action.FINISH, f"its journal ends with {facts.ended}; only its row is updated")
    if facts.crashed:
        given_up = _recovery_gave_up(facts)
        if given_up is not None:
            return given_up
    if not facts.flow_registered:
        return Decision(Action.HOLD_DEFINITION, f"{facts.why_unknown}, and the run goes on by itself")
    if facts.refused_input:
        return Decision(Action.HOLD_VERSION, facts.refused_input)
    if facts.changed_steps and facts.policy.version_mismatch == "fail":
        return Decision(
            Action.HOLD_VERSION,
            f"step {_some(facts.changed_steps)}: code or options changed since it was recorded; restore the old code, or set "
            f"version_mismatch to warn or rerun, {RESUME_IT}",
        )
    if is_suspect(facts):
        return _try(facts)
    if facts.crashed:
        return Decision(
            Action.RESUME, "its owner died; it keeps the results of its finished steps and goes on after them"
        )
    return Decision(Action.RESUME, "it is due")


def is_suspect(facts: Facts) -> bool:
    """Whether the run may be what kills its processes, and has to be tried apart from other suspects."""
    if facts.resumed and not facts.crashed:
        return False
    return facts.crashes_without_progress >= min(SUSPECTED_AFTER, facts.policy.max_attempts)


def _try(facts: Facts) -> Decision:
    """Of the suspects found together, half are tried, at least one, as soon as no other suspects are on trial."""
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
        return Decision(Action.LEAVE, f"it is active: {facts.owner} owns it and is alive")
    if facts.newer:
        return Decision(Action.LEAVE, facts.newer)
    # If a paused run has an owner, that owner died when it was about to let the run go on.
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
    """For a run without an owner: why it is left alone, if it is not due yet."""
    if facts.wake_at is None:
        return Decision(Action.LEAVE, "it waits for a message or for another run, which wakes it")
    if facts.wake_at <= facts.now:
        return None
    if facts.status is Status.PENDING and is_suspect(facts):
        why = f"{_died(facts)}: suspected, tried alone next; other suspects are tried before it"
        return Decision(Action.LEAVE, why, facts.wake_at)
    return Decision(Action.LEAVE, "it waits for a time that has not come", facts.wake_at)


def _recovery_gave_up(facts: Facts) -> Decision | None:
    """Whether the policy forbids resuming a run whose owner died."""
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
        return Decision(Action.HOLD_POISON, f"{_died(facts)}{alone}; find out why, {RESUME_IT}")
    return None


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
