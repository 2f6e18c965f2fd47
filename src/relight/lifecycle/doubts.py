"""Doubts: creations and claims that were reported as failed, and may have been written all the same.

The answer was lost, or the store failed half-way. What is ours after all must be driven, or nobody would: to everybody else
its owner is alive.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from relight.errors import StoreError
from relight.lifecycle.recover import take_up

if TYPE_CHECKING:
    from relight.lifecycle.orchestrator import Orchestrator


class Doubts:
    """One per orchestrator."""

    def __init__(self, orchestrator: Orchestrator, creating: Container[str]) -> None:
        self._orchestrator = orchestrator
        self._creating = creating
        self._doubtful: dict[str, bool] = {}  # whether each was claimed as crashed

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._doubtful

    def add(self, run_ids: Sequence[str], *, crashed: bool) -> None:
        """Whether this process owns these runs is unknown; look, once the store answers again."""
        self._doubtful.update(dict.fromkeys(run_ids, crashed))

    async def resolve(self) -> None:
        """Take up what is ours."""
        if not self._doubtful:
            return
        services = self._orchestrator.services
        doubtful, self._doubtful = self._doubtful, {}
        try:
            rows = await services.store.get_runs(list(doubtful))
            # One that is being created once more is driven by that, unless it is there already: it stays in doubt till then.
            self._doubtful |= {run_id: doubtful[run_id] for run_id in doubtful if run_id in self._creating}
            ours = [row for row in rows if row.owner == services.owner and row.id not in self._doubtful]
            await take_up(self._orchestrator, [row for row in ours if not doubtful[row.id]], crashed=False)
            await take_up(self._orchestrator, [row for row in ours if doubtful[row.id]], crashed=True)
        except StoreError:
            self._doubtful = doubtful | self._doubtful
            raise
