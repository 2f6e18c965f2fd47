"""Uncertain runs: those that may be ours in the store, and are not in memory here.

A creation or a claim was reported as failed, and may have been written all the same: the answer was lost, or the store failed
half-way. Or a bug has dropped a run from memory. What is ours must be driven, or nobody would: to everybody else its owner is
alive. An uncertain run is forgotten only when the store has said that the run is not ours, or when it is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from relight.model.run import Run, Status
from relight.orchestrator.memory import Memory
from relight.run.services import Services

PAGE_LIMIT = 1000  # runs read at once when all of our own are looked at


class TakeUp(Protocol):
    """`recovery.take_up.take_up`, for this process's memory."""

    async def __call__(self, rows: list[Run], *, crashed: bool) -> int:
        """Bring these into memory and drive them; how many were claimed."""
        ...


class UncertainRuns:
    """One per orchestrator. `take_up` drives what turns out to be ours."""

    def __init__(self, services: Services, memory: Memory, take_up: TakeUp) -> None:
        self._services = services
        self._memory = memory
        self._take_up = take_up
        self._uncertain: dict[str, bool] = {}  # whether each was claimed as crashed

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._uncertain

    def __len__(self) -> int:
        return len(self._uncertain)

    def add(self, run_ids: Sequence[str], *, crashed: bool) -> None:
        """Whether this process owns these runs is unknown; look, once the store answers again."""
        self._uncertain.update(dict.fromkeys(run_ids, crashed))

    async def look_for_lost(self) -> None:
        """Everything in our name that is not in memory. That counts as a crash of the run, unless it was claimed because it was
        due, and the answer was lost: then nothing of it was executed."""
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
        """Whether it has never been in memory here since, and its row is as `claim_due` leaves it."""
        due = row.wake_at is not None and row.wake_at <= self._services.clock.now()
        return due and row.status in (Status.PENDING, Status.WAITING) and row.id not in self._memory.entered

    async def resolve(self) -> None:
        """Take up what is ours, as far as there is room."""
        services, live = self._services, self._memory.live
        for run_id in [run_id for run_id in self._uncertain if run_id in live and live[run_id].stopping is None]:
            del self._uncertain[run_id]
        # One that is being created once more is driven by that, unless it is there already: it stays uncertain till then.
        ready = [run_id for run_id in self._uncertain if not self._memory.is_arriving(run_id)][
            : max(self._memory.room, 0)
        ]
        if not ready or not services.heartbeats.may_drive:
            return
        # Read after we have seen that they are not in memory: a row read before may be of one that was parked since.
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
            except Exception as error:  # noqa: BLE001 - raised below: the others do not wait for it
                failure = failure or error
        if failure is not None:
            raise failure
