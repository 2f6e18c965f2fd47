"""Waiting for SIGTERM or SIGINT, also while a step blocks the event loop."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal


async def stop_signal() -> None:
    """Until one arrives. A second one ends the process at once. Main thread only."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    count = itertools.count()

    def tell(*_: object) -> None:
        if next(count) > 0:
            os._exit(1)
        loop.call_soon_threadsafe(told.set)

    # Both kinds of handlers. The loop's own wakes an idle loop whichever thread the system hands the signal to: Python runs
    # handlers in the main thread alone, and that one sleeps on. But a step may be blocking the loop, and the second
    # signal must get through.
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, told.set)
        signal.signal(one, tell)
    await told.wait()
