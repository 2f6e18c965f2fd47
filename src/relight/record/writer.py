"""The writing end of one run's journal: what is gathered for its next commit, who waits for that, and what is told then."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from relight.model.journal import Event, encode_event
from relight.model.run import ItemResult, LogLine, Message, Run, RunChange
from relight.ports.store import Commit, NextGeneration
from relight.telemetry import Token, log


class Queue(Protocol):
    """The recorder, as a writer sees it."""

    loop: asyncio.AbstractEventLoop
    queue: list[Writer]  # whose drafts have begun

    @property
    def free(self) -> Sequence[object]:
        """Whoever waits for the next of these."""
        ...

    def wake_up(self) -> None:
        """They need not wait any longer."""
        ...


class Told(Protocol):
    """The run, as its writer sees it."""

    told: deque[Any]  # what the entries of its commits have ended, in their order

    @property
    def last_heard(self) -> int:
        """The newest message that it has heard."""
        ...

    def advance(self) -> None:
        """Let the flow go on."""
        ...

    def fenced(self, refused: bool) -> None:
        """Another owner has it; `refused`: entries were."""
        ...

    def failed(self) -> None:
        """The recorder gave up on a draft."""
        ...

    def checkpoint(self) -> None:
        """The journal has grown past its mark."""
        ...


# Who waits for a commit, and what is told after it. A list only when there are several: lists for every step would be the
# garbage collector's work.
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
        "failed",
        "fenced",
        "lost",
        "notes",
        "root_id",
        "run",
        "sequence",
        "under_way",
    )

    def __init__(self, recorder: Queue, root_id: str, epoch: int, sequence: int, run: Told) -> None:
        self.root_id = root_id
        self.epoch = epoch
        self.sequence = sequence
        self.run = run
        self.checkpoint_at: int | None = None  # the sequence at which a checkpoint is due
        self.lost = False  # nothing of this writer is written any more: see fenced and failed
        self.fenced = False  # another owner has the run: nothing of ours is written any more
        self.failed: BaseException | None = None  # the recorder gave up on a draft of this writer
        self.notes: dict[
            str, Event | ItemResult
        ] = {}  # what rides with the next draft: entries by key, and totals of foreachs
        self._recorder = recorder
        self._draft: Commit | None = None
        self._waiters: Waiters = None  # of the draft
        self._told: Any = None  # what its entries end
        self.under_way = False  # a draft is in a batch that is being committed,
        self._sent_waiters: Waiters = None  # these wait for it,
        self._sent_told: Any = None  # and this is told then

    @property
    def gathering(self) -> bool:
        """Whether something is being gathered for the next commit."""
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
        """The commit that is being gathered; touching it queues it."""
        draft = self._draft
        if draft is None:
            draft = Commit(root_id=self.root_id, epoch=self.epoch, entries=[])
            if not self.lost:  # else it goes nowhere
                self._draft = draft
                self._begun()
        return draft

    def _begun(self) -> None:
        self._recorder.queue.append(self)
        if self._recorder.free:
            self._recorder.wake_up()

    def add(self, event: Event, ends: Any = None) -> None:
        """Put an event into the draft. When it is durable, the run is told of what it `ends`."""
        if self.notes:
            self.flush()
        draft = self._draft
        if draft is None:  # nearly always
            entries = [encode_event(event)]
            if not self.lost:
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
        """An entry that is not worth a commit of its own. The end of what is itself only noted is not worth anything."""
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
        """A new status of a run of this tree."""
        self._also(changes=[*self.draft.extras.changes, change])

    def insert(self, run: Run, first: bytes | None = None) -> None:
        """A child run, or (with its first entry) a spawned one."""
        self._also(runs=[*self.draft.extras.runs, run])
        if first is not None:
            self._also(spawned=[*self.draft.extras.spawned, (run.id, first)])

    def begin_generation(self, begun: NextGeneration) -> None:
        """The run begins anew with this draft."""
        self.draft.next = begun

    def consume(self, message_ids: Iterable[int]) -> None:
        """Messages that the entries of this draft have taken in."""
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
        """How many items a foreach has (`totals_row`): not worth a commit of its own, and replaced by what it says next."""
        self.notes[f"{totals.run_id}\0{totals.key}"] = totals  # no key of an entry has a NUL

    def cut_items(self, run_id: str, key: str, index: int) -> None:
        """The items of a foreach from this index on no longer count."""
        self._also(cut_items=[*self.draft.extras.cut_items, (run_id, key, index)])

    def blob(self, digest: str, data: bytes) -> None:
        self._also(blobs={**self.draft.extras.blobs, digest: data})

    def _also(self, **extras: Any) -> None:
        """The draft writes this beside its entries."""
        draft = self.draft
        draft.extras = msgspec.structs.replace(draft.extras, **extras)

    def confirm_ownership(self) -> None:
        """Commit, even if it is nothing: the store's answer tells whether the run is still ours."""
        _ = self.draft

    def committed(self) -> asyncio.Future[None]:
        """Ends when everything added so far is durable, or when it never will be: check `fenced` and `failed` then."""
        future: asyncio.Future[None] = asyncio.Future(loop=self._recorder.loop)
        if self._draft is None:
            if self.lost or not self.under_way:
                future.set_result(None)
                return future
            _ = self.draft  # it is in the batch under way: ride on an empty draft behind it
        waiting = self._waiters
        if waiting is None:  # nearly always: one step waits for its own entry
            self._waiters = future
        elif isinstance(waiting, list):
            waiting.append(future)
        else:
            self._waiters = [waiting, future]
        return future

    def take_draft(self) -> Commit | None:
        """The draft leaves for the store; None if it was abandoned meanwhile."""
        draft = self._draft
        if draft is not None:
            draft.after = self.sequence
            self._draft = None
            self.under_way = True
            self._sent_waiters, self._waiters = self._waiters, None
            self._sent_told, self._told = self._told, None
        return draft

    def committed_up_to(self, sequence: int) -> Callable[[], None] | None:
        """What was taken is durable. Call what this returns to let the flow go on."""
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

    def abandon(self, error: BaseException | None) -> None:
        """Nothing more is written by this writer: it is fenced, or (with an error) the recorder gave up on it."""
        self.failed = error
        self.lost = True
        sent, waiting = self._sent_waiters, self._waiters
        self.under_way, self._sent_waiters, self._waiters, self._draft = False, None, None, None
        self._told = self._sent_told = None
        self.notes.clear()
        _wake(sent)
        _wake(waiting)
        if error is not None:
            self.run.failed()


def abandon(writers: Iterable[Writer], error: BaseException) -> None:
    """Each for itself: a bug that one of these runs brings out must not strand the others."""
    for writer in writers:
        try:
            writer.abandon(error)
        except Exception as broke:  # noqa: BLE001 - see above
            log(
                logging.CRITICAL, Token.INTERNAL_ERROR, f"run {writer.root_id}: giving up on it broke: {broke!r}", broke
            )


def _wake(waiters: Waiters) -> None:
    if waiters is None:
        return
    for waiter in waiters if isinstance(waiters, list) else (waiters,):
        if not waiter.done():
            waiter.set_result(None)


def _nothing(*_: object) -> None:
    """For callbacks of a run that is over."""


class _Gone:
    """What the writer of a run that is over tells."""

    def __init__(self) -> None:
        self.told: deque[Any] = deque(maxlen=0)
        self.last_heard = 0

    advance = fenced = failed = checkpoint = staticmethod(_nothing)


GONE: Told = _Gone()
