"""Calls that are under way while the engine is closed end with an error that says so: not with a CancelledError that nobody
has asked for, and not never."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from relight import Handle, Relight, RelightError, flow, sleep
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.model.run import Run
from relight.ports.store import Commit, CommitResult
from relight.record import recorder
from tests.flows.world import until


class Stuck(MemoryStore):
    """A store that does not answer, from the moment on at which a test says so."""

    def __init__(self) -> None:
        super().__init__(clock=SYSTEM_CLOCK)
        self.stuck: set[str] = set()
        self.asked: set[str] = set()
        self.again = asyncio.Event()

    async def _answer(self, what: str) -> None:
        if what in self.stuck:
            self.asked.add(what)
            await self.again.wait()

    async def get_run(self, run_id: str) -> Run | None:
        await self._answer("get")
        return await super().get_run(run_id)

    async def get_runs(self, run_ids: Sequence[str]) -> list[Run]:
        await self._answer("get")
        return await super().get_runs(run_ids)

    async def commit(self, batch: Sequence[Commit]) -> list[CommitResult]:
        await self._answer("commit")
        return await super().commit(batch)

    async def close(self) -> None:
        await self._answer("close")
        await super().close()


async def opened(store: Stuck) -> Relight:
    rl = Relight(store=store, lease_manager=MemoryLeases(store, clock=SYSTEM_CLOCK), shutdown_grace=0)
    await rl.open()
    return rl


def sleeping() -> Any:
    @flow
    async def sleeps() -> None:
        await sleep("1h")

    return sleeps


CALLS: dict[str, Callable[[Handle[Any]], Awaitable[Any]]] = {
    "status": lambda run: run.status(),
    "describe": lambda run: run.describe(),
    "progress": lambda run: run.progress(),
    "pause": lambda run: run.pause(),
}


@pytest.mark.parametrize("call", list(CALLS))
async def test_a_read_raises_what_a_task_group_hears(call: str):
    store = Stuck()
    rl = await opened(store)
    run = await rl.start(sleeping())
    await until(lambda: rl.services.idleness.now)

    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(CALLS[call](run))  # type: ignore[arg-type]  # a coroutine

    store.stuck.add("get")
    watching = asyncio.create_task(group())
    await until(lambda: store.asked)
    asked_later = asyncio.create_task(run.status())
    await asyncio.sleep(0)
    await asyncio.wait_for(rl.close(), 60)
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(watching, 60)
    (error,) = raised.value.exceptions
    assert isinstance(error, RelightError)
    assert "closed" in str(error)
    with pytest.raises(RelightError, match="closed"):
        await asyncio.wait_for(asked_later, 60)


async def test_a_run_that_is_started_while_the_store_is_being_closed():
    store = Stuck()
    rl = await opened(store)
    store.stuck.add("close")
    closing = asyncio.create_task(rl.close())
    await until(lambda: store.asked)
    with pytest.raises(RelightError, match="is stopping"):
        await asyncio.wait_for(rl.start(sleeping()), 60)
    store.again.set()
    await asyncio.wait_for(closing, 60)


async def test_a_start_whose_commit_is_under_way_when_the_recorder_stops(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder, "STOP_SECONDS", 0.01)
    store = Stuck()
    rl = await opened(store)
    store.stuck.add("commit")
    under_way = asyncio.create_task(rl.start(sleeping()))
    await until(lambda: store.asked)
    queued = asyncio.create_task(rl.start(sleeping()))
    await until(lambda: rl.services.recorder._creations)
    await rl.services.recorder.stop()
    for one in (under_way, queued):
        with pytest.raises(RelightError, match="start it again"):
            await asyncio.wait_for(one, 60)
    store.stuck.clear()
    store.again.set()
    await asyncio.wait_for(rl.close(), 60)
