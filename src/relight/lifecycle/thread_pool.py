"""A bounded number of threads for sync code, made when they are needed.

Daemons, because a step that never returns must not keep the process from exiting. What bounds them is the number of `Slot`s:
whoever has one may have a thread execute something. Code cannot be stopped; when nobody waits for it any more (its timeout has
passed, its run was cancelled or has left memory), its slot is given back all the same, and its thread is counted as abandoned
until it ends: else a few steps that hang would end all sync work of the process.
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
from relight.telemetry import Token, log

T = TypeVar("T")
IDLE_SECONDS = 10.0


class Slot:
    """The right to have one thread execute something. Given back once, by whoever comes first; from any thread."""

    __slots__ = ("_held", "_pool")

    def __init__(self, pool: Threads) -> None:
        self._pool = pool
        self._held = True

    def release(self) -> None:
        if self._pool.take_back(self):
            self._pool.pass_on()

    def drop(self) -> bool:
        """Under the pool's lock: whether it was held until now."""
        held, self._held = self._held, False
        return held


class Job:
    """Something that a thread executes, with the slot it needs for that; None: it needs none."""

    __slots__ = ("_abandoned", "_ended", "_pool", "_work", "slot", "what")

    def __init__(self, pool: Threads, work: Callable[[], None], slot: Slot | None, what: str) -> None:
        self._pool = pool
        self._work: Callable[[], None] | None = work
        self.slot = slot
        self.what = what
        self._abandoned = self._ended = False

    def run(self) -> None:
        """In a thread, once."""
        work, self._work = self._work, None  # or whoever keeps the job, and is kept by its work, would be garbage
        assert work is not None
        work()
        del work
        if self._pool.ended(self):
            log(logging.INFO, Token.THREAD_ABANDONED, f"{self.what}: the thread that nobody waited for has ended")

    def abandon(self) -> None:
        """Nobody waits for it any more. If it is being executed, it goes on, but others need not wait for its slot."""
        if self._pool.abandon(self):
            log(
                logging.WARNING,
                Token.THREAD_ABANDONED,
                f"{self.what}: nobody waits for it any more, but a thread cannot be stopped; it goes on, its slot is free again",
            )
        if self.slot is not None:
            self.slot.release()

    def end(self) -> bool:
        """Under the pool's lock: it has ended. Whether it had been abandoned."""
        self._ended = True
        return self._abandoned

    def leave(self) -> bool:
        """Under the pool's lock: whether it is abandoned by this."""
        if self._ended or self._abandoned:
            return False
        self._abandoned = True
        return True


class Threads:
    """One per engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.loop = loop
        self.abandoned = 0  # threads whose work nobody waits for any more, and which have not ended
        self._limit = limit
        self._free = limit  # slots
        self._lock = threading.Lock()
        self._idle: deque[queue.SimpleQueue[Job]] = deque()
        self._waiting: deque[Callable[[Slot], None]] = deque()  # for a slot, in the order of asking

    # ---- slots

    @property
    def in_use(self) -> int:
        return self._limit - self._free

    @property
    def wanted(self) -> int:
        """How many wait for a slot."""
        return len(self._waiting)

    def when_free(self, go: Callable[[Slot], None]) -> None:
        """Call `go` with a slot: now, or when one is given back, in whichever thread that happens."""
        with self._lock:
            if not self._free:
                self._waiting.append(go)
                return
            self._free -= 1
        go(Slot(self))

    async def slot(self) -> Slot:
        """Wait for a slot."""
        with self._lock:
            if self._free:
                self._free -= 1
                return Slot(self)
            given: asyncio.Future[Slot] = self.loop.create_future()
            self._waiting.append(lambda slot: self._give(given, slot))
        try:
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():  # it came in the same moment
                given.result().release()
            raise

    def _give(self, given: asyncio.Future[Slot], slot: Slot) -> None:
        def give() -> None:
            if given.done():  # cancelled: whoever wanted it does no more
                slot.release()
            else:
                given.set_result(slot)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants anything any more
            self.loop.call_soon_threadsafe(give)

    def take_back(self, slot: Slot) -> bool:
        with self._lock:
            return slot.drop()

    def pass_on(self) -> None:
        """A slot was given back: to the next who waits for one."""
        with self._lock:
            if not self._waiting:
                self._free += 1
                return
            go = self._waiting.popleft()
        go(Slot(self))

    # ---- jobs

    def abandon(self, job: Job) -> bool:
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
        """Have a thread do this: an idle one, or a new one."""
        with self._lock:
            if self._idle:
                self._idle.pop().put(job)
                return
        threading.Thread(target=self._work, args=(job,), name="relight-worker", daemon=True).start()

    def _work(self, job: Job) -> None:
        jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        while True:
            job.run()
            slot = job.slot
            del job  # or an idle thread would keep the last flow's objects alive
            with self._lock:
                self._idle.append(jobs)
            if slot is not None:
                slot.release()  # only now: so it is this thread that does what has waited for it
            try:
                job = jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if jobs in self._idle:
                        self._idle.remove(jobs)
                        return
                job = jobs.get()  # handed over in the last moment

    async def call(self, fn: Callable[[], T], current: StepInfo | None, slot: Slot | None = None) -> T:
        """Run a sync body in a thread; CURRENT is `current` there. Cancelling the caller abandons the thread."""
        future: asyncio.Future[T] = self.loop.create_future()
        context = contextvars.copy_context()
        context.run(CURRENT.set, current)
        what = "work of the engine" if current is None else f"run {current.run_id}: step {current.step!r}"
        job = Job(self, lambda: tell_end(self.loop, future, lambda: context.run(fn)), slot, what)
        self.start(job)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.done() or future.cancelled():
                job.abandon()
            raise


def tell_end(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    fn: Callable[[], T],
    settled: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """In a thread: run `fn`, and tell the loop how it ended. There, `settled` is called with what settles the future."""
    result: Any = None
    error: BaseException | None = None
    try:
        result = fn()
    except BaseException as caught:  # noqa: BLE001 - carried to whoever waits for it
        error = caught

    def end() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):  # a future refuses to carry it
            future.set_exception(RuntimeError(f"StopIteration escaped: {error!r}"))
        else:
            future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is gone, and with it everybody who could want to know
        if settled is None:
            loop.call_soon_threadsafe(end)
        else:
            loop.call_soon_threadsafe(settled, end)
