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
from relight.model.journal import Event, encode_event
from relight.model.run import ItemResult, Message, Run, RunChange
from relight.ports.store import Commit, CommitResult, Committed, Store
from relight.telemetry import Token, log

MAX_BATCH = 4096  # roots per transaction: bounds the burst; the rest follows at once
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
STOP_SECONDS = 5.0

# The pause is real time also under a test's clock: what it waits for is a disk, not a schedule.
_pause = asyncio.sleep  # noqa: TID251 - see above

Taken = tuple[Commit, list[asyncio.Future[None]]]  # a draft on its way, and who waits for it
Creation = tuple[Commit, asyncio.Future[CommitResult]]


class Writer:
    """The writing end of one root run's journal: its epoch, its last sequence, and the draft of its next commit."""

    __slots__ = (
        "_draft",
        "_recorder",
        "_waiters",
        "checkpoint_at",
        "epoch",
        "failed",
        "fenced",
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
        self._recorder = recorder
        self._draft: Commit | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def draft(self) -> Commit:
        """The commit that is being gathered; touching it queues it."""
        draft = self._draft
        if draft is None:
            draft = self._draft = Commit(root_id=self.root_id, epoch=self.epoch, entries=[])
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

    def item(self, item: ItemResult) -> None:
        self.draft.items = [*self.draft.items, item]

    def blob(self, digest: str, data: bytes) -> None:
        self.draft.blobs = {**self.draft.blobs, digest: data}

    def committed(self) -> asyncio.Future[None]:
        """Ends when everything added so far is durable, or when it never will be: check `fenced` and `failed` then."""
        future: asyncio.Future[None] = asyncio.Future(loop=self._recorder.loop)
        if self._draft is None and not self._recorder.in_flight(self):
            future.set_result(None)
        else:
            self._waiters.append(future)
            if self._draft is None:  # it is in the batch under way: ride on an empty draft behind it
                _ = self.draft
        return future

    def take(self) -> Taken:
        """The draft leaves for the store."""
        draft, waiters = self._draft, self._waiters
        assert draft is not None
        self._draft, self._waiters = None, []
        draft.after = self.sequence
        return draft, waiters

    def abandon(self, error: BaseException | None) -> None:
        """Nothing more is written by this writer."""
        self.failed = error
        self.lost = True
        waiters, self._waiters, self._draft = self._waiters, [], None
        _wake(waiters)


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
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
        self._batch: frozenset[Writer] | tuple[Writer, ...] = ()
        self._idle: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._creations: list[Creation] = []

    def start(self) -> None:
        self._task = self.loop.create_task(self._run(), name="relight-recorder")

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

    def in_flight(self, writer: Writer) -> bool:
        return writer in self._batch

    async def create(self, commit: Commit) -> CommitResult:
        """Commit a run's creation with the next batch. Raises StoreUnavailableError when that fails: it is not retried."""
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
            writers, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
            creations, self._creations = self._creations[:MAX_BATCH], self._creations[MAX_BATCH:]
            taken = [writer.take() for writer in writers]
            self._batch = tuple(writers) if len(writers) < 8 else frozenset(writers)
            try:
                results = await self._commit([commit for commit, _ in taken], creations)
            except Exception as error:  # noqa: BLE001 - a bug in a backend: no run may go on as if this were written
                self._broken(error, writers, taken, creations)
            else:
                self._settle(writers, taken, creations, results)
            self._batch = ()

    async def _commit(self, commits: list[Commit], creations: list[Creation]) -> list[CommitResult]:
        """One batch, until the store has taken it. Creations are tried once, with the first try."""
        try:
            results = await self._store.commit([*commits, *(commit for commit, _ in creations)])
        except StoreUnavailableError as error:
            self._failing(error, creations)
            creations.clear()
            results = await self._insist(commits) if commits else []
        if self.fault is not None and results:
            log(logging.WARNING, Token.COMMIT_RECOVERED, "the store takes commits again")
            self.fault = None
        return results

    async def _insist(self, commits: list[Commit]) -> list[CommitResult]:
        pause = FIRST_PAUSE_SECONDS
        while True:
            await _pause(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            try:
                return await self._store.commit(commits)
            except StoreUnavailableError as error:
                self._failing(error, [])

    def _settle(
        self, writers: list[Writer], taken: list[Taken], creations: list[Creation], results: list[CommitResult]
    ) -> None:
        """The batch is durable: wake everybody who waited for it, in the order of the journal."""
        self.commits += 1
        for writer, (commit, waiters), result in zip(writers, taken, results, strict=False):
            if type(result) is Committed:
                writer.sequence = result.sequence
                self.entries += len(commit.entries)
                if writer.checkpoint_at is not None and result.sequence >= writer.checkpoint_at:
                    writer.on_checkpoint()
            else:
                writer.fenced = True
                writer.abandon(None)
                writer.on_fenced()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        for (_, future), result in zip(creations, results[len(taken) :], strict=True):
            if not future.done():
                future.set_result(result)

    def _broken(self, error: Exception, writers: list[Writer], taken: list[Taken], creations: list[Creation]) -> None:
        log(logging.CRITICAL, Token.COMMIT_FAILED, f"a commit of {len(taken)} runs broke; they are dropped", error)
        for _, future in creations:
            if not future.done():
                future.set_exception(error)
        for writer, (_, waiters) in zip(writers, taken, strict=True):
            writer.abandon(error)
            _wake(waiters)

    def _failing(self, error: StoreUnavailableError, creations: list[Creation]) -> None:
        level = logging.ERROR if self.fault is None else logging.DEBUG  # say it once, not at every attempt
        log(level, Token.COMMIT_FAILED, f"{error}; nothing goes on until the store takes commits again, trying…")
        self.fault = str(error)
        for _, future in creations:
            if not future.done():
                future.set_exception(StoreUnavailableError(f"the run was not accepted: {error}"))
