"""Flows that are plain functions, each in a thread of its own. The threads themselves are those of `thread_pool.py`.

A sync flow runs in a thread of its own. Everything that it asks for is an async operation on the run's loop, and the
thread blocks until the operation has ended. There are no sync twins of operations: this file is the whole façade.

While a flow's thread waits for an operation, that operation may send work back into it (a sync step's body, a child flow),
so that a flow and its steps share one thread, as a reader of the code expects.

Only one thread of a run executes flow code at a time, and the flow is at rest when none does (`Turns`). So branches of
parallel() that share a list fill it in the same order on replay. If a thread does not come to rest within a second (it
waits for a lock that another branch holds, or computes), the others no longer wait for it, and that is logged.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from relight.errors import OutsideRunError, Unwind
from relight.execution.blocking_watch import place_of
from relight.execution.thread_pool import Job, Slot, Threads, report_end
from relight.flow.call import Call
from relight.flow.scope import CURRENT, Scope, StepInfo
from relight.run.phase import DRIVEN
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun

T = TypeVar("T")
LONGEST_TURN_SECONDS = 1.0


class Turns:
    """Which thread of a run executes flow code. One per run; used on the program's loop only."""

    __slots__ = ("_count", "_late", "_waiting", "_watching", "gone", "moving", "run", "threads")

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.threads: set[FlowThread] = set()  # with flow code in them, running or waiting
        self.moving: FlowThread | None = None  # the one that has the turn
        self._waiting: list[tuple[FlowThread, Callable[[], None]]] = []
        self._late: set[FlowThread] = set()  # those that had the turn for so long that others no longer wait for them
        self._count = 0  # how many turns there have been
        self._watching = False
        self.gone: asyncio.Future[None] | None = None  # done when the last thread has ended, for leaving memory

    @property
    def busy(self) -> bool:
        """Whether a thread executes flow code, or is about to."""
        return self.moving is not None or bool(self._waiting or self._late)

    def want(self, thread: FlowThread, go: Callable[[], None]) -> None:
        """This thread can go on. `go` is called when it gets the turn, and lets it go on."""
        if self.run.phase is not DRIVEN:
            go()  # the thread only unwinds
        else:
            self._waiting.append((thread, go))
            self.run.wake()

    def next(self) -> bool:
        """Give the turn to the next thread that wants it. Returns whether the run has to wait until one is at rest."""
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
        """If a thread has had the turn for a second, log it, and let the other threads go on."""
        self._watching = False
        thread = self.moving
        if thread is None or self.run.phase is not DRIVEN:
            return
        if count != self._count or not thread.ident:  # another turn; or it has not begun, since no thread is free
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
        """The run leaves memory: raise Unwind in all threads that wait, so that they end."""
        waiting, self._waiting = self._waiting, []
        for _, go in waiting:
            go()
        for thread in list(self.threads):
            thread.unwind(reason)


NO_TURNS = Turns(None)  # type: ignore[arg-type]  # of runs that have no threads


class ThreadFuture(asyncio.Future[T]):
    """The end of code in a flow's thread, where code cannot be stopped. Cancelling this future cancels the operation
    that the code waits for, or the next one it asks for, so that the code can clean up. Cancelling it again abandons
    the code."""

    def __init__(self, thread: FlowThread) -> None:
        self.run_loop = thread.turns.run.loop
        super().__init__(loop=self.run_loop)
        self._thread = thread
        self._outer = len(thread.operations)  # how many were under way before: not of this code
        self._may_ask = True

    def settled(self, then: Callable[[], None]) -> Callable[[Callable[[], None]], None]:
        """On the program's loop: settle this future, as part of the run, and then call `then`."""

        def settle(end: Callable[[], None]) -> None:
            with self.run_loop.driving():
                end()
            then()

        return settle

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
        self.abandoned = False  # nothing waits for it any more: every operation that it asks for is cancelled
        self._running = False
        self._interrupted = False  # its next operation is cancelled
        self.operations: list[asyncio.Task[Any]] = []  # those it waits for, the innermost last
        self.loop = threads.loop
        self._threads = threads
        self._job: Job | None = None
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
        self.turns.want(
            self, lambda: self._have_thread(lambda: report_end(self.loop, future, body, future.settled(ended)))
        )
        return future

    def _have_thread(self, work: Callable[[], None]) -> None:
        """Do `work` in a thread. Above the limit, it waits for a slot. A branch of a flow that already has a thread is
        not bounded: if flows that wait for their own branches had all the slots, none of them could go on."""
        if self._bounded:
            self._threads.when_free(lambda slot: self._execute(work, slot))
        else:
            self._execute(work, None)

    def _execute(self, work: Callable[[], None], slot: Slot | None) -> None:
        self._job = Job(self._threads, work, slot, f"run {self.turns.run.id}: its flow")
        self._threads.start(self._job)

    def abandon(self) -> None:
        """Its code does not end, and nothing waits for it any more."""
        if self._job is not None:
            self._job.abandon()

    def call(self, fn: Callable[[], T], scope: Scope) -> asyncio.Future[T]:
        """Called inside an operation that this thread waits for: run flow code in the thread. A branch that has no code
        of its own (a foreach worker) has no waiting thread: then a thread is started for this call."""
        if not self._running:
            return self.start(fn, scope)
        future: ThreadFuture[T] = ThreadFuture(self)

        def ended() -> None:
            self._interrupted = False
            self.turns.rested(self)  # it waits again for the operation that sent it this code

        def work() -> T:
            token = CURRENT.set(scope)
            try:
                return fn()
            finally:
                CURRENT.reset(token)

        serve = lambda: report_end(self.loop, future, work, future.settled(ended))  # noqa: E731 - the thread calls it
        self.turns.want(self, lambda: self._answers.put((None, None, serve)))
        return future

    def run_body(self, fn: Callable[[], T], info: StepInfo) -> asyncio.Future[T]:
        """Run a step's body in the thread, which waits for the step. To be awaited on the program's loop."""
        if not self._running:
            return asyncio.ensure_future(self._threads.call(fn, info), loop=self.loop)
        future: asyncio.Future[T] = self.loop.create_future()
        context = contextvars.copy_context()  # what the body sets stays in it, as with any step
        context.run(CURRENT.set, info)
        self._answers.put((None, None, lambda: report_end(self.loop, future, lambda: context.run(fn))))
        return future

    def wait(self, call: Call) -> Any:
        """In the flow's thread: have the run's loop do `call`, execute what it sends here, return or raise its end."""
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
                    threading.Event().wait()  # its code catches every Unwind: it waits here for ever
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
            return  # the run has left memory, and the thread has got Unwind
        self.operations.remove(task)
        error: BaseException | None = asyncio.CancelledError() if task.cancelled() else task.exception()
        answer = (None if error is not None else task.result(), error, None)
        self.turns.want(self, lambda: self._answers.put(answer))

    def unwind(self, reason: str) -> None:
        for _ in self.operations:
            self._answers.put((None, Unwind(reason), None))
        self.operations.clear()
