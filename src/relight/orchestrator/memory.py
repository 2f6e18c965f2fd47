"""Memory: which runs are in memory in this process, or about to be, and how much room there is for more.

Recovery and the waker fill the same room, in turns. Neither waits for room inside a round: it says that it wants room
(`SeeksRoom`), and is woken when there is some.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from relight.recovery.memory import SeeksRoom
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
        self.claiming = 0  # how many due runs the store may be claiming for this process right now
        self.own: set[str] = set()  # runs that were started or resumed here; used only while recovery is off
        self.stopping = False  # no run is taken up any more
        self.stopped = False  # nothing more happens to any run here, even if one has stayed in `live`
        self.arrived = asyncio.Event()  # a run that was being taken up or created is in memory now, or will not be
        self.departed = asyncio.Event()  # a run has left memory
        self.seekers: list[SeeksRoom] = []  # who takes up runs; the first of those that want room has the next one

    # ---- room

    @property
    def room(self) -> int:
        """How many more runs may be in memory. Runs that are being claimed, taken up or created count as if they were
        there."""
        return self._limit - len(self.live) - len(self.taking) - self.reserved - self.claiming

    @property
    def crowded(self) -> bool:
        return (self.room + self.claiming) * 10 < self._limit  # nearly always far fewer are claimed than may be

    @property
    def room_is_wanted(self) -> bool:
        """Whether runs may be waiting in the store for room here."""
        return any(seeker.wants_room for seeker in self.seekers)

    def room_for(self, seeker: SeeksRoom) -> int:
        """How many runs this seeker may take up now. If it is another one's turn, that one is left room for one run:
        otherwise the faster of the two would always take the room, and the other one never found any."""
        first = next((one for one in self.seekers if one is seeker or one.wants_room), seeker)
        return max(self.room - (first is not seeker), 0)

    def looked(self, seeker: SeeksRoom, *, had_room: bool) -> None:
        """This seeker has looked for runs to take up. If it had room for any, it is the others' turn now. In any case
        the others may need to be woken: it may be their turn for the room that there is."""
        if had_room:
            self.seekers.remove(seeker)
            self.seekers.append(seeker)
        self.offer_room(but=seeker)

    def offer_room(self, *, but: SeeksRoom | None = None) -> None:
        """A run may have left: if there is room, wake those that want it."""
        if self.room > 0:
            for seeker in self.seekers:
                if seeker is not but and seeker.wants_room:
                    seeker.wake_up()

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
