"""How far a run has come, as a caller sees it: for each foreach, and without reading the run's results."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relight import Handle, Relight, Retry, RunFailedError, continue_as, flow, foreach, step, wait_for
from relight.model.run import ForeachProgress
from tests.flows.world import World, until

pytestmark = pytest.mark.timeout(120)


def progress(done: int, total: int | None, failed: int = 0, key: str = "$foreach") -> ForeachProgress:
    return ForeachProgress(key=key, done=done, failed=failed, total=total)


class Gates:
    """A step for each number. It waits until it may go on, or fails."""

    def __init__(self, count: int) -> None:
        self.gates = [asyncio.Event() for _ in range(count)]
        self.bad: set[int] = set()

        @step
        async def work(n: int) -> int:
            await self.gates[n].wait()
            if n in self.bad:
                raise ValueError(f"bad {n}")
            return n

        self.work = work

    def open(self, *numbers: int) -> None:
        for number in numbers or range(len(self.gates)):
            self.gates[number].set()


async def done(run: Handle[Any], count: int) -> bool:
    return sum(one.done for one in await run.progress()) == count


async def test_a_foreach_tells_how_far_it_is(world: World):
    gates = Gates(4)

    @flow
    async def many() -> int:
        return len(await foreach(range(4), gates.work, concurrency=4)) + len(await foreach([], gates.work))

    rl = await world.open()
    run = await rl.start(many.with_id("r"))
    gates.open(2, 0)
    await until(lambda: done(run, 2))
    assert await run.progress() == [progress(2, 4)]
    gates.open()
    assert await run.result() == 4
    assert await run.progress() == [progress(4, 4), progress(0, 0, key="$foreach:1")]
    assert [item.index for item in await rl.items("r")] == [0, 1, 2, 3]


async def test_what_has_failed_is_counted_and_forgotten_when_the_flow_is_called_again(world: World):
    gates = Gates(3)
    gates.bad = {0, 2}

    @flow(retry=Retry(attempts=2, delay="1h"))
    async def many() -> int:
        return len(await foreach(range(3), gates.work, concurrency=3))

    rl = await world.open()
    run = await rl.start(many.with_id("r"))
    gates.open()
    await until(lambda: _has(run, progress(1, 3, failed=2)))
    gates.bad = set()
    world.clock.advance(3601)
    assert await run.result() == 3
    assert await run.progress() == [progress(3, 3)]


async def _has(run: Handle[Any], wanted: ForeachProgress) -> bool:
    return wanted in await run.progress()


async def test_a_foreach_that_fails_is_counted_with_the_end_of_its_run(world: World):
    gates = Gates(2)
    gates.bad = {1}

    @flow
    async def many() -> list[int]:
        return await foreach(range(2), gates.work)

    rl = await world.open()
    run = await rl.start(many.with_id("r"))
    gates.open()
    with pytest.raises(RunFailedError):
        await run.result()
    assert await run.progress() == [progress(1, 2, failed=1)]


async def test_after_a_crash_it_goes_on_counting(world: World):
    gates = Gates(5)
    numbers = list(range(4))

    @flow
    async def many() -> int:
        return len(await foreach(numbers, gates.work, concurrency=9))  # more items after the crash

    rl = await world.open()
    run = await rl.start(many.with_id("r"))
    gates.open(1)
    await until(lambda: done(run, 1))
    numbers.append(4)
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    gates.open(0)
    await until(lambda: done(run, 2))
    assert await run.progress() == [progress(2, 5)]
    gates.open()
    assert await run.result() == 5
    assert await run.progress() == [progress(5, 5)]


async def test_the_progress_inside_an_item_belongs_to_the_item_and_a_child_run_has_its_own(world: World):
    gates = Gates(2)
    gates.open()

    @flow
    async def inner(n: int) -> int:
        return len(await foreach(range(2), gates.work))

    async def nested(n: int) -> int:
        return len(await foreach(range(2), gates.work)) + await inner(n)

    @flow
    async def outer() -> int:
        return sum(await foreach(range(3), nested))

    rl = await world.open()
    run = await rl.start(outer.with_id("r"))
    assert await run.result() == 12
    assert await run.progress() == [progress(3, 3)]
    child = next(row.id for row in (await rl.list(roots_only=False)).runs if row.flow == "inner")
    (found,) = await (await rl.get(child)).progress()
    assert (found.done, found.total) == (2, 2)


async def test_the_total_after_an_item_that_had_ended_was_taken_away(world: World):
    gates = Gates(3)
    gates.open()
    numbers = [0, 1, 2]

    @flow
    async def many() -> int:
        found = len(await foreach(numbers, gates.work))
        await wait_for("go")
        return found

    rl = await world.open()
    run = await rl.start(many.with_id("r"))
    await until(lambda: done(run, 3))
    await world.park(run)
    numbers.pop()
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    await run.signal("go")
    assert await run.result() == 2
    assert await run.progress() == [progress(2, 2)]


async def test_a_foreach_of_no_items_is_there_after_a_crash(world: World):
    gates = Gates(2)
    gates.open(0)

    @flow
    async def many() -> int:
        await gates.work(0)
        await foreach([], gates.work)
        return await gates.work(1)

    async def has_begun(count: int) -> bool:
        return len(await world.recorded("r")) >= count

    rl = await world.open()
    await rl.start(many.with_id("r"))
    await until(lambda: has_begun(1))
    rl = await world.crash_and_reopen()
    gates.open()
    run = await rl.get("r")
    await run.result()
    assert await run.progress() == [progress(0, 0)]


async def test_an_attempt_with_fewer_items_has_no_more_done_than_there_are(world: World):
    gates = Gates(5)
    gates.open()
    numbers = [0, 1, 2, 3, 4]

    @flow(retry=Retry(attempts=2))
    async def many() -> int:
        found = len(await foreach(list(numbers), gates.work))
        if found == 5:
            del numbers[2:]
            raise ValueError
        return found

    rl = await world.open()
    run = await rl.start(many.with_id("r"))
    assert await run.result() == 2
    assert await run.progress() == [progress(2, 2)]


async def test_a_next_generation_begins_without_progress(world: World):
    gates = Gates(2)
    gates.open()

    @flow
    async def looping(n: int) -> int:
        if n:
            await foreach(range(2), gates.work)
            continue_as(n - 1)
        return n

    rl = await world.open()
    run = await rl.start(looping.with_id("r"), 1)
    assert await run.result() == 0
    assert await run.progress() == []


def test_progress_is_there_for_sync_code():
    @step
    def double(n: int) -> int:
        return 2 * n

    @flow
    def many() -> list[int]:
        return foreach(range(3), double, concurrency=2)

    with Relight("memory:") as rl:
        run = rl.start(many.with_id("r"))
        assert run.result() == [0, 2, 4]
        assert run.progress() == [progress(3, 3)]


@pytest.mark.parametrize("stored", ["inline", "blobs"])
async def test_a_retry_with_other_items_counts_those_that_it_has(world: World, stored: str):
    gate, attempts, done_again = asyncio.Event(), list[int](), list[int]()

    @step
    async def work(n: int) -> str:
        if len(attempts) > 1:
            done_again.append(n)
            await gate.wait()
        return f"{n} {'x' * 100}"

    @flow(retry=Retry(2))
    async def again() -> int:
        attempts.append(1)
        first = len(attempts) == 1
        found = await foreach([1, 2, 3, 4] if first else [1, 20, 3, 30, 40], work, concurrency=5)
        found += await foreach([5, 6, 7] if first else [5, 6], work, concurrency=5)
        if first:
            raise ValueError("once more")
        return len(found)

    rl = await world.open(payload={"blob_threshold": 50 if stored == "blobs" else 10_000})
    run = await rl.start(again.with_id("r"))
    await until(lambda: sorted(done_again) == [20, 30, 40])

    async def counted_anew() -> bool:  # with the commit after the items have begun
        return (await run.progress())[:1] == [progress(2, 5)]

    await until(counted_anew)
    assert [(one.index, bool(one.output_blob)) for one in await rl.items("r") if one.key == "$foreach"] == [
        (0, stored == "blobs"),
        (2, stored == "blobs"),
    ]
    gate.set()
    assert await run.result("60s") == 7
    assert await run.progress() == [progress(5, 5), progress(2, 2, key="$foreach:1")]
    assert [one.index for one in await rl.items("r")] == [0, 1, 2, 3, 4, 0, 1]
