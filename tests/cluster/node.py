"""An orchestrator of the cluster tests: `python -m tests.cluster.node SETTINGS` (see tests.harness.cluster.Node)."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from relight import Relight
from relight.clock import SYSTEM_CLOCK, Timer
from tests.cluster import flows
from tests.harness.cluster import Node, ready, told
from tests.harness.deeds import open_book

STUCK_SECONDS = 15.0  # closing never takes so long: shutdown_grace is shorter here


class SkewedClock:
    """The clock of a machine that is wrong by so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def now(self) -> float:
        return SYSTEM_CLOCK.now() + self.seconds

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return SYSTEM_CLOCK.call_later(seconds, callback)


async def main(node: Node) -> None:
    async with Relight(node.store, clock=SkewedClock(node.arguments.get("skew", 0.0)), **node.settings()) as rl:
        signalled = asyncio.create_task(rl.signalled())
        await asyncio.sleep(0)  # from here on SIGTERM is caught
        if node.arguments.get("settle"):  # wait until the pass at start is over, which knows dead processes at once
            assert rl._recovery is not None
            await rl._recovery.caught_up.wait()
        ready(rl.services.owner)
        await signalled
        # Now it closes, and then ends. If that takes too long, its log shows where it hangs.
        faulthandler.dump_traceback_later(STUCK_SECONDS)
        asyncio.get_running_loop().call_later(STUCK_SECONDS, _print_tasks)


def _print_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)


if __name__ == "__main__":
    settings = told()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%T"
    )
    flows.GATES = Path(settings.folder)
    open_book(Path(settings.folder) / "book", settings.id)
    asyncio.run(main(settings))
