"""What replay knows of one operation: how it ended (`Outcome`), or that it has begun and not ended (`Open`)."""

from __future__ import annotations

import enum

import msgspec
from msgspec import Raw

from relight.model.journal import NULL, ErrorRecord

INTERRUPTED = "relight.errors:StepInterruptedError"  # as error records name it
REFUSED_RESULT = "relight.errors:StepResultError"


class Ending(enum.IntEnum):
    """How an operation ended."""

    OK = 0
    ERROR = 1
    CANCELLED = 2
    TIMED_OUT = 3
    GIVEN_UP = 4  # the flow gave up on the operation, and the work that it had begun was cancelled
    UNSEEN = 5  # the operation ended, but the flow gave up on it before it was told


class Outcome(msgspec.Struct, array_like=True, gc=False):
    """The recorded end of one operation: on replay the flow is told this, and the operation is not done again."""

    sequence: int
    kind: str  # step | run | wait | timer | value | spawn | item: what the flow asked for, to notice a changed flow
    ending: Ending
    output: Raw = NULL
    blob: str = ""
    error: ErrorRecord | None = None
    fingerprint: str = ""
    digest: str = ""
    attempt: int = 1
    foreach: str = ""  # items only: the key of their foreach
    index: int = 0  # items only
    message_id: int = 0  # signals only
    name: str = ""  # signals only
    again: bool = False  # unseen only: the flow gave up on it twice
    at: float = 0.0  # when its end was recorded; 0: unknown, as in journals of older versions
    began: float = 0.0  # when it began: of a step, its first attempt; 0: unknown
    last_error: ErrorRecord | None = None  # steps and runs that were tried again: how the attempt before failed
    parts: tuple[int, ...] = ()  # steps: see StepCompleted

    @property
    def interrupted(self) -> bool:
        """Whether this is a step that must not be repeated, and its process died while it was running."""
        return self.error is not None and self.error.type == INTERRUPTED

    @property
    def has_had_effect(self) -> bool:
        """Whether this is a step that failed after its effect, or may have: a flow that is called again does not execute
        it again."""
        return self.error is not None and self.error.type in (INTERRUPTED, REFUSED_RESULT)


class Open(msgspec.Struct, array_like=True):
    """An operation that has begun and not ended: what must be known about it after a crash."""

    sequence: int
    kind: str  # step | run | wait
    attempt: int = 1  # the attempt under way; during a back-off, the next one
    deadline: float | None = None
    fatal: bool = False  # on_crash="fail", and this attempt was under way
    until: float | None = None  # end of a back-off or of a wait
    what: str = ""  # waits: sleep | timer | signal | run
    name: str = ""
    at: float = 0.0  # when it began: of a step, the attempt under way; 0: unknown, or that attempt has not begun yet
    began: float = 0.0  # steps: when the first attempt began
    last_error: ErrorRecord | None = None  # how the last attempt failed


class Unclaimed(msgspec.Struct, array_like=True, gc=False):
    """A signal that was consumed for a wait which the flow had given up on. The next wait for this name receives it."""

    message_id: int
    name: str
    output: Raw
    blob: str


class Cancellation(msgspec.Struct, array_like=True):
    """The cancellation of a run, and its place in the journal. See CancelRequested."""

    sequence: int
    reason: str
    unheard: list[str] = []


def item_scope(foreach: str, index: int, digest: str) -> str:
    """The scope of one foreach item: position and content, so that a changed item does not get old outcomes."""
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
