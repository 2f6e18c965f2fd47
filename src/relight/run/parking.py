"""Parking: when a run that waits leaves memory. How it leaves is in `leaving.py`.

A cancelled run stays while it cleans up, because its cancel_grace counts in memory. There is one exception: it waits for
another run, and that run needs its room or its thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relight.run import leaving
from relight.run.phase import DRIVEN

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun

CROWDED_SECONDS = 1.0  # between looks whether a cancelled run that waits for another run should leave its room
MOST_CLEAN_UP = 1000  # entries of a cancelled run: after so many it is not parked any more, so that its grace ends


def consider_parking(run: LiveRun) -> None:
    """The whole run waits: park it if it still waits after a moment."""
    if run.departure.park_armed or run.stopping is not None:
        return
    if run.cancel_reason is not None and not _cleans_up_elsewhere(run):
        return
    due = leaving.due_at(run)
    if due is not None and due - run.services.clock.now() <= run.services.config.park_after_seconds:
        return  # it is due too soon
    # At once if other runs wait for room in memory, or if it is a sync flow, which would keep its thread.
    if _is_in_the_way(run):
        run.departure.park_armed = True
        run.services.loop.call_soon(_check_parking, run)
    else:
        _check_later(run, run.services.config.park_after_seconds if run.cancel_reason is None else CROWDED_SECONDS)


def _check_later(run: LiveRun, seconds: float) -> None:
    run.departure.park_armed = True
    run.departure.park_timer = run.services.clock.call_later(seconds, lambda: _check_parking(run))


def _check_parking(run: LiveRun) -> None:
    run.departure.park_armed = False
    if run.phase is not DRIVEN or not run.blocked:
        return  # when it is blocked again, this is considered again
    if run.cancel_reason is None or (_cleans_up_elsewhere(run) and _is_in_the_way(run) and _may_come_back(run)):
        run.services.background.start(leaving.park(run), "park", run.broke)
    elif _cleans_up_elsewhere(run):
        _check_later(run, CROWDED_SECONDS)  # memory may be full by then


def _is_in_the_way(run: LiveRun) -> bool:
    """Whether other runs may be waiting for the room, or the thread, of this one."""
    return run.host.crowded or bool(run.turns.threads)


def _cleans_up_elsewhere(run: LiveRun) -> bool:
    """Whether a cancelled run waits for another run: that run may never begin if this one stays. All other cancelled
    runs stay in memory until their cancel_grace is over."""
    return run.cancelled and any(operation.needs_room for operation in run.pending.values())


def _may_come_back(run: LiveRun) -> bool:
    """The grace of a cancelled run begins anew when it is back in memory. So that this does not go on for ever, it is
    not parked twice without a new entry in between, and not any more after MOST_CLEAN_UP."""
    departure = run.departure
    return departure.grace_began_at < run.writer.sequence <= departure.cancelled_at + MOST_CLEAN_UP
