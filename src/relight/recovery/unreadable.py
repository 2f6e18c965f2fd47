"""A run that was claimed, and whose journal cannot be read, is held. Only its row says what is wrong."""

from __future__ import annotations

import logging

from relight.errors import CorruptionError, UpgradeRequiredError
from relight.model.run import Hold, Message, MessageKind, Run, RunChange, Status
from relight.ports.store import Commit, Extras
from relight.recovery import upgrades
from relight.recovery.memory import RunsInMemory
from relight.run.leaving import cancel_reason
from relight.run.services import Services
from relight.telemetry import Token, log


async def hold(orchestrator: RunsInMemory, row: Run, epoch: int, error: Exception, messages: list[Message]) -> None:
    """The journal cannot be read, so nothing can be appended to it: only the row says what is wrong."""
    if isinstance(error, UpgradeRequiredError):
        await upgrades.hold(orchestrator.services, row, epoch, error, messages)
        orchestrator.notify_watchers(row.id)
        return
    known = isinstance(error, CorruptionError)
    log(logging.ERROR, Token.JOURNAL_CORRUPT, f"run {row.id}: {error}", None if known else error)
    what = str(error) if known else f"its journal could not be restored: {error!r}"
    reason = f"{what}; restore the file from a backup and resume() the run, or cancel() it"
    heard = max((message.id for message in messages), default=0)
    status = RunChange(run_id=row.id, status=Status.PAUSED, hold=Hold.CORRUPT, reason=reason, heard=heard)
    to_cancel = next((message for message in messages if message.kind is MessageKind.CANCEL), None)
    if to_cancel is not None:
        await _cancel(
            orchestrator.services, row, epoch, f"cancelled; its journal was corrupt: {what}", cancel_reason(to_cancel)
        )
        orchestrator.look_for_messages()
    else:
        await orchestrator.services.store.hold({row.id: epoch}, status)
    orchestrator.notify_watchers(row.id)


async def _cancel(services: Services, row: Run, epoch: int, reason: str, asked: str) -> None:
    """One commit without entries: the run's end, the message to its parent, and the cancellation of the runs that it has
    spawned. With two commits, a crash between them would leave the parent waiting."""
    store = services.store
    parents = [] if row.parent_id is None else [row.parent_id]
    after = await store.latest_sequence(row.id)
    extras = Extras(
        changes=[RunChange(run_id=row.id, status=Status.CANCELLED, reason=reason)],
        messages=[Message.end_of(row.id, epoch, services.clock.now(), to=parent) for parent in parents],
        cancel_spawned=asked,
    )
    await store.commit([Commit(root_id=row.id, epoch=epoch, after=after, entries=[], extras=extras)])
