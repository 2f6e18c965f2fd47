"""Start-up recovery: the runs whose owner died are claimed, pass after pass, until none is left."""

from __future__ import annotations

import logging

from relight.errors import StoreUnavailableError
from relight.lifecycle.orchestrator import Orchestrator
from relight.lifecycle.patience import Patience
from relight.lifecycle.recover import take_up
from relight.telemetry import Token, log


class StartupRecovery:
    """One per engine. A full pass is followed at once by the next, so the limit bounds the burst and strands nothing.

    There are no leases yet, so a run counts as orphaned when its owner is not this session: a second process on the same
    store takes the first one's runs over (and fences it). Safe, but not kind; turn recovery off in processes that only
    start and signal runs.
    """

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._after: str | None = None
        self.finished = False

    async def run_once(self) -> int:
        """One pass: how many runs were claimed."""
        orchestrator = self._orchestrator
        services = orchestrator.services
        await orchestrator.wait_for_room()
        limit = min(services.config.recovery.max_startup_recovery, orchestrator.room)
        rows = await services.store.list_active_roots(self._after, limit)
        orphans = [row for row in rows if row.owner != services.owner]
        claimed = await take_up(orchestrator, orphans, crashed=True)
        if rows:
            self._after = rows[-1].id
        self.finished = len(rows) < limit
        return claimed

    async def run(self) -> None:
        """Pass after pass. A failing store is tried again: it never fails a run."""
        patience = Patience()
        while not self.finished:
            try:
                await self.run_once()
            except StoreUnavailableError as error:
                log(logging.WARNING, Token.RECOVERY_FAILED, f"{error}; trying again in {patience.seconds:.2g}s")
                await patience.pause()
            else:
                patience.again()
