"""Flow code that the garbage collector runs.

A coroutine that somebody began and lost in a reference cycle is ended by the collector, which raises GeneratorExit in it and so
runs its clean-up: whenever it happens to look, in the midst of any other code, of another run perhaps. What that clean-up asks
for must not be done in the name of whoever was interrupted. So it waits for ever, whereupon Python gives the coroutine up and
says so (`sys.unraisablehook`).
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from threading import get_ident
from typing import Any

from relight.errors import OutsideRunError

collector = 0  # the thread in which the collector is at work; 0: it is not


def watch() -> None:
    """Know when the collector is at work, from now on."""
    if _phase not in gc.callbacks:
        gc.callbacks.append(_phase)


def _phase(phase: str, info: dict[str, int]) -> None:
    global collector  # noqa: PLW0603 - there is one collector in a process
    collector = get_ident() if phase == "start" else 0


def runs_this() -> bool:
    """Whether the code that asks is run by the collector. Others go on meanwhile, in their own threads."""
    return collector != 0 and collector == get_ident()


def for_ever() -> Generator[Any, Any, Any]:
    """Where code is left that nobody may let go on: it waits here, and is thrown away."""
    while True:
        yield


class NeverCalled:
    """What an operation gives to such code."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, Any]:
        return for_ever()


def refuse(name: str, in_sync_code: bool) -> NeverCalled:
    """Instead of an operation called `name`."""
    if in_sync_code:
        raise OutsideRunError(
            f"{name!r} was called by code that the garbage collector runs, which is of no run any more"
        )
    return NeverCalled()
