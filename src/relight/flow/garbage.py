"""Flow code that the garbage collector runs.

If a begun coroutine is lost in a reference cycle, the garbage collector ends it: it raises GeneratorExit in the
coroutine, which runs the coroutine's clean-up code. That can happen at any moment, while other code runs, perhaps that
of another run. An operation that the clean-up code asks for must not be done for the run that was interrupted. So the
operation waits for ever. Python then gives the coroutine up and reports it (`sys.unraisablehook`).
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from threading import get_ident
from typing import Any

from relight.errors import OutsideRunError

collector = 0  # the thread in which the collector is running; 0: it is not running


def watch() -> None:
    """From now on, `collector` says when the collector is running."""
    if _phase not in gc.callbacks:
        gc.callbacks.append(_phase)


def _phase(phase: str, info: dict[str, int]) -> None:
    global collector  # noqa: PLW0603 - there is one collector in a process
    collector = get_ident() if phase == "start" else 0


def runs_this() -> bool:
    """Whether the collector runs the calling code. Meanwhile other threads go on with code of their own."""
    return collector != 0 and collector == get_ident()


def for_ever() -> Generator[Any, Any, Any]:
    """Code that must not go on waits here until Python throws it away."""
    while True:
        yield


class NeverCalled:
    """What an operation returns to code that the collector runs."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, Any]:
        return for_ever()


def refuse(name: str, in_sync_code: bool) -> NeverCalled:
    """Called instead of an operation called `name`."""
    if in_sync_code:
        raise OutsideRunError(
            f"{name!r} was called by code that the garbage collector runs, which no longer belongs to a run"
        )
    return NeverCalled()
