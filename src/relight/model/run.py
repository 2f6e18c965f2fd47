"""The metadata of a run: its row, its statuses, its messages, and how runs are listed."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from relight.errors import StoreError
from relight.model.formats import not_understood


class Status(enum.StrEnum):
    """The state of a run. The last three are terminal: no process takes a run out of them by itself. A person may
    resume a run that recovery gave up on (cancelled, hold=recovery), and a retried flow begins its child runs again."""

    PENDING = "pending"  # accepted, not driven yet
    RUNNING = "running"  # an orchestrator drives it (or did, until it crashed)
    WAITING = "waiting"  # provably blocked on a timer, a signal or another run
    PAUSED = "paused"  # held: `hold` says why, and `reason` says what frees the run
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED})
UNFINISHED = tuple(status for status in Status if status not in TERMINAL)


# How a person frees a held run, for the end of a reason.
RESUME_IT = "then resume() the run (`relight recovery resume RUN`)"


class Hold(enum.StrEnum):
    """Why a paused run is paused. Every kind but `user` comes with a reason that names the action that frees it.

    A run that ends with a hold (RECOVERY) keeps its inbox: it may come back."""

    USER = "user"  # pause() was called
    DEFINITION = "definition"  # its flow is not registered here; freed when it is
    VERSION = "version"  # a step's code changed under version_mismatch="fail"
    NONDETERMINISM = "nondeterminism"  # the flow asks for other steps than the journal has
    CORRUPT = "corrupt"  # a journal row or checkpoint does not read back
    POISON = "poison"  # its process died too often without progress of the run
    REFUSED = "refused"  # the store cannot write what the run did last
    UPGRADE = "upgrade"  # a newer version of Relight has written to the run; freed by a version that understands it
    RECOVERY = "recovery"  # of a cancelled run: recovery gave up on it, and it may be resumed by hand


class Run(msgspec.Struct, kw_only=True):
    """One row of metadata. A child run's row shares its root's journal, owner and epoch: only roots carry those."""

    id: str
    root_id: str
    flow: str
    status: Status
    created_at: float
    updated_at: float
    flow_hash: str = ""
    parent_id: str | None = None
    owner: str | None = None  # the session that has the run in memory; None once it is parked
    epoch: int = 0
    wake_at: float | None = None  # when a waiting run is due by itself
    hold: Hold | None = None
    reason: str = ""
    input: bytes = b"null"  # JSON; empty when input_blob names a blob
    input_blob: str = ""
    output: bytes | None = None  # JSON of a completed run; empty when output_blob names a blob
    output_blob: str = ""
    error: bytes | None = None  # JSON of an ErrorRecord of a failed or cancelled run
    newer: str = ""  # what this version does not understand in the row; if not empty, the run is left alone

    @property
    def is_root(self) -> bool:
        return self.id == self.root_id

    @property
    def key_prefix(self) -> str:
        """How the keys of its operations begin: with its own key in its tree, and a slash."""
        return "" if self.is_root else self.id.removeprefix(self.root_id + "/") + "/"


_STATUSES: dict[str, Status] = {status.value: status for status in Status}
_HOLDS: dict[str | None, Hold | None] = {None: None, **{hold.value: hold for hold in Hold}}


def run_of(status: str, hold: str | None, reason: str, **fields: Any) -> Run:
    """A run from its stored row. With a status or hold that is unknown here, it reads as held for an upgrade."""
    known = _STATUSES.get(status)
    if known is not None and hold in _HOLDS:
        return Run(status=known, hold=_HOLDS[hold], reason=reason, **fields)
    what = not_understood("its status", status) if known is None else not_understood("its hold", hold or "")
    why = f"{what} ({reason})" if reason else what
    seen = Status.PAUSED if known is None or not known.terminal else known
    return Run(status=seen, hold=Hold.UPGRADE, reason=why, newer=what, **fields)


class RunChange(msgspec.Struct, kw_only=True):
    """New values for one run's row. It replaces all of these fields, so that applying it twice changes nothing more."""

    run_id: str
    status: Status
    owner: str | None = None
    wake_at: float | None = None
    hold: Hold | None = None
    reason: str = ""
    output: bytes | None = None
    output_blob: str = ""
    error: bytes | None = None
    # Of a root that leaves memory to wait or to be paused: the newest message that it has received. If its inbox has a
    # newer one (for a pause: one that ends the pause), the run is due at once instead, and pending if it was to be
    # paused. Other processes left that message to the owner, because the run was still in memory; and the owner may die
    # before it looks again.
    heard: int | None = None


class RunFilter(msgspec.Struct, kw_only=True, frozen=True):
    """Which runs a listing contains. Newest first; `cursor` is the last page's `next_cursor`."""

    status: tuple[Status, ...] = ()  # as `run_of` reads it: PAUSED also finds runs with a status of a newer version
    flow: str | None = None
    since: float | None = None  # created at or after
    parent_id: str | None = None
    roots_only: bool = False
    limit: int = 100
    cursor: str | None = None


class Page(msgspec.Struct, kw_only=True, frozen=True):
    """One page of a listing; `next_cursor` is None on the last one."""

    runs: list[Run]
    next_cursor: str | None = None


def cursor_from(run: Run) -> str:
    """The cursor with which a listing goes on after this run."""
    return f"{run.created_at!r}:{run.id}"


def parse_cursor(cursor: str | None) -> tuple[float, str]:
    """The time and id after which the listing goes on."""
    if cursor is None:
        return float("inf"), ""
    created_at, _, run_id = cursor.partition(":")
    try:
        return float(created_at), run_id
    except ValueError:
        raise StoreError(f"cursor {cursor!r} is not one that a listing gave: pass next_cursor as it came") from None


class ItemResult(msgspec.Struct, kw_only=True):
    """One finished item of a foreach, for progress listings; the journal has the same fact for replay."""

    run_id: str
    key: str  # the foreach's key
    index: int
    digest: str  # the item's fingerprint
    output: bytes = b"null"
    output_blob: str = ""


class ForeachProgress(msgspec.Struct, kw_only=True, frozen=True):
    """How far one foreach of a run has come."""

    key: str
    done: int  # items that have finished
    failed: int = 0  # items whose function has raised, since the foreach was called last
    total: int | None = None  # None: this foreach was begun by an older version, which did not record it


class _Totals(msgspec.Struct):
    total: int
    failed: int


TOTALS_INDEX = -1  # the index of the `totals_row` among the items of a foreach


def totals_row(run_id: str, key: str, total: int, failed: int) -> ItemResult:
    """A row beside a foreach's items: how many items there are, and how many failed. It replaces the row before."""
    totals = msgspec.json.encode(_Totals(total, failed))
    return ItemResult(run_id=run_id, key=key, index=TOTALS_INDEX, digest="", output=totals)


def progress_of(key: str, done: int, totals: bytes | None) -> ForeachProgress:
    """From the number of a foreach's items and the content of its `totals_row`."""
    if totals is None:
        return ForeachProgress(key=key, done=done)
    known = msgspec.json.decode(totals, type=_Totals)
    # An earlier attempt of the flow may have had more items, and their rows stay.
    return ForeachProgress(key=key, done=min(done, known.total), failed=known.failed, total=known.total)


class LogLine(msgspec.Struct, kw_only=True):
    """One line of a run's log. What happens to the run itself, such as recovery, goes to the stream SERVER_LOG."""

    run_id: str
    at: float
    text: str
    token: str = ""  # see telemetry.Token
    stream: str = "_server"
    id: int = 0  # given by the store, increasing


SERVER_LOG = "_server"
RESUMED_BY_HAND = "resumed by hand"  # the reason of a pending run that a person has freed


class News(enum.Flag):
    """What another process may have written."""

    DUE = enum.auto()  # roots without an owner that are due, or due earlier than was known
    MAIL = enum.auto()  # messages in inboxes
    RUNS = enum.auto()  # runs that have ended, or whose status has changed
    HELD = enum.auto()  # runs that were held because their flow or format was unknown; another process may know it
    ANYTHING = DUE | MAIL | RUNS | HELD


class MessageKind(enum.StrEnum):
    """The kinds of messages to a run."""

    SIGNAL = "signal"
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    ENDED = "ended"  # to a run that waits for another: that run, whose id is `name`, has ended
    JOIN = "join"  # the run `name` waits for the end of this one; the store then posts ENDED to it
    NEWER = "newer"  # never stored: stands for a kind that this version does not know; `name` is that kind


ENDS_PAUSE = frozenset({MessageKind.RESUME, MessageKind.CANCEL})


_KINDS: dict[str, MessageKind] = {kind.value: kind for kind in MessageKind if kind is not MessageKind.NEWER}


def message_of(kind: str, name: str, **fields: Any) -> Message:
    """A message from its stored row. A kind that this version does not know becomes NEWER."""
    known = _KINDS.get(kind)
    return Message(kind=known or MessageKind.NEWER, name=kind if known is None else name, **fields)


class Message(msgspec.Struct, kw_only=True):
    """A message to a run. Any process may post it: it is unfenced on purpose, since the sender does not own the run.

    It stays in the run's inbox until an entry of the run consumes it in the same commit, so it is neither lost nor
    consumed twice. `dedup` makes posting it again (after a lost answer) harmless.
    """

    run_id: str  # a root run
    kind: MessageKind
    name: str = ""
    payload: bytes = b"null"
    payload_blob: str = ""
    dedup: str | None = None
    at: float = 0.0
    id: int = 0  # given by the store, increasing

    @classmethod
    def end_of(cls, run_id: str, epoch: int, at: float, *, to: str) -> Message:
        """A message to the run `to`: this run has ended under this epoch. The dedup makes it one message, whether the
        run or the store posts it. If the run is resumed and ends again, its epoch is greater: that is a new message."""
        return cls(run_id=to, kind=MessageKind.ENDED, name=run_id, dedup=f"ended:{run_id}:{epoch}", at=at)
