"""RunLogger: a logger for flow code, whose lines appear once.

A flow's code is called again whenever its run comes back to memory, and would write its log lines again each time. A RunLogger
writes nothing while the code repeats what it has done before, nor while the run is taken out of memory (which runs the
flow's `finally` blocks). In a step, and outside runs, it just logs.

It is a LoggerAdapter of the standard library: levels, handlers and formatters are those of the logger that it wraps.
Every record has the fields of `FIELDS`, which are empty outside runs.

The journal shows what is repeated. A line between the journal's last entry and a crash leaves no trace in the journal,
so it is written again. The same holds if a process stops in order while a step is in flight.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from relight.flow.scope import CURRENT, Scope, StepInfo, flow_of

FIELDS = ("run_id", "flow", "key")


class RunLogger(logging.LoggerAdapter[logging.Logger]):
    """`RunLogger(logging.getLogger("shop"))`. `relight.logger` is one, around the logger "relight.flow"."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, None)

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the standard library's name
        if not self.logger.isEnabledFor(level):
            return False
        current = CURRENT.get()
        return type(current) is not Scope or not current.run.logs_nothing()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**dict(zip(FIELDS, _here(), strict=True)), **(kwargs.get("extra") or {})}
        return msg, kwargs


def _here() -> tuple[str, str, str]:
    """The run, the flow and the step of the code that logs. Flow code has the path of its scope instead of a step."""
    current = CURRENT.get()
    if type(current) is StepInfo:
        return current.run_id, current.flow, current.step
    if type(current) is Scope:
        run, key = current.run, current.run_key
        return run.run_id(key), flow_of(key) or run.flow_name, current.path
    return "", "", ""


logger = RunLogger(logging.getLogger("relight.flow"))
