"""Replay: from journal entries to the state of a run's tree, by one pure fold.

`restore(checkpoint + tail)` equals `replay(all entries)`: a checkpoint is nothing but this state, encoded.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from relight.errors import CorruptionError
from relight.model import journal as j
from relight.model.crashes import NO_CRASHES, Crashes
from relight.model.journal import NULL, ErrorRecord

INTERRUPTED = "relight.errors:StepInterruptedError"  # as error records name it


class Ending(enum.IntEnum):
    """How an operation ended."""

    OK = 0
    ERROR = 1
    CANCELLED = 2
    TIMED_OUT = 3
    GIVEN_UP = 4  # the flow gave up on it, and what it had begun was cancelled
    UNSEEN = 5  # it ended, but the flow had given up on it before it heard of that


class Outcome(msgspec.Struct, array_like=True, gc=False):
    """The recorded end of one operation: what a replayed flow is given instead of doing it again."""

    sequence: int
    kind: str  # step | run | wait | timer | value | spawn | item: what was asked for, to notice a flow that changed
    ending: Ending
    output: Raw = NULL
    blob: str = ""
    error: ErrorRecord | None = None
    fingerprint: str = ""
    digest: str = ""
    attempt: int = 1
    foreach: str = ""  # items only: their foreach's key and index
    index: int = 0
    message_id: int = 0  # signals only: which it was, and its name
    name: str = ""
    again: bool = False  # unseen only: the flow gave up on it twice

    @property
    def interrupted(self) -> bool:
        """A step that may not be repeated was running when its process died."""
        return self.error is not None and self.error.type == INTERRUPTED


class Open(msgspec.Struct, array_like=True):
    """An operation that has begun and not ended: what a crash must not forget about it."""

    sequence: int
    kind: str  # step | run | wait
    attempt: int = 1  # the attempt under way (or next, while `until` is a back-off)
    deadline: float | None = None
    fatal: bool = False  # on_crash="fail", and this attempt was under way
    until: float | None = None  # end of a back-off or of a wait
    what: str = ""  # waits: sleep | timer | signal | run
    name: str = ""
    at: float = 0.0


class Unclaimed(msgspec.Struct, array_like=True, gc=False):
    """A signal that was taken for a wait which the flow had given up on: for whoever waits for it next."""

    message_id: int
    name: str
    output: Raw
    blob: str


class Cancellation(msgspec.Struct, array_like=True):
    """That the run was cancelled, and where in its journal. See CancelRequested."""

    sequence: int
    reason: str
    unheard: list[str] = []


def retried_at(retried: Mapping[str, int], key: str) -> int:
    """When the flow around `key` was called again last; 0 if it never was. `retried` is that of a TreeState."""
    return (
        max((at for flow, at in retried.items() if not flow or key.startswith(flow + "/")), default=0) if retried else 0
    )


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
    deadlocks: list[int] = []  # sequences at which the flow was told that nothing would ever wake it
    cuts: list[str] = []  # foreach operations whose items have changed between two lives of the run

    def apply(self, sequence: int, event: j.AnyEvent) -> None:
        """Fold one entry in. Order matters: entries come in sequence, without gaps."""
        self.sequence = sequence
        self.crashes = self.crashes.after(event) if type(event) is j.RunRecovered else NO_CRASHES
        _FOLD[type(event)](self, sequence, event)

    def end(self, key: str, outcome: Outcome) -> None:
        """Record an ending. A step that was executed once more because its code had changed keeps its place: the flow is given
        it there again. Not so what an earlier attempt of its flow had finished: that has no place any more."""
        self.open.pop(key, None)
        before = self.outcomes.get(key)
        if before is not None:
            if before.sequence > self.retried_at(key):
                outcome.sequence = before.sequence
            else:
                del self.outcomes[key]  # they stand in the order of their sequences
        self.outcomes[key] = outcome

    def retried_at(self, key: str) -> int:
        """See the function of that name."""
        return retried_at(self.retried, key)

    def is_kept(self, key: str, outcome: Outcome) -> bool:
        """Whether this has no place in the order any more, and is found done whenever the flow asks for it: an earlier attempt
        of its flow finished it, or it belongs to a foreach whose items have changed."""
        if self.cuts and any(key.startswith(foreach + "[") for foreach in self.cuts):
            return True
        return bool(self.retried) and outcome.sequence < self.retried_at(key)

    def forget_failures(self, scope: str) -> None:
        """Before a flow is called again: drop what failed (and what was failing) under `scope`, keep what completed.

        A step that may not be repeated stays as it is: begun, or known to have been interrupted.
        """
        prefix = scope + "/" if scope else ""

        def inside(key: str) -> bool:
            return key.startswith(prefix) and key != scope

        self.outcomes = {k: o for k, o in self.outcomes.items() if not inside(k) or _lasts(o)}
        self.open = {k: o for k, o in self.open.items() if not inside(k) or o.fatal}

    def take_back(self, outcome: Outcome | None) -> None:
        """The flow never heard of it. A signal is for whoever waits for it next."""
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
        """What a fork starts from: everything that had ended before `sequence`, renumbered to lie before a new journal's
        first entry, in the same order."""
        kept = {key: outcome for key, outcome in self.outcomes.items() if outcome.sequence < sequence}
        first = 1 - len(kept)
        return {
            key: msgspec.structs.replace(outcome, sequence=first + place)
            for place, (key, outcome) in enumerate(sorted(kept.items(), key=lambda pair: pair[1].sequence))
        }


_FAILED = (Ending.ERROR, Ending.GIVEN_UP, Ending.UNSEEN)


def _lasts(outcome: Outcome) -> bool:
    """Whether an outcome outlives the attempt of the flow it belongs to. asyncio's timers do not: the next attempt has its
    own, or an asyncio.timeout() that expired once would do so for ever."""
    return outcome.interrupted or (outcome.ending not in _FAILED and outcome.kind != "timer")


def item_scope(foreach: str, index: int, digest: str) -> str:
    """The scope of one foreach item: position and content, so that a changed item finds none of the old one's work."""
    return f"{foreach}[{index}@{digest}]"


def item_path(foreach: str, key: str) -> str | None:
    """The scope of the item of `foreach` that `key` is, or lies in."""
    if not key.startswith(foreach + "["):
        return None
    return key[: key.index("]", len(foreach)) + 1]


def item_index(foreach: str, key: str) -> int | None:
    """The index of the item of `foreach` that `key` lies in, if it does."""
    if not key.startswith(foreach + "["):
        return None
    return int(key[len(foreach) + 1 : key.index("@", len(foreach))])


# ---- the fold, one function per kind of event


def _created(s: TreeState, n: int, e: j.RunCreated) -> None:
    if e.key == "":
        s.created = e
        return
    s.children[e.key] = e
    s.open[e.key] = Open(n, "run", at=e.at)
    before = s.outcomes.get(e.key)
    if before is not None and s.is_kept(e.key, before):
        del s.outcomes[e.key]  # a retried flow has called it with another input: what it gave before does not count


def _run_completed(s: TreeState, n: int, e: j.RunCompleted) -> None:
    s.end(e.key, Outcome(n, "run", Ending.OK, e.output, e.blob))


def _run_failed(s: TreeState, n: int, e: j.RunFailed) -> None:
    s.end(e.key, Outcome(n, "run", Ending.ERROR, error=e.error))


def _run_cancelled(s: TreeState, n: int, e: j.RunCancelled) -> None:
    s.end(e.key, Outcome(n, "run", Ending.CANCELLED))


def _run_retrying(s: TreeState, n: int, e: j.RunRetrying) -> None:
    s.forget_failures(e.key)
    created = s.children.get(e.key, s.created)
    s.open[e.key] = Open(n, "run", attempt=e.attempt + 1, until=e.until, at=created.at if created else 0.0)
    s.retried[e.key] = n


def _recovered(s: TreeState, n: int, e: j.RunRecovered) -> None:
    pass  # counted in apply()


def _resumed(s: TreeState, n: int, e: j.RunResumed) -> None:
    s.outcomes.pop("", None)  # recovery had given up on it


def _cancel(s: TreeState, n: int, e: j.CancelRequested) -> None:
    s.cancelled = Cancellation(n, e.reason, e.unheard)
    for key in e.unheard:
        s.take_back(s.outcomes.get(key))


def _deadlocked(s: TreeState, n: int, e: j.Deadlocked) -> None:
    s.deadlocks.append(n)


def _step_started(s: TreeState, n: int, e: j.StepStarted) -> None:
    s.open[e.key] = Open(n, "step", attempt=e.attempt, deadline=e.deadline, fatal=e.fatal, at=e.at)


def _step_retrying(s: TreeState, n: int, e: j.StepRetrying) -> None:
    s.open[e.key] = Open(n, "step", attempt=e.attempt + 1, until=e.until)


def _step_completed(s: TreeState, n: int, e: j.StepCompleted) -> None:
    s.end(e.key, Outcome(n, "step", Ending.OK, e.output, e.blob, None, e.fingerprint, e.digest, e.attempt))


def _step_failed(s: TreeState, n: int, e: j.StepFailed) -> None:
    s.end(e.key, Outcome(n, "step", Ending.ERROR, NULL, "", e.error, e.fingerprint, e.digest, e.attempt))


def _operation_cancelled(s: TreeState, n: int, e: j.OperationCancelled) -> None:
    if not e.by_flow:
        s.end(e.key, Outcome(n, "any", Ending.CANCELLED))
        return
    before = s.outcomes.get(e.key)
    if before is not None and not s.is_kept(e.key, before):  # it had ended, but the flow did not hear of it any more
        s.take_back(before)
        error = before.error if before.interrupted else None  # a flow that is called again must not execute it either
        s.outcomes[e.key] = Outcome(before.sequence, before.kind, Ending.UNSEEN, error=error, again=e.again)
        return
    begun = s.open.pop(e.key, None)
    if begun is None or begun.kind != "wait":  # a wait that was given up on leaves nothing to be told of
        s.outcomes.pop(e.key, None)
        s.outcomes[e.key] = Outcome(n, "any", Ending.GIVEN_UP)


def _value(s: TreeState, n: int, e: j.ValueRecorded) -> None:
    s.end(e.key, Outcome(n, "value", Ending.OK, e.value))


def _wait_started(s: TreeState, n: int, e: j.WaitStarted) -> None:
    s.open[e.key] = Open(n, "wait", until=e.until, what=e.what, name=e.name, at=e.at)


def _fired(s: TreeState, n: int, e: j.TimerFired) -> None:
    begun = s.open.get(e.key)
    kind = "timer" if begun is not None and begun.what == "timer" else "wait"
    s.end(e.key, Outcome(n, kind, Ending.TIMED_OUT if e.timed_out else Ending.OK))


def _signal(s: TreeState, n: int, e: j.SignalReceived) -> None:
    s.end(e.key, Outcome(n, "wait", Ending.OK, e.payload, e.blob, message_id=e.message_id, name=e.name))
    if s.unclaimed:
        s.unclaimed = [one for one in s.unclaimed if one.message_id != e.message_id]


def _spawned(s: TreeState, n: int, e: j.RunSpawned) -> None:
    ending = Ending.ERROR if e.error else Ending.OK
    s.end(e.key, Outcome(n, "spawn", ending, Raw(msgspec.json.encode(e.run_id)), error=e.error))


def _joined(s: TreeState, n: int, e: j.RunJoined) -> None:
    s.end(e.key, Outcome(n, "wait", Ending.ERROR if e.error else Ending.OK, e.output, e.blob, e.error))


def _item(s: TreeState, n: int, e: j.ItemCompleted) -> None:
    s.end(e.key, Outcome(n, "item", Ending.OK, e.output, e.blob, digest=e.digest, foreach=e.foreach, index=e.index))


def _cut(s: TreeState, n: int, e: j.ForeachCut) -> None:
    s.cut_foreach(e.key, e.index)
    if e.key not in s.cuts:
        s.cuts.append(e.key)


_FOLD: dict[type[j.Event], Callable[[TreeState, int, Any], None]] = {
    j.RunCreated: _created,
    j.RunCompleted: _run_completed,
    j.RunFailed: _run_failed,
    j.RunCancelled: _run_cancelled,
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

# ---- to and from bytes

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TreeState)


def encode_state(state: TreeState) -> bytes:
    """A checkpoint's content."""
    return _encoder.encode(state)


def restore(journal: j.Journal) -> TreeState:
    """Checkpoint, then tail. A row that does not read back, or a gap, is a CorruptionError naming its sequence."""
    root_id, checkpoint = journal.root_id, journal.checkpoint
    state = TreeState()
    if checkpoint is not None:
        try:
            state = _decoder.decode(checkpoint.state)
        except msgspec.MsgspecError as error:
            raise CorruptionError(
                f"checkpoint {checkpoint.sequence} of run {root_id!r} does not read back: {error}",
                root_id=root_id,
                sequence=checkpoint.sequence,
            ) from error
        state.sequence = checkpoint.sequence
    for entry in journal.entries:
        if entry.sequence != state.sequence + 1:
            raise CorruptionError(
                f"journal of run {root_id!r} has a gap: {state.sequence + 1} is missing before {entry.sequence}",
                root_id=root_id,
                sequence=state.sequence + 1,
            )
        try:
            event = j.decode_event(entry.event)
        except msgspec.MsgspecError as error:
            raise CorruptionError(
                f"entry {entry.sequence} of run {root_id!r} does not read back: {error}",
                root_id=root_id,
                sequence=entry.sequence,
            ) from error
        state.apply(entry.sequence, event)
    if state.created is None:
        raise CorruptionError(f"journal of run {root_id!r} has no beginning", root_id=root_id, sequence=1)
    return state
