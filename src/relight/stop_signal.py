"""Waiting for SIGTERM or SIGINT, also while a step blocks the event loop."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal


async def stop_signal() -> None:
    """Wait until a signal arrives. A second signal ends the process at once. Main thread only."""
    loop = asyncio.get_running_loop()
    received = asyncio.Event()
    count = itertools.count()

    def on_signal(*_: object) -> None:
        if next(count) > 0:
            os._exit(1)
        loop.call_soon_threadsafe(received.set)

    # Both kinds of handlers are needed. The system may deliver the signal to any thread. Python runs handlers in the
    # main thread only, which would sleep on; the loop's own handler wakes the idle loop. But while a step blocks the
    # loop, only Python's handler runs, and the second signal must get through.
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, received.set)
        signal.signal(one, on_signal)
    await received.wait()
