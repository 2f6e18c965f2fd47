"""A bounded number of threads for sync code, made when they are needed.

The threads are daemons, because a step that never returns must not keep the process from exiting. The number of `Slot`s
bounds them: with a slot, a thread may execute something. Code in a thread cannot be stopped. When nothing waits for it
any more (its timeout has passed, its run was cancelled or has left memory), its slot is given back all the same, and
its thread is counted as abandoned until it ends. Otherwise a few steps that hang would stop all sync work of the
process.

The system may refuse a thread ("can't start new thread"). That is no failure: the code waits until a thread becomes
free or the system gives one. The pool tries again after pauses that grow. A step has its thread before its attempt
begins, so that its timeout does not run meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from relight.flow.scope import CURRENT, StepInfo
from relight.model.text import shown
from relight.retry_pause import RetryPause
from relight.telemetry import Token, log

T = TypeVar("T")
IDLE_SECONDS = 10.0


Worker = queue.SimpleQueue["Job | None"]  # a thread's queue: what it executes next; None: look again


class Slot:
    """The right to have one thread execute something. Any thread may release it. Only the first release counts."""

    __slots__ = ("_in_use", "_pool", "bounded", "worker")

    def __init__(self, pool: Threads, *, bounded: bool = True) -> None:
        self._pool = pool
        self._in_use = True
        self.bounded = bounded  # False: it is not one of the limited number
        self.worker: Worker | None = None  # a thread that is kept for what the slot will execute

    def release(self) -> None:
        if self._pool.reclaim(self) and self.bounded:
            self._pool.pass_on()

    def drop(self) -> bool:
        """Under the pool's lock: give it back. Returns whether it was in use until now."""
        in_use, self._in_use = self._in_use, False
        return in_use


class Job:
    """Something that a thread executes, with the slot that it needs for that; None: it needs no slot."""

    __slots__ = ("_abandoned", "_begun", "_ended", "_pool", "_work", "slot", "waits", "what")

    def __init__(self, pool: Threads, work: Callable[[], None], slot: Slot | None, what: str) -> None:
        self._pool = pool
        self._work: Callable[[], None] | None = work
        self.slot = slot
        self.waits: Callable[[Worker], None] | None = None  # called with a thread, if the system refused one at first
        self.what = what
        self._abandoned = self._begun = self._ended = False

    def run(self) -> None:
        """Called in a thread, once."""
        # Cleared, because an object that keeps the job, and that the work refers to, would be in a reference cycle.
        work, self._work, self.waits = self._work, None, None
        assert work is not None
        work()
        del work
        if self._pool.ended(self):
            log(logging.INFO, Token.THREAD_ABANDONED, f"{self.what}: the abandoned thread has ended")

    def abandon(self) -> None:
        """Nothing waits for it any more. If it is being executed, it goes on, but others need not wait for its slot."""
        if self._pool.abandon(self):
            log(
                logging.WARNING,
                Token.THREAD_ABANDONED,
                f"{self.what}: its result is not needed any more, but a thread cannot be stopped; it goes on, its slot is free "
                "again",
            )
        if self.slot is not None:
            self.slot.release()

    def begin(self) -> bool:
        """Under the pool's lock: there is a thread for it. Returns whether it is still wanted."""
        self._begun = not self._abandoned
        return self._begun

    def end(self) -> bool:
        """Under the pool's lock: it has ended. Returns whether it had been abandoned."""
        self._ended = True
        return self._abandoned

    def leave(self) -> bool:
        """Under the pool's lock: abandon it. Returns whether this abandons code that is being executed."""
        if self._ended or self._abandoned:
            return False
        self._abandoned = True
        return self._begun


class Threads:
    """One per engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.loop = loop
        self.abandoned = 0  # threads whose work nothing waits for any more, and which have not ended
        self._limit = limit
        self._free = limit  # slots
        self._lock = threading.Lock()
        self._idle: deque[Worker] = deque()
        self._waiting: deque[Callable[[Slot], None]] = deque()  # those that wait for a slot, in order
        self._refused: deque[Callable[[Worker], None]] = deque()  # those that wait for a thread, in order
        self._refusing = False  # whether it was logged that the system refuses threads
        self._pause = RetryPause()  # before the next try
        self._timer: asyncio.TimerHandle | None = None

    # ---- slots

    @property
    def in_use(self) -> int:
        return self._limit - self._free

    @property
    def wanted(self) -> int:
        """How many wait for a slot."""
        return len(self._waiting)

    @property
    def refused(self) -> int:
        """How many wait for a thread that the system has refused."""
        return len(self._refused)

    def when_free(self, go: Callable[[Slot], None]) -> None:
        """Call `go` with a slot: now, or when one is given back, in whichever thread that happens."""
        with self._lock:
            if not self._free:
                self._waiting.append(go)
                return
            self._free -= 1
        go(Slot(self))

    async def slot(self, *, bounded: bool = True) -> Slot:
        """Wait for a slot, if it is bounded, and for a thread, which is kept for the slot."""
        slot = await self._free_slot() if bounded else Slot(self, bounded=False)
        slot.worker = self._idle_or_new()
        if slot.worker is None:
            given: asyncio.Future[Worker] = self.loop.create_future()
            go = self._wait_for_worker(lambda worker: self._give(given, worker, self._rest))
            try:
                slot.worker = await given
            except asyncio.CancelledError:
                self._wait_no_more(go)
                if given.done() and not given.cancelled():  # the thread came in the same moment
                    slot.worker = given.result()
                slot.release()
                raise
        return slot

    async def _free_slot(self) -> Slot:
        with self._lock:
            if self._free:
                self._free -= 1
                return Slot(self)
            given: asyncio.Future[Slot] = self.loop.create_future()
            self._waiting.append(lambda slot: self._give(given, slot, Slot.release))
        try:
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():  # the slot came in the same moment
                given.result().release()
            raise

    def _give(self, given: asyncio.Future[T], what: T, give_back: Callable[[T], None]) -> None:
        def give() -> None:
            if given.done():  # cancelled: it is no longer wanted
                give_back(what)
            else:
                given.set_result(what)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is wanted any more
            self.loop.call_soon_threadsafe(give)

    def reclaim(self, slot: Slot) -> bool:
        with self._lock:
            worker, slot.worker = slot.worker, None
            in_use = slot.drop()
        if worker is not None:  # it was kept, and not used
            self._rest(worker)
            worker.put(None)  # it may be waiting without a time limit: let it look again
        return in_use

    def pass_on(self) -> None:
        """A slot was given back: give it to the next that waits for one."""
        with self._lock:
            if not self._waiting:
                self._free += 1
                return
            go = self._waiting.popleft()
        go(Slot(self))

    # ---- jobs

    def abandon(self, job: Job) -> bool:
        if job.waits is not None:
            self._wait_no_more(job.waits)
        with self._lock:
            left = job.leave()
            self.abandoned += left
            return left

    def ended(self, job: Job) -> bool:
        with self._lock:
            abandoned = job.end()
            self.abandoned -= abandoned
            return abandoned

    def start(self, job: Job) -> None:
        """Have a thread do this: the slot's own, an idle one, or a new one."""
        worker = None
        if job.slot is not None:
            worker, job.slot.worker = job.slot.worker, None
        if worker is None:
            worker = self._idle_or_new()
        if worker is None:
            job.waits = self._wait_for_worker(lambda worker: self._hand(worker, job))
        else:
            self._hand(worker, job)

    def _hand(self, worker: Worker, job: Job) -> None:
        with self._lock:
            wanted = job.begin()
        if wanted:
            worker.put(job)
        else:
            self._rest(worker)

    def _work(self, jobs: Worker) -> None:
        while True:
            try:
                job = jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if jobs in self._idle:
                        self._idle.remove(jobs)
                        return
                job = jobs.get()  # a job comes in the last moment, or the thread is kept for a slot
            if job is None:
                continue
            job.run()
            slot = job.slot
            del job  # otherwise an idle thread would keep the last flow's objects alive
            self._rest(jobs)
            if slot is not None:
                slot.release()  # only now, so that this thread does what has waited for the slot

    # ---- threads

    def _rest(self, worker: Worker) -> None:
        """This thread has nothing to do: give it to what has waited longest for one."""
        with self._lock:
            if not self._refused:
                self._idle.append(worker)
                return
            go = self._refused.popleft()
        go(worker)

    def _idle_or_new(self) -> Worker | None:
        """A thread. None: the system has refused one."""
        with self._lock:
            if self._refused:
                return None  # others have waited longer
            if self._idle:
                return self._idle.pop()
        return self._new()

    def _new(self) -> Worker | None:
        worker: Worker = queue.SimpleQueue()
        try:
            threading.Thread(target=self._work, args=(worker,), name="relight-worker", daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            with self._lock:
                said, self._refusing = self._refusing, True
            if not said:
                what = f"{error}; sync code waits until there is a thread for it, trying…"
                log(logging.ERROR, Token.THREAD_REFUSED, what)
            return None
        return worker

    def _wait_for_worker(self, go: Callable[[Worker], None]) -> Callable[[Worker], None]:
        """Call `go` with a thread, in whichever thread that happens."""
        with self._lock:
            self._refused.append(go)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._retry_later)
        return go

    def _wait_no_more(self, go: Callable[[Worker], None]) -> None:
        with self._lock, contextlib.suppress(ValueError):  # `go` has been called
            self._refused.remove(go)

    def _retry_later(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._pause.next(), self._retry)

    def _retry(self) -> None:
        """On the loop: find threads for those that wait. One may have become free in the moment in which they began to
        wait. Otherwise try to start new ones."""
        self._timer = None
        while self._refused:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            worker = worker or self._new()
            if worker is None:
                self._retry_later()
                return
            self._rest(worker)
        self._pause.reset()
        if self._refusing:
            self._refusing = False
            log(logging.WARNING, Token.THREAD_REFUSED, "no code waits for a thread any more")

    async def call(self, fn: Callable[[], T], current: StepInfo | None, slot: Slot | None = None) -> T:
        """Run a sync body in a thread; CURRENT is `current` there. Cancelling the caller abandons the thread."""
        future: asyncio.Future[T] = self.loop.create_future()
        context = contextvars.copy_context()
        context.run(CURRENT.set, current)
        what = "work of the engine" if current is None else f"run {current.run_id}: step {current.step!r}"
        job = Job(self, lambda: report_end(self.loop, future, lambda: context.run(fn)), slot, what)
        self.start(job)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.done() or future.cancelled():
                job.abandon()
            raise


class ThreadExitError(Exception):
    """Carries a GeneratorExit out of a thread. Thrown into a coroutine as it is, it would close the coroutines that this one
    awaits, and end its task as if nobody wanted it any more."""

    def __init__(self, error: GeneratorExit) -> None:
        super().__init__()
        self.error = error


def report_end(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    fn: Callable[[], T],
    settled: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """In a thread: run `fn`, and have the loop settle the future. If there is `settled`, the loop calls it instead,
    with a function that settles the future."""
    result: Any = None
    error: BaseException | None = None
    try:
        result = fn()
    except BaseException as caught:  # noqa: BLE001 - carried to the code that waits for it
        error = caught

    def end() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):  # a future refuses to carry it
            future.set_exception(RuntimeError(f"StopIteration escaped: {shown(error)}"))
        elif isinstance(error, GeneratorExit):
            future.set_exception(ThreadExitError(error))
        else:
            future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits for this any more
        if settled is None:
            loop.call_soon_threadsafe(end)
        else:
            loop.call_soon_threadsafe(settled, end)
