"""The leases of runs that are being taken up. Only the process that gets a run's lease pays for claiming and reading it."""

from __future__ import annotations

import logging

from relight.errors import StoreError
from relight.model.lease import OwnedBy
from relight.model.run import Run
from relight.run.services import Services
from relight.telemetry import Token, log


async def acquire(services: Services, rows: list[Run]) -> list[Run]:
    """The runs whose lease this process has now. If the row of a run names the wrong owner, it is corrected."""
    heartbeats = services.heartbeats
    # If the store keeps the leases, claiming a run without an owner acquires its lease as well.
    wanted = [row for row in rows if not heartbeats.leases.in_store or row.owner not in (None, services.owner)]
    if not wanted:
        return rows
    answers = await heartbeats.call(lambda leases: leases.acquire_lease([row.id for row in wanted]))
    refused = set()
    for row in wanted:
        answer = answers.get(row.id)
        if answer is None or isinstance(answer, OwnedBy):
            refused.add(row.id)
        if isinstance(answer, OwnedBy) and not heartbeats.leases.in_store and row.owner not in (None, answer.owner):
            await _correct_owner(services, row, answer.owner)
    return [row for row in rows if row.id not in refused]


def give_up(services: Services, run_ids: list[str]) -> None:
    """These runs are not driven here after all. A lease that this process kept would keep all others from them."""
    for run_id in run_ids:
        services.heartbeats.detach(run_id)


async def _correct_owner(services: Services, row: Run, holder: str) -> None:
    """Write the real owner of the lease into the row. If that breaks for one run, the next round tries again."""
    try:
        await services.store.correct_owner(row.id, row.epoch, holder)
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001 - the other runs of the pass go on
        log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {row.id}: correcting its owner broke: {error!r}", error)
        return
    what = f"run {row.id}: {holder} has its lease, not {row.owner}; corrected"
    log(logging.WARNING, Token.OWNER_CORRECTED, what)
