"""Races: where a flow waits for the first of several branches, their outcomes reach it one at a time.

One commit may hold the outcomes of several branches, and then all of them may go on. Mostly nobody can tell: gather and
TaskGroup wait for all. But `asyncio.wait(FIRST_COMPLETED)` would find several done at once, in no order, where replay, which
gives outcomes back one by one, finds only the first: the flow would go another way than it did. So while a flow waits like
that, the branches go on in the order of the journal, each when the event loop has come to rest after the one before.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Iterable
from typing import Any

# How often the loop turns, at most, until a flow has noticed one outcome and is given the next. It comes to rest sooner,
# unless other runs keep it busy; a result takes two or three turns for each task or gather() it comes up through.
MOST_TURNS = 12

_WAIT = vars(asyncio.tasks)["_wait"].__code__  # the coroutine under asyncio.wait()


def innermost_frame(task: asyncio.Task[Any]) -> Any:
    """The frame of the coroutine that really waits, at the end of the chain of awaits."""
    awaited: Any = task.get_coro()
    frame = None
    while inspect.iscoroutine(awaited):
        frame = awaited.cr_frame
        awaited = awaited.cr_await
    return frame


def waiting_in(task: asyncio.Task[Any]) -> dict[str, Any] | None:
    """The local variables of the asyncio.wait() that a task is in."""
    frame = innermost_frame(task)
    return None if frame is None or frame.f_code is not _WAIT else frame.f_locals


class OneByOne:
    """Wakes those who wait for the commits of one run that has branches."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parents: set[asyncio.Task[Any]] = set()  # tasks that have made others: who may wait for the first of them
        self._line: deque[asyncio.Future[None]] = deque()
        self._ticking = False
        self._turns = 0

    def watch(self, parent: asyncio.Task[Any] | None) -> None:
        """This task has made another one."""
        if parent is not None and parent not in self._parents:
            self._parents.add(parent)
            parent.add_done_callback(self._parents.discard)

    def wake(self, waiters: Iterable[asyncio.Future[None]]) -> None:
        """At once where nobody can tell, one by one where somebody can."""
        if not self._ticking and not self._racing():
            for waiter in waiters:
                _wake(waiter)
            return
        self._line.extend(waiters)
        if not self._ticking:
            self._next()

    def _racing(self) -> bool:
        return any(
            (waiting_in(task) or {}).get("return_when", asyncio.ALL_COMPLETED) != asyncio.ALL_COMPLETED
            for task in self._parents
        )

    def _next(self) -> None:
        self._ticking = bool(self._line)
        if self._line:
            _wake(self._line.popleft())
            self._turns = 0
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._turns += 1
        if self._turns < MOST_TURNS and getattr(self._loop, "_ready", True):  # uvloop does not tell
            self._loop.call_soon(self._tick)
        else:
            self._next()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
