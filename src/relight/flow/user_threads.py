"""Threads that flow code starts itself: whoever calls a step there must be told that it is in no flow.

Where code is, is told by a context variable, and a new thread begins with an empty context: a step called in it would look like
a plain call outside any run, be executed, and be executed again on replay. So while an engine is open, threads and jobs of
thread pools that flow code starts inherit its context, as those of other languages do, with a mark that this is no thread of
the flow's. An operation that is called there raises OutsideRunError. Nothing changes for anybody else's threads.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from relight.flow.scope import CURRENT, FOREIGN_THREAD, in_flow_code

_open_engines = 0
_lock = threading.Lock()
_start = threading.Thread.start
_submit = ThreadPoolExecutor.submit


def _context() -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(CURRENT.set, FOREIGN_THREAD)
    return context


@functools.wraps(_start)
def _start_with_context(thread: threading.Thread) -> None:
    if in_flow_code():
        thread.run = functools.partial(_context().run, thread.run)  # type: ignore[method-assign]
    _start(thread)


@functools.wraps(_submit)  # type: ignore[arg-type]
def _submit_with_context(pool: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    if not in_flow_code():
        return _submit(pool, fn, *args, **kwargs)
    job = functools.partial(_context().run, fn)
    token = CURRENT.set(None)  # a thread that the pool starts for it serves others later
    try:
        return _submit(pool, job, *args, **kwargs)
    finally:
        CURRENT.reset(token)


def hand_down_context() -> None:
    """An engine opens."""
    global _open_engines  # noqa: PLW0603 - what is patched belongs to the process
    with _lock:
        _open_engines += 1
        if _open_engines == 1:
            threading.Thread.start = _start_with_context  # type: ignore[assignment, method-assign]
            ThreadPoolExecutor.submit = _submit_with_context  # type: ignore[assignment, method-assign]


def leave_threads_alone() -> None:
    """It closes. What somebody else has put over ours meanwhile stays; ours does nothing outside flows."""
    global _open_engines  # noqa: PLW0603
    with _lock:
        _open_engines -= 1
        if _open_engines == 0:
            if threading.Thread.start is _start_with_context:
                threading.Thread.start = _start  # type: ignore[method-assign]
            if ThreadPoolExecutor.submit is _submit_with_context:
                ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign]
