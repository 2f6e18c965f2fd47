"""RunLoop: the event loop of one run. Flow code, its tasks and its futures live on it; step bodies live on the program's.

It is a queue of ready callbacks and nothing else. Nothing wakes it: the run tells the flow one outcome, and pumps the
loop until the queue is empty. Then the flow is *at rest*: it has done all that it does with what it was told, and
nothing more happens before it is told something. With the same outcomes in the same order, the flow does the same, live
and on replay, because nothing else gets in.

Time passes only through the run: `call_later` and `call_at`, and so asyncio.sleep, asyncio.timeout and asyncio.wait_for, are
timers of the run, which are journaled (`Host.start_timer`). `time()` stands still in between.

Whatever would reach outside (sockets, subprocesses, threads, futures of another loop) is refused where it is called. This
file knows asyncio, and nothing of journals.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from relight.errors import FlowCodeError, Unwind
from relight.execution import refused_calls
from relight.execution.running_loop import RunningLoop
from relight.flow import garbage
from relight.flow.scope import CURRENT, Scope, branch_name
from relight.model.text import shown

T = TypeVar("T")
# How many callbacks are run in one go; then other runs have their turn.
MOST_CALLBACKS = 10_000
# How often Unwind is thrown into code that goes on waiting in its clean-up.
MOST_THROWS = 100
# Tasks whose code goes on all the same. Deleting one would execute its code once more, outside any run: they are kept.
_UNDYING: list[asyncio.Task[Any]] = []


class Ready(msgspec.Struct, eq=False):
    """A callback that is due: what asyncio calls a Handle, with nothing in it that a run does not need."""

    callback: Callable[..., object] | None
    args: tuple[Any, ...]
    context: contextvars.Context
    of_timer: bool = False

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None


class TimerHandle(Protocol):
    """What `call_later` returns: a part of asyncio.TimerHandle."""

    def cancel(self) -> object: ...
    def cancelled(self) -> bool: ...
    def when(self) -> float: ...


class Host(Protocol):
    """The run, as its loop sees it."""

    main_done: bool  # set when the flow's own task has ended

    def start_timer(self, scope: Scope, when: float, seconds: float, ready: Ready) -> TimerHandle:
        """Put `ready` into the queue after so many seconds, durably."""
        ...

    def touched_from_outside(self) -> None:
        """Code outside the run has put something into the queue."""
        ...

    def on_trouble(self, context: dict[str, Any]) -> None:
        """Called with what asyncio passes to an exception handler."""
        ...


class FlowTask(asyncio.Task[T]):
    """A task of flow code.

    It hashes by its name in the run, so that sets of tasks (what asyncio.wait returns) have the same order in every
    process. A hash of the memory address, which is usual, would differ. So would a running number: replay makes no
    tasks for child runs that have ended.
    """

    is_branch = False  # whether flow code itself has made it

    def __init__(self, number: int, scope: Scope, loop: RunLoop, coro: Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = number  # set first: super().__init__ puts the task into a set of asyncio's, which hashes it
        self._scope = scope
        self._run_loop = loop
        super().__init__(coro, loop=loop, **options)

    def cancel(self, msg: Any = None) -> bool:
        """A task that cleans up after the run's cancellation is not cancelled again: when one branch of a TaskGroup has
        finished its clean-up, the group would cancel the clean-up of the others. Timeouts in clean-up still work."""
        branch, loop = self._scope.branch, self._run_loop
        if loop.in_timer:
            return super().cancel(msg)
        if branch.heard:
            return False
        branch.heard = loop.run_cancelled  # code that has heard of the run's cancellation passes it on to this task
        return super().cancel(msg)

    def cancel_for_good(self) -> None:
        """Cancel it, whatever it does."""
        super().cancel()

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class FlowFuture(asyncio.Future[Any]):
    """A future of flow code: what asyncio.shield() gives, or `loop.create_future()`. Hashes as a FlowTask does."""

    def __init__(self, number: int, loop: RunLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class RunLoop(asyncio.AbstractEventLoop):
    """See the module's docstring."""

    def __init__(self, run_id: str, running_loop: RunningLoop, host: Host) -> None:
        self.run_id = run_id
        self._running_loop = running_loop
        self._host = host
        self._outside: Sequence[Ready] = ()
        # Another seed for each run, since asyncio keeps the tasks of all runs in one set.
        self._seed = zlib.crc32(run_id.encode())
        self._number = self._seed  # the number of the last task that flow code never sees
        self.ready: deque[Ready] = deque()
        self.tasks: dict[FlowTask[Any], tuple[Scope, contextvars.Context]] = {}  # alive, in the order of their making
        self.main: FlowTask[Any] | None = None  # the task of the flow's function
        self.now = 0.0  # what time() returns: the time of the last timer that went off
        self._closed = False
        self.driven = False  # the run itself uses it now: otherwise nothing may be put into the queue
        self.in_timer = False  # what runs now is a timer's callback
        self.run_cancelled = False

    # ---- driving it

    @contextlib.contextmanager
    def driving(self) -> Iterator[None]:
        """What is done in this context is done by the run itself."""
        before, self.driven = self.driven, True
        try:
            yield
        finally:
            self.driven = before

    def pump(self) -> None:
        """Run what is ready until nothing is. Leaves it to the caller to give the running loop back."""
        ready = self.ready
        if not ready:
            return
        if self._running_loop.executing is not self:
            self._running_loop.enter(self)
        left = MOST_CALLBACKS
        while ready and left:
            left -= 1
            one = ready.popleft()
            callback = one.callback
            if callback is None:
                continue
            self.in_timer = one.of_timer
            args = one.args
            try:
                if len(args) == 1:  # nearly always, and this is quicker
                    one.context.run(callback, args[0])
                else:
                    one.context.run(callback, *args)
            except (SystemExit, KeyboardInterrupt):
                pass  # a task raised it and has ended with it; asyncio lets it through as well, to end the program's loop
            except BaseException as error:  # noqa: BLE001 - as asyncio's own loops: what a callback raises ends nothing
                self.call_exception_handler({"message": f"exception in callback {shown(callback)}", "exception": error})

    def start(
        self, coro: Coroutine[Any, Any, T], scope: Scope, name: str, context: contextvars.Context | None = None
    ) -> FlowTask[T]:
        """Make a task for flow code, in a scope that the engine has chosen."""
        self._number += 1
        return self._make(self._number, coro, scope, name, contextvars.copy_context() if context is None else context)

    async def end_branches(self, scope: Scope) -> None:
        """Flow code has ended: cancel the tasks that it has made and left behind, as asyncio.run() does, and wait for
        their end. Tasks that already clean up after the run's cancellation are not cancelled again."""
        own = asyncio.current_task()
        while left := [task for task in scope.branches if task is not own]:
            for task in left:
                task.cancel()
            await asyncio.wait(left)
            if scope.run.stop_reason() is not None:
                return

    def unwind(self, reason: str) -> bool:
        """Take all code out of memory: Unwind is raised wherever it waits, and nothing is pumped any more. Returns
        whether all code has ended."""
        gone = True
        self._closed = True  # from here on nothing is put into the queue
        self.ready.clear()
        if not self.tasks:
            return True
        self._running_loop.enter(self)
        try:
            for task, (_, context) in list(self.tasks.items()):
                if not context.run(_throw, task, reason):
                    gone = False
                    _UNDYING.append(task)
        finally:
            self._running_loop.give_back()
        self.tasks.clear()
        return gone

    def let_go(self) -> None:
        """The run is over: drop all references to it."""
        self.unwind("its run is over")
        self.main = None
        del self._host

    # ---- what flow code calls through asyncio

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        one = Ready(callback, args, contextvars.copy_context() if context is None else context)
        if self.driven and not self._closed:  # nearly always
            self.ready.append(one)
            return one
        if not self._closed:
            self._outside = [*self._outside, one]
            self._host.touched_from_outside()
            raise FlowCodeError(
                "a future, an event or a queue of flow code was used from outside the flow, perhaps by a step's body, "
                "which would not happen again on replay; return a value from the step, or send the run a signal"
            )
        return one

    def let_in(self) -> None:
        """Let in what other code has put into the queue. The flow was told that it is cancelled or deadlocked: it may
        now end by that."""
        self.ready.extend(self._outside)
        self._outside = ()

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        seconds = when - self.now
        if seconds <= 0 or self._closed:
            return self.call_soon(callback, *args, context=context)
        ready = Ready(callback, args, contextvars.copy_context() if context is None else context, of_timer=True)
        if garbage.runs_this():
            return ready  # which is never due
        scope = CURRENT.get()
        if type(scope) is not Scope:
            raise FlowCodeError("a timer was made on a run's event loop by code that is not part of its flow")
        return self._host.start_timer(scope, when, seconds, ready)

    def time(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future[Any]:
        return FlowFuture(self._number_in(CURRENT.get()), self)

    def _number_in(self, scope: Any) -> int:
        """A number that is the same whenever the run is replayed, and nearly always another one for each call."""
        return zlib.crc32(scope.child_path("").encode(), self._seed) if type(scope) is Scope else 0

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None, **_: Any) -> Any:
        scope = CURRENT.get()
        if self._closed or type(scope) is not Scope or garbage.runs_this():
            coro.close()
            raise Unwind("its run has left memory") if self._closed else FlowCodeError("a task was made outside a flow")
        refused_calls.coroutines_of_as_completed(coro)
        # A context that the caller passed is copied, too: two tasks that share it must not share the scope.
        copy = contextvars.copy_context() if context is None else context.copy()
        inner = Scope(scope.run, scope.child_path(branch_name(coro)), scope.run_key, scope, is_branch=True)
        number = zlib.crc32(inner.path.encode(), self._seed)
        task = self._make(number, coro, inner, inner.path if name is None else name, copy)
        task.is_branch = True
        return task

    def _make(self, number: int, coro: Any, scope: Scope, name: str, context: contextvars.Context) -> FlowTask[Any]:
        context.run(CURRENT.set, scope)
        task: FlowTask[Any] = FlowTask(number, scope, self, coro, name=name, context=context)
        self.tasks[task] = scope, context
        scope.branches[task] = None
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        if task is self.main:
            self._host.main_done = True
        found = self.tasks.pop(task, None)  # type: ignore[call-overload]  # a FlowTask: no other is made here
        if found is not None:
            scope, _ = found
            scope.branches.pop(task, None)
            if self.run_cancelled and scope.in_clean_up and scope.parent is not None and _is_broken_branch(task):
                scope.parent.hear()  # before the code that waits for the task goes on

    is_run_loop = True  # for code that cannot know this class: see `flow.scope.outside_any_run`

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    get_debug = staticmethod(bool)  # returns False without Python code: every future calls it

    def get_task_factory(self) -> None:
        return None

    def get_exception_handler(self) -> None:
        return None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._closed:
            self._host.on_trouble(context)

    default_exception_handler = call_exception_handler


def _is_broken_branch(task: Any) -> bool:
    """Whether a task that flow code has made has ended with an error. task.exception() would mark that as retrieved."""
    return task.is_branch and (task.cancelled() or task._exception is not None)  # noqa: SLF001


def close_generator(generator: AsyncGenerator[Any, Any]) -> None:
    """An async generator that flow code has not read to its end is being deleted. Its clean-up is flow code as well,
    and becomes a task; but not if the garbage collector deletes it, which may happen during any other code."""
    scope = CURRENT.get()
    loop = scope.run.loop if type(scope) is Scope and not garbage.runs_this() else None
    if isinstance(loop, RunLoop) and loop.driven and not loop.is_closed():
        loop.create_task(generator.aclose())


def _throw(task: FlowTask[Any], reason: str) -> bool:
    """Raise Unwind in a task's code, again while its clean-up waits for something. Returns whether it has ended."""
    coro: Any = task.get_coro()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - it never ends: asyncio would complain
    for _ in range(MOST_THROWS):
        try:
            coro.throw(Unwind(reason))
        except BaseException:  # noqa: BLE001 - the code has ended, and how does not matter any more
            return True
    return False


# Refuse everything else that an event loop can do: I/O, threads, signals, and being run by other code.
for _name in sorted(vars(asyncio.AbstractEventLoop)):
    if not _name.startswith("_") and _name not in vars(RunLoop):
        setattr(RunLoop, _name, refused_calls.call_of(_name))
