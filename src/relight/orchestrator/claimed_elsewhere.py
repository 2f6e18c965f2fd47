"""Noticing that another process has claimed a run which is in memory here.

When the run writes, the store fences it. A run that only waits (for a socket, or with a long park_after) would stay in
memory, and a caller that awaits its result here would wait on. So when other processes have written, this process
compares the epochs of its runs with the store.
"""

from __future__ import annotations

from relight.run.live_run import LiveRun
from relight.run.services import Services

LOOK_SECONDS = 1.0  # the shortest time between two looks


class ClaimedElsewhere:
    """One per orchestrator. While no other process writes to the store, it never looks."""

    def __init__(self, services: Services, live: dict[str, LiveRun]) -> None:
        self._services = services
        self._live = live
        self._next_look = 0.0
        self.others_wrote = False

    def look_soon(self) -> None:
        """The lease of this process had lapsed: check the epochs in the next round."""
        self.others_wrote, self._next_look = True, 0.0

    async def look(self) -> None:
        """Called in every round of the orchestrator."""
        now = self._services.loop.time()
        if not self.others_wrote or now < self._next_look:
            return  # too early: the next round comes in a few seconds in any case
        self.others_wrote, self._next_look = False, now + LOOK_SECONDS
        for row in await self._services.store.get_runs(list(self._live)):
            run = self._live.get(row.id)
            if run is not None and row.epoch > run.writer.epoch:
                run.writer.confirm_ownership()
