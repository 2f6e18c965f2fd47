"""Each shape is killed before, after and during every storage operation and step, and resumed in a fresh process. `make test`
takes a sample of the points, `make soak-ci` most of them, `make soak` all. With room for one run or two at a time `make test`
leaves each shape undisturbed, and `make soak-ci` takes the sample.

No step is lost, no committed step is repeated, a step in flight is repeated at most once per kill, and the end is
right. What is tried is in `relight.testing.crashpoints`, and how it is judged in `relight.testing.ledger`.
"""

from __future__ import annotations

from zlib import crc32

import pytest

from relight.testing.crashpoints import CrashPlan, Explorer, Mode, Report
from tests.crash.catalogue import SHAPES
from tests.crash.conftest import Explorers, Verify

# One of so many operations of each mode. The first one differs from shape to shape: so each shape tries another point
# of what they have in common, such as opening.
SAMPLE: dict[Mode, int] = {"after": 11, "during": 7, "before": 29, "raise": 23, "refuse": 37}
# A death before an operation mostly leaves the same as a death after the last write. A refusal kills no process.
MOST: dict[Mode, int] = {"after": 1, "during": 1, "before": 4, "raise": 4, "refuse": 6}


def full_house(name: str, explorers: Explorers, limit: int) -> Explorer:
    """With room for so many runs at a time."""
    shape = SHAPES[name]
    return explorers(shape.scenario, config={**(shape.config or {}), "max_concurrent_runs": limit}, check=shape.check)


def explorer_of(name: str, explorers: Explorers) -> Explorer:
    shape = SHAPES[name]
    explorer = explorers(shape.scenario, config=shape.config, check=shape.check)
    for _ in range(20 if shape.parks else 0):
        if explorer.baseline.comebacks:
            break
        explorer._baseline = None  # on a busy machine its signal may come before it is parked: try once more
    if shape.parks:
        assert explorer.baseline.comebacks, "it was never parked: what this shape is about did not happen"
    return explorer


def sampled(name: str, explorer: Explorer) -> list[CrashPlan]:
    plans = []
    for mode, step in SAMPLE.items():
        numbers = range(1, explorer._total(mode) + 1)
        worth = [one for one in numbers if mode not in ("after", "raise") or not explorer._only_reads(one)]
        first = crc32(f"{name}, {mode}".encode()) % min(step, max(len(worth), 1))
        plans += [CrashPlan(mode, one) for one in worth[first::step]]
    return plans


@pytest.mark.timeout(600)  # a matrix of processes, however busy the machine is
@pytest.mark.parametrize("name", SHAPES)
def test_a_sample_of_the_crash_points(name: str, explorers: Explorers, verify: Verify) -> None:
    try_a_sample(name, explorer_of(name, explorers), verify)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_a_full_house_comes_to_its_end(name: str, limit: int, explorers: Explorers) -> None:
    """Undisturbed: what waits makes room for what it waits for."""
    assert full_house(name, explorers, limit).baseline.outcome.value is not None


@pytest.mark.soak_ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHAPES)
def test_a_sample_of_the_crash_points_of_a_full_house(name: str, explorers: Explorers, verify: Verify) -> None:
    try_a_sample(name, full_house(name, explorers, 1), verify)


def try_a_sample(name: str, explorer: Explorer, verify: Verify) -> None:
    report = Report(scenario=explorer.scenario)
    plans = sampled(name, explorer)
    for plan in plans:
        trial = explorer.endure([plan])
        if trial.fired or trial.problems:  # how many operations there are depends a little on timing
            report.add(trial)
    assert report.points >= max(len(plans) // 2, 2), "many operations were not reached"
    verify(report)


@pytest.mark.soak_ci
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPES)
def test_every_crash_point(name: str, explorers: Explorers, verify: Verify) -> None:
    explorer = explorer_of(name, explorers)
    report = Report(scenario=explorer.scenario)
    for mode, step in MOST.items():
        report = report.plus(explorer.explore((mode,), step=step))
    reached = report.points + report.passed_over
    assert reached >= len(explorer.baseline.operations), "many operations were not reached"
    verify(report)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHAPES)
def test_every_crash_point_without_exception(name: str, explorers: Explorers, verify: Verify) -> None:
    shape = SHAPES[name]
    verify(explorers(shape.scenario, config=shape.config, check=shape.check).explore())
