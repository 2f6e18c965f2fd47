"""Crashes: what a run's journal tells of the deaths of its processes since its last progress.

A process that dies takes all its runs with it, and nobody can tell which of them has killed it. So each counts that death. Those
that share several deaths in a row without progress are suspects, and are tried apart from each other: see model/decisions.py.
"""

from __future__ import annotations

import msgspec

from relight.model.journal import RunRecovered


class Crashes(msgspec.Struct, frozen=True, array_like=True):
    """Of one run. Any entry but RunRecovered and StepStarted is progress, and makes them none."""

    count: int = 0  # deaths in a row without progress
    alone: int = 0  # of them those in which this run was the only suspect
    tried_with: int = 0  # it is being tried since `at`, together with so many suspects, itself included; 0: it is not
    trial_seconds: float = 0.0  # how long it has to live, without a death of its process, to pass
    at: float = 0.0  # when it was recovered last

    def after(self, event: RunRecovered) -> Crashes:
        return Crashes(
            self.count + event.died,
            self.alone + event.alone,
            event.tried_with,
            event.trial_seconds or self.trial_seconds,
            event.at if event.died or event.tried_with else self.at,  # one that has passed goes on as it was
        )


NO_CRASHES = Crashes()
