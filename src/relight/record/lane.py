"""Lane: commits one batch after the other, for the recorder. How many lanes there are, the store says (`Store.lanes`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from relight.errors import RelightError, StoreUnavailableError
from relight.execution.running_loop import RunningLoop
from relight.model.text import shown
from relight.ports.store import Commit, CommitResult, Committed, Store
from relight.record import batch_size
from relight.record.broken_batches import Creation, divide
from relight.record.writer import Writer, abandon
from relight.retry_pause import RetryPause
from relight.supervisor import Part
from relight.telemetry import Token, log


class Batches(Protocol):
    """The recorder, as a lane sees it."""

    store: Store
    loop: asyncio.AbstractEventLoop
    running_loop: RunningLoop

    def share(self, lane: Lane) -> tuple[list[Writer], list[Creation]]:
        """What this lane commits next."""
        ...

    def wait(self, lane: Lane) -> bool:
        """A lane has nothing to do. Returns whether it should wait to be woken; otherwise it ends."""
        ...

    def wait_no_more(self, lane: Lane) -> None:
        """The lane begins again, and does not wait any more."""
        ...

    def limit(self) -> float | None:
        """The time at which one commit must be done."""
        ...

    def batch_done(self) -> None:
        """A batch has ended."""
        ...

    def count(self, entries: int) -> None:
        """A batch with so many entries is durable."""
        ...

    def failing(self, error: StoreUnavailableError) -> None:
        """The store does not accept a batch."""
        ...

    def works(self) -> None:
        """The store has accepted a batch."""
        ...

    def insist(self, begun: bool) -> None:
        """A lane begins or ends to try one batch again and again."""
        ...

    def refuse(self, creations: list[Creation]) -> None:
        """Creations are not tried again: raise the fault in the callers that wait for them."""
        ...

    def refuse_queued(self) -> None:
        """The same, for the creations that are queued."""
        ...

    def give_up_in_time(self) -> None:
        """Raise StoreUnavailableError if the process stops and must not wait for the store any longer."""
        ...

    def refuse_when_given_up(self) -> None:
        """Raise StoreUnavailableError if a lane has given up: nothing is sent to the store any more."""
        ...


class Lane:
    """A lane commits one batch after the other."""

    def __init__(self, recorder: Batches) -> None:
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
        self._recorder.wait_no_more(self)
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
        recorder.refuse_when_given_up()
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
        recorder.insist(True)
        try:
            while True:
                recorder.refuse_queued()
                recorder.give_up_in_time()
                await pause.wait()
                try:
                    return await self._commit(commits)
                except StoreUnavailableError as error:
                    recorder.failing(error)
        finally:
            recorder.insist(False)

    def finish(
        self, writers: list[Writer], commits: list[Commit], creations: list[Creation], results: list[CommitResult]
    ) -> None:
        """The batch is durable: wake everything that waited for it, in the order of the journals. The flows go on in
        one callback of the loop, not in here: this is a task of its own, and flows run in other tasks."""
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
        self._recorder.count(entries)
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
