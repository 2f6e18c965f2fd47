"""Durations as people write them ("1h30m"), parsed once at the edge: inside, they are floats of seconds."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from decimal import Decimal
from typing import TypeAlias

from relight.errors import DurationError

Duration: TypeAlias = str | float | timedelta
"""What a user may write for a duration: "1h30m", seconds as a number (an int too), a timedelta."""

MAX_SECONDS = 36_525 * 86_400.0
"""A hundred years. A longer duration is a mistake in the unit, and a due time after the year 9999 cannot be shown."""

ACCEPTED = (
    'a duration such as "250ms", "30s", "1.5h", "1h30m", "3d" or "2w" (units in the order w d h m s ms), '
    "a number of seconds, or a timedelta; not negative, at most 100 years"
)
"""What `parse_duration` accepts, in words: for its own message and for the descriptions of options."""

# Largest first: the order in which units must be written, and the order in which they are printed.
_UNIT_MILLISECONDS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_WRITTEN = re.compile(
    r"\s*".join(rf"(?:(?P<{unit}>{_NUMBER})\s*{unit}(?![a-z]))?" for unit in _UNIT_MILLISECONDS), re.ASCII
)
_BARE_NUMBER = re.compile(_NUMBER, re.ASCII)
_MAX_CHARACTERS = 100  # of a written duration, and of a refused one in a message


def parse_duration(value: Duration, what: str) -> float:
    """Return `value` in seconds, from 0 to `MAX_SECONDS`.

    A string that is only a number means seconds too, because an environment variable cannot have a number that is no
    string. `what` names the option in the DurationError that anything else raises.
    """
    seconds = _to_seconds(value)
    # With `not 0 <= …`, NaN is refused too: every comparison with it is false.
    if seconds is None or not 0 <= seconds <= MAX_SECONDS:
        raise DurationError(f"{what}: {_shown(value)} is not accepted; expected {ACCEPTED}")
    return seconds


def _to_seconds(value: object) -> float | None:
    """`value` in seconds, not yet checked for range; None if it is no duration."""
    match value:
        case bool():  # Python counts it as an int; from a caller it is a mistake
            return None
        case timedelta():
            return value.total_seconds()
        case float():
            return value
        case int():
            return float(value) if abs(value) <= MAX_SECONDS else math.inf
        case str() if len(value) <= _MAX_CHARACTERS:
            return _read(value.strip())
        case _:
            return None


def _read(text: str) -> float | None:
    if _BARE_NUMBER.fullmatch(text):
        return float(text)
    parts = _WRITTEN.fullmatch(text)
    if parts is None or not any(parts.groups()):
        return None
    # Decimal, so that "0.1s" and "100ms" are the same float.
    milliseconds = sum(
        Decimal(number) * _UNIT_MILLISECONDS[unit] for unit, number in parts.groupdict().items() if number
    )
    return float(milliseconds / 1000)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MAX_CHARACTERS else f"{shown[:_MAX_CHARACTERS]}…"


def format_duration(seconds: float) -> str:
    """Write a duration as `parse_duration` reads it, rounded to the millisecond: "1d2h", "1m30s250ms", "0s".

    A negative one ("three seconds overdue") gets a minus sign, which `parse_duration` refuses.
    """
    rest = round(abs(seconds) * 1000)
    if rest == 0:
        return "0s"
    written = "-" if seconds < 0 else ""
    for unit, size in _UNIT_MILLISECONDS.items():
        if unit == "w":  # people say "30d", not "4w2d"
            continue
        count, rest = divmod(rest, size)
        if count:
            written += f"{count}{unit}"
    return written
