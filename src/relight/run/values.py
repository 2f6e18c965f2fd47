"""Values that flow code must not make itself (times, random numbers, ids): made once, and returned again on replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from relight.flow.operations import VALUES
from relight.flow.payloads import ValueCodec
from relight.flow.scope import Scope
from relight.model.journal import ValueRecorded
from relight.model.replay import Outcome

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun


def get_value(run: LiveRun, scope: Scope, name: str) -> Any:
    """now(), random(), uuid(). They do not wait for the commit: the next step does, before it can act on the value."""
    key = scope.begin(f"${name}")
    make, annotation = VALUES[name]
    codec = ValueCodec(annotation, f"{name}()")
    recorded = _recorded(run, key)
    if recorded is not None:
        return codec.open(bytes(recorded.output))
    data, value = codec.seal(make(run.services.clock, run.services.entropy))
    _record(run, ValueRecorded(key, msgspec.Raw(data), run.now()))
    return value


def _recorded(run: LiveRun, key: str) -> Outcome | None:
    found = None if run.replay is None else run.replay.values.pop(key, None)
    return found if found is not None or not run.kept else run.kept.pop(key, None)


def _record(run: LiveRun, event: ValueRecorded) -> None:
    """Record a value. The flow does not wait until it is durable: the next step does, before its body begins."""
    if run.replay is not None:
        run.replay.drawn.append(event.key)
    run.when_live(lambda: run.writer.add(event))
    run.seen_not_durable += 1


async def get_on_loop(run: LiveRun, scope: Scope, name: str) -> Any:
    """`get_value` for sync code, called on the run's loop."""
    return get_value(run, scope, name)
