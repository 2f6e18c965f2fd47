"""The operations that flow code may ask for: one method for each, which only makes a Call. What awaiting that Call does
is in the operation's own file, and ends in `LiveRun.ask`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from relight.flow.call import Call, make
from relight.flow.definitions import Flow
from relight.flow.scope import Scope
from relight.model.run import Run, Status
from relight.run import children, fanout, next_generation, spawned, values, waits
from relight.run.replay_order import Replay


class Asking:
    """The part of a LiveRun that flow code sees (`flow.scope.Operations`)."""

    __slots__ = ()  # LiveRun has them

    unawaited: dict[int, Call]
    numbers: Iterator[int]
    row: Run
    replay: Replay | None
    stopping: str | None

    @property
    def flow_name(self) -> str:
        return self.row.flow

    def logs_nothing(self) -> bool:
        if self.stopping is not None:
            return True
        # A run with status WAITING had been told everything before it left memory, and had asked for all it waits for.
        return self.replay is not None and (self.row.status is Status.WAITING or self.replay.has_more())

    def _call(self, scope: Scope, name: str, begin: Callable[..., Any], *args: Any) -> Call:
        return make(self, name, scope, 3, begin, *args)  # 3: this method, its caller, and sleep() or the like

    def child(self, scope: Scope, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return make(self, flow.name, scope, 2, children.call, flow, args, kwargs)

    def sleep(self, scope: Scope, seconds: float) -> Call:
        return self._call(scope, "sleep", waits.sleep, seconds)

    def wait_for(self, scope: Scope, name: str, payload_type: Any, timeout_seconds: float | None, default: Any) -> Call:
        return self._call(scope, "wait_for", waits.wait_for_signal, name, payload_type, timeout_seconds, default)

    def foreach(self, scope: Scope, items: list[Any], each: Callable[..., Any], concurrency: int) -> Call:
        return self._call(scope, "foreach", fanout.foreach, items, each, concurrency)

    def parallel(self, scope: Scope, branches: list[Callable[[], Any]]) -> Call:
        return self._call(scope, "parallel", fanout.parallel, branches)

    def spawn(
        self,
        scope: Scope,
        flow: Flow[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_id: str | None,
        handle: Callable[[str], Any],
    ) -> Call:
        return self._call(scope, "spawned", spawned.spawn, flow, args, kwargs, run_id, handle)

    def join(self, scope: Scope, run_id: str, flow: Flow[..., Any]) -> Call:
        return self._call(scope, "join", spawned.join, run_id, flow)

    def continue_as(self, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        next_generation.request(self, scope, args, kwargs)  # type: ignore[arg-type]  # it is a LiveRun

    def value(self, scope: Scope, name: str) -> Any:
        if scope.thread is not None:
            return scope.perform(self._call(scope, name, values.get_on_loop, name))
        return values.get_value(self, scope, name)  # type: ignore[arg-type]  # it is a LiveRun
