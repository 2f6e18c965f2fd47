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
    key = scope.begin(f"${name}")
    make, annotation = VALUES[name]
    codec = ValueCodec(annotation, f"{name}()")
    recorded = run.recorded_value(key)
    if recorded is not None:
        return codec.open(bytes(recorded.output))
    data, value = codec.seal(make(run.services.clock, run.services.entropy))
    run.record_value(ValueRecorded(key, msgspec.Raw(data)))
    return value


async def take_on_loop(run: LiveRun, scope: Scope, name: str) -> Any:
    """The same, for sync code."""
    return take(run, scope, name)
