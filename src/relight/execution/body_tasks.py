"""Bodies: the work of operations on the program's loop, each in a task, but without a new task for each.

Most steps of most programs end, from the event loop's view, at once, or wait once. A task for each of them would cost
more than all the rest of a step. So a few tasks, the runners, run bodies from a queue, one after the other. A body that
has to wait keeps its runner: the runner is its task from then on and ends with it, and another runner goes on with the
queue. So `asyncio.current_task()` in a body is a real task of the program's loop, before and after its first await.

Each step's body runs in its own context: a copy of the flow's when the flow asked, in which CURRENT names the step.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
from collections import deque
from collections.abc import Coroutine, Generator
from typing import Any, Protocol

from relight.model.text import shown
from relight.telemetry import Token, log


class Work(Protocol):
    """Something to do, as a runner sees it."""

    context: contextvars.Context
    task: asyncio.Task[None] | None  # the runner that does it, while it is being done
    coro: Any  # the coroutine that does it, once that had to wait for something; it returns nothing

    def first_stretch(self) -> Any:
        """In its context: begin it. Returns what it waits for, or OVER. Raises nothing."""
        ...

    def close(self, error: BaseException) -> None:
        """It ended with this error."""
        ...


OVER: Any = object()


class Body:
    """A coroutine of the engine itself, which handles its own errors."""

    __slots__ = ("context", "coro", "task")

    def __init__(self, coro: Coroutine[Any, Any, None], context: contextvars.Context) -> None:
        self.coro = coro
        self.context = context
        self.task: asyncio.Task[None] | None = None

    def first_stretch(self) -> Any:
        try:
            return next(self.coro.__await__(), OVER)
        except BaseException as error:  # noqa: BLE001 - any error ends only this body
            self.close(error)
            return OVER

    def close(self, error: BaseException) -> None:
        if not isinstance(error, asyncio.CancelledError):
            log(logging.CRITICAL, Token.INTERNAL_ERROR, f"the work of an operation broke: {shown(error)}", error)

    def drop(self) -> None:
        self.coro.close()


class Bodies:
    """One per engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: deque[Work] = deque()
        self._idle: asyncio.Future[None] | None = None  # what an idle runner waits for
        self.looking = False  # a runner is about to look at the queue
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Work) -> None:
        """Have a runner do it, in a moment."""
        self.queue.append(work)
        if not self.looking:
            self.look()

    def look(self) -> None:
        """There is something in the queue: wake the idle runner, or start one."""
        self.looking = True
        idle, self._idle = self._idle, None
        if idle is not None and not idle.done():  # done: the runner was cancelled
            idle.set_result(None)
        else:
            empty = contextvars.Context()  # not the caller's: a runner must not keep a run in memory
            task = asyncio.Task(self._run(), loop=self._loop, name="relight-body", context=empty)  # never an eager one
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard, context=empty)

    async def _run(self) -> None:
        """A runner: does what is in the queue."""
        task = asyncio.current_task()
        assert task is not None
        queue = self.queue
        unknown = sys.getrefcount(task)
        while True:
            while queue:
                work = queue.popleft()
                work.task = task
                awaited = work.context.run(work.first_stretch)
                if awaited is not OVER:
                    self._hand_over()
                    try:
                        await _Rest(work, awaited)
                    except GeneratorExit:
                        # A future that the body awaited was given this exception. Python closes everything that awaits such
                        # a future, so the body has ended with it.
                        return
                    finally:
                        work.task = None
                    return  # another runner has gone on with the queue
                work.task = None
                del work  # otherwise an idle runner would keep the last run in memory
                # The body cancelled this task, or other code has kept it and may do so. The next body needs another.
                if task.cancelling() or sys.getrefcount(task) > unknown:
                    self._hand_over()
                    return
            self.looking = False
            if self._idle is not None:
                return  # one idle runner is enough
            self._idle = self._loop.create_future()
            await self._idle

    def _hand_over(self) -> None:
        """Another runner goes on with the queue."""
        self.looking = False
        if self.queue:
            self.look()

    async def stop(self) -> None:
        """Cancel what is left, and wait for it."""
        for work in self.queue:
            if isinstance(work, Body):
                work.drop()  # otherwise Python warns that it was never awaited
        self.queue.clear()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)


class _Rest:
    """Runs the rest of a body that has to wait, in the body's own context."""

    __slots__ = ("_awaited", "_work")

    def __init__(self, work: Work, awaited: Any) -> None:
        self._work = work
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, None]:
        work, coro, awaited = self._work, self._work.coro, self._awaited
        run = work.context.run
        while True:
            try:
                value = yield awaited
                step = coro.send
            except BaseException as thrown:  # noqa: BLE001 - it is passed on to the body
                step, value = coro.throw, thrown
            try:
                awaited = run(step, value)
            except StopIteration:
                return
            except BaseException as error:  # noqa: BLE001 - any error ends only this body
                work.close(error)
                return
