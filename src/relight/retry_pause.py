"""How long to wait before something that failed is tried again: longer each time, up to a limit.

The pause is in real time, also under a test's clock: it waits for a disk, a server or a bug, not for a schedule.
"""

from __future__ import annotations

import asyncio

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0

_sleep = asyncio.sleep  # noqa: TID251 - see the module's docstring


async def real_pause(seconds: float) -> None:
    """Wait in real time: for a server or a network, which no test's clock moves."""
    await _sleep(seconds)


class RetryPause:
    """Pauses that grow, until `reset`."""

    def __init__(self) -> None:
        self.seconds = FIRST_PAUSE_SECONDS  # the next one

    def reset(self) -> None:
        self.seconds = FIRST_PAUSE_SECONDS

    def next(self) -> float:
        """The length of this pause. The next pause will be longer."""
        seconds, self.seconds = self.seconds, min(2 * self.seconds, LONGEST_PAUSE_SECONDS)
        return seconds

    async def wait(self) -> None:
        await real_pause(self.next())
