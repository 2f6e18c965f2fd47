"""Values: what a flow may not make up itself (the time, chance, ids), made once and given back by replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from relight.flow.operations import VALUES
from relight.flow.payloads import ValueCodec
from relight.flow.scope import Scope
from relight.model.journal import ValueRecorded

if TYPE_CHECKING:
    from relight.lifecycle.run import LiveRun


def take(run: LiveRun, scope: Scope, name: str) -> Any:
    """now(), random(), uuid(): no wait for the commit here; the next step waits before it takes effect with it."""
    if scope.thread is not None:

        async def on_loop() -> Any:
            return _take(run, scope, name)

        return scope.perform(on_loop())
    return _take(run, scope, name)


def _take(run: LiveRun, scope: Scope, name: str) -> Any:
    key = scope.begin(f"${name}")
    make, annotation = VALUES[name]
    codec = ValueCodec(annotation, f"{name}()")
    if scope.recorded is not None and run.replayer is not None:
        outcome = run.find(run.replayer, scope, key, "value")
        if outcome is not None:
            run.replayer.give(outcome)
            return codec.open(bytes(outcome.output))
    data, value = codec.seal(make(run.services.clock, run.services.entropy))
    run.writer.add(ValueRecorded(key, msgspec.Raw(data)))
    run.unsettled = True
    return value
