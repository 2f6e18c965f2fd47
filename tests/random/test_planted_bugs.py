"""Tests of the checks: each of these bugs, planted into the engine, is found within 200 programs."""

from __future__ import annotations

import pytest

from tests.random.conftest import BATCH
from tests.random.generate import generate
from tests.random.plants import PLANTS
from tests.random.trial import Found, Trials

MOST_PROGRAMS = 200


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    with Trials(plant=bug, patience=2.0) as trials:  # seconds: a run that hangs here does so because of the planted bug
        found: list[Found] = []
        for seed in range(0, MOST_PROGRAMS, BATCH):
            found = trials.run([generate(one) for one in range(seed, seed + BATCH)], "parked")
            if found:
                break
        print(f"caught after {trials.programs} programs: {[one.problems[0] for one in found]}")
    assert found, f"{bug} was not caught within {MOST_PROGRAMS} programs"
