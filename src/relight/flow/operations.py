"""What a flow may ask for besides steps: waiting, fanning out, spawning, and values that replay must see again.

Each of them calls the live run around it. Outside a run, those with a plain meaning (sleep, foreach, now, …) just do
that, so that a unit test can call a flow as a plain function. The others (wait_for, spawn) raise OutsideRunError.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import inspect
import typing
import uuid as _uuid
from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, ForwardRef, Generic, NoReturn, ParamSpec, TypeVar, get_origin, overload

from relight.clock import SYSTEM_CLOCK, SYSTEM_ENTROPY, Clock, Entropy, block
from relight.durations import Duration, parse_duration
from relight.errors import ContinueAs, DefinitionError, OutsideRunError, PayloadError
from relight.flow import garbage
from relight.flow.definitions import Definition, Flow, FlowWithId, without_id
from relight.flow.scope import CURRENT, Scope, StepInfo, current_scope, refuse_foreign_thread, refuse_lost_context
from relight.model.text import check_name

if TYPE_CHECKING:
    from relight.flow.call_types import SyncOrAsync

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")

# Annotations that are no classes and no generics. TypeAliasType, of `type X = ...`, is there from Python 3.12 on.
_OTHER_TYPES: tuple[Any, ...] = (TypeVar, getattr(typing, "TypeAliasType", TypeVar))
MISSING: Any = object()  # no default was given: a timeout raises


def sleep(duration: Duration) -> SyncOrAsync[None]:
    """Wait durably: `await sleep("3d")`, or `sleep("3d")` in a sync flow. The deadline survives crashes. The run leaves
    memory during a long sleep."""
    seconds = parse_duration(duration, "sleep()")
    scope = current_scope("sleep()")
    if scope is not None:
        return scope.perform(scope.run.sleep(scope, seconds))  # type: ignore[no-any-return]  # see call_types
    if _in_event_loop():
        return asyncio.sleep(seconds)  # type: ignore[return-value]  # noqa: TID251 - what a flow's sleep means outside a run
    return block(seconds)  # type: ignore[return-value, func-returns-value]  # as above


# The overloads that give `object` are for mypy. If the caller wants another type than the result's, mypy skips the
# first overload that fits and chooses the next. That one must not give Any, or the error would go unnoticed.


@overload
def wait_for(name: str, type: type[T], timeout: Duration | None = None) -> SyncOrAsync[T]: ...
@overload
def wait_for(name: str, type: type[T], timeout: Duration | None = None, *, default: U) -> SyncOrAsync[T | U]: ...
@overload
def wait_for(name: str, type: type, timeout: Duration | None = None, default: object = ...) -> SyncOrAsync[object]: ...
@overload
def wait_for(name: str, type: Any = Any, timeout: Duration | None = None, default: Any = ...) -> SyncOrAsync[Any]: ...
def wait_for(name: str, type: Any = Any, timeout: Duration | None = None, default: Any = MISSING) -> Any:  # noqa: A002 - reads best
    """Wait for a signal: `decision = await wait_for("approval", timeout="7d")`.

    Signals of one name are received in the order in which they were sent, also those sent before the flow waits. After
    `timeout` this raises TimeoutError, or returns `default` if it is given. `type` is the type of payload and result.
    """
    try:
        check_name(name, "signal name")
    except PayloadError as error:
        raise DefinitionError(f"wait_for({name!r}): {error}") from None
    if not _is_type(type):
        raise DefinitionError(
            f"wait_for({name!r}, {type!r}): give the type of the payload itself, such as int or a dataclass, not its name "
            "and no value; without it, the payload comes as plain JSON"
        )
    seconds = None if timeout is None else parse_duration(timeout, f"wait_for({name!r}, timeout=)")
    scope = current_scope("wait_for()")
    if scope is None:
        raise OutsideRunError(f"wait_for({name!r}) needs a run to be signalled: start the flow with Relight.start()")
    return scope.perform(scope.run.wait_for(scope, name, type, seconds, default))


@overload
def foreach(items: Iterable[T], each: Definition[[T], U], concurrency: int = 1) -> SyncOrAsync[list[U]]: ...
@overload
def foreach(items: Iterable[T], each: Definition[[T], object], concurrency: int = 1) -> SyncOrAsync[list[object]]: ...
@overload
def foreach(items: Iterable[T], each: Callable[[T], Awaitable[U]], concurrency: int = 1) -> SyncOrAsync[list[U]]: ...
@overload
def foreach(items: Iterable[T], each: Callable[[T], U], concurrency: int = 1) -> SyncOrAsync[list[U]]: ...
def foreach(items: Iterable[Any], each: Any, concurrency: int = 1) -> Any:
    """Call `each` (a step, a flow or a function that calls them) for every item; the list of results, in order.

    Progress is kept per item. After a crash, a sequential foreach (concurrency=1) goes on after the longest prefix of
    items that still match by position and content. A concurrent foreach keeps every finished item that still matches.
    The first error stops the remaining items and is raised.
    """
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise DefinitionError(f"foreach(concurrency={concurrency!r}): give a whole number, 1 or more")
    if not callable(each):
        raise DefinitionError(f"foreach(each={each!r}): give a step, a flow or a function of one item")
    scope = current_scope("foreach()")
    if scope is not None:
        return scope.perform(scope.run.foreach(scope, list(items), each, concurrency))
    return _foreach_plain(list(items), each, concurrency)


def parallel(*branches: Callable[[], T]) -> list[T]:
    """In a sync flow: call every branch in a thread of its own and return their results in order.

    `parallel(lambda: pay(order), lambda: ship(order))`. In async flows use asyncio.gather or TaskGroup.
    """
    scope = current_scope("parallel()")
    if scope is None:
        return [branch() for branch in branches]
    if scope.thread is None:
        raise DefinitionError("parallel() is for sync flows; in an async flow use asyncio.gather or asyncio.TaskGroup")
    result: list[T] = scope.perform(scope.run.parallel(scope, list(branches)))
    return result


class SpawnedRun(Generic[T]):
    """A root run started by a flow. Await it for its result (in a sync flow: `.result()`), or leave it to itself."""

    __slots__ = ("_flow", "_scope", "id")

    def __init__(self, scope: Scope, flow: Flow[..., T], run_id: str) -> None:
        self._scope = scope
        self._flow = flow
        self.id = run_id

    def __await__(self) -> Generator[Any, None, T]:
        scope = current_scope("awaiting a spawned run") or self._scope
        return scope.run.join(scope, self.id, self._flow).__await__()

    def result(self) -> T:
        """Wait for the result in a sync flow."""
        scope = current_scope("a spawned run's result()") or self._scope
        if scope.thread is None:
            raise DefinitionError("in an async flow await the spawned run instead of calling result()")
        return scope.perform(scope.run.join(scope, self.id, self._flow))  # type: ignore[no-any-return]


def spawn(flow: Flow[P, T] | FlowWithId[P, T], *args: P.args, **kwargs: P.kwargs) -> SyncOrAsync[SpawnedRun[T]]:
    """Start a root run linked to this run: `child = await spawn(ship, order)`, later perhaps `await child`.

    The spawn is in this run's journal: after a crash the same call finds the same run. Cancelling this run also cancels
    the spawned run; the end of this run does not affect it. `spawn(ship.with_id("ship-7"), order)` gives it an id.
    """
    found, run_id = without_id(flow, kwargs.pop("id", None))
    if not isinstance(found, Flow):
        raise DefinitionError(f"spawn() takes a flow, not {flow!r}; decorate the function with @flow")
    scope = current_scope("spawn()")
    if scope is None:
        raise OutsideRunError(f"spawn({found.name!r}) needs a run around it: use Relight.start() outside flows")
    return scope.perform(  # type: ignore[no-any-return]  # see call_types
        scope.run.spawn(scope, found, args, kwargs, run_id, lambda run_id: SpawnedRun(scope, found, run_id))
    )


def continue_as(*args: Any, **kwargs: Any) -> NoReturn:
    """End this generation of the run and begin the next, with these arguments of its flow: `return continue_as(cursor)`.

    For flows that loop for ever. The run keeps its id, its creation time (and so its timeout), and every message that
    it has not received yet. The same commit deletes what this generation did, so that the run does not grow. The
    function does not return: it raises ContinueAs, which passes through `finally` blocks, as a return would. Only for
    the flow's own code.
    """
    scope = current_scope("continue_as()")
    if scope is None:
        refuse_lost_context(None, "continue_as()")
        raise ContinueAs(args, kwargs)
    scope.run.continue_as(scope, args, kwargs)


def now() -> dt.datetime:
    """The time (UTC) when the flow first came to this point; replay gives the same time."""
    return _value("now")  # type: ignore[no-any-return]  # see VALUES


def random() -> float:
    """A random number in [0, 1); replay gives the same number."""
    return _value("random")  # type: ignore[no-any-return]


def uuid() -> _uuid.UUID:
    """A random UUID; replay gives the same UUID."""
    return _value("uuid")  # type: ignore[no-any-return]


def current_step() -> StepInfo:
    """Inside a step's body: which step this is, and its idempotency key, for outside services."""
    current = CURRENT.get()
    if type(current) is StepInfo:
        return current
    raise OutsideRunError("current_step() works only inside the body of a step that a run executes")


# How each recorded value is made, and its type.
VALUES: dict[str, tuple[Callable[[Clock, Entropy], Any], Any]] = {
    "now": (lambda clock, entropy: dt.datetime.fromtimestamp(clock.now(), dt.UTC), dt.datetime),
    "random": (lambda clock, entropy: entropy.random(), float),
    "uuid": (lambda clock, entropy: entropy.uuid(), _uuid.UUID),
}


def _value(name: str) -> Any:
    scope = CURRENT.get()
    refuse_foreign_thread(scope, f"{name}()")
    if type(scope) is Scope and not garbage.runs_this():
        return scope.run.value(scope, name)
    # Nothing is recorded outside a run, nor inside a step, of which only the result is recorded.
    return VALUES[name][0](SYSTEM_CLOCK, SYSTEM_ENTROPY)


def _is_type(type: Any) -> bool:  # noqa: A002 - as in wait_for
    """Whether this can be an annotation: a class, a generic or union of some, None, a type variable or alias."""
    if isinstance(type, str | ForwardRef) or inspect.isroutine(type):
        return False
    return type is None or callable(type) or get_origin(type) is not None or isinstance(type, _OTHER_TYPES)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _foreach_plain(items: list[Any], each: Callable[[Any], Any], concurrency: int) -> Any:
    """foreach outside a run: plain calls, concurrent only when `each` is async."""
    if not inspect.iscoroutinefunction(inspect.unwrap(each)):
        return [each(item) for item in items]
    gate = asyncio.Semaphore(concurrency)

    async def one(item: Any) -> Any:
        async with gate:
            return await each(item)

    async def every() -> list[Any]:
        return list(await asyncio.gather(*(one(item) for item in items)))

    return every()
