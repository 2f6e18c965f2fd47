"""Whether a run in memory is blocked on durable waits only, so that it may be parked.

Parking a run that also waits for something of its own (a socket, a plain asyncio.sleep, a lock) would strand it: nobody
would wake it for that. So every task of the run is looked at, and anything not understood counts as busy:

    a wait of ours                          durable
    a task or thread of this run, gather,
    TaskGroup, asyncio.wait without timeout  structural: ends when the others do
    anything else                            busy: the run stays in memory

An `asyncio.timeout()` that is counting for one of the tasks is busy too. It is found among the loop's scheduled timers,
which uvloop does not show: there, use the timeouts of Relight's own operations around long waits.
"""

from __future__ import annotations

import asyncio
import asyncio.taskgroups
import asyncio.tasks
from typing import TYPE_CHECKING, Any

from relight.lifecycle.races import innermost_frame, waiting_in
from relight.lifecycle.threads import DurableFuture

if TYPE_CHECKING:
    from relight.lifecycle.run import LiveRun

_GATHERING: Any = vars(asyncio.tasks)["_GatheringFuture"]  # no public name for what gather() returns
_TASK_GROUP_EXIT = asyncio.TaskGroup.__aexit__.__code__
_TASK_GROUP_INNER = getattr(asyncio.TaskGroup, "_aexit", asyncio.TaskGroup.__aexit__).__code__


def is_blocked(run: LiveRun) -> bool:
    """See the module's docstring."""
    if run.main is None or run.inflight or not run.waits:
        return False
    tasks = {run.main, *run.tasks}
    for thread in run.threads:
        if not thread.blocked:
            return False
        tasks.update(thread.operations)
    return all(_waits_durably(task, tasks) for task in tasks if not task.done()) and not _has_timeout(run, tasks)


def _waits_durably(task: asyncio.Task[Any], tasks: set[asyncio.Task[Any]]) -> bool:
    waiter = getattr(task, "_fut_waiter", None)  # None: it is about to run
    if waiter is None or waiter.done():
        return False
    if _ends_with_others(waiter, tasks):
        return True
    frame = innermost_frame(task)
    if frame is not None and frame.f_code in (_TASK_GROUP_EXIT, _TASK_GROUP_INNER):
        return True
    waiting = waiting_in(task)
    return waiting is not None and waiting.get("timeout_handle") is None


def _ends_with_others(future: Any, tasks: set[asyncio.Task[Any]]) -> bool:
    if isinstance(future, DurableFuture) or future in tasks:
        return True
    gathered = getattr(future, "_children", None) if isinstance(future, _GATHERING) else None
    return gathered is not None and all(child.done() or _ends_with_others(child, tasks) for child in gathered)


def break_off(task: asyncio.Task[Any], error: BaseException) -> None:
    """Raise `error` in a task that waits for several others, before these end with theirs: what they end with is something
    that gather(return_exceptions=True) and asyncio.wait() would show to the flow."""
    waiter = getattr(task, "_fut_waiter", None)
    if waiter is None or waiter.done():
        return
    if isinstance(waiter, _GATHERING) or waiting_in(task) is not None:
        waiter.set_exception(error)


def _has_timeout(run: LiveRun, tasks: set[asyncio.Task[Any]]) -> bool:
    for handle in getattr(run.services.loop, "_scheduled", ()):
        owner = getattr(getattr(handle, "_callback", None), "__self__", None)
        if isinstance(owner, asyncio.Timeout) and not handle.cancelled() and getattr(owner, "_task", None) in tasks:
            return True
    return False
