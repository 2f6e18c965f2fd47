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
from relight.ports.store import Commit, CommitResult, Store
from relight.record import batch_size
from relight.record.broken_batches import Creation
from relight.record.lane import Lane
from relight.record.writer import Writer, abandon
from relight.supervisor import Part, Supervisor
from relight.telemetry import Token, log

MAX_BATCH = 4096  # roots per transaction; the rest follows in the next one, at once
WORTH_SHARING = 32  # so many queued drafts are shared out between the free lanes; fewer are not
STOP_SECONDS = 5.0
STALLED_SECONDS = 2.0  # how long a commit under way may still take when there is no time to try it again


class Recorder:
    """Implements `lane.Batches`. One per process and store: gathers drafts and commits them, batch after batch, in each lane."""

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
        self._given_up = False  # a lane has given up: nothing is sent to the store any more
        self.queue: list[Writer] = []
        self._creations: list[Creation] = []
        self._lanes = [Lane(self) for _ in range(store.lanes)]
        self.free: list[Lane] = []  # waiting for something to commit
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

    def wait(self, lane: Lane) -> bool:
        """A lane has nothing to do. Returns whether it should wait to be woken; otherwise it ends."""
        if not self._closing:
            self.free.append(lane)
            self._idleness.look()
        return not self._closing

    def _is_idle(self) -> bool:
        return len(self.free) == len(self._lanes) and not self.queue and not self._creations

    def share(self, lane: Lane) -> tuple[list[Writer], list[Creation]]:
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

    def wait_no_more(self, lane: Lane) -> None:
        if lane in self.free:
            self.free.remove(lane)

    # ---- what lanes report

    def count(self, entries: int) -> None:
        self.commits += 1
        self.entries += entries

    def insist(self, begun: bool) -> None:
        self.insisting += 1 if begun else -1

    def give_up_in_time(self) -> None:
        if self.give_up_at is not None and self.loop.time() >= self.give_up_at:
            self._given_up = True
            raise StoreUnavailableError(f"Relight was stopped while nothing could be committed: {self.fault}")

    def refuse_when_given_up(self) -> None:
        if self._given_up:
            raise StoreUnavailableError(self.fault or "the store does not answer")

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
