"""Runs that a newer version has written to: held until a process that understands them comes (model/formats.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from relight.errors import UpgradeRequiredError
from relight.model.formats import not_understood
from relight.model.replay import restore
from relight.model.run import Hold, Message, MessageKind, Run, RunChange, Status
from relight.model.text import shown
from relight.run.services import Services
from relight.telemetry import Token, log


def refuse_newer(messages: Sequence[Message]) -> None:
    """Raise UpgradeRequiredError if this version does not know the kind of one of these messages."""
    for message in messages:
        if message.kind is MessageKind.NEWER:
            raise UpgradeRequiredError(
                not_understood(f"message {message.id} of run {message.run_id!r}, a", message.name)
            )


async def hold(
    services: Services, row: Run, epoch: int, error: UpgradeRequiredError, messages: Sequence[Message]
) -> None:
    """Only the row says that the run is held. Its journal and its inbox stay as they are, even if there is a request to
    cancel it: a newer version receives that request, and lets the flow clean up."""
    log(logging.WARNING, Token.RUN_HELD, f"run {row.id}: {error}")
    heard = max((message.id for message in messages), default=0)
    change = RunChange(run_id=row.id, status=Status.PAUSED, hold=Hold.UPGRADE, reason=str(error), heard=heard)
    await services.store.hold({row.id: epoch}, change)


class Freed:
    """Finds the runs that were held for a newer version and that this version understands. One per orchestrator."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._not_for_us: set[tuple[str, int]] = set()  # with their epochs: after a claim, a run may have changed

    async def look(self, limit: int) -> tuple[list[Run], bool]:
        """Up to `limit` such runs, and whether there may be more."""
        wanted = limit + len(self._not_for_us)
        held = await self._services.store.list_held(Hold.UPGRADE, self._services.registry.names(), wanted)
        unknown = [row for row in held if (row.id, row.epoch) not in self._not_for_us][:limit]
        if len(held) < wanted:  # the list is complete: forget runs that are no longer in it
            self._not_for_us.intersection_update([(row.id, row.epoch) for row in held])
        found = await self._understood(unknown)
        understood = {row.id for row in found}
        self._not_for_us.update((row.id, row.epoch) for row in unknown if row.id not in understood)
        return found, len(unknown) == limit

    async def _understood(self, rows: list[Run]) -> list[Run]:
        """Read the runs without claiming them: otherwise two processes of old versions would claim such a run in turns,
        without end."""
        if not rows:
            return []
        ids = [row.id for row in rows]
        inboxes: dict[str, list[Message]] = {run_id: [] for run_id in ids}
        for message in await self._services.store.inbox(ids):
            inboxes[message.run_id].append(message)
        found = []
        for row, journal in zip(rows, await self._services.store.read(ids), strict=True):
            try:
                if isinstance(journal, Exception):
                    raise journal
                restore(journal)
                refuse_newer(inboxes[row.id])
            except UpgradeRequiredError:
                continue
            except Exception as error:  # noqa: BLE001 - `take_up` holds it with the right reason
                log(logging.DEBUG, Token.RUN_HELD, f"run {row.id}: {shown(error)}")
            found.append(row)
        return found
