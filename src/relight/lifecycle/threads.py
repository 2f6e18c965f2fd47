"""Threads for sync code: step bodies, and flows that are plain functions.

A sync flow runs in a thread of its own. Whatever it asks for is an async operation on the run's loop; the thread blocks until
it has ended. There are no sync twins of operations: this file is the whole façade.

While a flow's thread waits for an operation, that operation may send work back into it (a sync step's body, a child flow),
so that a flow and its steps share one thread, as a reader of the code expects.

Of the threads of one run only one executes flow code at a time, and the run is at rest when none does (`Turns`): so branches
of parallel() that share a list fill it in the same order on replay. A thread that does not come back within a second (it
waits for a lock that another branch holds, or computes) no longer holds the others up, and the log says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from relight.errors import OutsideRunError, Unwind
from relight.flow.call import Call
from relight.flow.scope import CURRENT, Scope, StepInfo
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.lifecycle.run import LiveRun

T = TypeVar("T")
IDLE_SECONDS = 10.0
LONGEST_TURN_SECONDS = 1.0


class Threads:
    """A cache of daemon threads. Daemons, because a step that never returns must not keep the process from exiting."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.loop = loop
        self._limit = limit
        self._busy = 0
        self.abandoned = 0  # threads whose work nobody waits for any more, and which have not ended
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


def _finish(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    fn: Callable[[], T],
    then: Callable[[], None] | None = None,
) -> None:
    """In a thread: run `fn`, and tell the loop how it ended."""
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

    def settle() -> None:
        if isinstance(future, ThreadFuture):
            with future.run_loop.driving():
                end()
        else:
            end()
        if then is not None:
            then()

    with contextlib.suppress(RuntimeError):  # the loop is gone, and with it everybody who could want to know
        loop.call_soon_threadsafe(settle)


class Turns:
    """Which thread of a run executes flow code. One per run; used on the program's loop only."""

    __slots__ = ("_count", "_late", "_waiting", "_watching", "gone", "moving", "run", "threads")

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.threads: set[FlowThread] = set()  # with flow code in them, running or waiting
        self.moving: FlowThread | None = None  # whose turn it is
        self._waiting: list[tuple[FlowThread, Callable[[], None]]] = []
        self._late: set[FlowThread] = set()  # those that had the turn for so long that others no longer wait for them
        self._count = 0  # of turns
        self._watching = False
        self.gone: asyncio.Future[None] | None = None  # whoever takes the run out of memory waits for the last to end

    @property
    def busy(self) -> bool:
        """Whether a thread executes flow code, or is about to."""
        return self.moving is not None or bool(self._waiting or self._late)

    def want(self, thread: FlowThread, go: Callable[[], None]) -> None:
        """This thread can go on: `go` lets it, when it is its turn."""
        if self.run.stopping is not None or self.run.over:
            go()  # it only unwinds
        else:
            self._waiting.append((thread, go))
            self.run.wake()

    def next(self) -> bool:
        """Give the turn to the next thread that wants it. Whether the run has to wait until one is at rest."""
        if self.moving is None and self._waiting:
            self.moving, go = self._waiting.pop(0)
            self._count += 1
            self._watch()
            go()
        return self.moving is not None

    def rested(self, thread: FlowThread) -> None:
        """This thread waits for an operation now, or has ended."""
        if self.moving is thread:
            self.moving = None
            self.run.advance()
        else:
            self._late.discard(thread)
            self.run.wake()

    def ended(self, thread: FlowThread) -> None:
        self.threads.discard(thread)
        self.rested(thread)
        if self.gone is not None and not self.threads and not self.gone.done():
            self.gone.set_result(None)

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self.run.services.loop.call_later(LONGEST_TURN_SECONDS, self._look, self._count)

    def _look(self, count: int) -> None:
        """Whether the turn that was the last one a second ago still is."""
        self._watching = False
        thread = self.moving
        if thread is None or self.run.stopping is not None or self.run.over:
            return
        if (
            count != self._count or not thread.ident
        ):  # another one; or others have all the threads, and it has not begun
            self._watch()
            return
        log(
            logging.WARNING,
            Token.FLOW_BLOCKS,
            f"run {self.run.id}: a thread of its flow has run for {LONGEST_TURN_SECONDS:.0f}s without asking for anything, at "
            f"{place_of(thread.ident)}; its other branches no longer wait for it, and may go on in another order on replay",
        )
        self.moving = None
        self._late.add(thread)
        self.run.advance()

    def unwind(self, reason: str) -> None:
        """The run leaves memory: whoever waits is told so, and ends."""
        waiting, self._waiting = self._waiting, []
        for _, go in waiting:
            go()
        for thread in list(self.threads):
            thread.unwind(reason)


NO_TURNS = Turns(None)  # type: ignore[arg-type]  # of runs that have no threads


class ThreadFuture(asyncio.Future[T]):
    """The end of code in a flow's thread, which cannot be stopped there. Cancelling it cancels the operation that the code
    waits for, or the next one it asks for, so that it hears of it and can clean up; asked again, the code is left behind."""

    def __init__(self, thread: FlowThread) -> None:
        self.run_loop = thread.turns.run.loop
        super().__init__(loop=self.run_loop)
        self._thread = thread
        self._outer = len(thread.operations)  # what was under way when it began: not of this code
        self._may_ask = True

    def cancel(self, msg: Any = None) -> bool:
        if self._may_ask and not self.done():
            self._may_ask = False
            self._thread.interrupt(self._outer)
            return True
        self._thread.abandoned = not self._outer
        return super().cancel(msg)


class FlowThread:
    """The thread of a sync flow, or of one branch of it."""

    def __init__(self, threads: Threads, turns: Turns, bounded: bool) -> None:
        self.ident = 0
        self.turns = turns
        self.abandoned = False  # nobody waits for it any more: whatever it asks for is cancelled
        self._running = False
        self._interrupted = False  # its next operation is cancelled
        self.operations: list[asyncio.Task[Any]] = []  # those it waits for, the innermost last
        self.loop = threads.loop
        self._threads = threads
        self._bounded = bounded
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None, Callable[[], None] | None]] = (
            queue.SimpleQueue()
        )

    def start(self, fn: Callable[[], T], scope: Scope) -> asyncio.Future[T]:
        """Run flow code in a new thread."""
        future: ThreadFuture[T] = ThreadFuture(self)
        context = contextvars.copy_context()
        context.run(CURRENT.set, scope)

        def body() -> T:
            self.ident = threading.get_ident()
            return context.run(fn)

        def ended() -> None:
            self._running = self._interrupted = False
            self.turns.ended(self)

        self._running = True
        self.turns.threads.add(self)
        go = lambda: self._threads.submit(lambda: _finish(self.loop, future, body, ended), bounded=self._bounded)  # noqa: E731
        self.turns.want(self, go)
        return future

    def call(self, fn: Callable[[], T], scope: Scope) -> asyncio.Future[T]:
        """From inside an operation this thread waits for: run flow code in the thread. A branch that has no code of its own
        (a foreach worker) has no thread waiting either: then one is started for this call."""
        if not self._running:
            return self.start(fn, scope)
        future: ThreadFuture[T] = ThreadFuture(self)

        def ended() -> None:
            self._interrupted = False
            self.turns.rested(self)  # it waits for the operation again that sent it to work

        def work() -> T:
            token = CURRENT.set(scope)
            try:
                return fn()
            finally:
                CURRENT.reset(token)

        self.turns.want(self, lambda: self._answers.put((None, None, lambda: _finish(self.loop, future, work, ended))))
        return future

    def lend(self, fn: Callable[[], T], info: StepInfo) -> asyncio.Future[T]:
        """Run a step's body in the thread, which waits for the step. To be awaited on the program's loop."""
        if not self._running:
            return asyncio.ensure_future(self._threads.call(fn, info, bounded=False), loop=self.loop)
        future: asyncio.Future[T] = self.loop.create_future()
        context = contextvars.copy_context()  # what the body sets stays in it, as with any step
        context.run(CURRENT.set, info)
        self._answers.put((None, None, lambda: _finish(self.loop, future, lambda: context.run(fn))))
        return future

    def wait(self, call: Call) -> Any:
        """In the flow's thread: have the run's loop do it, serve what it sends here, return or raise its end."""
        scope, context = CURRENT.get(), contextvars.copy_context()
        assert type(scope) is Scope
        try:
            self.loop.call_soon_threadsafe(self._begin, call, scope, context)
        except RuntimeError as error:
            call.close()
            raise OutsideRunError("the Relight this flow ran in has been closed") from error
        while True:
            result, failure, work = self._answers.get()
            if work is not None:
                work()
                continue
            if failure is not None:
                if isinstance(failure, Unwind) and failure.stubborn:
                    threading.Event().wait()  # it will not be taken out of memory: it is left here
                raise failure
            return result

    def _begin(self, call: Call, scope: Scope, context: contextvars.Context) -> None:
        run = self.turns.run
        stop = run.stop_reason()
        if stop is not None:
            call.close()
            self._answers.put((None, stop, None))
            return
        with run.loop.driving():
            task = run.loop.start(call, scope, "relight-operation", context)
            self.operations.append(task)
            task.add_done_callback(self._ended)
            if self._interrupted or self.abandoned:
                self._interrupted = False
                task.cancel()
        self.turns.rested(self)

    def interrupt(self, outer: int) -> None:
        """Cancel what the code waits for, above the `outer` operations that wait for the code; or what it asks for next."""
        if len(self.operations) > outer:
            self.operations[-1].cancel()
        else:
            self._interrupted = True

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if task not in self.operations:
            return  # the run has left memory, and the thread was told so
        self.operations.remove(task)
        error: BaseException | None = asyncio.CancelledError() if task.cancelled() else task.exception()
        answer = (None if error is not None else task.result(), error, None)
        self.turns.want(self, lambda: self._answers.put(answer))

    def unwind(self, reason: str) -> None:
        for _ in self.operations:
            self._answers.put((None, Unwind(reason), None))
        self.operations.clear()


def place_of(ident: int) -> str:
    """What a thread executes right now: "file:line"."""
    frame = sys._current_frames().get(ident)  # noqa: SLF001 - the documented way, for all its underscore
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
