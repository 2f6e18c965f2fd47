"""Memory: which runs are in memory in this process or about to be, and how much room there is for more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from relight.run.live_run import LiveRun


class Memory:
    """One per orchestrator. Only the orchestrator changes it; its parts look."""

    def __init__(self, limit: int, *, takes_all: bool) -> None:
        self._limit = limit
        self._takes_all = takes_all  # False: recovery is off
        self.live: dict[str, LiveRun] = {}
        self.entered: set[str] = set()  # have come into memory, and not left it in order: as `live`, but for bugs
        self.taking: set[str] = set()  # being claimed and restored right now
        self.creating: Counter[str] = Counter()  # being created, with how many callers of start() want each
        self.reserved = 0  # rooms promised to those
        self.own: set[str] = set()  # runs started here; kept only while recovery is off
        self.stopping = False  # nothing is taken up any more
        self.arrived = asyncio.Event()  # something that was being taken up or created is in memory now, or will not be
        self.departed = asyncio.Event()  # a run has left memory
        self._room_waiters: list[asyncio.Future[None]] = []

    # ---- room

    @property
    def room(self) -> int:
        """How many more runs may be in memory. Those that are being taken up have their room until they are there."""
        return self._limit - len(self.live) - len(self.taking) - self.reserved

    @property
    def crowded(self) -> bool:
        return self.room * 10 < self._limit

    async def wait_for_room(self) -> None:
        """Until a run can be taken up: for recovery, which must not strand what does not fit at once."""
        while self.room <= 0:
            freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room_waiters.append(freed)
            await freed

    def wake_who_waits_for_room(self) -> bool:
        """Something has left: whether there is room now."""
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
        self.taking.discard(run.id)  # or it would have two rooms

    def leave(self, run: LiveRun) -> bool:
        """The run is in memory no more: whether it was, and not another life of it."""
        if self.live.get(run.id) is not run:
            return False
        del self.live[run.id]
        self.entered.discard(run.id)
        self.departed.set()
        return True

    def created(self, run_id: str, reserved: bool) -> None:
        """Creating a run is over, with whatever result."""
        self.reserved -= reserved
        self.creating[run_id] -= 1
        if not self.creating[run_id]:
            del self.creating[run_id]
        self.arrived.set()

    def taken_up(self, run_ids: Sequence[str]) -> None:
        """Taking these up is over, whether they are in memory now or not."""
        self.taking.difference_update(run_ids)
        self.arrived.set()

    # ---- questions

    def is_arriving(self, run_id: str) -> bool:
        """Whether a run is here, or comes in a moment. One that is just leaving may be claimed for its next life already."""
        return run_id in self.creating or run_id in self.taking or run_id in self.live

    def may_take_up(self, run_id: str) -> bool:
        """With recovery off nothing is claimed by itself, but for the runs this process has started."""
        if run_id in self.live or run_id in self.taking:
            return False
        return self._takes_all or run_id in self.own
