"""Threads for sync code: step bodies, and flows that are plain functions.

A sync flow runs in a thread of its own. Whatever it asks for is an async operation on the engine's loop; the thread blocks
until it has ended. There are no sync twins of operations: this file is the whole façade.

While a flow's thread waits for an operation, that operation may send work back into it (a sync step's body, a child flow),
so that a flow and its steps share one thread, as a reader of the code expects.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from relight.errors import OutsideRunError
from relight.flow.scope import CURRENT, Scope, StepInfo, start_task

T = TypeVar("T")
IDLE_SECONDS = 10.0


class DurableFuture(asyncio.Future[T]):
    """A future that ends through a durable wait or another branch of the run: a run blocked only on these may be parked."""


class ThreadFuture(DurableFuture[T]):
    """The end of code in a flow's thread, which cannot be stopped there. Cancelling it cancels the operation that the code
    waits for, or the next one it asks for, so that it hears of it and can clean up; asked again, the code is left behind."""

    def __init__(self, thread: FlowThread, current: Scope | StepInfo) -> None:
        super().__init__(loop=thread.loop)
        self._thread = thread
        self._outer = len(thread.operations)  # what was under way when it began: not of this code
        self._may_ask = isinstance(current, Scope)  # the body of a step asks for nothing

    def cancel(self, msg: Any = None) -> bool:
        if self._may_ask and not self.done():
            self._may_ask = False
            self._thread.interrupt(self._outer)
            return True
        self._thread.abandoned = not self._outer
        return super().cancel(msg)


class Threads:
    """A cache of daemon threads. Daemons, because a step that never returns must not keep the process from exiting."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.loop = loop
        self._limit = limit
        self._busy = 0
        self._lock = threading.Lock()
        self._idle: deque[queue.SimpleQueue[Callable[[], None]]] = deque()
        self._backlog: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None], *, bounded: bool = True) -> None:
        """Run `job` in a thread. Over the limit it waits its turn; what a flow waits for that already holds a thread is not
        bounded, or a full house of flows waiting for their own branches would never move."""
        if bounded:
            with self._lock:
                if self._busy >= self._limit:
                    self._backlog.append(job)
                    return
                self._busy += 1
            self._start(lambda: self._bounded(job))
        else:
            self._start(job)

    def _bounded(self, job: Callable[[], None] | None) -> None:
        while job is not None:
            job()
            with self._lock:
                if self._backlog:
                    job = self._backlog.popleft()
                else:
                    self._busy -= 1
                    job = None

    def _start(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle.pop().put(job)
                return
        threading.Thread(target=self._work, args=(job,), name="relight-worker", daemon=True).start()

    def _work(self, job: Callable[[], None]) -> None:
        jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        while True:
            job()
            del job  # or an idle thread would keep the last flow's objects alive
            with self._lock:
                self._idle.append(jobs)
            try:
                job = jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if jobs in self._idle:
                        self._idle.remove(jobs)
                        return
                job = jobs.get()  # handed over in the last moment

    async def call(self, fn: Callable[[], T], current: StepInfo | None, *, bounded: bool = True) -> T:
        """Run a sync body in a thread; CURRENT is `current` there. Cancelling the caller abandons the thread."""
        future: asyncio.Future[T] = self.loop.create_future()
        context = contextvars.copy_context()
        context.run(CURRENT.set, current)
        self.submit(lambda: _finish(self.loop, future, lambda: context.run(fn)), bounded=bounded)
        return await future


def _finish(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], fn: Callable[[], T]) -> None:
    """In a thread: run `fn`, and tell the loop how it ended."""
    result: Any = None
    error: BaseException | None = None
    try:
        result = fn()
    except BaseException as caught:  # noqa: BLE001 - carried to whoever waits for it
        error = caught

    def settle() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):  # a future refuses to carry it
            future.set_exception(RuntimeError(f"StopIteration escaped: {error!r}"))
        else:
            future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is gone, and with it everybody who could want to know
        loop.call_soon_threadsafe(settle)


class FlowThread:
    """The thread of a sync flow, or of one branch of it."""

    def __init__(self, threads: Threads, bounded: bool) -> None:
        self.ident = 0
        self._running = False
        # It waits for an operation: the loop decides what happens next. Written on the loop only, so that whoever decides
        # there about parking never sees a thread that is about to move as a waiting one.
        self.blocked = False
        self.abandoned = False  # nobody waits for it any more: whatever it asks for is cancelled
        self._interrupted = False  # its next operation is
        self.operations: list[asyncio.Task[Any]] = []  # those it waits for, the innermost last
        self.loop = threads.loop
        self._threads = threads
        self._bounded = bounded
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None, Callable[[], None] | None]] = (
            queue.SimpleQueue()
        )

    def start(self, fn: Callable[[], T], current: Scope | StepInfo) -> DurableFuture[T]:
        """Run `fn` in a new thread, with CURRENT as given."""
        future: DurableFuture[T] = ThreadFuture(self, current)
        context = contextvars.copy_context()
        context.run(CURRENT.set, current)

        def body() -> T:
            self.ident = threading.get_ident()
            return context.run(fn)

        def ended(_: asyncio.Future[T]) -> None:
            self._running = self._interrupted = False

        self._running = True
        self.blocked = False
        future.add_done_callback(ended)
        self._threads.submit(lambda: _finish(self.loop, future, body), bounded=self._bounded)
        return future

    def wait(self, operation: Coroutine[Any, Any, T]) -> T:
        """In the flow's thread: have the loop do `operation`, serve what it sends here, return or raise its end."""

        def begin() -> None:
            self.blocked = True
            task = start_task(self.loop, operation, None, "relight-operation")
            self.operations.append(task)
            task.add_done_callback(self._ended)
            if self._interrupted or self.abandoned:
                self._interrupted = False
                task.cancel()

        try:
            self.loop.call_soon_threadsafe(begin)
        except RuntimeError as error:
            operation.close()
            raise OutsideRunError("the Relight this flow ran in has been closed") from error
        while True:
            result, failure, work = self._answers.get()
            if work is not None:
                work()
                continue
            if failure is not None:
                raise failure
            return result  # type: ignore[no-any-return]

    def interrupt(self, outer: int) -> None:
        """Cancel what the code waits for, above the `outer` operations that wait for the code; or what it asks for next."""
        if len(self.operations) > outer:
            self.operations[-1].cancel()
        else:
            self._interrupted = True

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.operations.remove(task)
        self.blocked = False
        if task.cancelled():
            self._answers.put((None, asyncio.CancelledError(), None))
        else:
            error = task.exception()
            self._answers.put((None if error else task.result(), error, None))

    def call(self, fn: Callable[[], T], current: Scope | StepInfo) -> DurableFuture[T]:
        """On the loop, from inside an operation this thread waits for: run `fn` in the thread. A branch that has no code
        of its own (a foreach worker) has no thread waiting either: then one is started for this call."""
        if not self._running:
            return self.start(fn, current)
        future: DurableFuture[T] = ThreadFuture(self, current)

        def body() -> T:
            token = CURRENT.set(current)
            try:
                return fn()
            finally:
                CURRENT.reset(token)

        def returned(_: asyncio.Future[T]) -> None:
            self._interrupted = False
            self.blocked = True  # it waits for the operation again that sent it to work

        self.blocked = False
        future.add_done_callback(returned)
        self._answers.put((None, None, lambda: _finish(self.loop, future, body)))
        return future
