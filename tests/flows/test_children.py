"""Flows in flows: child runs, retried and timed-out flows."""

import asyncio
from typing import Any

import pytest

from relight import (
    Retry,
    RunFailedError,
    StepTimeoutError,
    flow,
    sleep,
    step,
    wait_for,
)
from relight.model import journal as j
from tests.flows.calls import Calls, NoStockError, finish, marking
from tests.flows.world import World, until

# ---- child runs


async def test_children_nest_with_deterministic_ids(world: World):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def leaf(n: int) -> str:
        return str(await mark(f"leaf{n}"))

    @flow
    async def middle(n: int) -> list[str]:
        return [await leaf(n), await leaf(n + 1)]

    @flow
    async def top() -> list[str]:
        found = [*await middle(0), *await middle(2)]
        await wait_for("go")
        return found

    rl = await world.open()
    run = await rl.start(top.with_id("t"))
    await world.until_status("waiting", run)
    rows = {row.id: row for row in (await rl.list(roots_only=False)).runs}
    assert set(rows) == {
        *("t", "t/middle", "t/middle:1", "t/middle/leaf", "t/middle/leaf:1"),
        *("t/middle:1/leaf", "t/middle:1/leaf:1"),
    }
    assert {row.root_id for row in rows.values()} == {"t"}
    assert rows["t/middle:1/leaf"].parent_id == "t/middle:1"
    assert rows["t/middle:1"].parent_id == "t"
    assert {row.status for row in rows.values() if row.id != "t"} == {"completed"}
    assert [row.id for row in (await rl.list()).runs] == ["t"]
    assert {row.id for row in (await rl.list(parent="t/middle")).runs} == {"t/middle/leaf", "t/middle/leaf:1"}
    assert await (await rl.get("t/middle:1/leaf")).result() == "leaf2"

    rl = await world.crash_and_reopen()
    await (await rl.get("t")).signal("go")
    assert await finish(world, "t") == ["leaf0", "leaf1", "leaf2", "leaf3"]
    assert calls == ["leaf0", "leaf1", "leaf2", "leaf3"]


async def test_a_crash_three_levels_down_repeats_only_what_was_in_flight(world: World):
    calls = Calls()
    mark = marking(calls)
    gate = asyncio.Event()

    @step
    async def slow() -> str:
        calls("slow")
        await gate.wait()
        return "slow"

    @flow
    async def leaf() -> list[str]:
        return [await mark("leaf"), await slow()]

    @flow
    async def middle() -> list[str]:
        return [await mark("middle"), *await leaf()]

    @flow
    async def top() -> list[str]:
        return [await mark("top"), *await middle(), await mark("end")]

    rl = await world.open()
    await rl.start(top.with_id("t"))
    await until(lambda: "slow" in calls)
    rl = await world.crash_and_reopen()
    await until(lambda: calls.count("slow") == 2)
    gate.set()
    assert await finish(world, "t") == ["top", "middle", "leaf", "slow", "end"]
    assert calls == ["top", "middle", "leaf", "slow", "slow", "end"]
    assert len((await rl.list(roots_only=False)).runs) == 3


@pytest.mark.parametrize("crash", [False, True])
async def test_sync_and_async_children_in_each_others_parents(world: World, crash: bool):
    calls = Calls()

    @step
    def mark(name: str) -> str:
        return calls(name)

    @flow
    def sync_leaf() -> str:
        found = str(mark("sync leaf"))
        wait_for("leaf")
        return found

    @flow
    async def async_middle() -> str:
        found = str(await mark("async middle"))
        return found + "+" + await sync_leaf()  # type: ignore[no-any-return]

    @flow
    def sync_top() -> str:
        found = async_middle()
        wait_for("go")
        return str(found) + "+" + str(mark("sync top"))

    rl = await world.open()
    run = await rl.start(sync_top.with_id("t"))
    await world.until_status("waiting", run)
    if crash:
        rl = await world.crash_and_reopen()
    await (await rl.get("t")).signal("leaf")
    await until(lambda: ended(world, "t/async_middle"))
    if crash:
        rl = await world.crash_and_reopen()
    await (await rl.get("t")).signal("go")
    assert await finish(world, "t") == "async middle+sync leaf+sync top"
    assert calls == ["async middle", "sync leaf", "sync top"]


async def ended(world: World, run_id: str) -> bool:
    return (await world.row(run_id)).status.terminal


async def test_a_childs_error_is_caught_by_its_parent_live_and_replayed(world: World):
    seen: list[str] = []

    @flow
    async def ship(sku: str) -> None:
        raise NoStockError(sku)

    @flow
    async def order() -> str:
        try:
            await ship("a-1")
        except NoStockError as error:
            seen.append(f"{error}/{error.sku}")
        await wait_for("go")
        return seen[-1]

    rl = await world.open()
    run = await rl.start(order.with_id("o"))
    await world.until_status("waiting", run)
    row = await world.row("o/ship")
    assert row.status == "failed"
    assert b"no a-1 in stock" in (row.error or b"")
    rl = await world.crash_and_reopen()
    await (await rl.get("o")).signal("go")
    assert await finish(world, "o") == "no a-1 in stock/a-1"
    assert seen == ["no a-1 in stock/a-1"] * 2
    with pytest.raises(RunFailedError, match=r"'o/ship' failed: NoStockError: no a-1 in stock"):
        await finish(world, "o/ship")


async def test_an_uncaught_error_fails_the_children_and_the_root(world: World):
    @flow
    async def leaf() -> None:
        raise ValueError("deep")

    @flow
    async def middle() -> None:
        await leaf()

    @flow
    async def top() -> None:
        await middle()

    rl = await world.open()
    with pytest.raises(RunFailedError, match="ValueError: deep") as raised:
        await rl.run(top.with_id("t"))
    assert isinstance(raised.value.__cause__, ValueError)
    assert {row.status for row in (await rl.list(roots_only=False)).runs} == {"failed"}


async def test_concurrent_children_of_one_flow_do_not_mix_up(world: World):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def one(n: int) -> str:
        first = await mark(f"{n}a")
        await wait_for(f"go-{n}")
        return str(first) + str(await mark(f"{n}b"))

    @flow
    async def all_of_them() -> list[str]:
        return list(await asyncio.gather(*(one(n) for n in range(3))))

    rl = await world.open()
    run = await rl.start(all_of_them.with_id("g"))
    await until(lambda: len(calls) == 3)
    await run.signal("go-2")

    async def recorded() -> bool:
        return any(key.endswith("mark:1") for key in await world.recorded("g"))

    await until(recorded)
    assert "2b" in calls
    rl = await world.crash_and_reopen()
    run = await rl.get("g")
    await run.signal("go-1")
    await run.signal("go-0")
    assert await finish(world, "g") == ["0a0b", "1a1b", "2a2b"]
    assert sorted(calls) == ["0a", "0b", "1a", "1b", "2a", "2b"]


# ---- retried flows


async def backing_off(world: World, attempt: int) -> bool:
    retried = [event for event in await world.events("t") if isinstance(event, j.RunRetrying)]
    return bool(retried) and retried[-1].attempt == attempt


@pytest.mark.parametrize("crash", [False, True])
async def test_a_retried_child_keeps_what_finished_at_any_depth(world: World, crash: bool):
    calls = Calls(last=1)
    mark = marking(calls)

    @flow
    async def leaf() -> str:
        return str(await mark("leaf")) + str(await mark("last"))

    @flow(retry=Retry(2, delay="1h"))
    async def middle() -> str:
        return str(await mark("middle")) + await leaf()

    @flow
    async def top() -> str:
        return str(await mark("top")) + await middle()

    rl = await world.open()
    run = await rl.start(top.with_id("t"))
    await world.until_status("waiting", run)
    if crash:
        rl = await world.crash_and_reopen()
        await until(lambda: "t" in rl.orchestrator.live)
    world.clock.advance("1h")
    assert await finish(world, "t") == "topmiddleleaflast"
    assert calls == ["top", "middle", "leaf", "last", "last"]


@pytest.mark.parametrize("how", ["live", "crash", "parked", "due while nobody ran"])
async def test_a_retried_root_keeps_what_finished_in_its_children(world: World, how: str):
    calls = Calls(last=2)
    mark = marking(calls)

    @flow
    async def leaf() -> str:
        return str(await mark("leaf")) + str(await mark("last"))

    @flow(retry=Retry(3, delay="1h"))
    async def top() -> str:
        return str(await mark("top")) + await leaf()

    rl = await world.open()
    run = await rl.start(top.with_id("t"))
    for attempt in (1, 2):
        await until(lambda attempt=attempt: backing_off(world, attempt))  # type: ignore[misc]
        await world.until_status("waiting", await rl.get(run.id))
        if how == "crash":
            rl = await world.crash_and_reopen()
            await until(lambda: "t" in world.rl.orchestrator.live)
        elif how == "parked":
            await world.park(await rl.get(run.id))
        elif how == "due while nobody ran":
            await world.crash()
            world.clock.advance("1h")
            rl = await world.open()
            continue
        world.clock.advance("1h")
    assert await finish(world, "t") == "topleaflast"
    assert calls == ["top", "leaf", "last", "last", "last"]
    retried = [event for event in await world.events("t") if isinstance(event, j.RunRetrying)]
    assert [event.attempt for event in retried] == [1, 2]


async def test_a_retried_sync_flow_keeps_what_finished(world: World):
    calls = Calls(b=1)

    @step
    def mark(name: str) -> str:
        return calls(name)

    @flow(retry=Retry(2, delay="1h"))
    def top() -> str:
        return str(mark("a")) + str(mark("b"))

    rl = await world.open()
    run = await rl.start(top.with_id("t"))
    await world.park(run)
    rl = await world.crash_and_reopen()
    world.clock.advance("1h")
    assert await finish(world, "t") == "ab"
    assert calls == ["a", "b", "b"]


@pytest.mark.parametrize("crash", [False, True])
async def test_a_retried_flow_may_take_another_way_than_the_failed_attempt(world: World, crash: bool):
    """The step failed, and the flow caught that and went another way. This time the step succeeds, and the flow does
    not go that way."""
    calls = Calls(direct=1, last=2)
    mark = marking(calls)

    @flow(retry=Retry(3, delay="1h"))
    async def top() -> str:
        try:
            found = await mark("direct")
        except ValueError:
            found = await mark("detour")
        await mark("more")
        return str(found) + str(await mark("last"))

    rl = await world.open()
    run = await rl.start(top.with_id("t"))
    for attempt in (1, 2):
        await until(lambda attempt=attempt: backing_off(world, attempt))  # type: ignore[misc]
        await world.until_status("waiting", await rl.get(run.id))
        if crash:
            rl = await world.crash_and_reopen()
            await until(lambda: "t" in world.rl.orchestrator.live)
        world.clock.advance("1h")
    assert await finish(world, "t") == "directlast"
    # `mark` is one step in four places: its results of an earlier attempt are found by their places.
    assert calls.count("last") == 3


async def test_a_retried_flow_uses_up_its_attempts(world: World):
    calls = Calls(a=9)
    mark = marking(calls)

    @flow(retry=Retry(3))
    async def top() -> None:
        await mark("a")

    rl = await world.open()
    with pytest.raises(RunFailedError, match="a fails"):
        await rl.run(top)
    assert calls == ["a", "a", "a"]


async def test_a_child_that_failed_and_was_retried_with_its_parent_is_listed_as_completed(world: World):
    calls = Calls(last=1)
    mark = marking(calls)

    @flow
    async def leaf() -> str:
        return str(await mark("last"))

    @flow(retry=Retry(2))
    async def top() -> str:
        return await leaf()

    rl = await world.open()
    assert await rl.run(top.with_id("t")) == "last"
    assert {row.id: row.status.value for row in (await rl.list(roots_only=False)).runs} == {
        "t": "completed",
        "t/leaf": "completed",
    }
    assert await finish(world, "t/leaf") == "last"


# ---- flow timeouts


@pytest.mark.parametrize("how", ["live", "parked", "crash", "due while nobody ran"])
async def test_a_flows_timeout_fires(world: World, how: str):
    calls = Calls()
    mark = marking(calls)

    @flow(timeout="1h")
    async def top() -> None:
        await mark("before")
        await wait_for("never")

    rl = await world.open()
    run = await rl.start(top.with_id("t"))
    await world.until_status("waiting", run)
    if how == "parked":
        row = await world.park(run)
        assert row.wake_at == row.created_at + 3600
    elif how == "crash":
        world.clock.advance("30m")
        rl = await world.crash_and_reopen()
        await until(lambda: "t" in world.rl.orchestrator.live)
        world.clock.advance("29m")
        await world.until_status("waiting", await rl.get("t"))
    elif how == "due while nobody ran":
        await world.crash()
        world.clock.advance("2h")
        rl = await world.open()
    world.clock.advance("1h")
    with pytest.raises(RunFailedError, match=r"flow 'top' did not finish within its timeout of 3600") as raised:
        await timed(world, "t")
    assert isinstance(raised.value.__cause__, StepTimeoutError)
    assert calls == ["before"]


async def timed(world: World, run_id: str) -> Any:
    """The result of a run whose timeout has already passed."""
    await until(lambda: passed(world, run_id))
    return await finish(world, run_id)


async def passed(world: World, run_id: str, seconds: float = 0) -> bool:
    world.clock.advance(seconds)  # 0: what is due now
    return await ended(world, run_id)


@pytest.mark.parametrize("how", ["live", "parked", "crash", "due while nobody ran"])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_childs_timeout_is_caught_by_its_parent(world: World, how: str, kind: str):
    calls = Calls()

    @step
    def mark(name: str) -> str:
        return calls(name)

    @flow(name="child", timeout="1h")
    async def child_async() -> None:
        await mark("before")
        await mark("two")
        try:
            await sleep("1d")
        finally:
            await mark("cleaned up")

    @flow(name="child_sync", timeout="1h")
    def child_sync() -> None:
        mark("before")
        mark("two")
        try:
            sleep("1d")
        finally:
            mark("cleaned up")

    child: Any = child_async if kind == "async" else child_sync

    @flow
    async def top() -> str:
        try:
            await child()
        except TimeoutError as error:
            return f"{type(error).__name__}: {error}"
        return "no timeout"

    rl = await world.open()
    run = await rl.start(top.with_id("t"))
    await world.until_status("waiting", run)
    if how == "parked":
        await world.park(run)
    elif how == "crash":
        rl = await world.crash_and_reopen()
        await world.until_status("waiting", await rl.get("t"))
    elif how == "due while nobody ran":
        await world.crash()
        world.clock.advance("2h")
        rl = await world.open()
    world.clock.advance("1h")
    assert "StepTimeoutError: flow 'child" in await timed(world, "t")
    assert calls == ["before", "two", "cleaned up"]
    assert (await rl.list(status="failed", roots_only=False)).runs[0].parent_id == "t"


async def test_a_timeout_is_not_renewed_by_a_crash_in_the_back_off(world: World):
    calls = Calls(a=1)
    mark = marking(calls)

    @flow(timeout="3h", retry=Retry(3, delay="2h"))
    async def child() -> None:
        await mark("a")
        await wait_for("never")

    @flow
    async def top() -> str:
        try:
            await child()
        except TimeoutError as error:
            return str(error)
        return "no timeout"

    rl = await world.open()
    run = await rl.start(top.with_id("t"))
    await world.until_status("waiting", run)
    world.clock.advance("1h")
    rl = await world.crash_and_reopen()
    await until(lambda: "t" in rl.orchestrator.live)
    world.clock.advance("1h")
    await until(lambda: calls.count("a") == 2)
    await until(lambda: world.rl.orchestrator.live["t"].timers.due)
    world.clock.advance("1h")
    assert "did not finish within its timeout of 10800" in await timed(world, "t")


async def test_a_flow_that_ends_in_time_is_left_alone(world: World):
    @flow(timeout="1h")
    async def top() -> str:
        return str(await wait_for("go"))

    rl = await world.open()
    run = await rl.start(top)
    await world.until_status("waiting", run)
    world.clock.advance("59m")
    await run.signal("go", "in time")
    assert await run.result(timeout="60s") == "in time"
    world.clock.advance("1h")
    assert await run.status() == "completed"
