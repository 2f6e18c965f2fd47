"""Killed again while it recovers, killed many times in a row, and killed once too often."""

from __future__ import annotations

import random
from typing import Any

import pytest

from relight.testing.crashpoints import MODES, CrashPlan, Report
from tests.crash.catalogue import SHAPES
from tests.crash.conftest import Explorers, Verify
from tests.seeds import known_seeds

CI = pytest.mark.soak_ci

# After these first kills, every operation of the recovery is tried as the second kill. They lie in the middle of the
# shape.
SECOND_ORDER = {
    "ten steps in a row": "before:12",
    "gather of five helpers": "after:12",
    "foreach, an item changed": "during:6",
    "three levels of child flows": "during:7",
    "spawned runs, parent parked": "before:24",
    "try, except, finally around a parked wait": "after:11",
    "signals during the crash, parked": "after:13",
    "retries with back-off": "during:5",
    "on_crash=fail": "during:2",
    "cancelled in a wait": "after:14",
    "sync flow with parallel": "during:4",
}


@pytest.mark.timeout(600)  # a matrix of processes, however busy the machine is
@pytest.mark.parametrize("name", SECOND_ORDER)
@pytest.mark.parametrize("step", [31, pytest.param(6, marks=CI), pytest.param(1, marks=pytest.mark.soak)])
def test_killed_again_at_every_point_of_its_recovery(
    name: str, step: int, explorers: Explorers, verify: Verify
) -> None:
    shape = SHAPES[name]
    first = CrashPlan.parse(SECOND_ORDER[name])
    explorer = explorers(shape.scenario, config=shape.config, check=shape.check)
    report = explorer.explore(("before", "after", "raise"), before=[first], step=step)
    assert report.points >= max(20 / step, 3), "the first kill was not where it should be"
    verify(report)


@pytest.mark.soak
@pytest.mark.parametrize("name", SHAPES)
def test_killed_again_after_every_first_point(name: str, explorers: Explorers, verify: Verify) -> None:
    shape = SHAPES[name]
    explorer = explorers(shape.scenario, config=shape.config, check=shape.check)
    total = len(explorer.baseline.operations)
    for operation in range(1, total + 1):
        verify(explorer.explore(("before", "after"), before=[CrashPlan("before", operation)]))


@pytest.mark.parametrize(("plan", "times"), [("before:12", 10), ("after:12", 10), ("during:1", 9)])
def test_many_kills_in_a_row(plan: str, times: int, explorers: Explorers, verify: Verify) -> None:
    """`during:1` makes no progress at all. A run may crash nine times without progress."""
    explorer = explorers("ten_steps")
    trial = explorer.endure([CrashPlan.parse(plan)] * times)
    report = Report(scenario=f"{explorer.scenario} {times} times {plan}")
    report.add(trial)
    verify(report)
    if plan == "during:1":
        assert trial.kills == 9
        assert trial.audit.repeated == ["crash-test/work#1 step 0"] * 9


def test_the_tenth_crash_without_progress_is_poison(explorers: Explorers) -> None:
    """The tenth, because of max_attempts. The run is held, its reason says so, and resume() frees it."""

    def check(trial: Any) -> None:
        held, freed = trial.outcome.value
        assert held["status"] == "held"
        assert "died 10 times in a row" in held["error"], held
        assert "resume()" in held["error"], held
        assert freed == {"status": "completed", "result": [f"step {number}" for number in range(10)]}

    explorer = explorers("poison", check=check)
    trial = explorer.endure([CrashPlan("during", 1)] * 10)
    assert trial.problems == []
    assert trial.kills == 10


def test_progress_between_crashes_is_no_poison(explorers: Explorers) -> None:
    """Each life finishes one step and dies in the next. Ten steps take ten kills, which is more than max_attempts=2."""
    explorer = explorers("ten_steps", config={"recovery": {"max_attempts": 2}})
    trial = explorer.endure([CrashPlan("during", 2)] * 9)
    assert trial.problems == []
    assert trial.kills == 9


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=CI) for seed in known_seeds("series")),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(100, 120)),
    ],
)
def test_random_series_of_kills(seed: int, explorers: Explorers, verify: Verify) -> None:
    """Up to eight crashes of any kind at any point, of every shape."""
    chance = random.Random(seed)
    for name, shape in SHAPES.items():
        explorer = explorers(shape.scenario, config=shape.config, check=shape.check)
        total = len(explorer.baseline.operations)
        report = Report(scenario=f"{name}, seed {seed}")
        for _ in range(10):
            plans = [CrashPlan(chance.choice(MODES), chance.randint(1, total)) for _ in range(chance.randint(1, 8))]
            report.add(explorer.endure(plans))
        verify(report)
