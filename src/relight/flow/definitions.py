"""`@flow` and `@step`: what users write. Outside a run both are the plain functions they wrap."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from relight.durations import Duration, parse_duration
from relight.errors import DefinitionError
from relight.flow import garbage
from relight.flow.fingerprint import function_fingerprint
from relight.flow.function_checks import check_function
from relight.flow.payloads import ArgumentsCodec, ValueCodec
from relight.flow.registry import REGISTRY
from relight.flow.retry import Retry
from relight.flow.scope import CURRENT, Scope, refuse_lost_context
from relight.flow.signatures import resolve
from relight.model.text import storable

if TYPE_CHECKING:
    from relight.flow.call_types import SyncOrAsync

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
OnCrash = Literal["rerun", "fail"]

_NAME = re.compile(r"[^\s/:\[\]@$~\x00-\x1f][^/:\[\]@$~\x00-\x1f]{0,99}")


class Definition(Generic[P, R_co]):
    """What flows and steps have in common: function, name, codecs and options. P: its parameters, R_co: its result."""

    kind = "function"

    def __init__(self, fn: Callable[P, Any], name: str | None, retry: Retry | None, timeout: Duration | None) -> None:
        check_function(self.kind, fn, name)
        self.fn: Callable[P, Any] = fn
        self.name = name if name is not None else fn.__name__.strip("<>")
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or not storable(self.name):
            raise DefinitionError(
                f"@{self.kind}(name={self.name!r}): a name has 1 to 100 characters, none of / : [ ] @ $ ~, no leading space, "
                "no control characters"
            )
        if retry is not None and not isinstance(retry, Retry):
            raise DefinitionError(f"@{self.kind} {self.name!r}: retry takes Retry(attempts=…), not {retry!r}")
        self.retry = retry
        self.timeout_seconds = (
            None if timeout is None else parse_duration(timeout, f"timeout of {self.kind} {self.name!r}")
        )
        if self.timeout_seconds == 0:
            raise DefinitionError(
                f"timeout of {self.kind} {self.name!r}: {timeout!r} leaves no time at all; give more than 0, or leave it out "
                "for no timeout"
            )
        self.is_async = inspect.iscoroutinefunction(fn)
        self.what = f"{self.kind} {self.name!r}"
        self.arguments = ArgumentsCodec(fn, self.what)
        functools.update_wrapper(cast("Any", self), fn)

    @property
    def place(self) -> str:
        """Where the function is defined: "file:line"."""
        code = self.fn.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    @functools.cached_property
    def result(self) -> ValueCodec:
        return ValueCodec(return_annotation(self.fn), f"result of {self.what}")

    @functools.cached_property
    def fingerprint(self) -> str:
        return function_fingerprint(self.fn, self._options())

    def _options(self) -> dict[str, object]:
        return {"retry": self.retry.describe() if self.retry else None, "timeout": self.timeout_seconds}

    def __repr__(self) -> str:
        return f"<{self.what} at {self.place}>"


class Step(Definition[P, R_co]):
    """A unit of work whose result is journaled: once it is committed it never runs again."""

    kind = "step"

    def __init__(
        self,
        fn: Callable[P, Any],
        name: str | None,
        retry: Retry | None,
        timeout: Duration | None,
        on_crash: OnCrash,
        volatile: Collection[str] = (),
    ) -> None:
        super().__init__(fn, name, retry, timeout)
        self.arguments.volatile = _parameters(self, volatile)
        if on_crash not in ("rerun", "fail"):
            raise DefinitionError(f"{self.what}: on_crash takes 'rerun' or 'fail', not {on_crash!r}")
        self.on_crash = on_crash
        # Such a step has nothing but its result to record: it is executed in the short way.
        self.plain = retry is None and timeout is None and on_crash == "rerun" and self.is_async
        REGISTRY.add_step(self)

    def _options(self) -> dict[str, object]:
        volatile = {"volatile": sorted(self.arguments.volatile)} if self.arguments.volatile else {}
        return {**super()._options(), "on_crash": self.on_crash, **volatile}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[object, object, R_co]:
        scope = CURRENT.get()
        if garbage.collector and garbage.runs_this() and (self.is_async or type(scope) is Scope):
            return garbage.refuse(self.name, type(scope) is Scope and scope.thread is not None)  # type: ignore[return-value]  # see call_types
        if type(scope) is not Scope:  # outside a run, or inside a step's body: a plain function
            refuse_lost_context(scope, self.name)
            return self.fn(*args, **kwargs)  # type: ignore[no-any-return]  # as above
        run, frame = scope.run, sys._getframe(1)  # noqa: SLF001 - the flow's code
        scope.calls = count = scope.calls + 1
        number = next(run.numbers)
        # The same as call.make(), inlined: every step comes through here, and a function call costs time.
        call = run.unawaited[number] = run.step_call(
            self.name,
            frame.f_code,
            frame.f_lasti,
            run.unawaited,
            number,
            scope,
            count,
            (run, scope, self, args, kwargs),
        )
        return call if scope.thread is None else scope.perform(call)


class Flow(Definition[P, R_co]):
    """A definition whose execution is a run. Called in a flow it is a child run; called outside, a plain function."""

    kind = "flow"

    def __init__(
        self, fn: Callable[P, Any], name: str | None, retry: Retry | None, timeout: Duration | None, resumable: bool
    ) -> None:
        super().__init__(fn, name, retry, timeout)
        if not isinstance(resumable, bool):
            raise DefinitionError(f"{self.what}: resumable takes True or False, not {resumable!r}")
        self.resumable = resumable

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[object, object, R_co]:
        scope = CURRENT.get()
        if garbage.collector and garbage.runs_this() and (self.is_async or type(scope) is Scope):
            return garbage.refuse(self.name, type(scope) is Scope and scope.thread is not None)  # type: ignore[return-value]  # as above
        if type(scope) is not Scope:
            refuse_lost_context(scope, self.name)
            return self.fn(*args, **kwargs)  # type: ignore[no-any-return]  # as above
        return scope.perform(scope.run.child(scope, self, args, kwargs))  # type: ignore[no-any-return]  # as above

    def with_id(self, run_id: str | None) -> FlowWithId[P, R_co]:
        """This flow, to be started as the run of that id: `rl.start(checkout.with_id("order-42"), order)`.

        `start`, `run` and `spawn` accept it in the place of a flow. With None, Relight makes an id, as for a flow
        alone. The id is not one of the flow's arguments, because type checkers could not tell it from them.
        """
        return FlowWithId(self, run_id)


class FlowWithId(Generic[P, R_co]):
    """A flow, and the id of the run to start. It cannot be called: a child run's id follows from its parent's."""

    __slots__ = ("flow", "run_id")

    def __init__(self, flow: Flow[P, R_co], run_id: str | None) -> None:
        self.flow = flow
        self.run_id = run_id

    def __repr__(self) -> str:
        return f"{self.flow!r}.with_id({self.run_id!r})"


def without_id(flow: object, run_id: Any) -> tuple[object, str | None]:
    """Separate what the caller gave as a flow from the run's id, which is that of `with_id` or the keyword's."""
    if not isinstance(flow, FlowWithId):
        return flow, run_id
    if run_id is not None:
        raise DefinitionError(f"{flow!r} was given another id, {run_id!r}: give one")
    return flow.flow, flow.run_id


def _parameters(step: Step[..., Any], volatile: Collection[str]) -> frozenset[str]:
    """Check the names of parameters that a user gave."""
    known = inspect.signature(step.fn).parameters
    if isinstance(volatile, str) or not all(name in known for name in volatile):
        takes = ", ".join(known) or "none"
        raise DefinitionError(f"{step.what}: volatile takes names of its parameters ({takes}), not {volatile!r}")
    return frozenset(volatile)


def return_annotation(fn: Callable[..., Any]) -> Any:
    """A function's return annotation; Any if it has none."""
    return resolve(fn, getattr(inspect.unwrap(fn), "__annotations__", {}).get("return", inspect.Parameter.empty))


@overload
def step(fn: Callable[P, Coroutine[Any, Any, T]], /) -> Step[P, T]: ...  # type: ignore[overload-overlap]  # first come, first served
@overload
def step(fn: Callable[P, T], /) -> SyncStep[P, T]: ...
@overload
def step(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    on_crash: OnCrash = "rerun",
    volatile: Collection[str] = (),
) -> _StepDecorator: ...
def step(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    on_crash: OnCrash = "rerun",
    volatile: Collection[str] = (),
) -> Any:
    """Make a function a step: `@step` or `@step(retry=Retry(3), timeout="30s", on_crash="fail", name="charge")`.

    A step that is running when its process crashes is executed again, once per crash. `on_crash="fail"` forbids that:
    the step's start is journaled first, and after a crash recovery raises StepInterruptedError in the flow. A timeout
    counts from the attempt's first start, also across a crash. A sync step that outlives its timeout is abandoned, not
    stopped, because Python cannot stop a thread.

    On replay the flow must ask for a step with the recorded arguments, otherwise the run is held. `volatile` names
    parameters that are not compared: those that differ each time, or are large and follow from the rest (an agent's
    whole conversation).
    """
    if fn is None:
        return lambda f: Step(f, name, retry, timeout, on_crash, volatile)
    return Step(fn, name, retry, timeout, on_crash, volatile)


@overload
def flow(fn: Callable[P, Coroutine[Any, Any, T]], /) -> Flow[P, T]: ...  # type: ignore[overload-overlap]  # first come, first served
@overload
def flow(fn: Callable[P, T], /) -> SyncFlow[P, T]: ...
@overload
def flow(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    resumable: bool = True,
) -> _FlowDecorator: ...
def flow(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    resumable: bool = True,
) -> Any:
    """Make a function a flow: `@flow` or `@flow(name="checkout", retry=Retry(3), timeout="1d", resumable=True)`.

    A retried flow keeps the steps it finished. `timeout` counts from the run's creation. With `resumable=False`,
    recovery fails an interrupted run instead of resuming it.
    """

    def make(f: Callable[..., Any]) -> Flow[..., Any]:
        made: Flow[..., Any] = Flow(f, name, retry, timeout, resumable)
        REGISTRY.add(made)
        return made

    return make if fn is None else make(fn)


if TYPE_CHECKING:
    # Names for type checkers only: at run time there are only Step and Flow, for sync and async functions.

    class SyncStep(Step[P, R_co]):
        """A step that is a sync function."""

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> SyncOrAsync[R_co]: ...

    class SyncFlow(Flow[P, R_co]):
        """A flow that is a sync function."""

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> SyncOrAsync[R_co]: ...

    class _StepDecorator(Protocol):
        """What `@step(...)` is."""

        @overload
        def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> Step[P, T]: ...  # type: ignore[overload-overlap]  # as above
        @overload
        def __call__(self, fn: Callable[P, T], /) -> SyncStep[P, T]: ...

    class _FlowDecorator(Protocol):
        """What `@flow(...)` is."""

        @overload
        def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> Flow[P, T]: ...  # type: ignore[overload-overlap]  # as above
        @overload
        def __call__(self, fn: Callable[P, T], /) -> SyncFlow[P, T]: ...
