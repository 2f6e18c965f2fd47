"""Messages that come while a run is being taken up: they are read with its inbox, and delivered by a hint at the same time."""

from __future__ import annotations

from typing import Any

from relight import flow, sleep, step, wait_for
from relight.model.run import Message, MessageKind, Status
from tests.flows.world import World, until


async def test_a_pause_that_was_taken_back_is_not_done_for_being_heard_of_twice(world: World, monkeypatch: Any):
    @step
    async def work() -> int:
        return 1

    @flow
    async def waiting() -> int:
        await sleep("1h")
        return await work()

    rl = await world.open(park_after="0s")
    run = await rl.start(waiting.with_id("r"))
    await world.until_status("waiting", run)
    await until(lambda: not rl.orchestrator.live)
    store = rl.services.store
    read = store.inbox

    async def inbox(ids: Any) -> list[Message]:
        """Pause and resume come between the claim and the reading of the inbox, and a hint delivers them before that."""
        monkeypatch.undo()
        told = [Message(run_id="r", kind=kind, at=0.0) for kind in (MessageKind.PAUSE, MessageKind.RESUME)]
        await store.post(told)
        await rl.orchestrator.delivery.deliver_new()
        return await read(ids)

    monkeypatch.setattr(store, "inbox", inbox, raising=False)
    world.clock.advance(3600)
    await until(lambda: _ended_or_paused(world, rl))
    assert await run.status() is Status.COMPLETED


async def _ended_or_paused(world: World, rl: Any) -> bool:
    row = await rl.row("r")
    return row.status.terminal or (row.status is Status.PAUSED and not rl.orchestrator.live)


async def test_a_signal_that_comes_after_the_look_into_the_inbox_is_heard(world: World, monkeypatch: Any):
    """It was delivered when the run was not in memory yet, and it is not delivered again."""

    @flow
    async def waiting() -> list[int]:
        return [await wait_for("first", int), await wait_for("second", int)]

    rl = await world.open()
    run = await rl.start(waiting.with_id("r"))
    await world.park(run)
    store = rl.services.store
    read = store.inbox

    async def inbox(ids: Any) -> list[Message]:
        monkeypatch.undo()
        found = await read(ids)
        await run.signal("second", 2)
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr(store, "inbox", inbox, raising=False)
    await run.signal("first", 1)
    assert await run.result(timeout="60s") == [1, 2]
