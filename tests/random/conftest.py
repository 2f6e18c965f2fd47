"""Trials of random programs, and what a failure says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.random.generate import generate
from tests.random.trial import Found, Trials

BATCH = 10  # programs at once in one process: their commits mix

Endure = Callable[..., None]


def try_seeds(trials: Trials, seeds: Sequence[int], mode: str, batch: int = BATCH) -> list[Found]:
    """Run programs of all these seeds, batch by batch."""
    found: list[Found] = []
    for at in range(0, len(seeds), batch):
        found += trials.run([generate(seed) for seed in seeds[at : at + batch]], mode)
    return found


@pytest.fixture
def endure() -> Endure:
    """Run programs of these seeds in a mode. A failure says what is wrong, and how to see it again."""

    def check(seeds: Sequence[int], mode: str, **options: Any) -> None:
        with Trials(**options) as trials:
            found = try_seeds(trials, seeds, mode)
            print(f"{trials.programs} programs {mode}, {trials.lives} processes, {trials.kills} kills")
        if found:
            pytest.fail("\n".join(one.text() for one in found), pytrace=False)

    return check
