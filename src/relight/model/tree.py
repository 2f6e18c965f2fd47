"""TreeState: the replayed state of one root run's tree, and how each event changes it: one pure fold over a journal's entries."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from relight.model import journal as j
from relight.model.crashes import NO_CRASHES, Crashes
from relight.model.journal import NULL
from relight.model.outcomes import Cancellation, Ending, Open, Outcome, Unclaimed, item_index


def retried_at(retried: Mapping[str, int], key: str) -> int:
    """The sequence at which the flow around `key` was last retried; 0: never. `retried` is that of a TreeState."""
    return (
        max((at for flow, at in retried.items() if not flow or key.startswith(flow + "/")), default=0) if retried else 0
    )


def generation_path(generation: int) -> str:
    """The path of the flow's own code. Every generation but the first has its own, so that the keys of its operations,
    the ids of the runs that it spawns and the idempotency keys of its steps are new."""
    return f"@{generation}" if generation > 1 else ""


class TreeState(msgspec.Struct):
    """The replayed state of one root run's tree."""

    sequence: int = 0
    created: j.RunCreated | None = None
    outcomes: dict[str, Outcome] = {}
    open: dict[str, Open] = {}
    children: dict[str, j.RunCreated] = {}  # child runs by key
    cancelled: Cancellation | None = None
    crashes: Crashes = NO_CRASHES  # since the last progress
    retried: dict[str, int] = {}  # flows that were called again, by key: the sequence at which that was decided
    unclaimed: list[Unclaimed] = []
    deadlocks: list[int] = []  # sequences at which the flow was cancelled because nothing would ever wake it
    cuts: list[str] = []  # keys of foreach operations whose items differed when the run was taken up again
    format: int = 1  # of this state, once encoded: raised by what an older version must not ignore (see formats.py)
    generation: int = 1  # how often its flow has begun: see RunContinued

    def apply(self, sequence: int, event: j.AnyEvent) -> None:
        """Apply one entry. Entries come in the order of their sequences, without gaps."""
        self.sequence = sequence
        kind = type(event)
        if type(event) is j.RunRecovered:
            self.crashes = self.crashes.after(event)
        elif kind is not j.StepStarted:  # an attempt that began is no progress
            self.crashes = NO_CRASHES
        _FOLD[kind](self, sequence, event)

    def end(self, key: str, outcome: Outcome) -> None:
        """Record an ending. A step that was executed again because its code had changed keeps its position: on replay
        the flow is told the new outcome at that position. An outcome from an earlier attempt of the flow has none."""
        begun = self.open.pop(key, None)
        if begun is not None:
            outcome.began = begun.began or begun.at or outcome.began
            outcome.last_error = begun.last_error
        before = self.outcomes.get(key)
        if before is not None:
            if before.sequence > self.retried_at(key):
                outcome.sequence = before.sequence
            else:
                del self.outcomes[key]  # inserted again below: outcomes are in the order of their sequences
        self.outcomes[key] = outcome

    @property
    def path(self) -> str:
        """Where the flow's own code is: see `generation_path`."""
        return generation_path(self.generation)

    def retried_at(self, key: str) -> int:
        """See the function `retried_at`."""
        return retried_at(self.retried, key)

    def is_kept(self, key: str, outcome: Outcome) -> bool:
        """Whether this outcome has no position any more, so that the flow is told it whenever it asks for the
        operation: an earlier attempt of the flow finished it, or it belongs to a foreach whose items have changed."""
        if self.cuts and any(key.startswith(foreach + "[") for foreach in self.cuts):
            return True
        return bool(self.retried) and outcome.sequence < self.retried_at(key)

    def forget_failures(self, scope: str) -> None:
        """Before a flow is called again: drop what failed or was open under `scope`, keep what completed.

        A step that must not be repeated stays as it is: begun, or known to have been interrupted. So does one whose
        result could not be journaled.
        """
        prefix = scope + "/" if scope else ""

        def inside(key: str) -> bool:
            return key.startswith(prefix) and key != scope

        self.outcomes = {k: o for k, o in self.outcomes.items() if not inside(k) or _lasts(o)}
        self.open = {k: o for k, o in self.open.items() if not inside(k) or o.fatal}

    def take_back(self, outcome: Outcome | None) -> None:
        """The flow is never told this outcome. If it is a signal, the next wait for that name receives it."""
        if outcome is not None and outcome.message_id:
            taken = Unclaimed(outcome.message_id, outcome.name, outcome.output, outcome.blob)
            bisect.insort(self.unclaimed, taken, key=lambda one: one.message_id)

    def cut_foreach(self, foreach: str, index: int) -> None:
        """Drop the items from `index` on, and everything under their scopes."""

        def dropped(key: str) -> bool:
            found = item_index(foreach, key)
            return found is not None and found >= index

        self.outcomes = {k: o for k, o in self.outcomes.items() if not dropped(k)}
        self.open = {k: o for k, o in self.open.items() if not dropped(k)}
        self.children = {k: c for k, c in self.children.items() if not dropped(k)}

    def before(self, sequence: int) -> dict[str, Outcome]:
        """What a fork starts from: all outcomes before `sequence`, in the same order, with new sequences that lie
        before the first entry of a new journal."""
        kept = {key: outcome for key, outcome in self.outcomes.items() if outcome.sequence < sequence}
        first = 1 - len(kept)
        return {
            key: msgspec.structs.replace(outcome, sequence=first + place)
            for place, (key, outcome) in enumerate(sorted(kept.items(), key=lambda pair: pair[1].sequence))
        }


_FAILED = (Ending.ERROR, Ending.GIVEN_UP, Ending.UNSEEN)


def _lasts(outcome: Outcome) -> bool:
    """Whether an outcome is kept when its flow is called again. asyncio's timers are not: otherwise an
    asyncio.timeout() that expired in one attempt would expire in every attempt."""
    return outcome.has_had_effect or (outcome.ending not in _FAILED and outcome.kind != "timer")


# ---- the fold, one function per kind of event


def _created(s: TreeState, n: int, e: j.RunCreated) -> None:
    if e.key == "":
        s.created = e
        return
    s.children[e.key] = e
    s.open[e.key] = Open(n, "run", at=e.at)
    before = s.outcomes.get(e.key)
    if before is not None and s.is_kept(e.key, before):
        del s.outcomes[e.key]  # a retried flow calls the child run with another input: its old result does not count


def _run_completed(s: TreeState, n: int, e: j.RunCompleted) -> None:
    s.end(e.key, Outcome(n, "run", Ending.OK, e.output, e.blob, at=e.at))


def _run_failed(s: TreeState, n: int, e: j.RunFailed) -> None:
    s.end(e.key, Outcome(n, "run", Ending.ERROR, error=e.error, at=e.at))


def _run_cancelled(s: TreeState, n: int, e: j.RunCancelled) -> None:
    s.end(e.key, Outcome(n, "run", Ending.CANCELLED, at=e.at))


def _run_continued(s: TreeState, n: int, e: j.RunContinued) -> None:
    assert s.created is not None
    s.created = msgspec.structs.replace(s.created, flow_hash=e.flow_hash, input=e.input, input_blob=e.input_blob)
    s.generation += 1
    s.format = 2
    s.outcomes, s.open, s.children, s.retried, s.deadlocks, s.cuts = {}, {}, {}, {}, [], []


def _run_retrying(s: TreeState, n: int, e: j.RunRetrying) -> None:
    s.forget_failures(e.key)
    created = s.children.get(e.key, s.created)
    at = created.at if created else 0.0
    s.open[e.key] = Open(n, "run", attempt=e.attempt + 1, until=e.until, at=at, last_error=e.error)
    s.retried[e.key] = n


def _recovered(s: TreeState, n: int, e: j.RunRecovered) -> None:
    pass  # counted in apply()


def _resumed(s: TreeState, n: int, e: j.RunResumed) -> None:
    s.outcomes.pop("", None)  # the run's end, if recovery had given up on it


def _cancel(s: TreeState, n: int, e: j.CancelRequested) -> None:
    s.cancelled = Cancellation(n, e.reason, e.unheard)
    for key in e.unheard:
        s.take_back(s.outcomes.get(key))


def _deadlocked(s: TreeState, n: int, e: j.Deadlocked) -> None:
    s.deadlocks.append(n)


def _step_started(s: TreeState, n: int, e: j.StepStarted) -> None:
    begun = Open(n, "step", attempt=e.attempt, deadline=e.deadline, fatal=e.fatal, at=e.at, began=e.at)
    before = s.open.get(e.key)
    if before is not None:  # an earlier attempt, or the same one before a crash
        begun.began = before.began or e.at
        begun.last_error = before.last_error
    s.open[e.key] = begun


def _step_retrying(s: TreeState, n: int, e: j.StepRetrying) -> None:
    before = s.open.get(e.key)
    began = (e.at_us - e.took_us) * 1e-6 if before is None else before.began or before.at
    s.open[e.key] = Open(n, "step", attempt=e.attempt + 1, until=e.until, began=began, last_error=e.error)


def _step_completed(s: TreeState, n: int, e: j.StepCompleted) -> None:
    ended = Outcome(n, "step", Ending.OK, e.output, e.blob, None, e.fingerprint, e.digest, e.attempt)
    ended.at, ended.began = e.at_us * 1e-6, (e.at_us - e.took_us) * 1e-6
    ended.parts = e.parts
    s.end(e.key, ended)


def _step_failed(s: TreeState, n: int, e: j.StepFailed) -> None:
    ended = Outcome(n, "step", Ending.ERROR, NULL, "", e.error, e.fingerprint, e.digest, e.attempt)
    ended.at, ended.began = e.at_us * 1e-6, (e.at_us - e.took_us) * 1e-6
    ended.parts = e.parts
    s.end(e.key, ended)


def _operation_cancelled(s: TreeState, n: int, e: j.OperationCancelled) -> None:
    if not e.by_flow:
        s.end(e.key, Outcome(n, "any", Ending.CANCELLED, at=e.at))
        return
    before = s.outcomes.get(e.key)
    if before is not None and not s.is_kept(e.key, before):  # it had ended, and the flow was not told
        s.take_back(before)
        error = before.error if before.has_had_effect else None  # a retried flow must not execute it again
        unseen = Outcome(before.sequence, before.kind, Ending.UNSEEN, error=error, again=e.again)
        unseen.at, unseen.began = before.at, before.began
        s.outcomes[e.key] = unseen
        return
    begun = s.open.pop(e.key, None)
    if begun is None or begun.kind != "wait":  # a wait that the flow gave up on needs no outcome
        s.outcomes.pop(e.key, None)
        given_up = Outcome(n, "any", Ending.GIVEN_UP, at=e.at)
        if begun is not None:
            given_up.began, given_up.last_error = begun.began or begun.at, begun.last_error
        s.outcomes[e.key] = given_up


def _value(s: TreeState, n: int, e: j.ValueRecorded) -> None:
    s.end(e.key, Outcome(n, "value", Ending.OK, e.value, at=e.at))


def _wait_started(s: TreeState, n: int, e: j.WaitStarted) -> None:
    s.open[e.key] = Open(n, "wait", until=e.until, what=e.what, name=e.name, at=e.at)


def _fired(s: TreeState, n: int, e: j.TimerFired) -> None:
    begun = s.open.get(e.key)
    kind = "timer" if begun is not None and begun.what == "timer" else "wait"
    s.end(e.key, Outcome(n, kind, Ending.TIMED_OUT if e.timed_out else Ending.OK, at=e.at))


def _signal(s: TreeState, n: int, e: j.SignalReceived) -> None:
    s.end(e.key, Outcome(n, "wait", Ending.OK, e.payload, e.blob, message_id=e.message_id, name=e.name, at=e.at))
    if s.unclaimed:
        s.unclaimed = [one for one in s.unclaimed if one.message_id != e.message_id]


def _spawned(s: TreeState, n: int, e: j.RunSpawned) -> None:
    ending = Ending.ERROR if e.error else Ending.OK
    s.end(e.key, Outcome(n, "spawn", ending, Raw(msgspec.json.encode(e.run_id)), error=e.error, at=e.at))


def _joined(s: TreeState, n: int, e: j.RunJoined) -> None:
    s.end(e.key, Outcome(n, "wait", Ending.ERROR if e.error else Ending.OK, e.output, e.blob, e.error, at=e.at))


def _item(s: TreeState, n: int, e: j.ItemCompleted) -> None:
    ended = Outcome(n, "item", Ending.OK, e.output, e.blob, digest=e.digest, foreach=e.foreach, index=e.index, at=e.at)
    s.end(e.key, ended)


def _cut(s: TreeState, n: int, e: j.ForeachCut) -> None:
    s.cut_foreach(e.key, e.index)
    if e.key not in s.cuts:
        s.cuts.append(e.key)


_FOLD: dict[type[j.Event], Callable[[TreeState, int, Any], None]] = {
    j.RunCreated: _created,
    j.RunCompleted: _run_completed,
    j.RunFailed: _run_failed,
    j.RunCancelled: _run_cancelled,
    j.RunContinued: _run_continued,
    j.RunRetrying: _run_retrying,
    j.RunRecovered: _recovered,
    j.RunResumed: _resumed,
    j.CancelRequested: _cancel,
    j.Deadlocked: _deadlocked,
    j.StepStarted: _step_started,
    j.StepRetrying: _step_retrying,
    j.StepCompleted: _step_completed,
    j.StepFailed: _step_failed,
    j.OperationCancelled: _operation_cancelled,
    j.ValueRecorded: _value,
    j.WaitStarted: _wait_started,
    j.TimerFired: _fired,
    j.SignalReceived: _signal,
    j.RunSpawned: _spawned,
    j.RunJoined: _joined,
    j.ItemCompleted: _item,
    j.ForeachCut: _cut,
}
