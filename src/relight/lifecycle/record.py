"""Record: group commit. The heart of the speed, and the only way a run's facts reach the store.

    run A ─ add(event) ┐
    run B ─ add(event) ┼─▶ drafts ──▶ one transaction ──▶ settle: wake everybody whose draft it held
    run C ─ add(event) ┘      ▲                │
                              └── whatever arrives meanwhile gathers in the next drafts

There is no timer and no artificial delay: alone, a step costs one commit; with 500 runs at once, hundreds of entries share
one. While one transaction is under way the next one gathers.

A commit that fails is tried again, with a growing pause, for as long as the process lives: the drafts hold what has really
happened (steps that ran), so dropping them would run those steps twice. Nothing that waits for them goes on meanwhile, and
`fault` says why. The store recognises a commit it already has, so an answer that was lost does no harm. A run's creation is
the exception: its caller can be told, so it fails at once and `start` raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from relight.errors import StoreUnavailableError
from relight.lifecycle.patience import Patience
from relight.lifecycle.races import OneByOne
from relight.model.journal import Event, encode_event
from relight.model.run import ItemResult, LogLine, Message, Run, RunChange
from relight.ports.store import Commit, CommitResult, Committed, Store
from relight.telemetry import Token, log

MAX_BATCH = 4096  # roots per transaction: bounds the burst; the rest follows at once
STOP_SECONDS = 5.0


# Who waits for a commit. A list only when there are several: lists for every step would be the garbage collector's work.
Waiters = asyncio.Future[None] | list[asyncio.Future[None]] | None
Creation = tuple[Commit, asyncio.Future[CommitResult]]


class Writer:
    """The writing end of one root run's journal: its epoch, its last sequence, and the draft of its next commit."""

    __slots__ = (
        "_draft",
        "_recorder",
        "_sent",
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
    )

    def __init__(
        self,
        recorder: Recorder,
        root_id: str,
        epoch: int,
        sequence: int,
        on_fenced: Callable[[], None],
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
        self._sent = False  # a draft is in the batch under way,
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
            if self.lost or not self._sent:
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
            self._sent = True
            self._sent_waiters, self._waiters = self._waiters, None
        return draft

    def settle(self, sequence: int) -> None:
        """What was taken is durable."""
        self.sequence = sequence
        self._sent = False
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
        self._sent, self._sent_waiters, self._waiters, self._draft = False, None, None, None
        _wake(sent)
        _wake(waiting)


def _wake(waiters: Waiters) -> None:
    if waiters is None:
        return
    for waiter in waiters if isinstance(waiters, list) else (waiters,):
        if not waiter.done():
            waiter.set_result(None)


class Recorder:
    """One per process and store: gathers drafts and commits them, batch after batch."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.fault: str | None = None  # why nothing is being committed right now
        self.commits = 0
        self.entries = 0
        self._store = store
        self._queue: list[Writer] = []
        self._batch: list[Writer] = []  # in the transaction under way
        self._idle: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._insisting = False  # the store refuses a batch that cannot be given up,
        self._give_up_at: float | None = None  # except when the process is stopping: then from this time on
        self._creations: list[Creation] = []

    def start(self) -> None:
        self._task = self.loop.create_task(self._run(), name="relight-recorder")

    def hurry(self, seconds: float) -> None:
        """The process is stopping: a store that fails for longer than this is not waited for. Whoever waits for a commit
        is told that it did not come to pass, or stopping would wait as long as the fault lasts."""
        self._give_up_at = self.loop.time() + seconds

    async def stop(self) -> None:
        """Commit what is queued, then end. A failing store is not waited for: what it has not taken, it never gets."""
        if self._task is None:
            return
        self._closing = True
        self._wake_up()
        await asyncio.wait([self._task], timeout=STOP_SECONDS)
        self._task.cancel()
        await asyncio.wait([self._task])
        for writer in (*self._queue, *self._batch):
            writer.abandon(StoreUnavailableError("Relight was stopped before this could be committed"))
        self._queue.clear()

    def queue(self, writer: Writer) -> None:
        """Called by a writer whose draft has just begun."""
        self._queue.append(writer)
        self._wake_up()

    def _wake_up(self) -> None:
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    async def create(self, commit: Commit) -> CommitResult:
        """Commit a run's creation with the next batch. Raises StoreUnavailableError when that fails: it is not retried."""
        if self._insisting:  # it would only wait behind a batch that the store refuses
            raise _refused(self.fault)
        future: asyncio.Future[CommitResult] = self.loop.create_future()
        self._creations.append((commit, future))
        self._wake_up()
        return await future

    async def _run(self) -> None:
        while True:
            if not self._queue and not self._creations:
                if self._closing:
                    return
                self._idle = self.loop.create_future()
                await self._idle
            else:
                await self._commit_next()

    async def _commit_next(self) -> None:
        """One batch of what is queued. In a frame of its own: idle, it would keep the runs of its last batch in memory."""
        writers, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
        creations, self._creations = self._creations[:MAX_BATCH], self._creations[MAX_BATCH:]
        commits = []
        for writer in writers:
            draft = writer.take()
            if draft is not None:
                self._batch.append(writer)
                commits.append(draft)
        try:
            results = await self._commit(commits, creations)
        except StoreUnavailableError as error:  # given up: the process stops
            log(logging.ERROR, Token.COMMIT_FAILED, f"{error}; what {len(commits)} runs did last will be repeated")
            for writer in self._batch:
                writer.abandon(error)
        except Exception as error:  # noqa: BLE001 - a bug in a backend: no run may go on as if this were written
            self._broken(error, creations)
        else:
            self._settle(commits, creations, results)
        self._batch.clear()

    async def _commit(self, commits: list[Commit], creations: list[Creation]) -> list[CommitResult]:
        """One batch, until the store has taken it. Creations are tried once, with the first try."""
        try:
            results = await self._store.commit([*commits, *(commit for commit, _ in creations)])
        except StoreUnavailableError as error:
            self._failing(error)
            self._refuse(creations)
            results = await self._insist(commits) if commits else []
        if self.fault is not None and results:
            log(logging.WARNING, Token.COMMIT_RECOVERED, "the store takes commits again")
            self.fault = None
        return results

    async def _insist(self, commits: list[Commit]) -> list[CommitResult]:
        patience = Patience()
        self._insisting = True
        try:
            while True:
                self._refuse(self._creations)
                if self._give_up_at is not None and self.loop.time() >= self._give_up_at:
                    raise StoreUnavailableError(f"Relight was stopped while nothing could be committed: {self.fault}")
                await patience.pause()
                try:
                    return await self._store.commit(commits)
                except StoreUnavailableError as error:
                    self._failing(error)
        finally:
            self._insisting = False

    def _settle(self, commits: list[Commit], creations: list[Creation], results: list[CommitResult]) -> None:
        """The batch is durable: wake everybody who waited for it, in the order of the journals."""
        self.commits += 1
        for writer, commit, result in zip(self._batch, commits, results, strict=False):
            if type(result) is Committed:
                self.entries += len(commit.entries)
                writer.settle(result.sequence)
            else:
                writer.fenced = True
                writer.abandon(None)
                writer.on_fenced()
        for (_, future), result in zip(creations, results[len(commits) :], strict=True):
            if not future.done():
                future.set_result(result)

    def _broken(self, error: Exception, creations: list[Creation]) -> None:
        log(
            logging.CRITICAL, Token.COMMIT_FAILED, f"a commit of {len(self._batch)} runs broke; they are dropped", error
        )
        for _, future in creations:
            if not future.done():
                future.set_exception(error)
        for writer in self._batch:
            writer.abandon(error)

    def _failing(self, error: StoreUnavailableError) -> None:
        level = logging.ERROR if self.fault is None else logging.DEBUG  # say it once, not at every attempt
        log(level, Token.COMMIT_FAILED, f"{error}; nothing goes on until the store takes commits again, trying…")
        self.fault = str(error)

    def _refuse(self, creations: list[Creation]) -> None:
        """Whoever waits for these can be told, so they are."""
        for _, future in creations:
            if not future.done():
                future.set_exception(_refused(self.fault))
        creations.clear()


def _refused(fault: str | None) -> StoreUnavailableError:
    return StoreUnavailableError(f"the run was not accepted: {fault}")
