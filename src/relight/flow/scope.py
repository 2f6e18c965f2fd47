"""Scopes: where in a run's code the flow asks for an operation. The scope makes the operation's key deterministic.

A scope is one sequential thread of control: the flow function, each task it creates (gather, TaskGroup, create_task), each
branch of parallel(), each foreach item, each child run. Operations are numbered per scope and name, so interleaved
branches can never get each other's results. A task's scope is named when the task is made, not when the task first
runs: the order in which the parent makes tasks is deterministic, the order in which the loop runs them is not.

The contextvar CURRENT says where code is: a Scope (in a flow), a StepInfo (in a step's body), or None (in no run at all).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec

from relight.errors import FlowCodeError, OutsideRunError
from relight.flow import garbage
from relight.flow.call import Call, Calls

if TYPE_CHECKING:
    from relight.flow.definitions import Flow


class StepInfo(msgspec.Struct, frozen=True, gc=False):
    """What `current_step()` returns inside a step's body."""

    run_id: str
    step: str  # the step's key in the run's tree
    attempt: int
    root_id: str  # of the tree's root run: the same as run_id, except in child runs
    root_flow: str = ""  # the name of the root run's flow

    @property
    def flow(self) -> str:
        """The name of the flow that called the step."""
        return flow_of(self.run_id[len(self.root_id) + 1 :]) or self.root_flow

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt, also after a crash: give it to outside services."""
        return f"{self.root_id}/{self.step}"


class FlowThread(Protocol):
    """The thread a sync flow (or a branch of one) runs in."""

    ident: int

    def wait(self, call: Call) -> Any:
        """Let the run's loop do an operation, and block this thread until the operation has ended."""
        ...


class Operations(Calls, Protocol):
    """What a live run does for its flow code. The package `run` implements it; this package only calls it.

    `scope` is where the operation was called. In async code it belongs to the task that awaits it, see `here`.
    """

    @property
    def loop(self) -> object:
        """The run loop, on which the flow's code runs."""
        ...

    @property
    def flow_name(self) -> str:
        """The name of the root run's flow."""
        ...

    def run_id(self, key: str) -> str:
        """The id of the (child) run with this key."""
        ...

    def logs_nothing(self) -> bool:
        """Whether the flow code repeats what it has done before, or will repeat what it does now. It repeats what it
        has done before while it is replayed and the journal has something later. It will repeat what it does now while
        the run is being taken out of memory."""
        ...

    stopping: str | None  # why the run leaves memory; None if it does not
    over: bool
    main_done: bool  # the flow's function has returned

    def stop_reason(self) -> BaseException | None:
        """What an operation must raise instead of beginning: Unwind while the run leaves memory, an error after its end."""
        ...

    step_call: type[Call]  # for steps; its `_args` are this object, the scope, the step, its args and kwargs

    def child(self, scope: Scope, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call: ...
    def sleep(self, scope: Scope, seconds: float) -> Call: ...
    def wait_for(
        self, scope: Scope, name: str, payload_type: Any, timeout_seconds: float | None, default: Any
    ) -> Call: ...
    def foreach(self, scope: Scope, items: list[Any], each: Callable[..., Any], concurrency: int) -> Call: ...
    def parallel(self, scope: Scope, branches: list[Callable[[], Any]]) -> Call: ...
    def spawn(
        self,
        scope: Scope,
        flow: Flow[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_id: str | None,
        handle: Callable[[str], Any],
    ) -> Call: ...
    def join(self, scope: Scope, run_id: str, flow: Flow[..., Any]) -> Call: ...
    def continue_as(self, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn: ...
    def value(self, scope: Scope, name: str) -> Any: ...


class Scope:
    """One sequential thread of control of one run."""

    __slots__ = (
        "_branch",
        "branches",
        "calls",
        "cancel_seen",
        "counts",
        "heard",
        "ident",
        "informed",
        "parent",
        "path",
        "prefix",
        "run",
        "run_key",
        "thread",
    )

    def __init__(
        self,
        run: Operations,
        path: str,
        run_key: str,
        parent: Scope | None,
        thread: FlowThread | None = None,
        *,
        ends_branches: bool = False,
        is_branch: bool = False,
    ) -> None:
        self.run = run
        # The live tasks that this code and its branches have made, in that order. A call of a flow and a foreach item
        # have a dict of their own, because the tasks that they made end with them.
        self.branches: dict[Any, None] = {} if ends_branches or parent is None else parent.branches
        self.parent = parent
        self.path = path
        self.prefix = path + "/" if path else ""
        self.run_key = run_key  # the key of the (child) run this scope belongs to
        self.ident = get_ident()  # of the engine's loop, where scopes are made and operations begin
        self.thread = thread  # None: async code on the engine's loop
        self.counts: dict[str, int] = {}
        self.calls = 0  # how many operations this code has asked for
        # The scope of the task that this code runs in. None means this scope: it must not refer to itself, because then
        # only the garbage collector could delete it and its run.
        self._branch: Scope | None = None if parent is None or is_branch else parent.branch
        # The run's cancellation was raised here, or in a branch of this code that ended with it: this is clean-up now.
        self.cancel_seen: bool = parent is not None and parent.in_clean_up
        self.heard = False  # of a task: the cancellation was raised in the task, which is not cancelled again
        # A branch of this code has raised the cancellation, which reaches this code when the branch ends.
        self.informed = False

    @property
    def branch(self) -> Scope:
        """The scope of the task that this code runs in."""
        return self if self._branch is None else self._branch

    def hear(self) -> None:
        """The run's cancellation is raised in this scope. It passes through the enclosing scopes of the same task, so
        they have seen it. Code that waits for the task will see it when the task ends."""
        branch = self.branch
        scope: Scope | None = self
        while scope is not None:
            if scope.branch is branch:
                scope.cancel_seen = True
            else:
                scope.informed = True
            scope = scope.parent

    @property
    def in_clean_up(self) -> bool:
        """Whether this code has seen the run's cancellation."""
        return self.cancel_seen or self.branch.heard

    def begin(self, name: str) -> str:
        """The key of the next operation called `name` here."""
        run = self.run
        if run.stopping is not None or run.over or run.main_done:
            stop = run.stop_reason()
            if stop is not None:
                raise stop
        if get_ident() != self.ident:
            raise OutsideRunError(
                f"{name!r} was called from a thread that is not its flow's: steps in threads of your own cannot be kept in "
                "order; use parallel() in a sync flow, asyncio.gather in an async one"
            )
        counts = self.counts  # from here on the same as child_path()
        count = counts.get(name, 0)
        counts[name] = count + 1
        return f"{self.prefix}{name}:{count}" if count else self.prefix + name

    def child_path(self, name: str) -> str:
        """The path of the next scope called `name` inside this scope. Scopes and operations share one numbering."""
        count = self.counts.get(name, 0)
        self.counts[name] = count + 1
        return f"{self.prefix}{name}:{count}" if count else self.prefix + name

    @property
    def has_thread(self) -> bool:
        """Whether enclosing sync code has a thread, which waits for this scope."""
        scope: Scope | None = self
        while scope is not None and scope.thread is None:
            scope = scope.parent
        return scope is not None

    def perform(self, call: Call) -> Any:
        """What the caller of an operation gets: in async code the call, to be awaited; in sync code the result."""
        if self.thread is None:
            return call
        if get_ident() != self.thread.ident:
            call.close()
            raise OutsideRunError(
                f"{call.name!r} was called from a thread that is not its flow's; use parallel() instead of threads"
            )
        return self.thread.wait(call)


class ForeignThread:
    """Marks code that runs in a thread that flow code has started itself: see `user_threads`."""


FOREIGN_THREAD = ForeignThread()
CURRENT: contextvars.ContextVar[Scope | StepInfo | ForeignThread | None] = contextvars.ContextVar(
    "relight_current", default=None
)


def in_flow_code() -> bool:
    """Whether the calling code is a flow's, in any thread."""
    current = CURRENT.get()
    return type(current) is Scope or current is FOREIGN_THREAD


def here(scope: Scope) -> Scope:
    """The scope of an operation: in sync code where it was called, in async code that of the task that awaits it.

    `gather(pay(a), pay(b))` calls both in the flow's scope but runs each in a task, and the task's scope counts.
    """
    if scope.thread is not None:
        return scope
    current = CURRENT.get()
    if type(current) is not Scope:
        raise OutsideRunError("an operation of a flow was awaited outside that flow's run")
    return current


def current_scope(what: str) -> Scope | None:
    """The scope of the flow code that is running, or None outside any run. In a step's body durable operations are errors."""
    current = CURRENT.get()
    if garbage.collector and garbage.runs_this():
        return Scope(_Nobody(what, type(current) is Scope and current.thread is not None), "", "", None)  # type: ignore[arg-type]
    refuse_foreign_thread(current, what)
    if type(current) is StepInfo:
        raise OutsideRunError(
            f"{what} was called inside step {current.step!r}: a step is the unit that is repeated as a whole, so waiting, "
            "spawning and recording belong in the flow around it"
        )
    return current  # type: ignore[return-value]  # StepInfo is excluded above by exact type


class _Nobody:
    """Stands for the run of code that no longer belongs to a run: see `garbage`."""

    def __init__(self, what: str, in_sync_code: bool) -> None:
        self._what, self._in_sync_code = what, in_sync_code

    def refuse(self, *_: Any) -> garbage.NeverCalled:
        return garbage.refuse(self._what, self._in_sync_code)

    sleep = wait_for = foreach = parallel = spawn = join = refuse

    def continue_as(self, *_: Any) -> None:
        raise OutsideRunError(f"{self._what} was called by the garbage collector, in no run")


def refuse_foreign_thread(current: object, name: str) -> None:
    """Raise if flow code has started a thread, and calls an operation there."""
    if current is FOREIGN_THREAD:
        raise OutsideRunError(
            f"{name!r} was called from a thread that is not its flow's: steps in threads of your own cannot be kept in "
            "order; use parallel() in a sync flow, asyncio.gather in an async one"
        )


def refuse_engine_in_flow_code() -> None:
    """Raise if flow code uses a Relight, or a handle from it."""
    if in_flow_code():
        raise FlowCodeError(
            "flow code used a Relight, or a handle from it: every replay would do so again. To execute another flow, call it "
            "(a child run) or spawn() it (a run of its own, with an id); anything else belongs into a step"
        )


def refuse_lost_context(current: object, name: str) -> None:
    """Raise if code on a run loop is in no scope: it has lost its context (`contextvars.Context().run(charge)`). The
    operations that it calls would be executed unrecorded, and again in every replay."""
    refuse_foreign_thread(current, name)
    if current is None and getattr(asyncio._get_running_loop(), "is_run_loop", False):  # noqa: SLF001 - the documented twin raises
        raise OutsideRunError(
            f"{name!r} was called in flow code without the flow's context variables: call it in a copy of them"
        )


def flow_of(run_key: str) -> str:
    """The name of a child run's flow, from the child's key. "" for the root run, whose key does not have it."""
    return run_key.rpartition("/")[2].partition(":")[0]


def branch_name(coro: Any) -> str:
    """The name, in keys, of a task that flow code makes of `coro`."""
    return f"~{getattr(coro, '__name__', None) or type(coro).__name__}"
