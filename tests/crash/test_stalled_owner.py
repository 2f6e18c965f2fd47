"""A process stalls (a suspended laptop, a paused machine) while another takes its runs over. When it wakes up, it
changes nothing any more, learns that it has been fenced, and comes to the same end."""

from __future__ import annotations

import pytest

from relight.testing.crashpoints import Report
from tests.crash.catalogue import SHAPES
from tests.crash.conftest import Explorers, Verify

# How many steps it may be executing, or may be about to begin: as many as the shape has branches at once.
BRANCHES = {
    "ten steps in a row": 1,
    "ten steps, checkpointed": 1,
    "many runs at once": 6,
    "gather of five helpers": 5,
    "three levels of child flows": 6,
    "spawned runs": 4,
    "sleep parked": 1,
    "signals during the crash, parked": 1,
    "retries with back-off": 1,
    "cancelled in a wait": 2,
    "sync flow with parallel": 3,
}


@pytest.mark.timeout(600)  # a matrix of processes, however busy the machine is
@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize(
    "step", [13, pytest.param(2, marks=pytest.mark.soak_ci), pytest.param(1, marks=pytest.mark.soak)]
)
def test_stalled_before_every_operation(name: str, step: int, explorers: Explorers, verify: Verify) -> None:
    shape = SHAPES[name]
    explorer = explorers(shape.scenario, config=shape.config, check=shape.check)
    report = Report(scenario=f"{explorer.scenario} overtaken")
    for operation in range(1, len(explorer.baseline.operations) + 1, step):
        trial = explorer.overtake(operation)
        report.add(trial)
        assert len(trial.late) <= BRANCHES[name], f"stall:{operation}: it went on with {trial.late}"
    assert report.points >= max(10 // step, 2)
    verify(report)
