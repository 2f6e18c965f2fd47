"""The events of a journal: append-only, one journal per root run's tree, state-changing facts only.

Every operation of a flow (step, wait, child run, foreach item, recorded value) has a key that is unique in its tree: the
path of scopes it was asked in, its name, its ordinal there. The root run itself has the empty key, and a child run is the
scope of that key: its steps lie under it, and its id is the root's id, a slash and the key. So one flat mapping from key
to outcome is the whole replayed state of a tree.

Events are JSON arrays led by a short tag (see `tag=`); fields are positional, so a new field goes at the end, with a
default, and no field is ever removed or reordered. An older version ignores such a field; a new kind of event it cannot ignore:
see `formats.py`.

Every event says when it was recorded (`at`), by the clock of the store where it has one; 0 in entries that were written
before events said so. The end of a step's attempt says, too, how long that took. These times are in whole microseconds
(`at_us`, `took_us`): there is one for every step, and to write a float takes longer than the rest of the entry.
"""

from __future__ import annotations

from typing import get_args

import msgspec
from msgspec import Raw

NULL = Raw(b"null")


class ErrorRecord(msgspec.Struct, omit_defaults=True):
    """An exception as data: enough to raise it again, after a crash, as the class it was."""

    type: str  # "module:QualName"
    message: str
    traceback: str = ""
    args: list[object] | None = None  # None: they do not survive as JSON
    attributes: dict[str, object] | None = None
    notes: list[str] | None = None


class Event(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of all events; `key` names the operation in its tree ("" is the root run)."""

    key: str


# ---- the life of a run (the root: key "", a child run: the key of the call)


class RunCreated(Event, tag="created"):
    flow: str
    flow_hash: str
    input: Raw
    input_blob: str
    at: float
    parent: str | None = None  # a spawned run: the id of the run that spawned it
    forked_from: str | None = None


class RunCompleted(Event, tag="completed"):
    output: Raw
    blob: str
    at: float


class RunFailed(Event, tag="failed"):
    error: ErrorRecord
    at: float


class RunCancelled(Event, tag="cancelled"):
    reason: str
    at: float


class RunContinued(Event, tag="2:continued"):
    """The flow ended its generation with continue_as(): what it did is forgotten, and it is called with this input. What it was
    told and has not taken is for the next generation. Never a row of a journal: the commit that it stands in replaces that by
    the checkpoint of what follows from it (`Commit.next`)."""

    flow_hash: str
    input: Raw
    input_blob: str
    at: float


class RunRetrying(Event, tag="retrying"):
    """A flow with retry failed: what failed under it is forgotten, what completed is kept, and it is called again."""

    attempt: int  # the attempt that failed
    error: ErrorRecord
    until: float
    at: float = 0.0


class RunRecovered(Event, tag="recovered"):
    """An orchestrator claimed the run after its owner died. Several in a row mean crashes without progress.

    Also, not `died`: a suspect that has waited for its turn is tried from here on (`tried_with` says how many are, itself
    included), or has passed (0). `alone`: in the death that is counted here this run was the only suspect.
    """

    owner: str
    previous_owner: str | None
    at: float
    alone: bool = False
    tried_with: int = 0
    trial_seconds: float = 0.0
    died: bool = True


class RunResumed(Event, tag="resumed"):
    """A person brought the run back: an orphan, or one that recovery had given up on (its end is then forgotten)."""

    at: float


class CancelRequested(Event, tag="cancel"):
    """The run is cancelled, from here on. `unheard`: operations whose end stands before this entry and had not reached the flow
    when the request came. It never does: they end here, with the cancellation, so that clean-up begins where the flow was."""

    reason: str
    at: float
    unheard: list[str] = []


class Deadlocked(Event, tag="deadlocked"):
    """The flow waits for something that nothing in its run can bring about: its main task is cancelled, and it fails."""

    at: float


# ---- steps


class StepStarted(Event, tag="started"):
    """Written before a step whose start must be known after a crash: it has a timeout, or on_crash="fail". And while a step is
    under way that takes long, so that it can be seen (`long_steps.py`). It is no progress of the run."""

    attempt: int
    at: float
    deadline: float | None
    fatal: bool  # on_crash="fail"


class StepRetrying(Event, tag="retry"):
    attempt: int  # the attempt that failed
    error: ErrorRecord
    until: float
    at_us: int = 0
    took_us: int = 0


class StepCompleted(Event, tag="step"):
    output: Raw
    blob: str
    fingerprint: str  # of the step's code and options
    digest: str  # of its arguments
    attempt: int
    at_us: int = 0
    took_us: int = 0
    parts: tuple[int, ...] = ()  # short digests of each of several arguments, if it waited for anything


class StepFailed(Event, tag="error"):
    error: ErrorRecord
    fingerprint: str
    digest: str
    attempt: int
    at_us: int = 0
    took_us: int = 0
    parts: tuple[int, ...] = ()


class OperationCancelled(Event, tag="interrupted"):
    """The run's cancellation was raised at this operation, and replay raises it there again.

    Or, `by_flow`: the flow gave up on it, by a timeout or task.cancel(). If its end was recorded before this entry, that came
    too late: the flow never saw it. Otherwise this is its end: what it had begun was cancelled and has ended. `again`: the flow
    had given up on it before, and waited for what it had begun to end; then it no longer did.
    """

    by_flow: bool = False
    again: bool = False
    at: float = 0.0


class ValueRecorded(Event, tag="value"):
    """now(), random(), uuid(): what the flow saw."""

    value: Raw
    at: float = 0.0


# ---- waits


class WaitStarted(Event, tag="wait"):
    what: str  # sleep | timer | signal | run
    name: str  # the signal's name or the awaited run's id
    until: float | None
    at: float


class TimerFired(Event, tag="fired"):
    """A sleep or a timer ended, or a wait for a signal timed out (`timed_out`)."""

    timed_out: bool
    at: float


class SignalReceived(Event, tag="signal"):
    payload: Raw
    blob: str
    message_id: int
    name: str = ""
    at: float = 0.0


class RunSpawned(Event, tag="spawned"):
    run_id: str
    error: ErrorRecord | None = None  # it could not be: the id is taken
    at: float = 0.0


class RunJoined(Event, tag="joined"):
    """The awaited run has ended: its output, or its error (cancelled counts as one)."""

    output: Raw
    blob: str
    error: ErrorRecord | None
    message_id: int
    at: float = 0.0


# ---- foreach


class ItemCompleted(Event, tag="item"):
    """`key` is the item's scope: the foreach's key, the index and the item's digest."""

    foreach: str
    index: int
    digest: str
    output: Raw
    blob: str
    at: float = 0.0


class ForeachCut(Event, tag="cut"):
    """A foreach found other items than before (or does another number of them at once): what is recorded from this index on no
    longer counts, and the rest is found whenever it is asked for, since the order of before no longer holds."""

    index: int
    at: float = 0.0


AnyEvent = (
    RunCreated
    | RunCompleted
    | RunFailed
    | RunCancelled
    | RunContinued
    | RunRetrying
    | RunRecovered
    | RunResumed
    | CancelRequested
    | Deadlocked
    | StepStarted
    | StepRetrying
    | StepCompleted
    | StepFailed
    | OperationCancelled
    | ValueRecorded
    | WaitStarted
    | TimerFired
    | SignalReceived
    | RunSpawned
    | RunJoined
    | ItemCompleted
    | ForeachCut
)

TAGS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyEvent))  # those that this version knows

encode_event = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def decode_event(data: bytes) -> AnyEvent:
    """Raises msgspec.DecodeError (or ValidationError) for bytes that are no event."""
    return _decoder.decode(data)


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A stored row of a journal: its place and the encoded event."""

    sequence: int
    event: bytes


class Checkpoint(msgspec.Struct, frozen=True):
    """An encoded TreeState that stands for all entries up to and including `sequence`."""

    sequence: int
    state: bytes


class Journal(msgspec.Struct, frozen=True):
    """What restoring one tree takes: its latest checkpoint, if any, and the entries after it."""

    root_id: str
    checkpoint: Checkpoint | None
    entries: list[Entry]
