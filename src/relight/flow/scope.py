"""Scopes: where in a run's code an operation is asked for, which makes its key deterministic.

A scope is one sequential thread of control: the flow function, each task it creates (gather, TaskGroup, create_task), each
branch of parallel(), each foreach item, each child run. Operations are numbered per scope and name, so interleaving branches
can never take each other's results. A task's scope is named when the task is made, not when it first runs: the order in
which the parent creates tasks is deterministic, the order in which the loop runs them is not.

The contextvar CURRENT says where code is: a Scope (in a flow), a StepInfo (in a step's body), or None (in no run at all).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from relight.errors import OutsideRunError

if TYPE_CHECKING:
    from relight.flow.definitions import Flow, Step

T = TypeVar("T")


class StepInfo(msgspec.Struct, frozen=True, gc=False):
    """What `current_step()` answers inside a step's body."""

    run_id: str
    step: str  # the step's key in the run's tree
    attempt: int
    idempotency_key: str  # the same for every attempt, also after a crash: hand it to outside services


class FlowThread(Protocol):
    """The thread a sync flow (or a branch of one) runs in."""

    ident: int

    def wait(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run an operation on the engine's loop and block this thread until it has ended."""
        ...

    def call(self, fn: Callable[[], T], current: Scope | StepInfo) -> Awaitable[T]:
        """On the loop: run `fn` in this thread."""
        ...


class Operations(Protocol):
    """What a live run does for the flow code inside it. Implemented by `lifecycle`; this package only asks.

    `scope` is None for async code: the operation then belongs to the task that awaits it, see `here`.
    """

    def stop_reason(self) -> BaseException | None:
        """What an operation must raise instead of beginning: Unwind while the run leaves memory, an error after its end."""
        ...

    def recorded_in(self, path: str) -> list[str] | None:
        """The keys the journal holds for the scope `path`, in order; None when there are none."""
        ...

    def adopt(self, scope: Scope, task: asyncio.Task[Any]) -> None:
        """A task of this run was made, in this scope."""
        ...

    def step(
        self, scope: Scope | None, step: Step[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]: ...
    def child(
        self, scope: Scope | None, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]: ...
    def sleep(self, scope: Scope | None, seconds: float) -> Coroutine[Any, Any, None]: ...
    def wait_for(
        self, scope: Scope | None, name: str, payload_type: Any, timeout_seconds: float | None, default: Any
    ) -> Coroutine[Any, Any, Any]: ...
    def foreach(
        self, scope: Scope | None, items: list[Any], each: Callable[..., Any], concurrency: int
    ) -> Coroutine[Any, Any, list[Any]]: ...
    def parallel(self, scope: Scope | None, branches: list[Callable[[], Any]]) -> Coroutine[Any, Any, list[Any]]: ...
    def spawn(
        self,
        scope: Scope | None,
        flow: Flow[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_id: str | None,
    ) -> Coroutine[Any, Any, str]: ...
    def join(self, scope: Scope | None, run_id: str, flow: Flow[..., Any]) -> Coroutine[Any, Any, Any]: ...
    def value(self, scope: Scope, name: str) -> Any: ...


class Scope:
    """One sequential thread of control of one run."""

    __slots__ = (
        "cancel_seen",
        "counts",
        "ident",
        "parent",
        "path",
        "position",
        "prefix",
        "recorded",
        "run",
        "run_key",
        "task",
        "thread",
    )

    def __init__(
        self, run: Operations, path: str, run_key: str, parent: Scope | None, thread: FlowThread | None = None
    ) -> None:
        self.run = run
        self.parent = parent
        self.path = path
        self.prefix = path + "/" if path else ""
        self.run_key = run_key  # the key of the (child) run this scope belongs to
        self.ident = get_ident()  # of the engine's loop, where scopes are made and operations begin
        self.thread = thread  # None: async code on the engine's loop
        self.task: asyncio.Task[Any] | None = None  # async code: the task that runs it, known once an operation begins
        self.counts: dict[str, int] = {}
        self.recorded = run.recorded_in(path)  # what replay expects here, in order; None once there is nothing (more)
        self.position = 0
        # The run's cancellation was raised here (or in a branch of this) once; from then on this is clean-up.
        self.cancel_seen: bool = parent is not None and parent.cancel_seen

    def begin(self, name: str) -> str:
        """The key of the next operation called `name` here."""
        stop = self.run.stop_reason()
        if stop is not None:
            raise stop
        if get_ident() != self.ident:
            raise OutsideRunError(
                f"{name!r} was called from a thread that is not its flow's: steps in threads of your own cannot be kept in "
                "order; use parallel() in a sync flow, asyncio.gather in an async one"
            )
        if self.task is None or self.thread is not None:  # a sync flow's operations are tasks of their own
            self.task = asyncio.current_task()
        return self.child_path(name)

    def child_path(self, name: str) -> str:
        """The path of the next scope called `name` inside this one; shares the numbering of operations."""
        count = self.counts.get(name, 0)
        self.counts[name] = count + 1
        return f"{self.prefix}{name}:{count}" if count else self.prefix + name

    @property
    def holds_thread(self) -> bool:
        """Whether sync code further out has a thread and waits for what happens here."""
        scope: Scope | None = self
        while scope is not None and scope.thread is None:
            scope = scope.parent
        return scope is not None

    @property
    def explicit(self) -> Scope | None:
        """This scope, as operations take it."""
        return None if self.thread is None else self

    def perform(self, operation: Coroutine[Any, Any, T]) -> Any:
        """Hand an operation to whoever called it: a coroutine in async code, its result in sync code."""
        if self.thread is None:
            return operation
        if get_ident() != self.thread.ident:
            operation.close()
            raise OutsideRunError(
                "a durable operation was called from a thread that is not its flow's; use parallel() instead of threads"
            )
        return self.thread.wait(operation)


CURRENT: contextvars.ContextVar[Scope | StepInfo | None] = contextvars.ContextVar("relight_current", default=None)


def here(scope: Scope | None) -> Scope:
    """The scope an operation belongs to: the one it was given, or (async code) that of the task it is awaited in.

    `gather(pay(a), pay(b))` calls both in the flow's scope but runs each in a task, and it is the task that counts.
    """
    if scope is not None:
        return scope
    current = CURRENT.get()
    if type(current) is not Scope:
        raise OutsideRunError("an operation of a flow was awaited outside that flow's run")
    return current


def current_scope(what: str) -> Scope | None:
    """The scope of the flow code that is running, or None outside any run. In a step's body durable operations are errors."""
    current = CURRENT.get()
    if type(current) is StepInfo:
        raise OutsideRunError(
            f"{what} was called inside step {current.step!r}: a step is the unit that is repeated as a whole, so waiting, "
            "spawning and recording belong in the flow around it"
        )
    return current  # type: ignore[return-value]  # StepInfo is excluded above by exact type


# ---- naming the scope of every task a flow creates


def _branch_name(coro: Any) -> str:
    name = getattr(coro, "__name__", None) or type(coro).__name__
    return f"~{name}"


class ScopedTaskFactory:
    """A task factory chained onto the loop's own: tasks made by flow code get a scope of their own, all others pass."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.users = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> Any:
        scope = CURRENT.get()
        if type(scope) is not Scope or scope.thread is not None:
            return self._make(loop, coro, kwargs)
        child = Scope(scope.run, scope.child_path(_branch_name(coro)), scope.run_key, scope)
        given = kwargs.get("context")
        # A copy also of a context the caller passed: two tasks sharing it must not share the scope.
        context: contextvars.Context = contextvars.copy_context() if given is None else given.copy()
        context.run(CURRENT.set, child)
        kwargs["context"] = context
        task = self._make(loop, coro, kwargs)
        scope.run.adopt(child, task)
        return task

    def _make(self, loop: asyncio.AbstractEventLoop, coro: Any, kwargs: dict[str, Any]) -> Any:
        if self.inner is not None:
            return self.inner(loop, coro, **kwargs)
        return asyncio.Task(coro, loop=loop, **kwargs)


def install_task_factory(loop: asyncio.AbstractEventLoop) -> None:
    """Chain our factory onto the loop's, once however many engines share the loop."""
    factory = loop.get_task_factory()
    if not isinstance(factory, ScopedTaskFactory):
        factory = ScopedTaskFactory(factory)
        loop.set_task_factory(factory)
    factory.users += 1


def remove_task_factory(loop: asyncio.AbstractEventLoop) -> None:
    """Give the loop its own factory back when the last engine leaves. One chained over ours is left alone."""
    factory = loop.get_task_factory()
    if isinstance(factory, ScopedTaskFactory):
        factory.users -= 1
        if factory.users == 0:
            loop.set_task_factory(factory.inner)


def start_task(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T], current: Scope | None, name: str
) -> asyncio.Task[T]:
    """Start one of the engine's own tasks with CURRENT set to `current`, unnoticed by the factory's naming."""
    outside = contextvars.copy_context()
    outside.run(CURRENT.set, None)
    inside = outside.copy()
    inside.run(CURRENT.set, current)

    def make() -> asyncio.Task[T]:
        return loop.create_task(coro, name=name, context=inside)

    return outside.run(make)
