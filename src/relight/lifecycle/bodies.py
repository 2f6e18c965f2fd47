"""Bodies: what operations do on the program's loop, each in a task, but without a new task for each.

Most steps of most programs end, as far as the event loop can tell, at once, or wait once. A task for each of them would cost
more than all the rest of a step. So a few tasks, the runners, take bodies from a queue and run one after the other. A body
that has to wait keeps its runner, which is its task from then on and ends with it, and another runner goes on with the queue.
So `asyncio.current_task()` in a body is a real task of the program's loop, before and after its first await.

Each body runs in a context of its own: the flow's, as it was when it asked, with CURRENT saying which step this is.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
from collections import deque
from collections.abc import Coroutine, Generator
from typing import Any, Protocol

from relight.telemetry import Token, log


class Work(Protocol):
    """Something to do, as a runner sees it."""

    context: contextvars.Context
    task: asyncio.Task[None] | None  # while it is being done: the runner

    def open(self) -> Coroutine[Any, Any, Any]:
        """It begins now: the coroutine that does it."""
        ...

    def close(self, value: Any, error: BaseException | None) -> None:
        """How that ended."""
        ...


class Body:
    """A coroutine of the engine's own, which knows what to do with its errors."""

    __slots__ = ("_coro", "context", "task")

    def __init__(self, coro: Coroutine[Any, Any, None], context: contextvars.Context) -> None:
        self._coro = coro
        self.context = context
        self.task: asyncio.Task[None] | None = None

    def open(self) -> Coroutine[Any, Any, None]:
        return self._coro

    def close(self, value: Any, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, asyncio.CancelledError):
            log(logging.CRITICAL, Token.INTERNAL_ERROR, f"what an operation does broke: {error!r}", error)

    def drop(self) -> None:
        self._coro.close()


class Bodies:
    """One per engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[Work] = deque()
        self._idle: asyncio.Future[None] | None = None  # of the runner that waits for something to do
        self._looking = False  # a runner is about to look at the queue
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Work) -> None:
        self._queue.append(work)
        if not self._looking:
            self._look()

    def _look(self) -> None:
        self._looking = True
        idle, self._idle = self._idle, None
        if idle is not None and not idle.done():  # done: somebody has cancelled the runner
            idle.set_result(None)
        else:
            task = self._loop.create_task(self._run(), name="relight-body", context=contextvars.Context())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _run(self) -> None:
        """A runner."""
        task = asyncio.current_task()
        assert task is not None
        queue = self._queue
        unknown = sys.getrefcount(task)
        while True:
            while queue:
                work = queue.popleft()
                work.task = task
                try:
                    coro, awaited = work.context.run(_first_stretch, work)
                except StopIteration as end:  # over, without having waited for anything: nearly always
                    work.close(end.value, None)
                except BaseException as error:  # noqa: BLE001 - whatever it is, it is how that body ended, and nothing else
                    work.close(None, error)
                else:
                    self._hand_over()
                    await _Rest(work, coro, awaited)
                    work.task = None
                    return  # others have gone on with the queue
                work.task = None
                del work  # or an idle runner would keep the last run in memory
                # It cancelled itself, or somebody has kept the task and may: what comes next must not be hit by that.
                if task.cancelling() or sys.getrefcount(task) > unknown:
                    self._looking = False
                    if self._queue:
                        self._look()
                    return
            self._looking = False
            if self._idle is not None:
                return  # one is enough
            self._idle = self._loop.create_future()
            await self._idle

    def _hand_over(self) -> None:
        """The runner has to wait with its body: another one goes on with the queue."""
        self._looking = False
        if self._queue:
            self._look()

    async def stop(self) -> None:
        """Cancel what is left, and wait for it."""
        for work in self._queue:
            if isinstance(work, Body):
                work.drop()  # or Python complains that nobody ever awaited it
        self._queue.clear()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)


def _first_stretch(work: Work) -> tuple[Any, Any]:
    """In the body's context: begin it. Its coroutine, and what it waits for; raises when it is over."""
    coro: Any = work.open()
    return coro, coro.send(None)


class _Rest:
    """Runs a body that has to wait to its end, in its own context."""

    __slots__ = ("_awaited", "_coro", "_work")

    def __init__(self, work: Work, coro: Any, awaited: Any) -> None:
        self._work = work
        self._coro = coro
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, None]:
        work, coro, awaited = self._work, self._coro, self._awaited
        run = work.context.run
        while True:
            try:
                value = yield awaited
                step = coro.send
            except BaseException as thrown:  # noqa: BLE001 - for the body
                step, value = coro.throw, thrown
            try:
                awaited = run(step, value)
            except StopIteration as end:
                work.close(end.value, None)
                return
            except BaseException as error:  # noqa: BLE001 - as above
                work.close(None, error)
                return
