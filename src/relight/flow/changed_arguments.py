"""Which argument of a step has changed since it was recorded, and what to do about it.

The journal keeps no arguments, only digests: one of all arguments, and a short one of each if there are several
(`parts`). So the changed argument can be named, and its present value examined. Its recorded value is not known.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from typing import Any

from relight.clock import SYSTEM_CLOCK
from relight.flow.jsonform import canonical
from relight.flow.payloads import ArgumentsCodec

_YEAR_SECONDS = 365 * 86_400.0
_UNITS = (1.0, 1e3, 1e6, 1e9)  # of times as numbers: seconds, milliseconds, microseconds, nanoseconds
_TIME = re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d")
_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)


def changed_arguments(
    codec: ArgumentsCodec,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    recorded: Sequence[int],
    today: Sequence[int],
) -> tuple[str, str]:
    """Two texts: which arguments have changed ("argument 'at' changed"), and a sentence on the likely cause, or ""."""
    bound = codec.bind(args, kwargs)
    names = list(bound)
    compared = [name for name in names if name not in codec.volatile]
    if len(recorded) == len(today) == len(names):
        named = [name for name, before, now in zip(names, recorded, today, strict=True) if before != now]
    else:  # recorded by a version that did not record the parts
        named = compared if len(compared) == 1 else []
    hint = _hint({name: bound[name] for name in named or compared})
    if not named:
        return f"arguments changed (one or more of {', '.join(map(repr, compared))})", hint
    return f"argument{'s' if len(named) > 1 else ''} {' and '.join(map(repr, named))} changed", hint


def _hint(values: Mapping[str, Any]) -> str:
    for name, value in values.items():
        if _looks_like_a_time(value):
            return f"{name!r} looks like a time: take it from relight.now(), which gives replay the same time again"
        if _UUID.search(_written(value)):
            return (
                f"{name!r} looks like a random id: take it from relight.uuid(), which gives replay the same one again"
            )
    return ""


def _looks_like_a_time(value: Any) -> bool:
    if isinstance(value, dt.date | dt.time):  # a datetime is a date
        return True
    if isinstance(value, int | float):
        now = SYSTEM_CLOCK.now()
        try:
            return any(abs(value / unit - now) < _YEAR_SECONDS for unit in _UNITS)
        except Exception:  # noqa: BLE001 - an int that no float can be; a subclass with operators of its own
            return False
    return _TIME.search(_written(value)) is not None


def _written(value: Any) -> bytes:
    try:
        return canonical(value)
    except BaseException:  # noqa: BLE001 - a hint must not fail, and values may be anything
        return b""
