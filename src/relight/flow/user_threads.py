"""Threads that flow code starts itself: an operation that is called there must raise an error.

A context variable says whether code belongs to a run, and a new thread begins with an empty context. A step called
there would look like a plain call outside any run. It would be executed, and executed again on replay. So while an
engine is open, threads and thread-pool jobs that flow code starts inherit its context, with a mark that the thread is
not the flow's. An operation that is called there raises OutsideRunError. Threads of other code do not change.
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
    token = CURRENT.set(None)  # the pool may start a thread for this job, which later does the jobs of others
    try:
        return _submit(pool, job, *args, **kwargs)
    finally:
        CURRENT.reset(token)


def hand_down_context() -> None:
    """Called when an engine opens: from now on, threads that flow code starts inherit its context."""
    global _open_engines  # noqa: PLW0603 - what is patched belongs to the process
    with _lock:
        _open_engines += 1
        if _open_engines == 1:
            threading.Thread.start = _start_with_context  # type: ignore[assignment, method-assign]
            ThreadPoolExecutor.submit = _submit_with_context  # type: ignore[assignment, method-assign]


def leave_threads_alone() -> None:
    """Called when an engine closes: the last one undoes the patches. If another library has patched over one of them,
    that one stays; it does nothing outside flows."""
    global _open_engines  # noqa: PLW0603
    with _lock:
        _open_engines -= 1
        if _open_engines == 0:
            if threading.Thread.start is _start_with_context:
                threading.Thread.start = _start  # type: ignore[method-assign]
            if ThreadPoolExecutor.submit is _submit_with_context:
                ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign]
