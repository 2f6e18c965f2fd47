"""A fork shows what it has inherited: items, totals and child runs, as the run that did them."""

import asyncio
import contextlib
from typing import Any

import pytest

from relight import Handle, Relight, Retry, flow, foreach, now, sleep, step, wait_for
from tests.flows.world import World

CALLS: list[int] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


async def shown(run: Handle[Any]) -> list[tuple[str, int, int, int | None]]:
    return [(one.key, one.done, one.failed, one.total) for one in await run.progress()]


async def key_of(run: Handle[Any], beginning: str) -> str:
    return next(one.key for one in (await run.steps()).steps if one.key.startswith(beginning))


async def children(rl: Relight, run_id: str) -> list[Any]:
    page = await rl.list(parent=run_id)
    return sorted(page.runs, key=lambda run: run.id)


def seen(run: Any) -> tuple[Any, ...]:
    """What of a child run's row is the same in the fork."""
    key = run.id.partition("/")[2]
    return key, run.flow, run.status, run.input, run.output, run.error, run.reason, run.created_at


@pytest.mark.parametrize("threshold", [10_000, 2], ids=["inline", "blobs"])
async def test_items_and_totals(world: World, threshold: int):
    @step
    async def work(text: str) -> str:
        CALLS.append(int(text))
        return text * 2

    @flow
    async def many() -> int:
        done = await foreach([str(n) for n in range(10)], work)
        done += await foreach(["7", "8"], work, concurrency=2)
        return len(done)

    rl = await world.open(payload={"blob_threshold": threshold})
    run = await rl.start(many.with_id("r"))
    assert await run.result(timeout="60s") == 12
    CALLS.clear()
    before = await rl.items("r")
    forked = await rl.fork("r", from_step=await key_of(run, "$foreach[5@"), new_id="f")
    assert await forked.result(timeout="60s") == 12
    assert CALLS == [5, 6, 7, 8, 9, 7, 8]
    assert await shown(forked) == await shown(run)
    items = await rl.items("f")
    assert [(one.key, one.index, one.digest, one.output, one.output_blob) for one in items] == [
        (one.key, one.index, one.digest, one.output, one.output_blob) for one in before
    ]
    assert {one.run_id for one in items} == {"f"}
    CALLS.clear()
    again = await rl.fork("f", from_step=await key_of(forked, "$foreach:1[1@"), new_id="g")
    assert await again.result(timeout="60s") == 12
    assert CALLS == [8]
    assert await shown(again) == await shown(run)
    assert len(await rl.items("g")) == 12


async def test_before_it_is_taken_up_and_after_a_crash(world: World):
    @step
    async def work(n: int) -> int:
        CALLS.append(n)
        return n

    @flow
    async def many() -> int:
        done = await foreach(range(10), work)
        await wait_for("go")
        return sum(done)

    @flow
    async def other() -> None: ...

    rl = await world.open()
    run = await rl.start(many.with_id("r"))
    await rl.idle()
    key = await key_of(run, "$foreach[5@")
    await world.close()
    rl = await world.open(flows=[many], drive=False)
    forked = await rl.fork("r", from_step=key, new_id="f")
    assert await shown(forked) == [("$foreach", 5, 0, 10)]
    await world.close()
    rl = await world.open()
    await rl.idle()
    rl = await world.crash_and_reopen()
    await (await rl.get("f")).signal("go")
    assert await (await rl.get("f")).result(timeout="60s") == 45
    assert await shown(await rl.get("f")) == [("$foreach", 10, 0, 10)]


async def test_what_has_failed_is_not_inherited(world: World):
    bad = {3}

    @step
    async def work(n: int) -> int:
        CALLS.append(n)
        if n in bad:
            raise ValueError("bad")
        return n

    @flow
    async def many() -> int:
        return sum(await foreach(range(5), work))

    rl = await world.open()
    run = await rl.start(many.with_id("r"))
    with pytest.raises(Exception, match="bad"):
        await run.result(timeout="60s")
    assert await shown(run) == [("$foreach", 3, 1, 5)]
    bad.clear()
    forked = await rl.fork("r", from_step=await key_of(run, "$foreach[3@"), new_id="f")
    assert await forked.result(timeout="60s") == 10
    assert CALLS == [0, 1, 2, 3, 3, 4]
    assert await shown(forked) == [("$foreach", 5, 0, 5)]


async def test_child_runs_and_what_is_in_them(world: World):
    @step
    async def work(n: int) -> int:
        CALLS.append(n)
        return n

    @flow
    async def inner(n: int) -> int:
        if n < 0:
            raise ValueError("negative")
        return sum(await foreach(range(n), work))

    @flow
    async def middle(n: int) -> int:
        return await inner(n) + await inner(n + 1)

    @flow
    async def outer() -> int:
        found = await middle(2)
        with contextlib.suppress(ValueError):
            await inner(-1)
        found += sum(await foreach([1, 2], inner))
        return found + await middle(4) + await work(99)

    rl = await world.open()
    run = await rl.start(outer.with_id("r"))
    result = await run.result(timeout="60s")
    assert CALLS.pop() == 99
    CALLS.clear()
    for number, beginning in enumerate(("work", "middle:1/inner:1/$foreach[2@", "middle:1/inner/$foreach[0@")):
        forked = await rl.fork("r", from_step=await key_of(run, beginning), new_id=f"f{number}")
        assert await forked.result(timeout="60s") == result
        ids = ["r"]
        while ids:
            one = ids.pop()
            theirs, ours = await children(rl, one), await children(rl, one.replace("r", forked.id, 1))
            if number == 0:
                assert [seen(row) for row in ours] == [seen(row) for row in theirs]
            assert [seen(row)[:-1] for row in ours] == [seen(row)[:-1] for row in theirs]
            assert {row.root_id for row in ours} <= {forked.id}
            ids += [row.id for row in theirs]
            here, there = await rl.get(one.replace("r", forked.id, 1)), await rl.get(one)
            assert await shown(here) == await shown(there)
            assert len(await rl.items(here.id)) == len(await rl.items(there.id))
    assert sorted(CALLS) == sorted([99, 2, 3, 4, 99, 0, 1, 2, 3, 0, 1, 2, 3, 4, 99])


async def test_a_child_run_that_its_flow_gave_up_on(world: World):
    """Its code is called again on replay, with the time at which it had begun."""
    times: list[float] = []

    @step
    async def work(n: int) -> int:
        CALLS.append(n)
        return n

    @flow
    async def slow() -> None:
        times.append((await work(1)) and now().timestamp())
        await sleep("1h")

    @flow
    async def outer() -> int:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await slow()
        return await work(2)

    rl = await world.open()
    run = await rl.start(outer.with_id("r"))
    await rl.idle()
    world.clock.advance(10)
    assert await run.result(timeout="60s") == 2
    forked = await rl.fork("r", from_step="work", new_id="f")
    assert await forked.result(timeout="60s") == 2
    assert CALLS == [1, 2, 2]
    assert len(set(times)) == 1
    assert [seen(row) for row in await children(rl, "f")] == [seen(row) for row in await children(rl, "r")]


async def test_a_retried_flow_that_calls_a_child_with_another_input(world: World):
    """What the fork knows of the child run tells that this is another call."""

    @step
    async def work(n: int) -> int:
        CALLS.append(n)
        return n

    @flow
    async def child(n: int) -> int:
        return await work(n)

    tries: list[int] = []

    @flow(retry=Retry(attempts=3, delay="1h"))
    async def outer() -> int:
        found = await child(7 if len(tries) < 2 else 8)
        await work(0)
        tries.append(1)
        if len(tries) < 3:
            raise ValueError("again")
        return found

    rl = await world.open()
    run = await rl.start(outer.with_id("r"))
    await rl.idle()
    forked = await rl.fork("r", from_step="work", new_id="f")
    await run.cancel()
    await rl.idle()
    while await forked.status() != "completed":
        world.clock.advance(3600)
        await rl.idle()
    assert await forked.result(timeout="60s") == 8
