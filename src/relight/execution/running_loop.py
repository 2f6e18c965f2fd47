"""Floor: which event loop is the running one in the program's thread: the program's own, or that of the run whose flow code is
being executed.

To change it costs as much as a tenth of a short step. So it is changed no more often than need be: pumping a run's loop takes
the floor and does not give it back, and the next run in a batch takes it over. Whoever is about to execute code that asks for
the running loop, or to return to the program, calls `leave` first.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

from relight.execution.blocking_watch import BlockingWatch, Speaker
from relight.execution.body_tasks import Bodies

# This is how asyncio lets others write event loops; uvloop does the same.
_set_running_loop = asyncio._set_running_loop  # noqa: SLF001
_set_asyncgen_hooks = sys.set_asyncgen_hooks


class Floor:
    """One per engine."""

    __slots__ = ("_bodies", "_hooks", "_on_dropped", "_outer", "_watch", "batch", "speaker")

    def __init__(
        self,
        outer: asyncio.AbstractEventLoop,
        on_dropped: Callable[[AsyncGenerator[Any, Any]], None],
        watch: BlockingWatch,
        bodies: Bodies,
    ) -> None:
        self._outer = outer
        self._hooks: Any = (None, None)  # what the program does with async generators,
        self._on_dropped = on_dropped  # and what is done with those that flow code does not read to their end
        self._watch = watch
        self._bodies = bodies
        self.speaker: Speaker | None = None  # the run's loop that has it
        self.batch = False  # other runs are about to have it: `leave` is called after the last

    def enter(self, loop: Any) -> None:
        """Flow code of this run is executed next, and async generators that it begins are its own."""
        watch = self._watch
        if self.speaker is None:
            self._hooks = sys.get_asyncgen_hooks()
            _set_asyncgen_hooks(None, self._on_dropped)
            if watch.thread is None:
                watch.start()
        self.speaker = watch.speaker = loop
        watch.stretches += 1
        _set_running_loop(loop)

    def leave(self) -> None:
        """The program's loop is the running one again, and the bodies of steps that flow code has asked for may begin."""
        if self.speaker is not None:
            self.speaker = self._watch.speaker = None
            _set_asyncgen_hooks(*self._hooks)
            _set_running_loop(self._outer)
            if self._bodies.queue and not self._bodies.looking:
                self._bodies.look()
