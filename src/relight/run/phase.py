"""Phase: how far a run in memory has come. Only `RunRecord.enter` changes it, and asserts that the change is allowed.

Which phases may follow each phase:

    DRIVEN    STOPPING, LEAVING, ENDING
    STOPPING  LEAVING
    LEAVING   CLOSING; LEFT if a bug broke the leaving
    CLOSING   LEFT; ENDED if the run's end was committed
    ENDING    ENDED; STOPPING if the run's end could not be written

What each phase means:

    DRIVEN    the flow goes on: operations begin, and the flow is told their outcomes
    STOPPING  nothing begins and nothing is told any more; the run is about to be taken out of memory. It came too late
              to be driven, it cannot go on (it will be held), or its entries (its end, perhaps) could not be written
    LEAVING   the run is being taken out of memory: steps in flight may finish, then the flow's code is unwound
    CLOSING   nothing of this object acts any more: the run's new status is being committed
    LEFT      the run is no longer in memory: it is parked, paused, held, released, or owned by another process
    ENDING    the flow has ended, or continues as the next generation: that is being committed. An object whose next
              generation has begun stays in this phase
    ENDED     the run is terminal, and that is durable
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """In this order, so that one comparison shows whether anything of a run may act."""

    DRIVEN = 0
    STOPPING = 1
    LEAVING = 2
    CLOSING = 3
    LEFT = 4
    ENDING = 5
    ENDED = 6


# Module constants, because looking up a member of an enum takes longer than most of what is done with it.
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
