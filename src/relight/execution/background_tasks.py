"""Tasks of the engine that nothing awaits and that end by themselves: kept alive here, and their errors are logged.

Tasks that never end belong to the supervisor."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from relight.execution.idle import Idleness
from relight.model.text import shown
from relight.telemetry import Token, log

T = TypeVar("T")


def start_task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start one of the engine's own tasks, in an empty context: it is part of no run, even if a run starts it. It is
    made without the program's task factory: an eager factory would begin it inside the code that starts it."""
    return asyncio.Task(work, loop=loop, name=f"relight-{name}", context=contextvars.Context())


class Background:
    """The event loop keeps only weak references to tasks; these are the strong ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop, idleness: Idleness) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idleness = idleness
        idleness.parts.append(lambda: not self._tasks)

    def start(
        self, work: Coroutine[Any, Any, Any], name: str, broke: Callable[[BaseException], None] | None = None
    ) -> None:
        """Start a task. `broke` is called with its error, where something else waits for what the task was to do."""
        task = start_task(self._loop, work, name)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, broke))

    def _ended(self, task: asyncio.Task[Any], broke: Callable[[BaseException], None] | None) -> None:
        self._tasks.discard(task)
        self._idleness.look()
        if not task.cancelled() and (error := task.exception()) is not None:
            log(logging.CRITICAL, Token.INTERNAL_ERROR, f"{task.get_name()} broke: {shown(error)}", error)
            if broke is not None:
                broke(error)

    async def stop(self) -> None:
        """Cancel what is left, and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
