"""Explain: why a run is where it is. One sentence, then the facts behind it."""

from __future__ import annotations

import datetime as dt

import msgspec

from relight.model.decisions import Action
from relight.model.journal import ErrorRecord
from relight.model.operations import OperationReport, error_text, unfinished_steps
from relight.model.replay import Open, TreeState
from relight.model.run import RESUMED_BY_HAND, SERVER_LOG, Hold, LogLine, Message, Run, Status
from relight.recovery.plan import Known, Planned, in_flight, know_one, planned
from relight.run.services import Services

LOG_LINES = 1000
_OPEN = ("running", "begun", "backing off")


class Explanation(msgspec.Struct, kw_only=True):
    """What `relight explain` shows."""

    run_id: str
    sentence: str
    status: Status
    flow: str
    owner: str | None
    owner_alive: bool
    owner_trouble: str  # what the owner says is wrong with it
    last_heartbeat: float | None
    lease_expires_at: float | None
    epoch: int
    generation: int  # how often its flow has begun: see continue_as()
    input: str  # of that generation: JSON, or "blob <digest>" for large ones; empty if its journal cannot be read
    created_at: float
    updated_at: float
    last_entry: int
    last_operation: str
    waits_for: list[str]
    unread: list[str]  # messages in its inbox that it has not consumed, oldest first
    steps: list[OperationReport]  # those that are running or backing off
    plan: Planned
    events: list[LogLine]  # the last 1,000 lines of its log, oldest first, with every recovery


async def explain(services: Services, run_id: str) -> Explanation:
    """Explain one run. Raises RunNotFoundError. For a child run its root is explained: they share owner and journal."""
    known = await know_one(services, run_id)
    row, session, state = known.row, known.session, known.state
    events = await services.store.read_log(row.id, SERVER_LOG, 0, LOG_LINES, newest=True)
    ended = [key for key in state.outcomes if key] if state is not None else []
    now = services.clock.now()
    return Explanation(
        run_id=row.id,
        sentence=sentence(known, now),
        status=row.status,
        flow=row.flow,
        owner=row.owner,
        owner_alive=known.alive,
        owner_trouble=known.trouble_of_owner,
        last_heartbeat=None if session is None else session.heartbeat_at,
        lease_expires_at=None if session is None else session.expires_at,
        epoch=row.epoch,
        generation=1 if state is None else state.generation,
        input=_input(state),
        created_at=row.created_at,
        updated_at=row.updated_at,
        last_entry=0 if state is None else state.sequence,
        last_operation=ended[-1] if ended else "",
        waits_for=[] if state is None else waits(state),
        unread=[_message_in_words(message) for message in known.unread],
        steps=[] if state is None else _steps(state, row, now),
        plan=planned(services, known),
        events=events,
    )


def sentence(known: Known, now: float) -> str:
    """Why the run is where it is: one sentence for every status."""
    row = known.row
    words = {
        Status.PENDING: _pending,
        Status.RUNNING: _running,
        Status.WAITING: _waiting,
        Status.PAUSED: _paused,
        Status.COMPLETED: _completed,
        Status.FAILED: _failed,
        Status.CANCELLED: _cancelled,
    }[row.status]
    return f"Run {row.id} {words(known, now)}{_unread(known)}."


def _unread(known: Known) -> str:
    """The messages that the run has not consumed. A run that is driven consumes them in its own time."""
    unread = [_message_in_words(message) for message in known.unread]
    if not unread or known.row.status.terminal:
        return ""
    some = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
    return f"; unread in its inbox: {some}"


def _message_in_words(message: Message) -> str:
    named = f" {message.name!r}" if message.name else ""
    return f"{message.kind.value}{named} of {_time(message.at)}"


def _pending(known: Known, now: float) -> str:
    row = known.row
    if row.owner is not None:
        return f"was accepted and {_owner_in_words(known, now)}"
    if row.wake_at is not None and row.wake_at > now and known.decision.action is Action.LEAVE:
        return f"waits until {_time(row.wake_at)} at the latest: {known.decision.reason}"
    since = "" if row.wake_at is None else f", for {_ago(now - row.wake_at)} now,"
    why = {"released": "was released by its last orchestrator", RESUMED_BY_HAND: "was resumed by hand"}
    begun = f"{why.get(row.reason, 'was accepted')} and waits{since} for "
    if known.decision.action is Action.LEAVE:  # recovery is off
        return f"{begun}a process to take it up: {known.decision.reason}"
    return f"{begun}an orchestrator with room, and with its flow {row.flow!r}, to take it up{_who_could(known)}"


def _who_could(known: Known) -> str:
    """Why no orchestrator may take the run up, though it is due: none is alive, or those that are have trouble."""
    if not known.orchestrators:
        return "; no orchestrator is alive"
    in_trouble = [f"{owner} is in trouble ({trouble})" for owner, trouble in known.orchestrators.items() if trouble]
    return "; " + " and ".join(in_trouble[:3]) if in_trouble else ""


def _running(known: Known, now: float) -> str:
    return f"is running and {_owner_in_words(known, now)}"


def _owner_in_words(known: Known, now: float) -> str:
    """Which process drives the run, and whether that process is alive."""
    row, session = known.row, known.session
    if row.owner is None:
        return f"is about to be taken up again{_who_could(known)}"
    if known.alive:
        trouble = f" and in trouble ({known.trouble_of_owner})" if known.trouble_of_owner else ""
        return f"is driven by {row.owner}, which is alive{trouble}; it is at {_place(known.state, now)}"
    silent = "whose session is gone" if session is None else f"silent for {_ago(now - session.heartbeat_at)}"
    return f"was driven by {row.owner}, {silent}; recovery {_would(known)}"


def _would(known: Known) -> str:
    if known.trouble:
        return f"would hold it, because its journal cannot be read: {known.trouble}"
    verb = {
        Action.LEAVE: "leaves it alone",
        Action.RESUME: "will resume it",
        Action.WAIT: "will let it wait",
        Action.FINISH: "will bring its row up to its journal",
        Action.CANCEL: "will cancel it",
        Action.FAIL: "will fail it",
        Action.HOLD_POISON: "will hold it",
        Action.HOLD_DEFINITION: "will hold it",
        Action.HOLD_VERSION: "will hold it",
    }[known.decision.action]
    return f"{verb}: {known.decision.reason}"


def _waiting(known: Known, now: float) -> str:
    row, state = known.row, known.state
    pending = waits(state) if state is not None else []
    what = "; ".join(pending[:3]) + (f" and {len(pending) - 3} more" if len(pending) > 3 else "")
    what = what or "a time or a message"
    if row.owner is not None:
        return f"waits for {what}, and {_owner_in_words(known, now)}"
    due = "" if row.wake_at is None else f"; due at {_time(row.wake_at)}"
    if row.wake_at is not None and row.wake_at <= now:
        due = f"; due for {_ago(now - row.wake_at)}, as soon as an orchestrator has room{_who_could(known)}"
    return f"waits, out of memory, for {what}{due}"


def _paused(known: Known, now: float) -> str:
    row = known.row
    if row.owner is not None:
        return f"was about to go on after a pause, and {_owner_in_words(known, now)}"
    if row.hold is Hold.USER and row.reason.startswith("paused by request"):
        return f"was {row.reason}"
    kind = {
        Hold.USER: "was paused by request",
        Hold.DEFINITION: "is held because its flow is missing",
        Hold.VERSION: "is held because its code has changed",
        Hold.NONDETERMINISM: "is held because its flow asks for other steps than its journal holds",
        Hold.CORRUPT: "is held because its journal cannot be read",
        Hold.POISON: "is held as poison",
        Hold.REFUSED: "is held because the store cannot write what it did last",
        Hold.RECOVERY: "is held by recovery",
        Hold.UPGRADE: "is held for a newer version of Relight",
        None: "is paused",
    }[row.hold]
    return f"{kind}: {row.reason}" if row.reason else kind


def _completed(known: Known, now: float) -> str:
    return f"completed at {_time(known.row.updated_at)}"


def _failed(known: Known, now: float) -> str:
    row = known.row
    if row.reason:
        return f"failed at {_time(row.updated_at)}: {row.reason}"
    record = msgspec.json.decode(row.error or b'{"type":"","message":""}', type=ErrorRecord)
    return f"failed at {_time(row.updated_at)} with {record.type.rpartition(':')[2]}: {record.message}"


def _cancelled(known: Known, now: float) -> str:
    row = known.row
    again = "; `relight recovery resume` brings it back" if row.hold is Hold.RECOVERY else ""
    if again and "recovery resume" in row.reason:
        again = ""
    return f"was cancelled at {_time(row.updated_at)}: {row.reason or 'by request'}{again}"


# ---- words


def waits(state: TreeState) -> list[str]:
    """What the run waits for, in words."""
    return [_wait(key, begun) for key, begun in state.open.items() if begun.until is not None or begun.kind == "wait"]


def _wait(key: str, begun: Open) -> str:
    until = "" if begun.until is None else f" until {_time(begun.until)}"
    if begun.kind != "wait":
        error = error_text(begun.last_error)
        return f"attempt {begun.attempt} of {key or 'the flow'}{until}" + (f" (after {error})" if error else "")
    if begun.what == "signal":
        return f"signal {begun.name!r}{until} ({key})"
    if begun.what == "run":
        return f"run {begun.name!r} to end ({key})"
    return f"a timer{until} ({key})"


def _input(state: TreeState | None) -> str:
    """The arguments of the run's generation."""
    if state is None or state.created is None:
        return ""
    return f"blob {state.created.input_blob}" if state.created.input_blob else bytes(state.created.input).decode()


def _steps(state: TreeState, row: Run, now: float) -> list[OperationReport]:
    """The steps that are under way, as far as the journal knows, or wait for their next attempt."""
    return [one for one in unfinished_steps(state, row, now) if one.state in _OPEN]


def _place(state: TreeState | None, now: float) -> str:
    if state is None:
        return "an unknown place"
    begun = in_flight(state)
    if begun:
        return "step " + ", ".join(_under_way(key, state.open[key], now) for key in begun[:3])
    ended = [key for key in state.outcomes if key]
    return f"what follows {ended[-1]} (entry {state.sequence})" if ended else "its beginning"


def _under_way(key: str, begun: Open, now: float) -> str:
    """A step, how long it has been running, and how the attempt before failed."""
    about = []
    if begun.attempt > 1:
        about.append(f"attempt {begun.attempt}")
    if begun.at:
        about.append(f"for {_ago(now - begun.at)}")
    if begun.last_error is not None:
        about.append(f"after {error_text(begun.last_error)}")
    return f"{key} ({', '.join(about)})" if about else key


def _time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")


def _ago(seconds: float) -> str:
    return f"{max(seconds, 0.0):.1f}s"
