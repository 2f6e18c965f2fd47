"""Runs that fall due together are shared between orchestrators that are idle."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cluster.arena import Arena, flows

RUNS = 100


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_runs_that_fall_due_together_go_to_both_of_two_idle_orchestrators(arena: Arena):
    """Without sharing, one of them would take all hundred in one batch, and the other would find none."""
    async with arena.opened(10.0) as (cluster, rl):
        for name in ("a", "b"):
            await cluster.start(name)
        runs = [await rl.start(flows.napping.with_id(f"run-{n}"), 3.0) for n in range(RUNS)]
        for run in runs:
            await run.result(timeout="60s")
        second = Counter(note.by for note in arena.notes(key="work:1"))
        assert sum(second.values()) == RUNS
        assert len(second) == 2, second
        # How many each gets depends on which comes first, and on a busy machine one may be late.
        assert min(second.values()) >= RUNS // 20, second
        await arena.verify(rl, runs)
