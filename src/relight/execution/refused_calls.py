"""Refuses what flow code must not do on its event loop. The errors say what to do instead."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from relight.errors import FlowCodeError
from relight.model.text import error_message, shown

_FOREIGN = ("attached to a different loop", "is bound to a different event loop")


def explain(error: BaseException) -> BaseException:
    """Replace asyncio's error about a future of another loop by one that says what to do."""
    if type(error) is not RuntimeError or not any(words in error_message(error) for words in _FOREIGN):
        return error
    explained = FlowCodeError(
        "flow code awaited a future, a task, a lock or an event of another event loop (every run has its own), and what comes of "
        "that could not be repeated on replay: put it into a step, and make locks and events inside the flow"
    )
    explained.__cause__ = error
    return explained


def coroutines_of_as_completed(coro: Any) -> None:
    """Refuse coroutines in asyncio.as_completed(), which puts what it is given into a set first.

    Their order in the set depends on their addresses, so that the branches made of them would have other names in every
    process. (Calls of steps and flows hash by where they were made.)
    """
    frame = sys._getframe(2)  # noqa: SLF001 - there is no other way to see the caller
    if not asyncio.iscoroutine(coro) or type(coro).__hash__ is not object.__hash__:
        return
    for _ in range(4):
        code = frame.f_code
        if code.co_filename != asyncio.tasks.__file__ or frame.f_back is None:
            return
        if "as_completed" in code.co_name or "AsCompleted" in getattr(code, "co_qualname", ""):
            coro.close()
            raise FlowCodeError(
                f"asyncio.as_completed() was given the coroutine {shown(coro)}, and starts coroutines in an order that "
                "could not be repeated on replay: give it tasks, as_completed([asyncio.create_task(...), ...])"
            )
        frame = frame.f_back


def call_of(name: str) -> Callable[..., NoReturn]:
    """A method that refuses the call, in place of one of an event loop that reaches outside the run."""

    def refuse(self: object, *_: Any, **__: Any) -> NoReturn:
        raise FlowCodeError(
            f"flow code called {name}() of its event loop, which reaches outside the run, and what comes back could not be "
            "repeated on replay: put it into a step"
        )

    refuse.__name__ = name
    return refuse
