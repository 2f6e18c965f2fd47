"""A process that drives no runs: it makes no database, and hears why what it waits for does not come."""

import os
from pathlib import Path

import pytest

from relight import Relight, RelightError, flow, sleep, step, wait_for
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import StoreFormatError
from tests.flows.world import World


async def test_a_client_makes_no_database(tmp_path: Path):
    path = tmp_path / "typo.db"
    for migrate in (True, False):
        with pytest.raises(StoreFormatError, match=rf"{path} does not exist.*start an orchestrator first") as refused:
            await Relight(path, drive=False, migrate=migrate).open()
        assert "relight migrate" in str(refused.value)
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - ruff refuses pathlib in async functions
    path.touch()
    with pytest.raises(StoreFormatError, match=rf"{path} is empty.*start an orchestrator first"):
        await Relight(path, drive=False).open()
    assert path.stat().st_size == 0
    async with Relight(path):
        pass
    async with Relight(path, drive=False) as client:
        assert (await client.list()).runs == []


def test_a_blocking_client_makes_no_database(tmp_path: Path):
    with pytest.raises(StoreFormatError, match="does not exist"), Relight(tmp_path / "typo.db", drive=False):
        pass
    assert list(tmp_path.iterdir()) == []


@step
async def add(n: int) -> int:
    return n + 1


async def test_a_timeout_says_why_the_run_has_not_ended(world: World):
    @flow
    async def asking() -> int:
        return await add(await wait_for("number", int))

    @flow
    async def outer() -> int:
        return await asking()

    @flow
    async def sleeping() -> None:
        await sleep("1h")

    rl = await world.open()
    run = await rl.start(asking.with_id("r"))
    nap = await rl.start(sleeping.with_id("nap"))
    parent = await rl.start(outer.with_id("p"))
    await rl.idle()
    with pytest.raises(TimeoutError, match=r"^run 'r' has not ended within 0\.0s: it waits.* for signal 'number'"):
        await run.result(timeout=0)
    with pytest.raises(TimeoutError, match=r"^run 'nap' has not ended within 0\.0s: it waits.* for a timer until"):
        await nap.result(timeout=0)
    with pytest.raises(TimeoutError, match=r"its root 'p' waits.* for signal 'number'"):
        await (await rl.get("p/asking")).result(timeout=0)
    await run.pause()
    await rl.idle()
    with pytest.raises(TimeoutError, match="it was paused by request"):
        await run.result(timeout=0)
    await parent.cancel()


async def test_a_timeout_of_a_run_with_a_large_journal_reads_only_its_row(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("relight.handle.SMALL_JOURNAL_BYTES", 10)

    @flow
    async def asking() -> int:
        return await wait_for("number", int)

    rl = await world.open()
    run = await rl.start(asking.with_id("r"))
    await rl.idle()
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.0s: it is waiting$"):
        await run.result(timeout=0)


async def test_a_client_hears_that_no_orchestrator_is_alive():
    @flow
    async def asking() -> int:
        return await wait_for("number", int)

    store = MemoryStore(clock=SYSTEM_CLOCK)

    def engine(*, drive: bool) -> Relight:
        return Relight(store=store, lease_manager=MemoryLeases(store, clock=SYSTEM_CLOCK), drive=drive)

    async with engine(drive=False) as client:
        run = await client.start(asking.with_id("r"))
        with pytest.raises(
            TimeoutError, match=r"it was accepted and waits.* with its flow 'asking'.*no orchestrator is"
        ):
            await run.result(timeout=0)
        async with engine(drive=True) as rl:
            await rl.idle()
            with pytest.raises(TimeoutError, match="for signal 'number'") as waiting:
                await run.result(timeout=0)
        assert "no orchestrator" not in str(waiting.value)
        await run.signal("number", 7)
        assert (await client.explain("r")).sentence.count("no orchestrator is alive") == 1
        with pytest.raises(TimeoutError, match="has not ended"):
            await run.result(timeout=0)


async def test_a_timeout_while_nothing_can_be_asked_says_just_that(world: World, monkeypatch: pytest.MonkeyPatch):
    @flow
    async def asking() -> int:
        return await wait_for("number", int)

    rl = await world.open()
    run = await rl.start(asking.with_id("r"))
    await rl.idle()

    async def fails(_: str) -> None:
        raise RelightError("no answer")

    monkeypatch.setattr(rl, "explain", fails)
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.0s$"):
        await run.result(timeout=0)
