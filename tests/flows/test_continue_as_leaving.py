"""Runs of many generations leave memory, are released and make room for others. They do not grow."""

import gc
from typing import Any

import pytest

from relight import (
    RunCancelled,
    RunCancelledError,
    continue_as,
    flow,
    wait_for,
)
from tests.flows.calls import Calls, marking
from tests.flows.watching import is_beyond, is_in_generation, waits_for
from tests.flows.world import World, until


async def test_cancelling_ends_a_run_in_whatever_generation_it_is(world: World):
    @flow
    async def turning(n: int) -> int:
        try:
            await wait_for("go")
        except RunCancelled:
            return continue_as(n + 1)  # in any case it is cancelled
        return continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(turning.with_id("t"), 0)
    await until(lambda: waits_for(world, run, "go"))
    await run.signal("go")
    await until(lambda: is_in_generation(world, "t", 2))
    await run.cancel("enough")
    with pytest.raises(RunCancelledError, match="enough"):
        await run.result()


async def test_a_run_that_never_waits_can_be_cancelled_and_paused(world: World):
    @flow
    async def spinning(n: int) -> int:
        return continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(spinning.with_id("s"), 0)
    await until(lambda: is_beyond(world, "s", 5))
    await run.pause()
    await world.until_status("paused", run)
    stood_at = (await world.state("s")).generation
    await run.resume()
    await until(lambda: is_beyond(world, "s", stood_at + 5))
    await run.cancel()
    with pytest.raises(RunCancelledError):
        await run.result()


async def test_closing_releases_the_run_and_it_goes_on_elsewhere(world: World):
    @flow
    async def spinning(n: int) -> int:
        return n if n == 10_000_000 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(spinning.with_id("s"), 0)
    for _ in range(8):
        stood_at = (await world.state("s")).generation
        await until(lambda at=stood_at: is_beyond(world, "s", at + 3))
        await world.close()
        await world.open()
        row = await world.row("s")
        assert row.owner in (None, world.rl.services.owner), "it was let go of"
        run = await world.rl.get("s")
    await run.cancel()
    with pytest.raises(RunCancelledError):
        await run.result()
    assert await world.rl.services.store.read_log("s", "_server", 0, 100), "its log outlives its generations"


async def test_a_lease_that_is_lost_while_the_next_generation_is_committed(world: World):
    @flow
    async def turning(n: int) -> int:
        await wait_for("go")
        return n if n == 1 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(turning.with_id("t"), 0)
    await until(lambda: waits_for(world, run, "go"))
    store: Any = rl.services.store
    commit, heartbeats = store.inner.commit, rl.services.heartbeats
    lost = False

    async def lost_first(commits: Any) -> Any:
        nonlocal lost
        if not lost and any(one.next is not None for one in commits):
            lost = heartbeats._lost = True
            rl.orchestrator.let_go_of_all()
        return await commit(commits)

    store.inner.commit = lost_first
    await run.signal("go")
    row = await world.until_status("pending", run)
    assert row.owner is None
    assert rl.orchestrator.live == {}
    heartbeats._lost = False
    rl.orchestrator.lease_regained(lapsed=False)
    await run.signal("go")
    assert await run.result() == 1


async def test_a_lease_that_lapses_fences_the_next_generation(world: World):
    """Another process claims the run in the moment in which its next generation is committed."""

    @flow
    async def turning(n: int) -> int:
        await wait_for("go")
        return n if n == 1 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(turning.with_id("t"), 0)
    await until(lambda: waits_for(world, run, "go"))
    store: Any = rl.services.store
    commit = store.inner.commit
    claimed = False

    async def claimed_first(commits: Any) -> Any:
        nonlocal claimed
        if not claimed and any(one.next is not None for one in commits):
            claimed = True
            await store.inner.claim({"t": commits[0].epoch}, rl.services.owner)
        return await commit(commits)

    store.inner.commit = claimed_first
    await run.signal("go")
    await until(lambda: claimed)
    await until(lambda: is_in_generation(world, "t", 2))
    await run.signal("go")
    assert await run.result() == 1


async def test_a_run_that_never_waits_makes_room_for_others(world: World):
    @flow
    async def spinning(n: int) -> int:
        return continue_as(n + 1)

    @flow
    async def short(n: int) -> int:
        return n

    rl = await world.open(max_concurrent_runs=1)
    endless = await rl.start(spinning.with_id("s"), 0)
    runs = [await rl.start(short, n) for n in range(3)]
    world.clock.advance("1s")  # from now on it is due after them
    assert [await run.result(timeout="60s") for run in runs] == [0, 1, 2]
    await until(lambda: is_beyond(world, "s", 10))
    await endless.cancel()
    with pytest.raises(RunCancelledError):
        await endless.result()


async def test_many_generations_leave_nothing_behind(world: World):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def child(n: int) -> int:
        return n

    @flow
    async def turning(n: int) -> int:
        await mark("x")
        await child(n)
        await wait_for("go")
        return n if n == 90 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(turning.with_id("t"), 0)
    sizes: dict[int, tuple[int, ...]] = {}
    for n in range(91):
        await run.signal("go", id=f"{n}")
        if n in (30, 60, 90):
            await until(lambda n=n: is_beyond(world, "t", n))
            gc.collect()
            count = sum(type(one).__name__ in ("LiveRun", "RunLoop", "FlowTask", "Writer") for one in gc.get_objects())
            sizes[n] = (world.rows_in("runs"), world.rows_in("journal"), count)
    assert await run.result() == 90
    rows, entries, objects = zip(*sizes.values(), strict=True)
    assert max(rows) <= 2, sizes
    assert max(entries) < 10, sizes
    assert max(objects) - min(objects) < 20, sizes


async def test_a_generation_that_waited_for_a_moment_is_not_kept_by_its_timer(world: World):
    @flow
    async def turning(n: int) -> int:
        await wait_for("go")
        return n if n == 20 else continue_as(n + 1)

    rl = await world.open(park_after="5m")
    run = await rl.start(turning.with_id("t"), 0)
    for n in range(20):
        await until(lambda n=n: is_in_generation(world, "t", n + 1))
        await until(lambda: waits_for(world, run, "go"))
        await run.signal("go")
    await until(lambda: is_in_generation(world, "t", 21))
    gc.collect()
    assert len(world.clock.pending) < 10
    await run.signal("go")
    assert await run.result() == 20


async def test_a_checkpoint_of_the_last_generation_that_comes_late_is_refused(world: World):
    """The checkpoint was made in the background, from the earlier journal."""
    calls = Calls()
    mark = marking(calls)

    @flow
    async def turning(n: int) -> int:
        for _ in range(4):
            await mark("x")
        return n if n == 30 else continue_as(n + 1)

    world.slow["checkpoint"] = 7
    rl = await world.open(checkpoint={"every": 3})
    assert await rl.run(turning.with_id("t"), 0) == 30
    assert len(calls) == 31 * 4
