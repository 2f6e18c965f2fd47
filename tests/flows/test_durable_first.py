"""What must be durable before code goes on. A test stops the commit on its way to the store. Until it has arrived, nothing may
follow from it, because a process that dies meanwhile has lost it."""

from __future__ import annotations

import asyncio
from typing import Any

from relight import Retry, current_step, flow, step
from relight.model import journal as j
from tests.flows.watching import turns
from tests.flows.world import World, until


class Stopped:
    """Stops the first commit with an event of this kind, until `go`."""

    def __init__(self, world: World, kind: type[j.Event]) -> None:
        self.on_its_way = False
        self._go = asyncio.Event()
        store: Any = world.rl.services.store
        commit = store.commit

        async def stopping(batch: Any) -> Any:
            entries = [j.decode_event(entry) for one in batch for entry in one.entries]
            if any(isinstance(event, kind) for event in entries) and not self._go.is_set():
                self.on_its_way = True
                await self._go.wait()
            return await commit(batch)

        store.commit = stopping

    async def stop(self) -> None:
        """Wait until the commit is on its way, and everything that does not wait for it has happened."""
        await until(lambda: self.on_its_way)
        await turns()

    def go(self) -> None:
        self._go.set()


async def test_a_step_that_may_not_be_repeated_begins_when_its_start_is_durable(world: World):
    begun: list[int] = []

    @step(on_crash="fail")
    async def dispense() -> None:
        begun.append(1)

    @flow
    async def vends() -> None:
        await dispense()

    rl = await world.open()
    stopped = Stopped(world, j.StepStarted)
    run = await rl.start(vends)
    await stopped.stop()
    assert begun == []
    stopped.go()
    await run.result(timeout="60s")
    assert begun == [1]


async def test_the_next_attempt_of_a_step_begins_when_the_failure_of_the_last_is_durable(world: World):
    attempts: list[int] = []

    @step(retry=Retry(attempts=2, delay="1s"))
    async def flaky() -> None:
        attempts.append(current_step().attempt)
        if len(attempts) == 1:
            raise ValueError("not yet")

    @flow
    async def insists() -> None:
        await flaky()

    rl = await world.open()
    stopped = Stopped(world, j.StepRetrying)
    run = await rl.start(insists)
    await stopped.stop()
    world.clock.advance("1s")
    await turns()
    assert attempts == [1]
    stopped.go()
    await run.result(timeout="60s")
    assert attempts == [1, 2]


async def test_the_next_attempt_of_a_flow_finds_what_the_last_has_finished_however_late_its_failure_is_durable(
    world: World,
):
    charged: list[int] = []
    failures: list[int] = []

    @step
    async def charge() -> int:
        charged.append(1)
        return len(charged)

    @flow(retry=Retry(attempts=2, delay="1s"))
    async def insists() -> int:
        paid = await charge()
        if not failures:
            failures.append(1)
            raise ValueError("not yet")
        return paid

    rl = await world.open()
    stopped = Stopped(world, j.RunRetrying)
    run = await rl.start(insists)
    await stopped.stop()
    world.clock.advance("1s")
    await turns()
    stopped.go()
    assert await run.result(timeout="60s") == 1
    assert charged == [1], "a committed step was executed again"
