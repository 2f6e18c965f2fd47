"""Phase: how far a run in memory has come. It is changed in one place, `RunRecord.enter`, which asserts that it may.

What follows what:

    DRIVEN    STOPPING, LEAVING, ENDING
    STOPPING  LEAVING
    LEAVING   CLOSING; LEFT if taking it out of memory broke
    CLOSING   LEFT; ENDED if what was committed is its end
    ENDING    ENDED; STOPPING if its end could not be written

What each means:

    DRIVEN    the flow goes on: operations begin, and it is told how they have ended
    STOPPING  nothing begins and nothing is told any more; somebody is about to take the run out of memory. It came too late to be
              driven, it cannot go on (it is held), or its entries could not be written, its end among them perhaps
    LEAVING   it is being taken out of memory: steps in flight may finish, then the flow's code is unwound
    CLOSING   nothing of this object acts any more: what the store shall say of it is being committed
    LEFT      it is in memory no more: parked, paused, held, released, or another's
    ENDING    the flow has ended, or continues as the next generation: that is being committed. An object whose next generation
              has begun stays in this phase
    ENDED     it is terminal, durably
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """In this order, so that one comparison tells whether anything of a run may act."""

    DRIVEN = 0
    STOPPING = 1
    LEAVING = 2
    CLOSING = 3
    LEFT = 4
    ENDING = 5
    ENDED = 6


# Looking up a member of an enum takes longer than most of what is done with it.
DRIVEN, STOPPING, LEAVING, CLOSING, LEFT, ENDING, ENDED = Phase

ALLOWED: dict[Phase, frozenset[Phase]] = {
    DRIVEN: frozenset({STOPPING, LEAVING, ENDING}),
    STOPPING: frozenset({LEAVING}),
    LEAVING: frozenset({CLOSING, LEFT}),
    CLOSING: frozenset({LEFT, ENDED}),
    LEFT: frozenset(),
    ENDING: frozenset({STOPPING, ENDED}),
    ENDED: frozenset(),
}
