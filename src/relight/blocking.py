"""The blocking façade: the same engine for sync code, on an event loop in a thread of its own. No logic lives here."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime as dt
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from relight.description import RunDescription
from relight.durations import Duration
from relight.errors import RelightError
from relight.flow.definitions import Flow, FlowWithId
from relight.flow.scope import in_flow_code
from relight.handle import Handle
from relight.model.operations import OperationReport, StepPage
from relight.model.run import ForeachProgress, ItemResult, Page, Run, Status
from relight.orchestrator.health import Health
from relight.recovery.explain import Explanation
from relight.recovery.plan import Planned

if TYPE_CHECKING:
    from relight.engine import Relight

P = ParamSpec("P")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


class BlockingHandle(Generic[R_co]):
    """A Handle whose methods block."""

    __slots__ = ("_handle", "_relight", "id")

    def __init__(self, relight: BlockingRelight, handle: Handle[R_co]) -> None:
        self._relight = relight
        self._handle = handle
        self.id = handle.id

    def __repr__(self) -> str:
        return repr(self._handle)

    def result(self, timeout: Duration | None = None) -> R_co:
        return self._relight.call(self._handle.result(timeout))

    def status(self) -> Status:
        return self._relight.call(self._handle.status())

    def describe(self) -> RunDescription:
        return self._relight.call(self._handle.describe())

    def progress(self) -> list[ForeachProgress]:
        return self._relight.call(self._handle.progress())

    def steps(
        self, *, limit: int = 100, cursor: str | None = None, failed: bool = False, newest: bool = False
    ) -> StepPage:
        return self._relight.call(self._handle.steps(limit=limit, cursor=cursor, failed=failed, newest=newest))

    def operations(self) -> list[OperationReport]:
        return self._relight.call(self._handle.operations())

    def signal(self, name: str, payload: Any = None, *, id: str | None = None) -> None:  # noqa: A002 - as Handle.signal
        self._relight.call(self._handle.signal(name, payload, id=id))

    def cancel(self, reason: str = "cancelled by request") -> None:
        self._relight.call(self._handle.cancel(reason))

    def pause(self) -> None:
        self._relight.call(self._handle.pause())

    def resume(self) -> None:
        self._relight.call(self._handle.resume())


def _say_closed(future: concurrent.futures.Future[Any]) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has ended after all
        future.set_exception(RelightError("this Relight was closed while this call was under way"))


class BlockingRelight:
    """What `with Relight(...) as rl` gives."""

    def __init__(self, relight: Relight) -> None:
        self.relight = relight
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relight-loop", daemon=True)
        self._calls: set[concurrent.futures.Future[Any]] = set()  # under way, in whatever thread

    def open(self) -> BlockingRelight:
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            self._loop.close()
            raise RelightError(f"the system refused a thread for a blocking Relight: {error}") from error
        try:
            self.call(self.relight.open())
        except BaseException:
            self._end()
            raise
        return self

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # a copy in a forked process, which has no thread: only the parent closes the engine
        try:
            self.call(self.relight.close())
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for future in list(self._calls):  # nothing else would end them, and their threads would wait for ever
            _say_closed(future)

    def call(self, operation: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            operation.close()
            raise RelightError("this Relight is closed: use it inside `with Relight(...)`")
        if self._pid != os.getpid() or in_flow_code():
            operation.close()
            _ = self.relight.services  # raises the error that says what is wrong
        if threading.get_ident() == self._thread.ident:
            operation.close()
            raise RelightError(
                "a blocking Relight was used on its own event loop; use `async with Relight(...)` in async code"
            )
        future = asyncio.run_coroutine_threadsafe(operation, self._loop)
        self._calls.add(future)
        if self._loop.is_closed():
            _say_closed(future)
        try:
            return future.result()
        finally:
            self._calls.discard(future)

    @property
    def fault(self) -> str | None:
        return self.relight.fault

    def health(self) -> Health:
        """As `Relight.health`. It runs in the caller's thread, so it returns also while the loop is busy."""
        return self.relight.health()

    def idle(self) -> None:
        self.call(self.relight.idle())

    @overload
    def start(self, flow: Flow[P, T] | FlowWithId[P, T], /, *args: P.args, **kwargs: P.kwargs) -> BlockingHandle[T]: ...
    @overload
    def start(self, flow: str, /, *args: Any, id: str | None = None, **kwargs: Any) -> BlockingHandle[Any]: ...
    def start(self, flow: Any, /, *args: Any, **kwargs: Any) -> BlockingHandle[Any]:
        return BlockingHandle(self, self.call(self.relight.start(flow, *args, **kwargs)))

    @overload
    def run(self, flow: Flow[P, T] | FlowWithId[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def run(self, flow: str, /, *args: Any, id: str | None = None, **kwargs: Any) -> Any: ...
    def run(self, flow: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.relight.run(flow, *args, **kwargs))

    def get(self, id: str) -> BlockingHandle[Any]:  # noqa: A002
        return BlockingHandle(self, self.call(self.relight.get(id)))

    def list(
        self,
        *,
        status: Status | str | tuple[Status | str, ...] = (),
        flow: str | None = None,
        since: dt.datetime | float | None = None,
        parent: str | None = None,
        roots_only: bool = True,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        return self.call(
            self.relight.list(
                status=status,
                flow=flow,
                since=since,
                parent=parent,
                roots_only=roots_only,
                limit=limit,
                cursor=cursor,
            )
        )

    def fork(self, id: str, from_step: str | None = None, new_id: str | None = None) -> BlockingHandle[Any]:  # noqa: A002
        return BlockingHandle(self, self.call(self.relight.fork(id, from_step, new_id)))

    def items(self, id: str) -> Sequence[ItemResult]:  # noqa: A002
        return self.call(self.relight.items(id))

    def incomplete(self, limit: int | None = None) -> Sequence[Run]:
        return self.call(self.relight.incomplete(limit))

    def plan(self, limit: int | None = None) -> Sequence[Planned]:
        return self.call(self.relight.plan(limit))

    def explain(self, id: str) -> Explanation:  # noqa: A002
        return self.call(self.relight.explain(id))

    def resume(self, id: str) -> BlockingHandle[Any]:  # noqa: A002
        return BlockingHandle(self, self.call(self.relight.resume(id)))
