"""Random programs: undisturbed, parked, with checkpoints or killed, a flow sees the same and ends the same, whatever it does.

The seeds here are fixed. The races inside the programs are real. `make soak-ci` tries those of `tests/seeds.txt`, `make soak`
thousands of others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.random.check import oracle
from tests.random.conftest import BATCH, Endure
from tests.random.generate import generate
from tests.random.shrink import shrink
from tests.random.trial import MODES, Found, Trials
from tests.seeds import known_seeds
from tests.servers.postgres import PostgresServer

# How many programs: together they take a quarter of a minute of one processor.
COUNTS = {"undisturbed": 40, "parked": 80, "checkpoints": 60, "killed": 100}
PART = 100  # for one test


@pytest.mark.timeout(600)  # only a program that hangs takes so long
@pytest.mark.parametrize("mode", MODES)
def test_programs_on_sqlite(mode: str, endure: Endure) -> None:
    endure(range(COUNTS[mode]), mode)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["parked", "killed"])
def test_programs_on_postgres(mode: str, endure: Endure, postgres_server: PostgresServer) -> None:
    endure(range(10), mode, postgres=postgres_server.url())


def parts(store: str, modes: Iterable[str]) -> list[Any]:
    """The known seeds, as parameters (mode, seeds) of tests that may run at the same time."""
    found = []
    for mode in modes:
        seeds = known_seeds(f"{store}/{mode}")
        for at in range(0, len(seeds), PART):
            found.append(pytest.param(mode, seeds[at : at + PART], id=f"{mode}-{seeds[at]}"))
    return found


@pytest.mark.soak_ci
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "seeds"), parts("programs", MODES))
def test_known_seeds_on_sqlite(mode: str, seeds: Sequence[int], endure: Endure) -> None:
    endure(seeds, mode)


@pytest.mark.soak_ci
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "seeds"), parts("postgres", ["parked", "killed"]))
def test_known_seeds_on_postgres(
    mode: str, seeds: Sequence[int], endure: Endure, postgres_server: PostgresServer
) -> None:
    endure(seeds, mode, postgres=postgres_server.url())


def test_a_seed_always_makes_the_same_program() -> None:
    assert [generate(seed) for seed in range(50)] == [generate(seed) for seed in range(50)]


def test_every_statement_is_generated() -> None:
    from tests.random import core, interpret_sync

    found: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            found.update([node["op"]] if "op" in node else [])
            node = list(node.values())
        if isinstance(node, list):
            for one in node:
                walk(one)

    for seed in range(300):
        walk(generate(seed))
    assert found == {*core.STATEMENTS, *interpret_sync.STATEMENTS}


def test_the_oracle_executes_programs_without_the_engine() -> None:
    certain = [program for program in map(generate, range(200)) if program["certain"]]
    kinds = [oracle(program)[0] for program in certain]
    assert {"completed", "failed"} == set(kinds)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_thousands(mode: str, store: str, request: pytest.FixtureRequest) -> None:
    """RANDOM_SEED and RANDOM_COUNT say which. A program that fails is made as small as possible and printed."""
    first = int(os.environ.get("RANDOM_SEED", "1000000"))
    count = int(os.environ.get("RANDOM_COUNT", "3000" if store == "sqlite" else "300"))
    url = request.getfixturevalue("postgres_server").url() if store == "postgres" else None
    failed: list[str] = []
    with Trials(postgres=url) as trials:
        for seed in range(first, first + count, BATCH):
            programs = [generate(one) for one in range(seed, seed + BATCH)]
            for found in trials.run(programs, mode):
                failed.append(f"{found.text()}\n{smallest(trials, found)}")
                print(failed[-1], flush=True)
        print(f"{trials.programs} programs {mode}, {trials.lives} processes, {trials.kills} kills")
    assert not failed, "\n".join(failed)


def smallest(trials: Trials, found: Found) -> str:
    def fails(program: dict[str, Any]) -> bool:
        return any(trials.run([program] * BATCH, found.mode, turn) for turn in range(5))

    return str(shrink(generate(found.seed), fails))
