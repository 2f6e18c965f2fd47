"""Engines that are broken on purpose, to see that the exploration notices. Each scenario breaks its own process, in
every life."""

from __future__ import annotations

import asyncio
from typing import Any

from relight import Relight, current_step, flow, step
from relight.model.replay import restore
from relight.record.writer import Writer
from relight.recovery import take_up
from relight.run import step_bodies
from relight.testing.ledger import effect, ledger
from relight.testing.life import Life
from tests.crash import shapes


async def no_waiting_for_commits(rl: Relight, life: Life) -> Any:
    """A step's result reaches the flow before it is durable. The store is slow, so that this is noticed on any machine."""
    add, commit = Writer.add, rl.services.store.commit

    def impatient(self: Writer, event: Any, ends: Any = None) -> None:
        add(self, event)
        if ends is not None:
            self.run.told.append(ends)
            asyncio.get_running_loop().call_soon(self.run.advance)

    async def slow(commits: Any) -> Any:
        for _ in range(100):
            await asyncio.sleep(0)
        return await commit(commits)

    Writer.add = impatient  # type: ignore[method-assign]
    rl.services.store.commit = slow  # type: ignore[method-assign]
    return await life.end(await life.start(rl, shapes.ten_steps))


async def no_start_in_the_journal(rl: Relight, life: Life) -> Any:
    """The start of a step that may not be repeated is not journaled first."""

    async def announce(*_: Any) -> None:
        pass

    step_bodies._announce = announce  # type: ignore[assignment]
    return await life.end(await life.start(rl, shapes.never_twice))


async def no_recovery(rl: Relight, life: Life) -> Any:
    """After a crash the run is claimed, and everything in its journal is forgotten."""

    def forgetful(journal: Any) -> Any:
        state = restore(journal)
        state.outcomes.clear()
        return state

    take_up.restore = forgetful  # type: ignore[attr-defined]
    return await life.end(await life.start(rl, shapes.ten_steps))


@step
async def careless(number: int) -> int:
    """A step has its effect twice in one life."""
    for _ in range(2):
        with effect():
            pass
    return number


@flow
async def careless_flow() -> int:
    return await careless(1)


async def another_end_each_time(rl: Relight, life: Life) -> Any:
    await life.end(await life.start(rl, shapes.ten_steps))
    return life.number


@step
async def forgetting() -> str:
    """A step has no effect if a process was killed in the middle of it before. Only the ledger shows that."""
    book = ledger()
    assert book is not None
    info = current_step()
    if book.life == 1:
        with effect():
            pass
    return info.step


@flow
async def forgetting_flow() -> str:
    return await forgetting()
