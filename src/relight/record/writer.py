"""The writing end of one run's journal: the draft of its next commit, what waits for it, and what is told then.

A writer is in one of three states:

    OPEN ──▶ FAILED ──▶ FENCED
       ╲────────────────▲

    FAILED  the recorder or the run gave up on a commit: it may have been written, and nothing follows from it
    FENCED  the store has refused a commit: another owner has the run. The answer may come after the writer has failed
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any, Protocol

import msgspec

from relight.model.journal import Event, encode_event
from relight.model.run import ItemResult, LogLine, Message, Run, RunChange
from relight.model.text import shown
from relight.ports.store import Commit, NextGeneration
from relight.telemetry import Token, log


class Queue(Protocol):
    """The recorder, as a writer sees it."""

    loop: asyncio.AbstractEventLoop
    queue: list[Writer]  # writers that have a draft

    @property
    def free(self) -> Sequence[object]:
        """The lanes that wait for a draft."""
        ...

    def wake_up(self) -> None:
        """Wake the lanes that wait."""
        ...


class Told(Protocol):
    """The run, as its writer sees it."""

    told: deque[Any]  # the operations that its committed entries have ended, in the order of the entries

    @property
    def last_heard(self) -> int:
        """The newest message that the run has received."""
        ...

    def advance(self) -> None:
        """Let the flow go on."""
        ...

    def fenced(self, refused: bool) -> None:
        """Another owner has the run. `refused`: the store has refused entries, not only a check of the ownership."""
        ...

    def failed(self) -> None:
        """The recorder gave up on a draft."""
        ...

    def checkpoint(self) -> None:
        """The journal has reached `checkpoint_at`: a checkpoint is due."""
        ...


class Writing(Enum):
    """The state of a writer: see the module's docstring."""

    OPEN = auto()
    FENCED = auto()
    FAILED = auto()


OPEN, FENCED, FAILED = Writing  # module constants: looking up a member of an enum takes longer


# The futures that wait for a commit. A list only for several: one for every step would burden the garbage collector.
Waiters = asyncio.Future[None] | list[asyncio.Future[None]] | None


class Writer:
    """The writing end of one root run's journal: its epoch, its last sequence, and the draft of its next commit."""

    __slots__ = (
        "_draft",
        "_recorder",
        "_sent_told",
        "_sent_waiters",
        "_told",
        "_waiters",
        "checkpoint_at",
        "epoch",
        "notes",
        "root_id",
        "run",
        "sequence",
        "state",
        "under_way",
    )

    def __init__(self, recorder: Queue, root_id: str, epoch: int, sequence: int, run: Told) -> None:
        self.root_id = root_id
        self.epoch = epoch
        self.sequence = sequence
        self.run = run
        self.checkpoint_at: int | None = None  # the sequence at which a checkpoint is due
        self.state = OPEN  # only `_close` changes it
        # What is added to the next draft: entries by key, and totals of foreachs.
        self.notes: dict[str, Event | ItemResult] = {}
        self._recorder = recorder
        self._draft: Commit | None = None
        self._waiters: Waiters = None  # these wait for the draft
        self._told: Any = None  # the operations that its entries end: one, or a list
        self.under_way = False  # a draft is in a batch that is being committed
        self._sent_waiters: Waiters = None  # these wait for the draft under way
        self._sent_told: Any = None  # the operations that its entries end

    @property
    def lost(self) -> bool:
        """Whether nothing of this writer is written any more."""
        return self.state is not OPEN

    @property
    def fenced(self) -> bool:
        """Whether another owner has the run."""
        return self.state is FENCED

    @property
    def gathering(self) -> bool:
        """Whether there is a draft of the next commit."""
        return self._draft is not None

    @property
    def telling(self) -> bool:
        """Whether the run will be told something when what was added is durable."""
        return self._told is not None or self._sent_told is not None

    @property
    def idle(self) -> bool:
        """Whether all that was added is durable."""
        return self._draft is None and not self.under_way

    @property
    def size(self) -> int:
        """About how many bytes the next commit carries."""
        return 0 if self._draft is None else self._draft.size

    @property
    def draft(self) -> Commit:
        """The draft of the next commit. Reading this property begins and queues one, if there is none."""
        draft = self._draft
        if draft is None:
            draft = Commit(root_id=self.root_id, epoch=self.epoch, entries=[])
            if self.state is OPEN:  # the draft of a lost writer is never committed
                self._draft = draft
                self._begun()
        return draft

    def _begun(self) -> None:
        self._recorder.queue.append(self)
        if self._recorder.free:
            self._recorder.wake_up()

    def add(self, event: Event, ends: Any = None) -> None:
        """Put an event into the draft. When it is durable, the run is told the end of the operation `ends`."""
        if self.notes:
            self.flush()
        draft = self._draft
        if draft is None:  # nearly always
            entries = [encode_event(event)]
            if self.state is OPEN:
                self._draft = Commit(root_id=self.root_id, epoch=self.epoch, entries=entries)
                self._recorder.queue.append(self)  # as _begun() does
                if self._recorder.free:
                    self._recorder.wake_up()
        else:
            draft.entries.append(encode_event(event))
        if ends is not None:
            told = self._told
            if told is None:  # nearly always
                self._told = ends
            elif type(told) is list:
                told.append(ends)
            else:
                self._told = [told, ends]

    def note(self, event: Event) -> None:
        """Keep an entry for the next draft: it is not worth a commit of its own. If the beginning of an operation is
        only noted, its end removes that note, and neither is written."""
        if self.notes.pop(event.key, None) is None:
            self.notes[event.key] = event

    def flush(self) -> None:
        """Put the notes into the draft."""
        notes, self.notes = self.notes, {}
        for note in notes.values():
            if isinstance(note, ItemResult):
                self.item(note)
            else:
                self.draft.entries.append(encode_event(note))

    def change(self, change: RunChange) -> None:
        """Write a new status of a run of this tree."""
        self._also(changes=[*self.draft.extras.changes, change])

    def insert(self, run: Run, first: bytes | None = None) -> None:
        """Insert the row of a child run or, with its first entry, of a spawned run."""
        self._also(runs=[*self.draft.extras.runs, run])
        if first is not None:
            self._also(spawned=[*self.draft.extras.spawned, (run.id, first)])

    def begin_generation(self, begun: NextGeneration) -> None:
        """The run begins anew with this draft."""
        self.draft.next = begun

    def consume(self, message_ids: Iterable[int]) -> None:
        """Remove messages from the inbox: the entries of this draft have consumed them."""
        self._also(consumed=[*self.draft.extras.consumed, *message_ids])

    def send(self, message: Message) -> None:
        self._also(messages=[*self.draft.extras.messages, message])

    def cancel_spawned(self, reason: str) -> None:
        self._also(cancel_spawned=reason)

    def log(self, line: LogLine) -> None:
        self._also(log=[*self.draft.extras.log, line])

    def item(self, item: ItemResult) -> None:
        self._also(items=[*self.draft.extras.items, item])

    def note_totals(self, totals: ItemResult) -> None:
        """Note how many items a foreach has (`totals_row`): not worth its own commit, and replaced by the next
        totals."""
        self.notes[f"{totals.run_id}\0{totals.key}"] = totals  # no key of an entry has a NUL

    def cut_items(self, run_id: str, key: str, index: int) -> None:
        """The items of a foreach from this index on no longer count."""
        self._also(cut_items=[*self.draft.extras.cut_items, (run_id, key, index)])

    def blob(self, digest: str, data: bytes) -> None:
        self._also(blobs={**self.draft.extras.blobs, digest: data})

    def _also(self, **extras: Any) -> None:
        """Add to what the draft writes beside its entries."""
        draft = self.draft
        draft.extras = msgspec.structs.replace(draft.extras, **extras)

    def confirm_ownership(self) -> None:
        """Commit, even an empty draft: the store's answer shows whether this process still owns the run."""
        _ = self.draft

    def committed(self) -> asyncio.Future[None]:
        """A future: done when all that was added is durable, or never will be. Then check `lost`."""
        future: asyncio.Future[None] = asyncio.Future(loop=self._recorder.loop)
        if self._draft is None:
            if self.lost or not self.under_way:
                future.set_result(None)
                return future
            _ = self.draft  # everything is in the batch under way: wait for an empty draft, which is committed after it
        waiting = self._waiters
        if waiting is None:  # nearly always: one step waits for its own entry
            self._waiters = future
        elif isinstance(waiting, list):
            waiting.append(future)
        else:
            self._waiters = [waiting, future]
        return future

    def take_draft(self) -> Commit | None:
        """The draft goes to the store. None if it was abandoned meanwhile."""
        draft = self._draft
        if draft is not None:
            draft.after = self.sequence
            self._draft = None
            self.under_way = True
            self._sent_waiters, self._waiters = self._waiters, None
            self._sent_told, self._told = self._told, None
        return draft

    def committed_up_to(self, sequence: int) -> Callable[[], None] | None:
        """The draft under way is durable. The caller must call the function returned, if any, to let the flow go on."""
        self.sequence = sequence
        self.under_way = False
        waiters, told = self._sent_waiters, self._sent_told
        self._sent_waiters = self._sent_told = None
        if waiters is not None:
            _wake(waiters)
        if self.checkpoint_at is not None and sequence >= self.checkpoint_at:
            self.run.checkpoint()
        if told is None:
            return None
        run = self.run
        if type(told) is list:
            run.told.extend(told)
        else:
            run.told.append(told)
        return run.advance

    def fence(self, refused: bool) -> None:
        """Another owner has the run, and nothing more is written. `refused`: the store has refused entries, not only a
        check of the ownership."""
        self._close(FENCED)
        self.run.fenced(refused)

    def abandon(self) -> None:
        """Nothing more is written, because what was added could not be written, or must not be. The run leaves memory."""
        self._close(FAILED)
        self.run.failed()

    def drop(self) -> None:
        """Nothing more is written, and the run need not know: it has not begun to be driven."""
        self._close(FAILED)

    def _close(self, state: Writing) -> None:
        """What is not committed yet never will be."""
        if self.state is not FENCED:
            self.state = state
        sent, waiting = self._sent_waiters, self._waiters
        self.under_way, self._sent_waiters, self._waiters, self._draft = False, None, None, None
        self._told = self._sent_told = None
        self.notes.clear()
        _wake(sent)
        _wake(waiting)


def abandon(writers: Iterable[Writer]) -> None:
    """Abandon each writer on its own: a bug that one of these runs triggers must not stop the others."""
    for writer in writers:
        try:
            writer.abandon()
        except Exception as broke:  # noqa: BLE001 - a bug of ours, in one run
            log(
                logging.CRITICAL,
                Token.INTERNAL_ERROR,
                f"run {writer.root_id}: giving up on it broke: {shown(broke)}",
                broke,
            )


def _wake(waiters: Waiters) -> None:
    if waiters is None:
        return
    for waiter in waiters if isinstance(waiters, list) else (waiters,):
        if not waiter.done():
            waiter.set_result(None)


def _nothing(*_: object) -> None:
    """Does nothing, for callbacks of a run that is over."""


class _Gone:
    """Stands in for a run that is over, as its writer sees it."""

    def __init__(self) -> None:
        self.told: deque[Any] = deque(maxlen=0)
        self.last_heard = 0

    advance = fenced = failed = checkpoint = staticmethod(_nothing)


GONE: Told = _Gone()
