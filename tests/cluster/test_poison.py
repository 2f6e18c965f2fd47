"""Recovery finds the run that kills its process among other runs. It is held, and the others finish."""

from __future__ import annotations

import pytest

from relight import Relight
from relight.model.run import Hold, Run, Status
from tests.cluster.arena import Arena, flows
from tests.harness.cluster import Cluster, until

COMPANIONS = 5
MAX_DEATHS = 40  # of all processes together


async def _settled(rl: Relight) -> list[Run]:
    """The rows, if every run has ended or is held. Otherwise nothing."""
    rows = await rl.services.store.get_runs(["killer", *(f"companion-{n}" for n in range(COMPANIONS))])
    return rows if all(row.status.terminal or row.status is Status.PAUSED for row in rows) else []


async def _revive(cluster: Cluster, rl: Relight, names: list[str]) -> int:
    """Start each dead node again until all runs are settled. Returns how often a node died."""
    deaths = 0

    async def over() -> bool:
        nonlocal deaths
        for name in names:
            if not cluster.processes[name].alive:
                deaths += 1
                await cluster.ended(name)
                await cluster.launch(cluster.processes[name].node)
        return deaths > MAX_DEATHS or bool(await _settled(rl))

    await until(over, "all to be settled", within=110, poll=0.02)
    return deaths


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize(
    "names", [pytest.param(["a"], id="one", marks=pytest.mark.soak_ci), pytest.param(["a", "b"], id="two")]
)
async def test_companions_of_a_run_that_kills_its_process_finish(arena: Arena, names: list[str]):
    async with arena.opened(2.0, recovery={"max_attempts": 4}) as (cluster, rl):
        for n in range(COMPANIONS):
            await rl.start(flows.steps.with_id(f"companion-{n}"), 1, 2.0)
        await rl.start(flows.killing.with_id("killer"), 0.3)
        for name in names:
            await cluster.start(name)
        deaths = await _revive(cluster, rl, names)
        rows = {row.id: row for row in await _settled(rl)}
        told = {run_id: (row.status, row.reason) for run_id, row in rows.items()}
        assert all(rows[f"companion-{n}"].status is Status.COMPLETED for n in range(COMPANIONS)), told
        assert rows["killer"].hold is Hold.POISON, told
        assert "4 of them while it was the only suspect" in rows["killer"].reason
        assert 4 <= deaths <= MAX_DEATHS, deaths
