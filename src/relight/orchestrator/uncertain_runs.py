"""Uncertain runs: runs that this process may own in the store, and that are not in memory here.

A creation or a claim was reported as failed, and may have been written all the same: the answer was lost, or the store
failed half-way. Or a bug has dropped a run from memory. This process must drive the runs that it owns: no other process
claims them, because their owner is alive. An uncertain run is forgotten only when the store has answered that this
process does not own it, or when it is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from relight.model.run import Run, Status
from relight.orchestrator.memory import Memory
from relight.run.services import Services

PAGE_LIMIT = 1000  # runs per page, when all runs that this process owns are read


class TakeUp(Protocol):
    """`recovery.take_up.take_up`, for this process's memory."""

    async def __call__(self, rows: list[Run], *, crashed: bool) -> int:
        """Bring these runs into memory and drive them. Returns how many were claimed."""
        ...


class UncertainRuns:
    """One per orchestrator. `take_up` drives the runs that turn out to be owned by this process."""

    def __init__(self, services: Services, memory: Memory, take_up: TakeUp) -> None:
        self._services = services
        self._memory = memory
        self._take_up = take_up
        self._uncertain: dict[str, bool] = {}  # by run id: whether taking the run up counts as recovery from a crash

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._uncertain

    def __len__(self) -> int:
        return len(self._uncertain)

    def add(self, run_ids: Sequence[str], *, crashed: bool) -> None:
        """It is unknown whether this process owns these runs: `resolve` reads them once the store answers again."""
        self._uncertain.update(dict.fromkeys(run_ids, crashed))

    async def look_for_lost(self) -> None:
        """Find every run that this process owns and that is not in memory. That counts as a crash of the run, unless
        the run was claimed because it was due, and only the answer was lost: then none of its code was executed."""
        services, after = self._services, None
        while True:
            rows = await services.store.list_active_roots(services.owner, after, PAGE_LIMIT)
            for row in rows:
                if not self._memory.is_arriving(row.id) and row.id not in self._uncertain:
                    self.add([row.id], crashed=not self._only_claimed(row))
            if len(rows) < PAGE_LIMIT:
                return
            after = rows[-1].id

    def _only_claimed(self, row: Run) -> bool:
        """Whether the run has not been in memory since it was created or claimed here: its row is as `start` or
        `claim_due` leaves it."""
        if row.id in self._memory.entered:
            return False
        due = row.wake_at is not None and row.wake_at <= self._services.clock.now()
        return row.epoch == 1 or (due and row.status in (Status.PENDING, Status.WAITING))

    async def resolve(self) -> None:
        """Take up the uncertain runs that this process owns, as far as there is room."""
        services, live = self._services, self._memory.live
        for run_id in [run_id for run_id in self._uncertain if run_id in live and live[run_id].stopping is None]:
            del self._uncertain[run_id]
        # If `start` is being called again for a run, that call drives it, unless the store has it already. Until then
        # the run stays uncertain.
        ready = [run_id for run_id in self._uncertain if not self._memory.is_arriving(run_id)][
            : max(self._memory.room, 0)
        ]
        if not ready or not services.heartbeats.may_drive:
            return
        # The rows are read after the check that the runs are not in memory. A row read earlier could be out of date:
        # the run may have been parked since then.
        rows = {row.id: row for row in await services.store.get_runs(ready)}
        ours = []
        for run_id in ready:
            row = rows.get(run_id)
            if row is None or row.owner != services.owner or row.status.terminal:
                self._uncertain.pop(run_id, None)
            elif not self._memory.is_arriving(run_id):
                ours.append(row)
        crashed = {row.id: self._uncertain[row.id] for row in ours if row.id in self._uncertain}
        failure = None
        for was_crashed in (False, True):
            some = [row for row in ours if crashed.get(row.id) is was_crashed]
            try:
                if some:
                    await self._take_up(some, crashed=was_crashed)
            except Exception as error:  # noqa: BLE001 - raised below, after the other runs were taken up
                failure = failure or error
        if failure is not None:
            raise failure
