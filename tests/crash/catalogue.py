"""Every shape, with the settings and the checks of its exploration."""

from __future__ import annotations

from typing import Any, NamedTuple

from relight.testing.crashpoints import Check
from tests.crash import checks

PARKING = {"park_after": "1ms"}  # every run that waits leaves memory


class Shape(NamedTuple):
    scenario: str
    config: dict[str, Any] | None = None
    check: Check | None = None
    parks: bool = False  # an undisturbed run of this shape must leave memory and come back


SHAPES = {
    "ten steps in a row": Shape("ten_steps"),
    "ten steps, checkpointed": Shape("ten_steps", {"checkpoint": {"every": 3}}),
    "values over the blob threshold": Shape("large_values", {"payload": {"blob_threshold": 16}}),
    "recorded values": Shape("recorded_values", check=checks.values_stay),
    "many runs at once": Shape("crowd"),
    "many runs, room for two": Shape("crowd", {"max_concurrent_runs": 2}),
    "gather of five helpers": Shape("five_helpers"),
    "task groups and tasks": Shape("task_group"),
    "foreach, an item changed": Shape("sequential_items", check=checks.items_in_turn),
    "foreach at once, an item changed": Shape("concurrent_items", check=checks.items_at_once),
    "foreach of a step, an item changed": Shape("step_items", check=checks.items_as_steps),
    "three levels of child flows": Shape("three_levels"),
    "spawned runs": Shape("spawned_runs"),
    "spawned runs, parent parked": Shape("spawned_runs", PARKING, parks=True),
    "a run that others join": Shape("joined_by_others"),
    "a run that others join, parked": Shape("joined_by_others", PARKING, parks=True),
    "generations": Shape("generations"),
    "generations, parked": Shape("generations", PARKING),
    "sleep in memory": Shape("napping"),
    "sleep parked": Shape("napping", PARKING, parks=True),
    "signals before the crash": Shape("signals_before"),
    "signals before the crash, parked": Shape("signals_before", PARKING),
    "signals during the crash": Shape("signals_during"),
    "signals during the crash, parked": Shape("signals_during", PARKING, parks=True),
    "signals after the crash": Shape("signals_after"),
    "signals after the crash, parked": Shape("signals_after", PARKING, parks=True),
    "try, except, finally around a parked wait": Shape("guarded_wait", PARKING, parks=True),
    "retries with back-off": Shape("retrying"),
    "retries with back-off, parked": Shape("retrying", PARKING),
    "a flow that is retried": Shape("flow_retries"),
    "on_crash=fail": Shape("never_twice", check=checks.never_twice),
    "cancelled in a wait": Shape("cancelled_in_wait"),
    "cancelled in a wait, parked": Shape("cancelled_in_wait", PARKING),
    "cancelled in a step": Shape("cancelled_in_step", check=checks.cancelled),
    "cancelled somewhere": Shape("cancelled_at_once", check=checks.cancelled_somewhere),
    "cancelled with what it spawned": Shape("cancelled_family", check=checks.cancelled_together),
    "paused and resumed": Shape("paused_and_resumed"),
    "paused and resumed, parked": Shape("paused_and_resumed", PARKING),
    "sync flow with parallel": Shape("sync_flow"),
    "sync flow with parallel, parked": Shape("sync_flow", PARKING, parks=True),
}
