"""Each shape is killed before, after and during every storage operation and step, and resumed in a fresh process. `make test`
takes a sample of the points, `make soak-ci` most of them, `make soak` all.

Lost 0, committed steps repeated 0, steps in flight repeated at most once per kill, and the right end: see
`relight.testing.crashpoints` for what is tried and `relight.testing.ledger` for how it is judged.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from relight.testing.crashpoints import Explorer, Mode, Report
from tests.crash.catalogue import SHAPES
from tests.crash.conftest import Explorers, Verify

# Every so-many-th operation in each mode.
SAMPLE: dict[Mode, int] = {"after": 6, "during": 5, "before": 17, "raise": 13, "refuse": 23}
# What a death before an operation leaves, a death after the last write has left, mostly; refusals kill nobody.
MOST: dict[Mode, int] = {"after": 1, "during": 1, "before": 4, "raise": 4, "refuse": 6}


def explored(name: str, explorers: Explorers, steps: Mapping[Mode, int]) -> tuple[Explorer, Report]:
    shape = SHAPES[name]
    explorer = explorers(shape.scenario, config=shape.config, check=shape.check)
    for _ in range(20 if shape.parks else 0):
        if explorer.baseline.comebacks:
            break
        explorer._baseline = None  # on a busy machine what it waits for may come before it is parked: once more
    if shape.parks:
        assert explorer.baseline.comebacks, "it was never parked: what this shape is about did not happen"
    report = Report(scenario=explorer.scenario)
    for mode, step in steps.items():
        report = report.plus(explorer.explore((mode,), step=step))
    return explorer, report


@pytest.mark.timeout(600)  # a matrix of processes, however busy the machine is
@pytest.mark.parametrize("name", SHAPES)
def test_a_sample_of_the_crash_points(name: str, explorers: Explorers, verify: Verify) -> None:
    explorer, report = explored(name, explorers, SAMPLE)
    assert report.points >= len(explorer.baseline.operations) / 12, "many operations were not reached"
    verify(report)


@pytest.mark.soak_ci
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPES)
def test_every_crash_point(name: str, explorers: Explorers, verify: Verify) -> None:
    explorer, report = explored(name, explorers, MOST)
    reached = report.points + report.passed_over
    assert reached >= len(explorer.baseline.operations), "many operations were not reached"
    verify(report)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHAPES)
def test_every_crash_point_without_exception(name: str, explorers: Explorers, verify: Verify) -> None:
    shape = SHAPES[name]
    verify(explorers(shape.scenario, config=shape.config, check=shape.check).explore())
