"""A transaction is also bounded by bytes. PostgreSQL accepts no message over 1 GB, and the store would try such a batch
for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relight import flow, step
from relight.ports.store import Commit
from relight.record import batch_size
from tests.flows.world import World

MANY = 40
LARGE = 100_000  # bytes of one result
LIMIT = 500_000


class Scale:
    """A store that counts the bytes that it gets."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        self.blobs = 0
        store = world.rl.services.store
        commit, put_blob = store.commit, store.put_blob

        async def weigh(commits: list[Commit]) -> Any:
            self.batches.append(sum(one.size for one in commits))
            return await commit(commits)

        async def count(data: bytes) -> str:
            self.blobs += 1
            return await put_blob(data)

        monkeypatch.setattr(store, "commit", weigh, raising=False)
        monkeypatch.setattr(store, "put_blob", count, raising=False)
        monkeypatch.setattr(batch_size, "MAX_BATCH_BYTES", LIMIT)


@pytest.fixture(params=[True, False], ids=["blobs", "inline"])
def threshold(request: pytest.FixtureRequest) -> int:
    return 1000 if request.param else 10 * LARGE


async def test_batches_of_many_runs_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch, threshold: int):
    gate = asyncio.Event()

    @step
    async def large(n: int) -> str:
        await gate.wait()
        return str(n % 10) * LARGE

    @flow
    async def carries(n: int) -> int:
        return len(await large(n))

    rl = await world.open(payload_blob_threshold=threshold)
    scale = Scale(world, monkeypatch)
    runs = [await rl.start(carries, n) for n in range(MANY)]
    gate.set()  # all end in one turn of the loop
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [LARGE] * MANY
    assert max(scale.batches) <= LIMIT + 2 * LARGE
    assert sum(size > LARGE for size in scale.batches) < MANY, "they are committed one by one"


async def test_batches_of_many_runs_that_are_started_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch, threshold: int
):
    @flow
    async def takes(text: str) -> int:
        return len(text)

    rl = await world.open(payload_blob_threshold=threshold)
    scale = Scale(world, monkeypatch)
    runs = await asyncio.gather(*(rl.start(takes, str(n % 10) * LARGE) for n in range(MANY)))
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [LARGE] * MANY
    assert max(scale.batches) <= LIMIT + 4 * LARGE


async def test_batches_of_one_run_with_many_branches_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch):
    gate = asyncio.Event()

    @step
    async def large(n: int) -> str:
        await gate.wait()
        return f"{n:03}" + "x" * LARGE

    @flow
    async def fans_out() -> int:
        tasks = [asyncio.create_task(large(n)) for n in range(MANY)]
        return sum(len(text) for text in await asyncio.gather(*tasks))

    rl = await world.open(payload_blob_threshold=1000)
    scale = Scale(world, monkeypatch)
    run = await rl.start(fans_out)
    gate.set()
    assert await run.result(timeout="60s") == MANY * (LARGE + 3)
    assert max(scale.batches) <= LIMIT + 2 * LARGE
    assert scale.blobs, "so much of one run was never committed at once: this test tells nothing"
    assert world.rows_in("blobs") == MANY
    await world.crash_and_reopen()
    assert await (await world.rl.get(run.id)).result(timeout="60s") == MANY * (LARGE + 3)
