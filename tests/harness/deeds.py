"""Deeds: what steps did and flows got, written down outside the engine's database, and what follows from the lines.

    @step
    async def work(n: int) -> Receipt:
        with deed(n) as receipt:         # "start" and "end", with the step's key and the process
            ...
        return receipt

    total += got(await work(1))          # "seen": the result was committed before, so the step may never begin again

    repeated   a step begun after its result had been seen, or after a later step of the same scope had begun
    stale      written by an owner after another had claimed the run: an outcome twice, an epoch that does not grow, an
               outcome of an execution that had begun before the run was claimed by another

Times in the ledger are taken when a step's body is entered, not when the line is written: a step whose process is
frozen in between was in flight. One small error remains. A process may be frozen for longer than the ttl, in the
microseconds between the engine's last check of its lease and the first line of the body. Then it begins that step once
more than it may. No engine can prevent that. The store then refuses its result.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from relight.clock import SYSTEM_CLOCK
from relight.engine import Relight
from relight.flow.operations import current_step
from relight.model.journal import AnyEvent, RunRecovered, RunSpawned, StepCompleted, StepFailed, decode_event
from relight.model.run import SERVER_LOG, Run
from relight.testing.ledger import Ledger, Line

CLAIM_SECONDS = 0.05  # between a claim in the store and the time in its entry


# ---- what steps and flows write down


class Note(Line, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the ledger: start | end | seen | accepted. `life` is the pid, and `by` is the orchestrator's name."""

    by: str = ""
    at: float = 0.0
    nonce: str = ""  # of one execution of a step


class Receipt(msgspec.Struct, frozen=True):
    """A step's result: its value, and the execution that it comes from."""

    value: int
    run: str
    key: str
    attempt: int
    nonce: str


class _Book:
    """This process's ledger."""

    def __init__(self, path: Path, by: str) -> None:
        self.ledger = Ledger(path, os.getpid())
        self.by = by
        self.count = itertools.count(1)

    def write(self, note: Note) -> None:
        self.ledger.write(msgspec.structs.replace(note, by=self.by))


_book: _Book | None = None


def open_book(path: Path, by: str) -> None:
    """Make `deed` and `got` of this process write to a file."""
    global _book  # noqa: PLW0603 - steps are plain functions: there is nothing else to hand it to them by
    _book = _Book(path, by)


def read_book(path: Path) -> list[Note]:
    """All lines so far, in the order of their times. No lines if there is no file yet."""
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(Note)
    return sorted((decoder.decode(line) for line in path.read_bytes().splitlines()), key=lambda note: note.at)


def write_down(note: Note) -> None:
    """Write a line about this process."""
    assert _book is not None, "open_book() comes first"
    _book.write(note)


@contextlib.contextmanager
def deed(value: int) -> Iterator[Receipt]:
    """Used in a step's body, around its work."""
    at = SYSTEM_CLOCK.now()  # first of all: see the module's docstring
    info = current_step()
    assert _book is not None, "open_book() comes first"
    nonce = f"{os.getpid()}:{next(_book.count)}"
    root = info.idempotency_key.removesuffix("/" + info.step)
    note = Note(what="start", run=root, key=info.step, attempt=info.attempt, at=at, nonce=nonce)
    _book.write(note)
    yield Receipt(value, root, info.step, info.attempt, nonce)
    _book.write(msgspec.structs.replace(note, what="end", at=SYSTEM_CLOCK.now()))


def got(receipt: Receipt) -> int:
    """Used in a flow: the result has reached it. From here on the step must not begin again."""
    write_down(
        Note(
            what="seen",
            run=receipt.run,
            key=receipt.key,
            attempt=receipt.attempt,
            at=SYSTEM_CLOCK.now(),
            nonce=receipt.nonce,
        )
    )
    return receipt.value


# ---- what follows from the lines


class Deeds(msgspec.Struct):
    """What became of the steps."""

    starts: int = 0
    repeated: list[str] = []  # committed, and begun again: never allowed
    in_flight: list[str] = []  # begun again without having been seen: allowed when its owner died or was frozen


def audit_deeds(notes: Sequence[Note]) -> Deeds:
    """What became of the steps, by these lines in the order of their times. A scope executes one line of code after the
    other: if its third step begins, the flow has the result of the second."""
    found = Deeds()
    seen: dict[tuple[str, str], Note] = {}
    place: dict[tuple[str, str, int], int] = {}  # attempt of a step → its place in its scope, in the order of beginning
    furthest: dict[tuple[str, str], int] = {}  # scope → the furthest place that has begun
    for note in notes:
        step = (note.run, note.key)
        if note.what == "seen":
            seen.setdefault(step, note)
        if note.what != "start":
            continue
        found.starts += 1
        scope = (note.run, note.key.rpartition("/")[0])
        mine = (*step, note.attempt)
        where = f"{note.run} {note.key} attempt {note.attempt} by {note.by} ({note.nonce})"
        if step in seen:
            found.repeated.append(f"{where}: its result had been seen {note.at - seen[step].at:.3f}s before")
        elif mine not in place:
            place[mine] = furthest[scope] = furthest.get(scope, 0) + 1
        elif place[mine] < furthest[scope]:
            found.repeated.append(f"{where}: a later step of its scope had begun")
        else:
            found.in_flight.append(where)
    return found


def audit_journal(root_id: str, events: Sequence[AnyEvent], begun: Mapping[str, float]) -> list[str]:
    """What a process wrote to a journal when it no longer owned the run. `begun`: when each execution began."""
    found: list[str] = []
    outcomes: set[str] = set()
    recovered: RunRecovered | None = None
    for event in events:
        if isinstance(event, RunRecovered):
            if recovered is not None and event.at < recovered.at:
                found.append(f"{root_id}: recovered by {event.owner} before it was by {recovered.owner}")
            recovered = event
        if not isinstance(event, StepCompleted | StepFailed):
            continue
        if event.key in outcomes:
            found.append(f"{root_id}: two outcomes of {event.key}")
        outcomes.add(event.key)
        nonce = _nonce(event)
        if recovered is not None and begun.get(nonce, recovered.at) < recovered.at - CLAIM_SECONDS:
            found.append(
                f"{root_id}: {event.key} was begun ({nonce}) before {recovered.owner} claimed it, and written after"
            )
    return found


def _nonce(event: StepCompleted | StepFailed) -> str:
    if isinstance(event, StepFailed) or event.blob:
        return ""
    try:
        return msgspec.json.decode(event.output, type=Receipt).nonce
    except msgspec.ValidationError:  # another step's result
        return ""


async def stale_writes(rl: Relight, rows: Sequence[Run], notes: Sequence[Note]) -> list[str]:
    """For these roots and all runs that they have spawned: the entries and claims that an old owner must have written."""
    begun = {note.nonce: note.at for note in notes if note.what == "start"}
    found: list[str] = []
    pending = [row.id for row in rows]
    while pending:
        stale, spawned = await _audit_root(rl, pending.pop(), begun)
        found += stale
        pending += spawned
    return found


async def _audit_root(rl: Relight, root_id: str, begun: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """What is stale in one journal and log, and the ids of the runs that the run has spawned."""
    store = rl.services.store
    row = await store.get_run(root_id)
    assert row is not None, f"{root_id} is gone"
    journal = await store.read_from(root_id, 0, 100_000)
    events = [decode_event(entry.event) for entry in journal.entries]
    found = audit_journal(root_id, events, begun)
    lines = await store.read_log(root_id, SERVER_LOG, 0, 10_000)
    epochs = [_epoch(line.text) for line in lines if line.text.startswith("claimed from ")]
    if epochs != sorted(set(epochs)) or (epochs and epochs[-1] > row.epoch):
        found.append(f"{root_id}: claimed at epochs {epochs}, and its row is at {row.epoch}")
    return found, [event.run_id for event in events if isinstance(event, RunSpawned)]


def _epoch(text: str) -> int:
    return int(text.partition(" at epoch ")[2].partition(":")[0])
