"""Patience: how long to wait for a store that fails before asking it again.

The pause is real time also under a test's clock: what it waits for is a disk or a server, not a schedule.
"""

from __future__ import annotations

import asyncio

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0

_sleep = asyncio.sleep  # noqa: TID251 - see the module's docstring


class Patience:
    """Pauses that grow, until `again` begins anew."""

    def __init__(self) -> None:
        self.seconds = FIRST_PAUSE_SECONDS

    def again(self) -> None:
        self.seconds = FIRST_PAUSE_SECONDS

    async def pause(self) -> None:
        seconds, self.seconds = self.seconds, min(2 * self.seconds, LONGEST_PAUSE_SECONDS)
        await _sleep(seconds)
