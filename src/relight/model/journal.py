"""The events of a journal: append-only, one journal per root run's tree, state-changing facts only.

Every operation of a flow (step, wait, child run, foreach item, recorded value) has a key that is unique in its tree:
the path of scopes in which the flow asked for it, its name, its ordinal there. The root run itself has the empty key. A
child run has the key of its call, and is a scope: its steps lie under that key, and its id is the root's id, a slash
and the key. So one flat mapping from key to outcome is the whole replayed state of a tree.

Events are JSON arrays led by a short tag (see `tag=`); fields are positional, so a new field goes at the end, with a
default, and no field is ever removed or reordered. An older version ignores a new field. It must not ignore a new kind
of event: see `formats.py`.

Every event says when it was recorded (`at`), by the store's clock if the store has one; 0 in entries of versions that
did not record times. The end of a step's attempt also says how long the attempt took. These times are in whole
microseconds (`at_us`, `took_us`): every step has them, and writing a float takes longer than the rest of the entry.
"""

from __future__ import annotations

from typing import get_args

import msgspec
from msgspec import Raw

NULL = Raw(b"null")


# Among the attributes of an ErrorRecord: the message and the members of an exception group. An attribute of a user's
# exception with such a name is not recorded.
GROUP = "__group__"


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
    """The flow ended its generation with continue_as(): what it did is forgotten, and it is called with this input.
    Messages that it has not received go to the next generation. This event is never a row of a journal: its commit
    replaces the whole journal by a checkpoint of the state that follows from it (`Commit.next`)."""

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

    With died=False: a suspect that has waited for its turn is tried from here on (`tried_with` is the number of runs on
    trial, this one included), or has passed (0). `alone`: this run was the only suspect in the death that is counted
    here.
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
    """The run is cancelled, from here on. `unheard`: operations whose end was recorded before this entry, and which the
    flow had not been told when the request came. It is never told: these operations end here, with the cancellation, so
    that clean-up begins at the point that the flow had reached."""

    reason: str
    at: float
    unheard: list[str] = []


class Deadlocked(Event, tag="deadlocked"):
    """The flow waits for something that nothing in its run can bring about: its main task is cancelled, and it fails."""

    at: float


# ---- steps


class StepStarted(Event, tag="started"):
    """Written before a step whose start must be known after a crash: it has a timeout, or on_crash="fail". Also written
    during a step that takes long, so that people can see it (`long_steps.py`). It is not progress."""

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
    parts: tuple[int, ...] = ()  # a short digest per argument, of several; of plain values only if the step waited


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

    Or, `by_flow`: the flow gave up on the operation, by a timeout or task.cancel(). If the operation's end was recorded
    before this entry, it came too late: the flow was never told. Otherwise this entry is its end: the work that it had
    begun was cancelled and has ended. `again`: the flow had given up on it before and was waiting for that work to end;
    then the flow also stopped waiting for that work.
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
    error: ErrorRecord | None = None  # the run could not be spawned: the id is taken
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
    """A foreach found other items than before (or its concurrency changed): what is recorded from this index on no
    longer counts. The flow gets the rest whenever it asks for it, since the recorded order is no longer valid."""

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

TAGS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyEvent))  # the tags that this version knows

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
    """What is needed to restore one tree: its latest checkpoint, if any, and the entries after it."""

    root_id: str
    checkpoint: Checkpoint | None
    entries: list[Entry]
