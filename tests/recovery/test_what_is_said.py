"""What a person reads after a crash: the numbers are true, changed steps are named, and nothing is logged twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from relight import Relight, flow, foreach, step, wait_for
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import LeasesUnavailableError, StoreUnavailableError
from relight.flow.registry import Registry
from relight.model.lease import Acquired, OwnedBy
from relight.model.run import News
from tests.flows.world import World, until

# ---- repeated steps


@pytest.mark.parametrize(("at_once", "listed"), [(1, 1), (32, 21)])
async def test_every_step_that_may_have_been_in_flight_is_counted(world: World, at_once: int, listed: int):
    begun: list[int] = []
    gate = asyncio.Event()

    @step
    async def work(n: int) -> int:
        begun.append(n)
        await gate.wait()
        return n

    @flow
    async def many() -> int:
        return sum(await foreach(range(100), work, concurrency=at_once))

    rl = await world.open()
    await rl.start(many.with_id("r"))
    await until(lambda: len(begun) == at_once)
    rl = await world.crash_and_reopen()
    await until(lambda: len(begun) == 2 * at_once)
    gate.set()
    assert await (await rl.get("r")).result(timeout="60s") == sum(range(100))
    assert rl.metrics.value("relight_steps_repeated_total") == at_once
    events = [line for line in (await rl.explain("r")).events if line.token == "STEP_REPEATED"]
    assert len(events) == listed
    assert ("not listed" in events[-1].text) == (at_once > listed)


async def test_a_step_that_follows_from_something_new_was_not_in_flight(world: World):
    gate, blocked = asyncio.Event(), asyncio.Event()

    @step
    async def first() -> None:
        blocked.set()
        await gate.wait()

    @step
    async def second() -> None: ...

    @flow
    async def both() -> None:
        await first()
        await second()
        await asyncio.gather(second(), second())

    rl = await world.open()
    await rl.start(both.with_id("r"))
    await blocked.wait()
    gate.set()
    rl = await world.crash_and_reopen()
    await (await rl.get("r")).result(timeout="60s")
    assert rl.metrics.value("relight_steps_repeated_total") == 1


# ---- changed code


@pytest.mark.parametrize(("policy", "done"), [("warn", "its result is used"), ("rerun", "it is executed again")])
async def test_the_history_names_a_changed_step(
    world: World, registry: Registry, policy: str, done: str, caplog: pytest.LogCaptureFixture
):
    def define(number: int) -> Any:
        if number == 1:

            @step(name="work")
            async def work() -> int:
                return 1
        else:

            @step(name="work")
            async def work() -> int:
                return 2

        @flow(name="changing")
        async def changing() -> int:
            value = await work()
            for _ in range(3):
                await wait_for("go")
            return value

        return changing

    rl = await world.open()
    run = await rl.start(define(1).with_id("r"))
    await world.park(run)
    registry.remove("changing")
    define(2)
    rl = await world.close_and_reopen(recovery={"version_mismatch": policy})
    run = await rl.get("r")
    with caplog.at_level(logging.WARNING, logger="relight"):
        for _ in range(2):  # it wakes up, and is parked again: that is logged once
            await run.signal("go")
            await until(lambda: inbox_is_empty(world))
            await world.park(run)
        await run.signal("go")
        assert await run.result(timeout="60s") == (1 if policy == "warn" else 2)
    changed = [line for line in (await rl.explain("r")).events if line.token == "FINGERPRINT_MISMATCH"]
    assert len(changed) == 1
    assert "step 'work'" in changed[0].text
    assert done in changed[0].text
    assert sum("[FINGERPRINT_MISMATCH]" in record.getMessage() for record in caplog.records) == 1


async def inbox_is_empty(world: World) -> bool:
    return not await world.rl.services.store.inbox(["r"])


# ---- logged once


async def test_a_run_that_is_held_is_said_once(world: World, registry: Registry, caplog: pytest.LogCaptureFixture):
    @flow
    async def gone() -> None:
        await wait_for("go")

    rl = await world.open()
    run = await rl.start(gone.with_id("r"))
    await until(lambda: world.is_("waiting", run))
    registry.remove("gone")
    with caplog.at_level(logging.INFO, logger="relight"):
        rl = await world.crash_and_reopen()
        await world.until_status("paused", await rl.get("r"))
    said = [line for record in caplog.records if "is not registered" in (line := record.getMessage())]
    assert len(said) == 1
    assert said[0].startswith("[DEFINITION_MISSING] run r: ")


class Cut(MemoryLeases):
    """A lease manager that does not answer while `cut`."""

    cut = False
    tries = 0

    async def heartbeat(self) -> bool:
        if self.cut:
            self.tries += 1
            raise LeasesUnavailableError("UNAVAILABLE: failed to connect to all addresses")
        return await super().heartbeat()


async def test_an_outage_of_the_leases_is_said_once_and_counted(caplog: pytest.LogCaptureFixture):
    store = MemoryStore(clock=SYSTEM_CLOCK)
    leases = Cut(store, clock=SYSTEM_CLOCK)
    recovery = {"lease_ttl": "0.6s", "check_interval": "0.1s"}
    with caplog.at_level(logging.WARNING, logger="relight"):
        async with Relight(store=store, lease_manager=leases, recovery=recovery) as rl:
            leases.cut = True
            await until(lambda: leases.tries >= 10)
            leases.cut = False
            await until(lambda: rl.services.heartbeats.may_drive)
            await until(lambda: "get through again" in caplog.text)
    said = [record.getMessage() for record in caplog.records if "[HEARTBEAT_FAILED]" in record.getMessage()]
    assert len(said) == 2
    assert "UNAVAILABLE" in said[0]
    assert "heartbeats get through again, after 1" in said[1]


async def test_an_outage_of_the_store_is_said_once_by_each_part(caplog: pytest.LogCaptureFixture):
    store = MemoryStore(clock=SYSTEM_CLOCK)
    plain, tries = store.next_due, 0
    down = True

    async def next_due() -> Any:
        nonlocal tries
        if down:
            tries += 1
            raise StoreUnavailableError("the server is down")
        return await plain()

    with caplog.at_level(logging.WARNING, logger="relight"):
        store.next_due = next_due  # type: ignore[method-assign]
        async with Relight(store=store):
            await until(lambda: tries >= 4)
            down = False
            await until(lambda: "gets answers again" in caplog.text)
    said = [record.getMessage() for record in caplog.records if "[RECOVERY_FAILED]" in record.getMessage()]
    assert len(said) == 2, said
    assert "the server is down" in said[0]
    assert "gets answers again, after " in said[1]


class NoKeys(MemoryLeases):
    """A manager outside the store that does not take the keys of runs while it is `down`."""

    in_store = False
    down = True
    tries = 0

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        self.tries += 1
        if self.down:
            raise LeasesUnavailableError("the server is down")
        return {}


async def test_an_outage_of_what_only_makes_recovery_slower_begins_and_ends_with_one_token(
    caplog: pytest.LogCaptureFixture,
):
    @flow
    async def waits() -> Any:
        return await wait_for("go")

    store = MemoryStore(clock=SYSTEM_CLOCK)
    leases = NoKeys(store, clock=SYSTEM_CLOCK)
    with caplog.at_level(logging.WARNING, logger="relight"):
        async with Relight(store=store, lease_manager=leases, park_after="1h") as rl:
            await rl.start(waits.with_id("r"))
            await until(lambda: leases.tries >= 2)
            leases.down = False
            await until(lambda: "gets answers again" in caplog.text)
    said = [record.getMessage() for record in caplog.records if "attach" in record.getMessage()]
    assert [line.partition(" ")[0] for line in said] == ["[WATCH_FAILED]", "[WATCH_FAILED]"], said
    assert "the server is down" in said[0]
    assert "gets answers again, after " in said[1]


# ---- many who wait


async def test_many_callers_that_wait_for_results_share_one_read_per_notification(world: World):
    @flow
    async def waits() -> Any:
        return await wait_for("go")

    driver = await world.open()
    client = await world.open(drive=False)
    runs = [await client.start(waits.with_id(f"r{n}")) for n in range(50)]
    results = [asyncio.ensure_future(run.result(timeout="60s")) for run in runs]
    await until(lambda: len(client.orchestrator.watchers._watchers) == 50)
    reads = 0
    store: Any = client.services.store
    get_runs, get_run = store.get_runs, store.get_run

    async def count_many(*arguments: Any) -> Any:
        nonlocal reads
        reads += 1
        return await get_runs(*arguments)

    async def count_one(*arguments: Any) -> Any:
        nonlocal reads
        reads += 1
        return await get_run(*arguments)

    store.get_runs, store.get_run = count_many, count_one
    for _ in range(5):
        before = reads
        client.orchestrator.waker._changed(News.RUNS)
        await until(lambda before=before: reads > before)
        for _ in range(50):
            await asyncio.sleep(0)
    assert reads <= 25, "nearly one for each who waits"
    for run in runs:
        await (await driver.get(run.id)).signal("go", 1)
    assert await asyncio.gather(*results) == [1] * 50


async def test_a_caller_that_asks_for_a_row_is_told_what_went_wrong(world: World):
    rl = await world.open()
    store: Any = rl.services.store

    async def broken(*_: Any) -> Any:
        raise StoreUnavailableError("the server is down")

    store.get_runs = store.get_run = broken
    asked = [rl.row(f"r{n}") for n in range(3)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(one) for one in found] == ["the server is down"] * 3
    del store.get_runs, store.get_run
    with pytest.raises(LookupError):
        await rl.row("r0")
