"""The kill harness. `make test`: short. `make soak-ci`: more seeds, on all kinds of stores. `make soak`: long."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from relight import Relight
from tests.cluster.arena import Arena, flows
from tests.harness.deeds import Note, audit_deeds
from tests.harness.killing import Report, torment
from tests.seeds import known_seeds

TTL = 1.0
NAMES = ("a", "b", "c")
SECONDS = 6.0  # for each seed
SOAK_MINUTES = float(os.environ.get("RELIGHT_TEST_SOAK_MINUTES", "10"))


class Everything:
    """Runs of each shape in turn."""

    shapes: tuple[tuple[Any, tuple[Any, ...], int], ...] = (
        (flows.steps, (12, 0.04), sum(range(12))),
        (flows.each, (8, 3, 0.03), 2 * sum(range(8))),
        (flows.tree, (2, 2, 0.03), 14),
        (flows.spawning, (3, 0.04), 10),
        (flows.napping, (0.6,), 3),
        (flows.asking, (), 36),
        (flows.threaded, (6,), sum(range(6))),
        (flows.plain, (6,), sum(range(6))),
        (flows.retrying, (), 6),
    )

    def _shape(self, run_id: str) -> tuple[Any, tuple[Any, ...], int]:
        return self.shapes[int(run_id.rpartition("-")[2]) % len(self.shapes)]

    async def start(self, rl: Relight, run_id: str) -> None:
        flow, arguments, _ = self._shape(run_id)
        run = await rl.start(flow.with_id(run_id), *arguments)
        if flow is flows.asking:
            await run.signal("second", 20, id="2")
            await run.signal("first", 10, id="1")

    def expected(self, run_id: str) -> Any:
        return self._shape(run_id)[2]


async def killing(arena: Arena, seed: int, seconds: float) -> None:
    # Here ten deaths in a row within a second of resuming are no sign of poison, and on a busy machine they happen.
    async with arena.opened(TTL, recovery={"max_attempts": 1000}) as (cluster, rl):
        for name in NAMES:
            await cluster.start(name)
        report = await torment(
            cluster, NAMES, rl, Everything(), book=arena.book, seed=seed, seconds=seconds, ttl_seconds=TTL
        )
        print(f"\n{arena.kind}: {report}")
        report.check()


# With seed 87, the first three strikes of each node have all kinds, and two freezes that are longer than the ttl.
# `make soak` takes a new seed each time, and prints it.
@pytest.mark.parametrize(
    "seed",
    [
        87,
        *(pytest.param(seed, marks=pytest.mark.soak_ci) for seed in known_seeds("kills") if seed != 87),
        pytest.param(None, id="random", marks=pytest.mark.soak),
    ],
)
async def test_kills(arena: Arena, seed: int | None):
    await killing(arena, random.randrange(1_000_000) if seed is None else seed, SECONDS)


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_kills_for_long(arena: Arena):
    await killing(arena, random.randrange(1_000_000), SOAK_MINUTES * 60)


def start(key: str, at: float, attempt: int = 1) -> Note:
    return Note(what="start", run="r", key=key, attempt=attempt, at=at)


def seen(key: str, at: float) -> Note:
    return Note(what="seen", run="r", key=key, at=at)


def test_the_audit_tells_a_repetition_from_a_step_in_flight():
    assert audit_deeds([start("a:1", 1), start("a:1", 2), seen("a:1", 3), start("a:2", 4)]).repeated == []
    assert len(audit_deeds([start("a:1", 1), start("a:1", 2)]).in_flight) == 1
    assert len(audit_deeds([start("a:1", 1), seen("a:1", 2), start("a:1", 3)]).repeated) == 1
    assert len(audit_deeds([start("a:1", 1), start("a:2", 2), start("a:1", 3)]).repeated) == 1
    assert audit_deeds([start("x/a:1", 1), start("y/a:1", 2), start("x/a:1", 3)]).repeated == []
    assert audit_deeds([start("a:1", 1), start("a:1", 2, attempt=2)]).in_flight == []
    assert len(audit_deeds([start("a:1", 1), start("a:1", 2, attempt=2), start("a:1", 3)]).repeated) == 1


def test_a_bound_is_given_only_where_nothing_went_wrong():
    assert Report(seed=1, strikes={"kill": 28, "kill starting": 1, "freeze": 5}).bound == 0.1
    assert Report(seed=1, strikes={"kill": 30}, lost=["r"]).bound is None
    assert Report(seed=1, strikes={"freeze": 30}).bound is None
    assert "harm per kill" not in str(Report(seed=1, strikes={"kill": 30}, stale=["r"]))
