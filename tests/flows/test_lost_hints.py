"""Notifications wake, the store decides: losing every hint that another process has written costs only latency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relight import Relight, flow, wait_for
from relight.backends.sqlite.store import SqliteStore
from relight.clock import SYSTEM_CLOCK
from relight.orchestrator import waking
from tests.flows.world import World, until


class DeafStore(SqliteStore):
    """A store that never reports writes of other processes."""

    def watch(self, changed: object, supervisor: object = None) -> None:
        pass


@pytest.mark.parametrize("parked", [True, False])
async def test_two_engines_that_never_hear_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parked: bool
) -> None:
    monkeypatch.setattr(waking, "CHECK_SECONDS", 0.05)  # the poll is what is left

    @flow
    async def answering() -> str:
        return f"got {await wait_for('question')}"

    path = tmp_path / "relight.db"
    driver = Relight(store=DeafStore(path, clock=SYSTEM_CLOCK), park_after="1ms" if parked else "1h")
    other = Relight(store=DeafStore(path, clock=SYSTEM_CLOCK), recovery={"enabled": False})
    async with driver, other:
        run = await driver.start(answering.with_id("r"))

        async def waits() -> bool:
            row = await run.describe()
            return row.status == "waiting" and (row.owner is None) == parked

        await until(waits)
        elsewhere = await other.get("r")
        await elsewhere.signal("question", 42)
        assert await elsewhere.result(timeout="60s") == "got 42"


async def test_what_was_claimed_when_the_lease_was_lost_is_given_back(world: World):
    """This process does not drive the run, and other processes would have to wait until this one is known to be dead."""

    @flow
    async def listening() -> str:
        return str(await wait_for("go"))

    rl = await world.open()
    run = await rl.start(listening.with_id("r"))
    await world.park(run)
    store: Any = rl.services.store
    claim_due, heartbeats = store.inner.claim_due, rl.services.heartbeats
    claimed = 0

    async def lost_meanwhile(*args: Any) -> Any:
        nonlocal claimed
        rows = await claim_due(*args)
        if rows and not claimed:
            claimed = len(rows)
            heartbeats._lost = True
        return rows

    store.inner.claim_due = lost_meanwhile
    await run.signal("go", "on")
    await until(lambda: claimed)
    row = await world.until_status("pending", run)
    assert row.owner is None
    heartbeats._lost = False
    rl.orchestrator.lease_regained(lapsed=False)
    assert await run.result() == "on"
