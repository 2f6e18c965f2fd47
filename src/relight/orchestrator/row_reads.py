"""Reading runs' rows: callers that want a row at the same moment share one read.

A notification wakes every caller that waits for a result. A thousand callers cost one query, not a thousand.
"""

from __future__ import annotations

import asyncio
from copy import copy

from relight.errors import RelightError
from relight.execution.background_tasks import Background
from relight.model.run import Run
from relight.ports.store import Store

Waiting = dict[str, list[asyncio.Future[Run | None]]]


class RowReads:
    """One per engine. A row is never older than the request for it: a read answers only requests from before it."""

    def __init__(self, store: Store, background: Background) -> None:
        self._store = store
        self._background = background
        self._wanted: Waiting = {}
        self._reading = False

    async def get(self, run_id: str) -> Run | None:
        """The same as `Store.get_run`."""
        found: asyncio.Future[Run | None] = asyncio.get_running_loop().create_future()
        self._wanted.setdefault(run_id, []).append(found)
        if not self._reading:
            self._reading = True
            self._background.start(self._read(), "look")
        return await found

    async def _read(self) -> None:
        """Make one read after the other, until no request is left."""
        try:
            while self._wanted:
                wanted, self._wanted = self._wanted, {}
                await self._answer(wanted)
        finally:
            self._reading = False
            for futures in self._wanted.values():  # requests are left only if this task was cancelled; no read follows
                _say_closed(futures)
            self._wanted = {}

    async def _answer(self, wanted: Waiting) -> None:
        try:
            (run_id, *others) = wanted
            rows = await self._store.get_runs(list(wanted)) if others else [await self._store.get_run(run_id)]
        except Exception as error:  # noqa: BLE001 - raised in the callers
            for future in _waiting(wanted):
                future.set_exception(error)
            return
        except BaseException:
            for futures in wanted.values():
                _say_closed(futures)
            raise
        found = {row.id: row for row in rows if row is not None}
        for run_id, futures in wanted.items():
            row = found.get(run_id)
            for future in _waiting({run_id: futures}):
                future.set_result(None if row is None else copy(row))


def _say_closed(futures: list[asyncio.Future[Run | None]]) -> None:
    """The engine is being closed. To cancel the futures would be wrong: the callers would get a CancelledError although
    nobody has cancelled them, and a task group would take that for an orderly end."""
    for future in futures:
        if not future.done():
            future.set_exception(RelightError("this Relight was closed before the store had answered"))


def _waiting(wanted: Waiting) -> list[asyncio.Future[Run | None]]:
    """The futures that a caller still waits for."""
    return [future for futures in wanted.values() for future in futures if not future.done()]
