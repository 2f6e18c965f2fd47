"""Retry: how often, after which pause, and for which exceptions a step or flow is tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from relight.durations import Duration, parse_duration
from relight.errors import DefinitionError

Backoff = Literal["fixed", "exponential", "fibonacci"]
ExceptionTypes = type[BaseException] | Iterable[type[BaseException]]


class Retry:
    """`Retry(attempts=5, delay="1s", backoff="exponential", max_delay="1m", jitter=0.1, not_on=ValueError)`.

    `attempts` includes the first try. `jitter` spreads each delay by up to that share in both directions. Only
    exceptions of `on` are retried, and never those of `not_on`. The count and the pause survive a crash.
    """

    __slots__ = ("attempts", "backoff", "delay_seconds", "jitter", "max_delay_seconds", "not_on", "on")

    def __init__(
        self,
        attempts: int = 3,
        delay: Duration = 0,
        backoff: Backoff = "fixed",
        max_delay: Duration | None = None,
        jitter: float = 0.0,
        on: ExceptionTypes = Exception,
        not_on: ExceptionTypes = (),
    ) -> None:
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise DefinitionError(f"Retry(attempts={attempts!r}): give a whole number of tries, 1 or more")
        if backoff not in ("fixed", "exponential", "fibonacci"):
            raise DefinitionError(f"Retry(backoff={backoff!r}): use 'fixed', 'exponential' or 'fibonacci'")
        if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0.0 <= jitter <= 1.0:
            raise DefinitionError(f"Retry(jitter={jitter!r}): give a share between 0 and 1, such as 0.1")
        self.attempts = attempts
        self.delay_seconds = parse_duration(delay, "Retry(delay=)")
        self.backoff = backoff
        self.max_delay_seconds = None if max_delay is None else parse_duration(max_delay, "Retry(max_delay=)")
        self.jitter = jitter
        self.on = _exception_types(on, "on")
        self.not_on = _exception_types(not_on, "not_on")

    def again(self, attempt: int, error: BaseException) -> bool:
        """Whether another attempt follows attempt number `attempt`, which failed with `error`."""
        return attempt < self.attempts and isinstance(error, self.on) and not isinstance(error, self.not_on)

    def delay_after(self, attempt: int, random: float) -> float:
        """Seconds between attempt number `attempt` and the next; `random`, in [0, 1), is for the jitter."""
        delay = self.delay_seconds * _FACTOR[self.backoff](attempt)
        if self.max_delay_seconds is not None:
            delay = min(delay, self.max_delay_seconds)
        return delay * (1.0 + self.jitter * (2.0 * random - 1.0))

    def describe(self) -> dict[str, object]:
        """The options as plain data, for fingerprints."""
        return {
            "attempts": self.attempts,
            "delay": self.delay_seconds,
            "backoff": self.backoff,
            "max_delay": self.max_delay_seconds,
            "jitter": self.jitter,
            "on": sorted(t.__qualname__ for t in self.on),
            "not_on": sorted(t.__qualname__ for t in self.not_on),
        }


def _fibonacci(n: int) -> float:
    a, b = 1.0, 1.0
    for _ in range(min(n, 1000) - 1):
        a, b = b, a + b
    return a


_FACTOR: dict[str, Callable[[int], float]] = {
    "fixed": lambda attempt: 1.0,
    "exponential": lambda attempt: 2.0 ** min(attempt - 1, 1000),
    "fibonacci": _fibonacci,
}


def _exception_types(types: ExceptionTypes, option: str) -> tuple[type[BaseException], ...]:
    found = tuple(types) if isinstance(types, Iterable) else (types,)
    if not all(isinstance(item, type) and issubclass(item, BaseException) for item in found):
        raise DefinitionError(f"Retry({option}={types!r}): give an exception class or several")
    return found
