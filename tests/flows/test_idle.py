"""`Relight.idle()`: nothing can happen in the engine before time passes or a call reaches it. And clocks whose time passes by
itself when the engine is idle."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from relight import Relight, RelightError, Retry, flow, foreach, parallel, sleep, spawn, step, wait_for
from relight.execution import idle
from relight.testing.clock import FakeClock
from tests.flows.world import World, until


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """If code forgets to report that something has ended, a test hangs."""
    monkeypatch.setattr(idle, "CHECK_SECONDS", 3600.0)


async def nothing_happens(world: World) -> None:
    """Check that for a while the engine does nothing for its runs, and stays idle."""
    rl = world.rl
    before = (rl.services.recorder.commits, rl.services.recorder.entries, set(rl.orchestrator.live))
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        await asyncio.sleep(0)
        assert rl.services.idleness.now
    assert (rl.services.recorder.commits, rl.services.recorder.entries, set(rl.orchestrator.live)) == before


class Places(list[str]):
    """The places that a flow has reached. On replay it reaches them again."""

    def append(self, place: str) -> None:
        if place not in self:
            super().append(place)


@step
async def quick(n: int) -> int:
    return n


@step
async def slow(n: int) -> int:
    await asyncio.sleep(0.05)
    return n


@step
def in_thread(n: int) -> int:
    time.sleep(0.05)
    return n


SLOW = {
    "commit": 40,
    "claim_due": 30,
    "next_due": 20,
    "read": 30,
    "inbox": 30,
    "get_run": 10,
    "post": 30,
    "messages_after": 30,
}


@pytest.mark.parametrize("store", ["fast", "slow"])
async def test_a_flow_has_come_to_where_it_waits(world: World, store: str):
    if store == "slow":
        world.slow.update(SLOW)
    where = Places()

    @flow
    async def inner(n: int) -> int:
        await slow(n)
        await sleep("1h")
        return n

    @flow
    async def spawned() -> None:
        await wait_for("never", timeout="3d")

    @flow
    async def outer() -> int:
        await foreach([1, 2, 3], quick, concurrency=2)
        await asyncio.gather(slow(1), in_thread(2))
        where.append("sleeps")
        await sleep("1h")
        where.append("calls")
        found = list(await asyncio.gather(inner(1), inner(2)))
        where.append("waits")
        found.append(await wait_for("go", int))
        other = await spawn(spawned.with_id("other"))
        where.append("joins")
        try:
            await other
        except TimeoutError:
            pass
        return sum(found)

    rl = await world.open()
    run = await rl.start(outer.with_id("r"))
    await rl.idle()
    assert where == ["sleeps"]
    assert await run.status() == "waiting"
    await nothing_happens(world)
    world.clock.advance("1h")
    await rl.idle()
    assert where == ["sleeps", "calls"]
    await nothing_happens(world)
    world.clock.advance("1h")
    await rl.idle()
    assert where == ["sleeps", "calls", "waits"]
    world.clock.advance(rl.config.park_after_seconds)
    await rl.idle()
    assert "r" not in rl.orchestrator.live  # parked
    await nothing_happens(world)
    await run.signal("go", 4)
    await rl.idle()
    assert where == ["sleeps", "calls", "waits", "joins"]
    assert await (await rl.get("other")).status() == "waiting"
    await nothing_happens(world)
    rl = await world.crash_and_reopen()
    await rl.idle()
    assert set(rl.orchestrator.live) == {"r", "other"}
    await nothing_happens(world)
    world.clock.advance("3d")
    await rl.idle()
    assert await (await rl.get("other")).status() == "failed"
    assert await (await rl.get("r")).status() in ("completed", "failed")
    assert not rl.orchestrator.live


async def test_sync_flows_and_their_threads_are_waited_for(world: World):
    where = Places()

    @flow
    def sync() -> None:
        parallel(lambda: in_thread(1), lambda: in_thread(2))
        where.append("sleeps")
        sleep("1h")
        time.sleep(0.05)  # the flow's own code takes its time
        where.append("over")

    rl = await world.open()
    await rl.start(sync.with_id("r"))
    await rl.idle()
    assert where == ["sleeps"]
    assert "r" not in rl.orchestrator.live  # a sync flow is parked at once
    await nothing_happens(world)
    world.clock.advance("1h")
    await rl.idle()
    assert where == ["sleeps", "over"]
    assert await (await rl.get("r")).status() == "completed"


async def test_a_step_under_way_is_waited_for_and_a_back_off_is_not(world: World):
    tried: list[int] = []
    go_on = threading.Event()

    @step(retry=Retry(attempts=3, delay="10m"))
    def failing() -> str:
        go_on.wait()
        tried.append(len(tried) + 1)
        if len(tried) < 3:
            raise ValueError("not yet")
        return "well"

    @flow
    async def tries() -> str:
        return str(await failing())

    rl = await world.open()
    run = await rl.start(tries)
    waiting = asyncio.ensure_future(rl.idle())
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert not waiting.done()
    go_on.set()
    await waiting
    assert tried == [1]
    world.clock.advance("10m")
    await rl.idle()
    assert tried == [1, 2]
    world.clock.advance("10m")
    assert await run.result() == "well"


async def test_runs_that_are_held_paused_or_cancelled(world: World):
    @flow
    async def held() -> None:
        await wait_for("go")

    rl = await world.open()
    run = await rl.start(held)
    await rl.idle()
    await run.pause()
    await rl.idle()
    assert await run.status() == "paused"
    await nothing_happens(world)
    await run.resume()
    await rl.idle()
    assert await run.status() == "waiting"
    await run.cancel()
    await rl.idle()
    assert await run.status() == "cancelled"
    await nothing_happens(world)


async def test_several_may_wait_and_an_idle_engine_answers_at_once(world: World):
    rl = await world.open()
    await asyncio.gather(rl.idle(), rl.idle(), rl.idle())

    @flow
    async def once() -> int:
        return int(await slow(1))

    await asyncio.gather(rl.start(once), rl.idle(), rl.idle())
    await rl.idle()
    assert not rl.orchestrator.live


def test_a_blocking_engine_has_it_too():
    @flow
    def blocking() -> str:
        sleep("7d")
        return "a week later"

    clock = FakeClock()
    with Relight("memory:", clock=clock) as rl:
        run = rl.start(blocking)
        rl.idle()
        assert run.status() == "waiting"
        clock.advance("7d")
        assert run.result() == "a week later"


# ---- time that passes by itself


async def test_time_jumps_from_timer_to_timer(world: World):
    seen: list[Any] = []

    @step(retry=Retry(attempts=3, delay="1d"))
    async def failing() -> None:
        seen.append(world.clock.now())
        if len(seen) < 3:
            raise ValueError("not yet")

    @flow
    async def long() -> str:
        await failing()
        await sleep("40d")
        await asyncio.gather(*(sleep(f"{n}h") for n in range(5)))
        try:
            async with asyncio.timeout(86_400):
                await wait_for("never")
        except TimeoutError:
            pass
        return str(await wait_for("nobody", str, timeout="1d", default="nobody"))

    rl = await world.open()
    began = world.clock.now()
    async with world.clock.advancing(rl):
        assert await rl.run(long) == "nobody"
    assert [round(at - began) for at in seen] == [0, 86_400, 2 * 86_400]
    days = (world.clock.now() - began) / 86_400
    assert 44 <= days < 45


async def test_time_does_not_jump_ahead_of_a_signal(world: World):
    """The test sends a signal after each result, and the flow gets it before time passes."""

    @flow
    async def asked(n: int) -> str:
        return str(await wait_for("answer", str, timeout="1s", default="nobody"))

    world.slow.update(SLOW)
    rl = await world.open()
    async with world.clock.advancing(rl):
        for n in range(5):
            run = await rl.start(asked, n)
            await run.signal("answer", "me")
            assert await run.result() == "me"
        assert await rl.run(asked, 6) == "nobody"


async def test_a_clock_for_several_engines(world: World):
    @flow
    async def other() -> str:
        await sleep("1d")
        return "other"

    @flow
    async def one() -> str:
        return str(await (await spawn(other)))

    first, second = await world.open(), await world.open()
    async with world.clock.advancing(first, second):
        assert list(await asyncio.gather(first.run(one), second.run(one))) == ["other", "other"]


async def test_it_ends_with_its_context(world: World):
    rl = await world.open()
    async with world.clock.advancing(rl):
        pass

    @flow
    async def sleeping() -> None:
        await sleep("1d")

    run = await rl.start(sleeping)
    await rl.idle()
    await nothing_happens(world)
    assert await run.status() == "waiting"


@step
async def for_ever() -> None:
    await asyncio.Event().wait()


def never_idle() -> Any:
    @flow
    async def works() -> None:
        await for_ever()

    return works


async def test_whoever_waits_for_an_engine_that_is_closed_is_told_so():
    rl = Relight("memory:", shutdown_grace=0)
    await rl.open()
    await rl.start(never_idle())
    waits = asyncio.create_task(rl.idle())
    await until(lambda: rl.services.idleness._waiters)
    await rl.close()
    with pytest.raises(RelightError, match="was closed while"):
        await asyncio.wait_for(waits, 60)


def test_threads_with_calls_of_a_blocking_engine_that_is_closed_are_told_so():
    ended: list[str] = []
    relight = Relight("memory:", shutdown_grace=0)
    with relight as rl:
        run = rl.start(never_idle())

        def waits(call: Any) -> None:
            try:
                call()
            except RelightError as error:
                ended.append(str(error))

        async def for_nothing() -> None:
            await asyncio.Event().wait()

        calls: list[Any] = [rl.idle, run.result, lambda: rl.call(for_nothing())]
        threads = [threading.Thread(target=waits, args=[call], daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while len(rl._calls) < len(calls) and time.monotonic() < deadline:
            time.sleep(0.001)
    for thread in threads:
        thread.join(60)
    assert len(ended) == 3
    assert all("closed" in one for one in ended)


async def test_time_that_would_stand_still_because_an_engine_was_closed(world: World):
    """The other engine would wait for ever, and nothing would say why."""

    @flow
    async def week() -> str:
        await sleep("7d")
        return "over"

    first, second = await world.open(), await world.open()

    async def stands_still() -> None:
        async with world.clock.advancing(first, second):
            assert await second.run(week) == "over"
            await world.close(first)
            await second.run(week)

    with pytest.raises(RelightError, match=r"closed|not open"):
        await stands_still()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    async with world.clock.advancing(second):
        assert await second.run(week) == "over"


async def test_the_error_of_the_test_itself_comes_through(world: World):
    async def fails(error: BaseException) -> None:
        rl = await world.open()
        async with world.clock.advancing(rl):
            await world.close(rl)
            raise error

    with pytest.raises(ZeroDivisionError):
        await fails(ZeroDivisionError())
    with pytest.raises(asyncio.CancelledError):
        await fails(asyncio.CancelledError())
