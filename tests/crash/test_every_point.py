"""Each shape is killed before, after and during every storage operation and step, and resumed in a fresh process.

Lost 0, committed steps repeated 0, steps in flight repeated at most once per kill, and the right end: see
`relight.testing.crashpoints` for what is tried and `relight.testing.ledger` for how it is judged.
"""

from __future__ import annotations

import pytest

from tests.crash.catalogue import SHAPES
from tests.crash.conftest import Explorers, Verify


@pytest.mark.timeout(600)  # a matrix of processes, however busy the machine is
@pytest.mark.parametrize("name", SHAPES)
def test_every_crash_point(name: str, explorers: Explorers, verify: Verify) -> None:
    shape = SHAPES[name]
    explorer = explorers(shape.scenario, config=shape.config, check=shape.check)
    for _ in range(3 if shape.parks else 0):
        if explorer.baseline.comebacks:
            break
        explorer._baseline = None  # on a busy machine what it waits for may come before it is parked: once more
    if shape.parks:
        assert explorer.baseline.comebacks, "it was never parked: what this shape is about did not happen"
    # What a death before an operation leaves, a death after the last write has left, mostly; refusals kill nobody: so of these
    # some are tried here, and all of them by `make soak`.
    report = explorer.explore(("after", "during"))
    report = report.plus(explorer.explore(("before", "raise"), step=4)).plus(explorer.explore(("refuse",), step=6))
    reached = report.points + report.passed_over
    assert reached >= len(explorer.baseline.operations), "many operations were not reached"
    verify(report)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPES)
def test_every_crash_point_without_exception(name: str, explorers: Explorers, verify: Verify) -> None:
    shape = SHAPES[name]
    verify(explorers(shape.scenario, config=shape.config, check=shape.check).explore())
