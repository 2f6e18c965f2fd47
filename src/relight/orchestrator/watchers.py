"""Watchers: callbacks for callers that wait for news of a run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container

from relight.model.run import Run
from relight.model.text import shown
from relight.telemetry import Token, log

Watcher = Callable[[Run | None], None]

LAST_LOOK_SECONDS = 5.0  # a store that does not answer must not keep an engine from closing


class Watchers:
    """Watchers by run id. A watcher is given a run's final row, or None: something may have changed, read the store."""

    def __init__(self) -> None:
        self._watchers: dict[str, list[Watcher]] = {}
        self._last_left = asyncio.Event()

    def add(self, run_id: str, watcher: Watcher) -> Callable[[], None]:
        """Returns a function that removes the watcher."""
        self._watchers.setdefault(run_id, []).append(watcher)
        self._last_left.clear()

        def remove() -> None:
            watchers = self._watchers.get(run_id, [])
            if watcher in watchers:
                watchers.remove(watcher)
            if not watchers:
                self._watchers.pop(run_id, None)
            if not self._watchers:
                self._last_left.set()

        return remove

    def notify(self, run_id: str, row: Run | None = None) -> None:
        for watcher in list(self._watchers.get(run_id, ())):
            try:
                watcher(row)
            except Exception as error:  # noqa: BLE001 - a bug in one watcher: the others are notified all the same
                log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {run_id}: a watcher broke: {shown(error)}", error)

    def notify_all_but(self, run_ids: Container[str]) -> None:
        """Notify the watchers of all runs but these: they should read the store."""
        for run_id in [run_id for run_id in self._watchers if run_id not in run_ids]:
            self.notify(run_id)

    async def last_look(self) -> None:
        """Notify all watchers: they should read the store, and wait no longer. The store is closed after this, so wait
        until they have read it."""
        self.notify_all_but(())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_LOOK_SECONDS):
                while self._watchers:
                    await self._last_left.wait()
