from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from relight.durations import Duration
from relight.flow import definitions
from relight.flow.definitions import FlowWithId, OnCrash
from relight.flow.operations import SpawnedRun
from relight.flow.retry import Retry

__all__ = ["Flow", "SpawnedRun", "Step", "flow", "foreach", "parallel", "sleep", "spawn", "step", "wait_for"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_U = TypeVar("_U")
_T1 = TypeVar("_T1")
_T2 = TypeVar("_T2")
_T3 = TypeVar("_T3")
_T4 = TypeVar("_T4")
_R_co = TypeVar("_R_co", covariant=True)

class Step(definitions.Step[_P, _R_co]):
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...  # type: ignore[override]  # as sync code sees it

class Flow(definitions.Flow[_P, _R_co]):
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...  # type: ignore[override]  # as sync code sees it

class _StepDecorator(Protocol):
    @overload
    def __call__(self, fn: Callable[_P, Coroutine[Any, Any, _T]], /) -> Step[_P, _T]: ...
    @overload
    def __call__(self, fn: Callable[_P, _T], /) -> Step[_P, _T]: ...

class _FlowDecorator(Protocol):
    @overload
    def __call__(self, fn: Callable[_P, Coroutine[Any, Any, _T]], /) -> Flow[_P, _T]: ...
    @overload
    def __call__(self, fn: Callable[_P, _T], /) -> Flow[_P, _T]: ...

@overload
def step(fn: Callable[_P, Coroutine[Any, Any, _T]], /) -> Step[_P, _T]: ...
@overload
def step(fn: Callable[_P, _T], /) -> Step[_P, _T]: ...
@overload
def step(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    on_crash: OnCrash = "rerun",
    volatile: Collection[str] = (),
) -> _StepDecorator: ...
@overload
def flow(fn: Callable[_P, Coroutine[Any, Any, _T]], /) -> Flow[_P, _T]: ...
@overload
def flow(fn: Callable[_P, _T], /) -> Flow[_P, _T]: ...
@overload
def flow(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    resumable: bool = True,
) -> _FlowDecorator: ...
def sleep(duration: Duration) -> None: ...
@overload
def wait_for(name: str, type: type[_T], timeout: Duration | None = None) -> _T: ...
@overload
def wait_for(name: str, type: type[_T], timeout: Duration | None = None, *, default: _U) -> _T | _U: ...
@overload
def wait_for(
    name: str, type: type, timeout: Duration | None = None, default: object = ...
) -> object: ...  # for mypy: see operations.py
@overload
def wait_for(name: str, type: Any = ..., timeout: Duration | None = None, default: Any = ...) -> Any: ...
@overload
def foreach(items: Iterable[_T], each: definitions.Definition[[_T], _U], concurrency: int = 1) -> list[_U]: ...
@overload
def foreach(items: Iterable[_T], each: Callable[[_T], Awaitable[_U]], concurrency: int = 1) -> list[_U]: ...
@overload
def foreach(items: Iterable[_T], each: Callable[[_T], _U], concurrency: int = 1) -> list[_U]: ...

# A list, whatever its items are: of several types, their union, where mypy alone would say `object`.
@overload
def parallel(first: Callable[[], _T1], second: Callable[[], _T2], /) -> list[_T1 | _T2]: ...
@overload
def parallel(
    first: Callable[[], _T1], second: Callable[[], _T2], third: Callable[[], _T3], /
) -> list[_T1 | _T2 | _T3]: ...
@overload
def parallel(
    first: Callable[[], _T1], second: Callable[[], _T2], third: Callable[[], _T3], fourth: Callable[[], _T4], /
) -> list[_T1 | _T2 | _T3 | _T4]: ...
@overload
def parallel(*branches: Callable[[], _T]) -> list[_T]: ...
def spawn(
    flow: definitions.Flow[_P, _T] | FlowWithId[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> SpawnedRun[_T]: ...
