"""The writing end of one run's journal: what is gathered for its next commit, and who waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from relight.lifecycle.races import OneByOne
from relight.model.journal import Event, encode_event
from relight.model.run import ItemResult, LogLine, Message, Run, RunChange
from relight.ports.store import Commit


class Queue(Protocol):
    """The recorder, as a writer sees it."""

    loop: asyncio.AbstractEventLoop

    def queue(self, writer: Writer) -> None:
        """A draft has begun."""
        ...


# Who waits for a commit. A list only when there are several: lists for every step would be the garbage collector's work.
Waiters = asyncio.Future[None] | list[asyncio.Future[None]] | None


class Writer:
    """The writing end of one root run's journal: its epoch, its last sequence, and the draft of its next commit."""

    __slots__ = (
        "_draft",
        "_recorder",
        "_sent_waiters",
        "_waiters",
        "checkpoint_at",
        "epoch",
        "failed",
        "fenced",
        "in_turn",
        "lost",
        "on_checkpoint",
        "on_fenced",
        "root_id",
        "sequence",
        "under_way",
    )

    def __init__(
        self,
        recorder: Queue,
        root_id: str,
        epoch: int,
        sequence: int,
        on_fenced: Callable[[bool], None],  # with whether entries were refused
        on_checkpoint: Callable[[], None],
    ) -> None:
        self.root_id = root_id
        self.epoch = epoch
        self.sequence = sequence
        self.on_fenced = on_fenced
        self.on_checkpoint = on_checkpoint
        self.checkpoint_at: int | None = None  # the sequence at which a checkpoint is due
        self.lost = False  # nothing of this writer is written any more: see fenced and failed
        self.fenced = False  # another owner has the run: nothing of ours is written any more
        self.failed: BaseException | None = None  # the recorder gave up on a draft of this writer
        self.in_turn: OneByOne | None = None  # once the run has branches: lets them go on in the order of the journal
        self._recorder = recorder
        self._draft: Commit | None = None
        self._waiters: Waiters = None  # of the draft
        self.under_way = False  # a draft is in a batch that is being committed,
        self._sent_waiters: Waiters = None  # and these wait for it

    @property
    def draft(self) -> Commit:
        """The commit that is being gathered; touching it queues it."""
        draft = self._draft
        if draft is None:
            draft = Commit(root_id=self.root_id, epoch=self.epoch, entries=[])
            if not self.lost:  # else it goes nowhere
                self._draft = draft
                self._recorder.queue(self)
        return draft

    def add(self, event: Event) -> None:
        """Put an event into the draft. It is not durable before `committed()` says so."""
        draft = self._draft
        if draft is None:
            draft = self.draft
        draft.entries.append(encode_event(event))

    def change(self, change: RunChange) -> None:
        """A new status of a run of this tree."""
        self.draft.changes = [*self.draft.changes, change]

    def insert(self, run: Run, first: bytes | None = None) -> None:
        """A child run, or (with its first entry) a spawned one."""
        self.draft.runs = [*self.draft.runs, run]
        if first is not None:
            self.draft.spawned = [*self.draft.spawned, (run.id, first)]

    def consume(self, message_ids: Iterable[int]) -> None:
        """Messages that the entries of this draft have taken in."""
        self.draft.consumed = [*self.draft.consumed, *message_ids]

    def send(self, message: Message) -> None:
        self.draft.messages = [*self.draft.messages, message]

    def cancel_spawned(self, reason: str) -> None:
        self.draft.cancel_spawned = reason

    def log(self, line: LogLine) -> None:
        self.draft.log = [*self.draft.log, line]

    def item(self, item: ItemResult) -> None:
        self.draft.items = [*self.draft.items, item]

    def cut_items(self, run_id: str, key: str, index: int) -> None:
        """The items of a foreach from this index on no longer count."""
        self.draft.cut_items = [*self.draft.cut_items, (run_id, key, index)]

    def blob(self, digest: str, data: bytes) -> None:
        self.draft.blobs = {**self.draft.blobs, digest: data}

    def ask(self) -> None:
        """Commit, even if it is nothing: the store's answer tells whether the run is still ours."""
        _ = self.draft

    def branch(self, parent: asyncio.Task[object] | None) -> None:
        """Code of the run has made a task: from now on outcomes may race."""
        if self.in_turn is None:
            self.in_turn = OneByOne(self._recorder.loop)
        self.in_turn.watch(parent)

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

    def take(self) -> Commit | None:
        """The draft leaves for the store; None if it was abandoned meanwhile."""
        draft = self._draft
        if draft is not None:
            draft.after = self.sequence
            self._draft = None
            self.under_way = True
            self._sent_waiters, self._waiters = self._waiters, None
        return draft

    def settle(self, sequence: int) -> None:
        """What was taken is durable."""
        self.sequence = sequence
        self.under_way = False
        waiters, self._sent_waiters = self._sent_waiters, None
        if self.in_turn is None or waiters is None:
            _wake(waiters)
        else:
            self.in_turn.wake(waiters if isinstance(waiters, list) else [waiters])
        if self.checkpoint_at is not None and sequence >= self.checkpoint_at:
            self.on_checkpoint()

    def abandon(self, error: BaseException | None) -> None:
        """Nothing more is written by this writer: it is fenced, or (with an error) the recorder gave up on it."""
        self.failed = error
        self.lost = True
        sent, waiting = self._sent_waiters, self._waiters
        self.under_way, self._sent_waiters, self._waiters, self._draft = False, None, None, None
        _wake(sent)
        _wake(waiting)


def _wake(waiters: Waiters) -> None:
    if waiters is None:
        return
    for waiter in waiters if isinstance(waiters, list) else (waiters,):
        if not waiter.done():
            waiter.set_result(None)
