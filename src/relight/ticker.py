"""Ticker: makes the rounds of a background part: one when it is wanted, and one when its time has come.

    wake ─┐
          ├──▶ run_once ──▶ the round went well ──▶ wait
    time ─┘

A part is a function `run_once`, which does what is to be done now and returns what it did. The ticker calls it, never twice at
once. The supervisor keeps the ticker alive: a round that raises is reported, and made again after a pause. Tests call
`run_once` themselves, and need neither.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from relight.supervisor import Part


def _nothing() -> None:
    """Nobody waits for a round to end."""


class Ticker:
    """`every_seconds` counts from the end of the last round: a part that was just woken need not be woken by the time."""

    def __init__(
        self,
        run_once: Callable[[], Awaitable[object]],
        every_seconds: float,
        *,
        round_over: Callable[[], None] = _nothing,
    ) -> None:
        self._run_once = run_once
        self._every_seconds = every_seconds
        self._round_over = round_over
        self._wanted = asyncio.Event()
        self._under_way = False
        self._finishing = False
        self.timed = False  # the last round was made because its time had come

    def wake(self) -> None:
        """Make a round, as soon as the one under way is over."""
        self._wanted.set()

    def finish(self) -> None:
        """Make no more rounds: `run` returns when the one under way is over. To cancel that could leave half of its work
        behind."""
        self._finishing = True
        self._wanted.set()

    @property
    def resting(self) -> bool:
        """Whether no round is wanted or under way. A round that broke is under way until another one has gone well."""
        return not self._under_way and not self._wanted.is_set()

    async def run(self, part: Part) -> None:
        """Round after round, for the supervisor to keep alive."""
        if self._under_way:  # it broke
            self.wake()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_seconds):
                    await self._wanted.wait()
            if self._finishing:
                return
            self.timed = not self._wanted.is_set()
            self._wanted.clear()
            self._under_way = True
            await self._run_once()
            self._under_way = False
            self._round_over()
            part.well()
