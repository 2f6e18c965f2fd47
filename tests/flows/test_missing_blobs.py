"""A blob is gone from the store, or has other bytes: the run is held with its digest, and goes on when the blob is back.

A missing blob is never an outcome of the flow, and never replaced by another value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from relight import Handle, Retry, flow, foreach, spawn, step, wait_for
from relight.errors import CorruptionError
from relight.flow.definitions import Flow
from relight.model.blob import blob_digest
from relight.model.run import Hold, Run, Status
from tests.flows.world import World, until

LARGE = "x" * 2000
BLOB = msgspec.json.encode(LARGE)
CONFIG: dict[str, Any] = {"payload_blob_threshold": 1000}


@pytest.fixture(params=["missing", "spoilt"])
def lose(request: pytest.FixtureRequest) -> Callable[[World], None]:
    return lambda world: world.lose_blobs(None if request.param == "missing" else b'"another text"')


async def held(world: World, run: Handle[Any], digest: str) -> Run:
    """Check that the run is held as corrupt, that the reason names the blob, and that callers that wait for the run are told."""
    row = await world.until_status("paused", run)
    assert row.hold is Hold.CORRUPT
    assert digest in row.reason
    assert "resume() the run" in row.reason
    with pytest.raises(CorruptionError, match=digest):
        await run.result(timeout="60s")
    assert digest in (await run.describe()).reason
    assert digest in (await world.rl.explain(run.id)).sentence
    return row


async def goes_on(world: World, run: Handle[Any], blob: bytes = BLOB) -> Any:
    """Put the blob back, as from a backup, and resume the run."""
    world.lose_blobs()
    await world.rl.services.store.put_blob(blob)
    await run.resume()
    return await run.result(timeout="60s")


@step
async def large() -> str:
    return LARGE


def asks(how: str) -> Flow[[], Any]:
    """A flow that has recorded a large value before it waits for "go"."""

    @flow
    async def child() -> str:
        return LARGE

    async def item(_: int) -> str:
        return LARGE

    @flow
    async def asks() -> Any:
        try:
            if how == "step":
                value = await large()
            elif how == "signal":
                value = await wait_for("large")
            elif how == "child":
                value = await child()
            else:
                (value,) = await foreach([1], item)
            await wait_for("go")
        except Exception as error:
            return repr(error)
        return len(value)

    return asks


@pytest.mark.parametrize("how", ["step", "signal", "child", "item"])
async def test_a_missing_blob_on_replay(world: World, lose: Callable[[World], None], how: str):
    rl = await world.open(**CONFIG)
    run = await rl.start(asks(how).with_id("r"))
    if how == "signal":
        await run.signal("large", LARGE)
    await world.park(run)
    lose(world)
    await run.signal("go")
    await held(world, run, blob_digest(BLOB))
    assert await goes_on(world, run) == len(LARGE)


async def test_a_missing_blob_of_the_input(world: World, lose: Callable[[World], None]):
    @flow
    async def takes(text: str) -> int:
        await wait_for("go")
        return len(text)

    rl = await world.open(**CONFIG)
    run = await rl.start(takes.with_id("r"), LARGE)
    row = await world.park(run)
    blob = await rl.services.store.get_blob(row.input_blob)
    assert blob is not None
    lose(world)
    with pytest.raises(CorruptionError, match=row.input_blob):
        await rl.fork("r", new_id="forked")
    assert [found.id for found in (await rl.list()).runs] == ["r"], "a fork was begun with another input"
    await run.signal("go")
    await held(world, run, row.input_blob)
    assert await goes_on(world, run, blob) == len(LARGE)


async def test_a_missing_blob_of_a_signal_that_was_not_received_yet(world: World, lose: Callable[[World], None]):
    @flow
    async def takes() -> int:
        try:
            return len(await wait_for("large"))
        except Exception as error:
            return repr(error)  # type: ignore[return-value]

    rl = await world.open(**CONFIG, drive=False)
    run = await rl.start(takes.with_id("r"))
    await run.signal("large", LARGE)
    lose(world)
    await world.close()
    rl = await world.open(**CONFIG)
    run = await rl.get("r")
    await held(world, run, blob_digest(BLOB))
    assert len(await rl.services.store.inbox(["r"])) == 1, "the signal was lost"
    assert await goes_on(world, run) == len(LARGE)


async def test_a_missing_blob_of_the_result_of_a_spawned_run(world: World, lose: Callable[[World], None]):
    @flow
    async def makes() -> str:
        return LARGE

    @flow
    async def joins() -> int:
        other = await spawn(makes.with_id("other"))
        await wait_for("go")
        try:
            return len(await other)
        except Exception as error:
            return repr(error)  # type: ignore[return-value]

    rl = await world.open(**CONFIG)
    run = await rl.start(joins.with_id("r"))
    await until(lambda: is_there(world, "other"))
    await world.until_status("completed", await rl.get("other"))
    lose(world)
    with pytest.raises(CorruptionError, match=blob_digest(BLOB)):
        await (await rl.get("other")).result(timeout="60s")
    assert await (await rl.get("other")).status() is Status.COMPLETED
    await run.signal("go")
    await held(world, run, blob_digest(BLOB))
    assert await goes_on(world, run) == len(LARGE)


async def is_there(world: World, run_id: str) -> bool:
    return await world.rl.services.store.get_run(run_id) is not None


async def test_a_missing_blob_of_an_earlier_attempt_of_the_flow(world: World, lose: Callable[[World], None]):
    failing = asyncio.Event()

    @flow(retry=Retry(attempts=3, delay="1h"))
    async def tries() -> int:
        value = await large()
        if not failing.is_set():
            failing.set()
            raise ValueError("not yet")
        return len(value)

    rl = await world.open(**CONFIG)
    run = await rl.start(tries.with_id("r"))
    await until(lambda: world.asleep(run))
    lose(world)
    world.clock.advance(3600.0)
    await held(world, run, blob_digest(BLOB))
    assert await goes_on(world, run) == len(LARGE)
