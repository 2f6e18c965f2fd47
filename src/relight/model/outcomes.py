"""What replay knows of one operation: how it ended (`Outcome`), or that it has begun and not ended (`Open`)."""

from __future__ import annotations

import enum

import msgspec
from msgspec import Raw

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
    at: float = 0.0  # when its end was recorded; 0: unknown, as in journals of older versions
    began: float = 0.0  # when it did: of a step, its first attempt; 0: unknown
    last_error: ErrorRecord | None = (
        None  # steps and runs that were tried again: how the attempt before this one failed
    )
    parts: tuple[int, ...] = ()  # steps: see StepCompleted

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
    at: float = 0.0  # when it began: of a step, the attempt under way; 0: unknown, as of one that has not begun yet
    began: float = 0.0  # steps: when the first attempt did
    last_error: ErrorRecord | None = None  # how the last attempt failed


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
