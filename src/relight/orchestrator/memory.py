"""Memory: which runs are in memory in this process, or about to be, and how much room there is for more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from relight.run.live_run import LiveRun


class Memory:
    """One per orchestrator. Only the orchestrator changes it; its parts read it."""

    def __init__(self, limit: int, *, takes_all: bool) -> None:
        self._limit = limit
        self._takes_all = takes_all  # False: recovery is off
        self.live: dict[str, LiveRun] = {}
        self.entered: set[str] = set()  # runs that came in and did not leave in order; a bug may drop one from `live`
        self.taking: set[str] = set()  # runs that are being claimed and restored right now
        self.creating: Counter[str] = Counter()  # runs that are being created: how many calls of start() create each
        self.reserved = 0  # for how many of those calls room is reserved
        self.own: set[str] = set()  # runs that were started or resumed here; used only while recovery is off
        self.stopping = False  # no run is taken up any more
        self.stopped = False  # nothing more happens to any run here, even if one has stayed in `live`
        self.arrived = asyncio.Event()  # a run that was being taken up or created is in memory now, or will not be
        self.departed = asyncio.Event()  # a run has left memory
        self._room_waiters: list[asyncio.Future[None]] = []

    # ---- room

    @property
    def room(self) -> int:
        """How many more runs may be in memory. Runs that are being taken up or created count as if they were there."""
        return self._limit - len(self.live) - len(self.taking) - self.reserved

    @property
    def crowded(self) -> bool:
        return self.room * 10 < self._limit

    async def wait_for_room(self) -> None:
        """Wait until a run can be taken up. Recovery waits here, so that no orphan is left behind for lack of room."""
        while self.room <= 0:
            freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room_waiters.append(freed)
            await freed

    def wake_who_waits_for_room(self) -> bool:
        """A run may have left: wake those who wait for room, if there is some. Returns whether there is."""
        if self.room <= 0:
            return False
        for waiter in self._room_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._room_waiters.clear()
        return True

    # ---- coming in and leaving

    def enter(self, run: LiveRun) -> None:
        """The run is in memory from now on."""
        self.live[run.id] = run
        self.entered.add(run.id)
        self.taking.discard(run.id)  # so that it is not counted twice

    def leave(self, run: LiveRun) -> bool:
        """The run is in memory no more. Returns False if it was not, or if a later object of the same run is there."""
        if self.live.get(run.id) is not run:
            return False
        del self.live[run.id]
        self.entered.discard(run.id)
        self.departed.set()
        return True

    def created(self, run_id: str, reserved: bool) -> None:
        """Creating a run has succeeded or failed."""
        self.reserved -= reserved
        self.creating[run_id] -= 1
        if not self.creating[run_id]:
            del self.creating[run_id]
        self.arrived.set()

    def taken_up(self, run_ids: Sequence[str]) -> None:
        """These runs are in memory now, or could not be taken up."""
        self.taking.difference_update(run_ids)
        self.arrived.set()

    def started_here(self, run_id: str) -> None:
        """A caller of this process has started or resumed the run: this process may take it up while recovery is off."""
        if not self._takes_all:
            self.own.add(run_id)

    # ---- queries

    def is_arriving(self, run_id: str) -> bool:
        """Whether a run is in memory, or comes in a moment. A run that is leaving may be claimed again already."""
        return run_id in self.creating or run_id in self.taking or run_id in self.live

    def may_take_up(self, run_id: str) -> bool:
        """Whether this process may take the run up now. With recovery off: only if it was started or resumed here."""
        if run_id in self.live or run_id in self.taking:
            return False
        return self._takes_all or run_id in self.own
