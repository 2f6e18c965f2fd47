"""Record: group commit. It makes Relight fast, and it is the only way in which a run's facts reach the store.

    run A ─ add(event) ┐
    run B ─ add(event) ┼─▶ drafts ──▶ one transaction ──▶ finish: the runs whose drafts it contained go on
    run C ─ add(event) ┘      ▲                │
                              └── events that arrive meanwhile gather in the next drafts

There is no timer: while one transaction is under way, drafts gather for the next one. On a store that takes several at
once (`Store.lanes`), many queued drafts are shared out between the lanes that are free.

A batch on which the store breaks (an exception that is not an outage) is divided: see `broken_batches.py`.

A commit that fails is tried again, with a growing pause, for as long as the process lives. The drafts contain what has
really happened (steps that ran): if they were dropped, those steps would run twice. Meanwhile nothing that waits for a
commit goes on, and `fault` says why. The store recognises a commit that it already has, so a lost answer does no harm.
A run's creation is the exception: it fails at once, and `start` raises the error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from relight.errors import RelightError, StoreUnavailableError
from relight.execution.idle import Idleness
from relight.execution.running_loop import RunningLoop
from relight.model.text import shown
from relight.ports.store import Commit, CommitResult, Committed, Store
from relight.record import batch_size
from relight.record.broken_batches import Creation, divide
from relight.record.writer import Writer, abandon
from relight.retry_pause import RetryPause
from relight.supervisor import Part, Supervisor
from relight.telemetry import Token, log

MAX_BATCH = 4096  # roots per transaction; the rest follows in the next one, at once
WORTH_SHARING = 32  # so many queued drafts are shared out between the free lanes; fewer are not
STOP_SECONDS = 5.0
STALLED_SECONDS = 2.0  # how long a commit under way may still take when there is no time to try it again


class Recorder:
    """One per process and store: gathers drafts and commits them, batch after batch, in each lane."""

    def __init__(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        running_loop: RunningLoop,
        supervisor: Supervisor | None = None,
        idleness: Idleness | None = None,
    ) -> None:
        self._idleness = idleness or Idleness()
        self._idleness.parts.append(self._is_idle)
        self._supervisor = supervisor or Supervisor()
        self.loop = loop
        self.running_loop = running_loop
        self.fault: str | None = None  # why nothing is being committed right now
        self.commits = 0
        self.entries = 0
        self.store = store
        self.insisting = 0  # lanes that try a batch again and again, because the store does not accept it
        self.give_up_at: float | None = None  # when the process is stopping: from this time on, lanes give up
        self.given_up = False  # a lane has given up: nothing is sent to the store any more
        self.queue: list[Writer] = []
        self._creations: list[Creation] = []
        self._lanes = [_Lane(self) for _ in range(store.lanes)]
        self.free: list[_Lane] = []  # waiting for something to commit
        self._parts: list[Part] = []
        self._closing = False

    def start(self) -> None:
        keep = self._supervisor.keep
        self._parts = [keep(f"recorder-{number}", lane.run) for number, lane in enumerate(self._lanes, start=1)]

    def hurry(self, seconds: float) -> None:
        """The process is stopping: if the store fails for longer than this, lanes give up. What waits for a commit is
        woken, with `failed` set. Without this, stopping would wait as long as the fault lasts."""
        self.give_up_at = self.loop.time() + seconds
        for lane in self._lanes:
            lane.hurry()

    def limit(self) -> float | None:
        """The time at which one commit must be done; None while the process is not stopping. The deadlines of a store
        that hangs are longer than people wait for a process to stop."""
        if self.give_up_at is None:
            return None
        return max(self.give_up_at, self.loop.time()) + STALLED_SECONDS

    async def stop(self) -> None:
        """Commit what is queued, then end. Drafts that are not committed after STOP_SECONDS are abandoned."""
        if not self._parts:
            return
        self._closing = True
        self.wake_up()
        await asyncio.wait([part.task for part in self._parts if part.task is not None], timeout=STOP_SECONDS)
        await asyncio.gather(*(part.stop() for part in self._parts))
        left = [*self.queue, *(writer for lane in self._lanes for writer in lane.batch)]
        abandon(left)  # Relight was stopped before this could be committed
        self.queue.clear()
        for _, future in [*self._creations, *(one for lane in self._lanes for one in lane.creations)]:
            if not future.done():
                future.set_exception(_closed())
        self._creations.clear()

    def wake_up(self) -> None:
        """Wake all free lanes: they share the queued drafts between them."""
        for lane in self.free:
            lane.wake()
        self.free.clear()

    async def create(self, commit: Commit) -> CommitResult:
        """Commit a run's creation with the next batch. Raises StoreUnavailableError when that fails: it is not retried. If
        the caller gives up on this, `withdraw` tells whether the run may be written all the same."""
        if self.insisting:  # the creation would only wait behind a batch that the store does not accept
            raise _refused(self.fault)
        future: asyncio.Future[CommitResult] = self.loop.create_future()
        self._creations.append((commit, future))
        self.wake_up()
        return await future

    def withdraw(self, commit: Commit, answered: Callable[[], None]) -> None:
        """The caller of `create` was told that it failed, or has given up. If the creation may have been written, or may be
        soon, call `answered` when nothing of it is under way any more: what the store has then is what counts."""
        for place, (queued, _) in enumerate(self._creations):
            if queued is commit:
                del self._creations[place]
                return
        for lane in self._lanes:
            if any(sent is commit for sent, _ in lane.creations):
                lane.answered.append(answered)
                return
        answered()

    def wait(self, lane: _Lane) -> bool:
        """A lane has nothing to do. Returns whether it should wait to be woken; otherwise it ends."""
        if not self._closing:
            self.free.append(lane)
            self._idleness.look()
        return not self._closing

    def _is_idle(self) -> bool:
        return len(self.free) == len(self._lanes) and not self.queue and not self._creations

    def share(self, lane: _Lane) -> tuple[list[Writer], list[Creation]]:
        """What this lane commits next: all that is queued, or a share of it while other woken lanes wait for theirs."""
        looking = 1 + sum(1 for other in self._lanes if other is not lane and other.looking)
        writers, left = self._take_writers(_share(len(self.queue), looking), batch_size.MAX_BATCH_BYTES)
        return writers, self._take_creations(_share(len(self._creations), looking), max(left, 1))

    def _take_writers(self, count: int, size: int) -> tuple[list[Writer], int]:
        """At most `count` writers of about `size` bytes; and the bytes left. A run with a draft under way stays
        queued."""
        queue = self.queue
        if len(self._lanes) == 1 or not any(writer.under_way for writer in queue):
            count, size = batch_size.fitting([writer.size for writer in queue[:count]], size)
            taken, self.queue = queue[:count], queue[count:]
            return taken, size
        ready = [writer for writer in queue if not writer.under_way][:count]
        count, size = batch_size.fitting([writer.size for writer in ready], size)
        chosen = set(ready[:count])
        self.queue = [writer for writer in queue if writer not in chosen]
        return ready[:count], size

    def _take_creations(self, count: int, size: int) -> list[Creation]:
        count, _ = batch_size.fitting([commit.size for commit, _ in self._creations[:count]], size)
        taken, self._creations = self._creations[:count], self._creations[count:]
        return taken

    # ---- what lanes report

    def batch_done(self) -> None:
        """A batch has ended: drafts of its runs may be queued, and can be committed now."""
        if self.queue and self.free:
            self.wake_up()

    def failing(self, error: StoreUnavailableError) -> None:
        level = logging.ERROR if self.fault is None else logging.DEBUG  # an error once, not at every attempt
        log(level, Token.COMMIT_FAILED, f"{error}; nothing goes on until the store takes commits again, trying…")
        self.fault = str(error)

    def works(self) -> None:
        if self.fault is not None and not self.insisting:
            log(logging.WARNING, Token.COMMIT_RECOVERED, "the store takes commits again")
            self.fault = None

    def refuse(self, creations: list[Creation]) -> None:
        """Creations are not tried again: raise the fault in the callers that wait for them."""
        for _, future in creations:
            if not future.done():
                future.set_exception(_refused(self.fault))
        creations.clear()

    def refuse_queued(self) -> None:
        self.refuse(self._creations)


class _Lane:
    """A lane commits one batch after the other."""

    def __init__(self, recorder: Recorder) -> None:
        self.batch: list[Writer] = []  # writers whose drafts are in the transaction under way
        self.creations: list[Creation] = []  # creations in the transaction under way
        self.answered: list[Callable[[], None]] = []  # to be called when the transaction under way has ended
        self.looking = False  # woken, and about to get its share
        self._recorder = recorder
        self._idle: asyncio.Future[None] | None = None
        self._limit: asyncio.Timeout | None = None  # of the commit under way

    def hurry(self) -> None:
        if self._limit is not None:
            self._limit.reschedule(self._recorder.limit())

    def wake(self) -> None:
        if self._idle is not None:
            self.looking = True
            if not self._idle.done():  # done: the program has cancelled all tasks, and closes the engine after that
                self._idle.set_result(None)
            self._idle = None

    async def run(self, part: Part) -> None:
        recorder = self._recorder
        self._begin_again(part)
        while True:
            writers, creations = recorder.share(self)
            self.looking = False
            if writers or creations:
                await self._commit_next(writers, creations)
                self._tell_answered()
                recorder.batch_done()
                part.well()
            elif recorder.wait(self):
                self._idle = recorder.loop.create_future()
                await part.rest(self._idle)
            else:
                return

    def _begin_again(self, part: Part) -> None:
        """Begin again after a bug of ours. It is unknown whether the batch under way was written, so its runs must not
        go on as if it were: they leave memory, and the orchestrator reads the store for them."""
        if self in self._recorder.free:
            self._recorder.free.remove(self)
        self._idle, self.looking = None, False
        error = RelightError(f"the recorder broke: {part.error}")
        abandon([writer for writer in self.batch if writer.under_way])
        for future in [future for _, future in self.creations if not future.done()]:
            future.set_exception(error)
        self.batch, self.creations = [], []
        self._tell_answered()

    def _tell_answered(self) -> None:
        if self.answered:
            callbacks, self.answered = self.answered, []
            for callback in callbacks:
                self._recorder.loop.call_soon(callback)

    async def _commit_next(self, writers: list[Writer], creations: list[Creation]) -> None:
        """Commit one batch. It has a function of its own, because local variables of an idle lane's `run` would keep
        the runs of its last batch in memory."""
        commits = []
        self.creations = creations
        for writer in writers:
            draft = writer.take_draft()
            if draft is not None:
                self.batch.append(writer)
                commits.append(draft)
        await self.commit_all(self.batch, commits, creations)
        writers.clear()
        self.batch, self.creations = [], []

    async def commit_all(self, writers: list[Writer], commits: list[Commit], creations: list[Creation]) -> None:
        """Commit until the store has written all of these, or it is known which one it cannot write."""
        try:
            results = await self.commit(commits, creations)
        except StoreUnavailableError as error:  # given up, because the process stops
            log(logging.ERROR, Token.COMMIT_FAILED, f"{error}; what {len(commits)} runs did last will be repeated")
            abandon(writers)
        except Exception as error:  # noqa: BLE001 - a bug in a backend, or a value that it cannot write
            await divide(self, writers, commits, creations, error)
        else:
            self.finish(writers, commits, creations, results)

    async def commit(self, commits: list[Commit], creations: list[Creation]) -> list[CommitResult]:
        """Commit one batch; try again until the store has written it. Creations are only part of the first try."""
        recorder = self._recorder
        try:
            results = await self._commit([*commits, *(commit for commit, _ in creations)])
        except StoreUnavailableError as error:
            recorder.failing(error)
            recorder.refuse(creations)
            results = await self._insist(commits) if commits else []
        if results:
            recorder.works()
        return results

    async def _commit(self, commits: list[Commit]) -> list[CommitResult]:
        """Send the store a batch, once."""
        recorder = self._recorder
        if recorder.given_up:
            raise StoreUnavailableError(recorder.fault or "the store does not answer")
        limit = asyncio.timeout_at(recorder.limit())
        try:
            async with limit:
                self._limit = limit
                await batch_size.put_large_blobs(recorder.store, commits)
                return await recorder.store.commit(commits)
        except TimeoutError:
            if not limit.expired():
                raise
            raise StoreUnavailableError("the store did not answer before this process had to stop") from None
        finally:
            self._limit = None

    async def _insist(self, commits: list[Commit]) -> list[CommitResult]:
        pause = RetryPause()
        recorder = self._recorder
        recorder.insisting += 1
        try:
            while True:
                recorder.refuse_queued()
                if recorder.give_up_at is not None and recorder.loop.time() >= recorder.give_up_at:
                    recorder.given_up = True
                    raise StoreUnavailableError(
                        f"Relight was stopped while nothing could be committed: {recorder.fault}"
                    )
                await pause.wait()
                try:
                    return await self._commit(commits)
                except StoreUnavailableError as error:
                    recorder.failing(error)
        finally:
            recorder.insisting -= 1

    def finish(
        self, writers: list[Writer], commits: list[Commit], creations: list[Creation], results: list[CommitResult]
    ) -> None:
        """The batch is durable: wake everything that waited for it, in the order of the journals. The flows go on in
        one callback of the loop, not in here: this is a task of its own, and flows run in other tasks."""
        self._recorder.commits += 1
        flows: list[Callable[[], None]] = []
        entries = 0
        for writer, commit, result in zip(writers, commits, results, strict=False):
            try:
                if type(result) is Committed:
                    entries += len(commit.entries)
                    go_on = writer.committed_up_to(result.sequence)
                    if go_on is not None:
                        flows.append(go_on)
                else:
                    writer.fence(refused=bool(commit.entries))
            except Exception as error:  # noqa: BLE001 - a bug of ours: the other runs of the batch go on
                log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {commit.root_id}: {shown(error)}", error)
                abandon([writer])
        self._recorder.entries += entries
        if flows:
            self._recorder.loop.call_soon(_go_on, self._recorder.running_loop, flows)
        for (_, future), result in zip(creations, results[len(commits) :], strict=True):
            if not future.done():
                future.set_result(result)


def _go_on(running_loop: RunningLoop, flows: list[Callable[[], None]]) -> None:
    running_loop.batch = True
    try:
        for advance in flows:
            advance()
    finally:
        running_loop.batch = False
        running_loop.give_back()


def _share(queued: int, looking: int) -> int:
    """How many drafts a lane gets. A few drafts are not shared out: two transactions cost more than one."""
    fair = queued if queued < WORTH_SHARING else -(-queued // looking)
    return min(fair, MAX_BATCH)


def _closed() -> RelightError:
    return RelightError(
        "this Relight was closed while it accepted the run, and it is not known whether the store has written it: start it "
        "again under the same id"
    )


def _refused(fault: str | None) -> StoreUnavailableError:
    return StoreUnavailableError(f"the run was not accepted: {fault}")
