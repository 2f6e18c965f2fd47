"""An engine that is woken all the time must still look, now and then, for work that no hint has reported."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from relight import flow
from relight.model import journal as j
from relight.model.run import Run, Status
from relight.orchestrator import waking
from relight.ports.store import Commit
from tests.flows.world import World, until


@pytest.mark.parametrize("busy", [False, True])
async def test_what_no_hint_has_told_is_found_by_looking(world: World, monkeypatch: pytest.MonkeyPatch, busy: bool):
    @flow
    async def work() -> int:
        return 7

    monkeypatch.setattr(waking, "CHECK_SECONDS", 0.2)
    rl = await world.open()
    watch = rl.orchestrator.waker

    async def trickle() -> None:
        while True:
            watch.look_for_held()
            await asyncio.sleep(0.02)

    await until(lambda: not watch._look_again and watch._ticker.resting)  # it has looked once
    trickling = asyncio.create_task(trickle()) if busy else None
    await asyncio.sleep(0)  # the trickle has begun
    now = world.clock.now()
    row = Run(
        id="r", root_id="r", flow="work", flow_hash=work.fingerprint, status=Status.PENDING, epoch=1, wake_at=now,
        created_at=now, updated_at=now, input=work.arguments.seal((), {}, 1000),
    )  # fmt: skip
    first = j.encode_event(j.RunCreated("", "work", work.fingerprint, msgspec.Raw(row.input), "", now))
    await rl.services.store.commit([Commit(root_id="r", epoch=1, entries=[first], create=row)])
    try:
        await until(lambda: _completed(rl))
    finally:
        if trickling is not None:
            trickling.cancel()


async def _completed(rl: object) -> bool:
    return (await rl.row("r")).status is Status.COMPLETED  # type: ignore[attr-defined,no-any-return]
