"""One life: a child process executes a batch of programs until all have ended or the process is killed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from relight import Handle, Relight
from relight.errors import RelightError, RunCancelledError, RunFailedError, RunStateError
from relight.flow.registry import REGISTRY
from relight.model.run import Hold, Status
from tests.random.book import Line, book, describe, forget_traces, open_book, plain, read_book
from tests.random.env import watch_calls

POLL_SECONDS = 0.002


class Order(msgspec.Struct, kw_only=True):
    """The arguments of a life."""

    folder: str  # the trial's
    url: str
    config: dict[str, Any]
    programs: dict[str, dict[str, Any]]  # by run id
    number: int = 1
    kill_at: int = 0  # kill after so many lines of the book; 0: never
    kill_after: float = 0.0  # kill after so many seconds; 0: never
    plant: str = ""  # a bug of plants.py to plant into the engine
    patience: float = 30.0  # seconds: a run that has not ended after that hangs


def prepare() -> None:
    """Work that every life would repeat. The fork server does it once."""
    for module in ("relight.backends.sqlite", "relight.backends.postgres", "tests.random.interpret_sync"):
        importlib.import_module(module)
    watch_calls()
    for name in REGISTRY.names():
        _ = REGISTRY.get(name).fingerprint


def live(argument: dict[str, Any]) -> None:
    """The main function of the child."""
    order = msgspec.convert(argument, Order)
    if order.plant:
        importlib.import_module("tests.random.plants").plant(order.plant)
    if order.kill_after:
        timer = threading.Timer(order.kill_after, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    asyncio.run(_live(order))


async def _live(order: Order) -> None:
    path = Path(order.folder) / "book"
    before = read_book(path)
    written = open_book(path, order.number, order.kill_at)
    forget_traces()
    async with Relight(order.url, **order.config) as rl:
        outside = Outside(rl, order, before)
        written.on_line = outside.on_line
        await asyncio.gather(*(outside.drive(run, program) for run, program in order.programs.items()))
        await outside.all_ended()
        await outside.stop()


class Outside:
    """The caller outside the runs: starts them, sends them signals and requests, and waits for their ends."""

    def __init__(self, rl: Relight, order: Order, before: list[Line]) -> None:
        self._rl = rl
        self._order = order
        self._loop = asyncio.get_running_loop()
        self._seen: Counter[str] = Counter()
        self._sent = {(line.run, line.key) for line in before if line.what == "sent"}
        self._ended = {line.run for line in before if line.what == "ended"}
        self._doing: set[asyncio.Task[None]] = set()

    def on_line(self, line: Line) -> None:
        if line.what == "see" and line.run in self._order.programs:
            self._seen[line.run] += 1
            if any(action["at"] for action in self._order.programs[line.run]["actions"]):
                # In a new context: the present one is the flow's, and actions from outside do not belong to the flow.
                self._loop.call_soon_threadsafe(self._act, line.run, context=contextvars.Context())

    async def drive(self, run: str, program: dict[str, Any]) -> None:
        order = {"run": run, "path": "", "block": program["block"], "last": 0}
        handle = await self._rl.start(program["flow"], order, id=run)
        if any(action["do"] == "pause" for action in program["actions"]):
            self._begin(self._free(handle))
        self._act(run)
        await self.ended(handle)

    def _act(self, run: str) -> None:
        """Do the actions from outside that are due."""
        for number, action in enumerate(self._order.programs[run]["actions"]):
            key = f"{action['do']} {number}"
            if action["at"] <= self._seen[run] and (run, key) not in self._sent:
                self._sent.add((run, key))
                self._begin(self._do(Handle(self._rl, run), action, key))

    def _begin(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._doing.add(task)

    async def stop(self) -> None:
        """Stop the actions. Raises the error of an action that went wrong."""
        for task in self._doing:
            task.cancel()
        for end in await asyncio.gather(*self._doing, return_exceptions=True):
            if isinstance(end, Exception):
                raise end

    async def _do(self, handle: Handle[Any], action: dict[str, Any], key: str) -> None:
        with contextlib.suppress(RunStateError):  # too late: the run has ended
            if action["do"] == "signal":
                await handle.signal(action["name"], action["number"], id=key)
            elif action["do"] == "cancel":
                await handle.cancel("from outside")
            else:
                await handle.pause()
        book().write(Line("sent", book().life, handle.id, key=key))

    async def _free(self, handle: Handle[Any]) -> None:
        """Resume the run whenever it is paused on request."""
        while not (row := await handle.describe()).status.terminal:
            if row.status is Status.PAUSED and row.hold is Hold.USER:
                with contextlib.suppress(RunStateError):
                    await handle.resume()
            await asyncio.sleep(POLL_SECONDS)

    async def all_ended(self) -> None:
        """Wait also for spawned runs, and for the runs that those have spawned."""
        while left := {row.id for row in (await self._rl.list(limit=10_000)).runs} - self._ended:
            for run in sorted(left):
                await self.ended(Handle(self._rl, run))

    async def ended(self, handle: Handle[Any]) -> None:
        """Wait until a run has ended, and write down how."""
        kind, text = "completed", ""
        try:
            text = plain(await handle.result(timeout=self._order.patience))
        except RunFailedError as error:
            assert error.__cause__ is not None
            kind, text = "failed", describe(error.__cause__)
        except RunCancelledError as error:
            kind, text = "cancelled", str(error.reason)
        except TimeoutError:
            kind, text = "hangs", f"it is {await handle.status()}"
        except RelightError as error:
            kind, text = "held", describe(error)
        if handle.id not in self._ended:
            self._ended.add(handle.id)
            book().write(Line("ended", book().life, handle.id, kind=kind, text=text))
