"""Which event loop is the running one in the program's thread: the program's own, or that of the run whose flow code is being
executed.

A change costs up to a tenth of a short step, so the running loop is changed no more often than necessary. Executing a
run's ready code makes the run's loop the running one. It stays so until the next run of a batch replaces it. Code that
needs the program's loop again, or returns to the program, calls `give_back` first.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

from relight.execution.blocking_watch import BlockingWatch, Executing
from relight.execution.body_tasks import Bodies

# This is how asyncio lets others write event loops; uvloop does the same.
_set_running_loop = asyncio._set_running_loop  # noqa: SLF001
_set_asyncgen_hooks = sys.set_asyncgen_hooks


class RunningLoop:
    """One per engine."""

    __slots__ = ("_bodies", "_hooks", "_on_dropped", "_outer", "_watch", "batch", "executing")

    def __init__(
        self,
        outer: asyncio.AbstractEventLoop,
        on_dropped: Callable[[AsyncGenerator[Any, Any]], None],
        watch: BlockingWatch,
        bodies: Bodies,
    ) -> None:
        self._outer = outer
        self._hooks: Any = (None, None)  # the program's own hooks for async generators
        self._on_dropped = on_dropped  # the hook for those that flow code does not read to their end
        self._watch = watch
        self._bodies = bodies
        self.executing: Executing | None = None  # the run's loop that is the running one
        self.batch = False  # other runs are about to be executed: `give_back` is called after the last

    def enter(self, loop: Any) -> None:
        """Flow code of this run is executed next, and async generators that it begins are its own."""
        watch = self._watch
        if self.executing is None:
            self._hooks = sys.get_asyncgen_hooks()
            _set_asyncgen_hooks(None, self._on_dropped)
            if watch.thread is None:
                watch.start()
        self.executing = watch.executing = loop
        watch.stretches += 1
        _set_running_loop(loop)

    def give_back(self) -> None:
        """The program's loop is the running one again, and the bodies of steps that flow code has asked for may begin."""
        if self.executing is not None:
            self.executing = self._watch.executing = None
            _set_asyncgen_hooks(*self._hooks)
            _set_running_loop(self._outer)
            if self._bodies.queue and not self._bodies.looking:
                self._bodies.look()
