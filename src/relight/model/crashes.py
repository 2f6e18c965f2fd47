"""Crashes: what a run's journal says about the deaths of its processes since its last progress.

A process that dies stops all its runs, and Relight cannot know which run caused the death. So each run counts that
death. Runs that count several deaths in a row without progress are suspects, and are tried apart from each other: see
model/decisions.py.
"""

from __future__ import annotations

import msgspec

from relight.model.journal import RunRecovered


class Crashes(msgspec.Struct, frozen=True, array_like=True):
    """The crashes of one run. Any entry but RunRecovered and StepStarted is progress, and sets them back to none."""

    count: int = 0  # deaths in a row without progress
    alone: int = 0  # those of them in which this run was the only suspect
    tried_with: int = 0  # the run is on trial since `at`, with so many suspects, itself included; 0: it is not on trial
    trial_seconds: float = 0.0  # the run passes if its process does not die for so long
    at: float = 0.0  # when the run was last recovered, or its trial began

    def after(self, event: RunRecovered) -> Crashes:
        return Crashes(
            self.count + event.died,
            self.alone + event.alone,
            event.tried_with,
            event.trial_seconds or self.trial_seconds,
            event.at if event.died or event.tried_with else self.at,  # passing a trial does not change `at`
        )


NO_CRASHES = Crashes()
