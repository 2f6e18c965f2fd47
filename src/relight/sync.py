"""The functions of `relight` that flow code calls, with the types that they have in sync code.

    from relight import Relight
    from relight.sync import flow, step, wait_for

They are the same objects. Only their types differ (`sync.pyi`): here the call of a step, of a flow or of `wait_for` has the
type of its result, as in a sync flow and outside runs. In `relight` the call has the type of an awaitable, and type
checkers accept every use of it without await. So programs without async import from here to be checked in full.
"""

from __future__ import annotations

from relight.flow.definitions import Flow, Step, flow, step
from relight.flow.operations import SpawnedRun, foreach, parallel, sleep, spawn, wait_for

__all__ = ["Flow", "SpawnedRun", "Step", "flow", "foreach", "parallel", "sleep", "spawn", "step", "wait_for"]
