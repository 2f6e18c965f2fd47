"""The way that a flow's code goes each time it is called: live, after a crash, and after it was parked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from relight import Handle, wait_for
from relight.model import journal as j
from tests.flows.world import World, until


class Ways(list[list[str]]):
    """One list for each time the flow's code was called: what it saw, in order."""

    def begin(self) -> list[str]:
        self.append([])
        return self[-1]

    def check(self, at_least: int = 2) -> list[str]:
        """Check that all ways are the same as far as they go. Returns the longest."""
        assert len(self) >= at_least, f"its code was called only {len(self)} times"
        longest = max(self, key=len)
        for way in self:
            assert way == longest[: len(way)], f"it went another way: {list(self)}"
        return longest


class Gate:
    """Where bodies of steps wait for the test."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self._open = asyncio.Event()

    async def pass_by(self, name: str = "") -> None:
        self.entered.append(name)
        await self._open.wait()

    async def open(self, after: int = 1) -> None:
        """Wait until so many bodies wait here. Then let all go on in one turn of the loop, so that one commit has what
        they record."""
        await until(lambda: len(self.entered) >= after)
        self._open.set()


class ThreadGate:
    """A gate for one sync body."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()

    def pass_by(self) -> None:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self._open.wait(60), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


class Held:
    """Holds back a method of an engine's store until the test lets it go on: all calls, or only those for which `when`
    is true."""

    def __init__(self, world: World, method: str, when: Callable[..., bool] = lambda *_: True) -> None:
        store, self._open = world.rl.services.store, asyncio.Event()
        self.reached = asyncio.Event()  # a call waits, or has waited
        plain = getattr(store, method)

        async def held(*args: Any) -> Any:
            if when(*args):
                self.reached.set()
                await self._open.wait()
            return await plain(*args)

        setattr(store, method, held)

    def let_go(self) -> None:
        self._open.set()


async def cancel_is_heard(world: World, run: Handle[Any]) -> None:
    """Wait until the request has reached the run, whatever the run is doing."""
    await until(lambda: world.rl.orchestrator.live[run.id].last_heard)


async def two_signals() -> None:
    """The end of a flow that is used with `replay_to_the_end`."""
    await wait_for("go")
    await wait_for("go")


async def waits(world: World, run: Handle[Any], name: str = "go") -> int:
    """How often the run has begun to wait for this signal. Fails if the run is held or has failed: then it never waits."""
    row = await world.row(run.id)
    assert row.status.value not in ("paused", "failed"), f"{row.status}: {row.reason} {row.error!r}"
    return sum(isinstance(one, j.WaitStarted) and one.name == name for one in await world.events(run.id))


async def replay_to_the_end(world: World, run: Handle[Any], crash: bool = True) -> Any:
    """Kill the process where the run waits (or only park it), let it come back twice, and give its result."""
    await until(lambda: waits(world, run))
    if crash:
        rl = await world.crash_and_reopen()
        run = await rl.get(run.id)
    await park(world, run)
    await run.signal("go")
    await until(lambda: two_waits(world, run))
    await park(world, run)
    await run.signal("go")
    return await run.result("60s")


async def two_waits(world: World, run: Handle[Any]) -> bool:
    return await waits(world, run) >= 2


async def park(world: World, run: Handle[Any]) -> None:
    """Wait until the run waits, has no owner, and has left memory. Fails at once if the run is held instead."""
    await until(lambda: _parked(world, run))


async def _parked(world: World, run: Handle[Any]) -> bool:
    row = await world.row(run.id)
    assert row.status.value in ("waiting", "running"), f"{row.status}: {row.reason} {row.error!r}"
    live = world.rl.orchestrator.live.get(run.id)
    if live is not None:
        if live.departure.park_armed:  # otherwise it is leaving, and others would fall due meanwhile
            world.clock.advance(world.rl.config.park_after_seconds)
        return False
    return row.status.value == "waiting" and row.owner is None
