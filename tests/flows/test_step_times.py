"""When steps began and ended, their attempts and their errors: they are recorded, kept in checkpoints, and shown during a run."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from relight import ConfigError, Relight, Retry, StoreError, flow, foreach, now, sleep, spawn, step, uuid, wait_for
from relight.model.journal import StepStarted
from relight.run.long_steps import LONG_SECONDS
from relight.testing.clock import START
from tests.flows.world import World, until


async def test_every_entry_has_the_time_at_which_it_was_recorded(world: World):
    @step(retry=Retry(attempts=2, delay="1ms"))
    async def twice(seen: list[int]) -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("no")
        return 1

    @step
    async def plain(n: int) -> int:
        return n

    @step
    async def failing() -> None:
        raise KeyError("gone")

    @flow
    async def inner(n: int) -> int:
        return await plain(n)

    @flow
    async def spawned() -> int:
        return 1

    attempts: list[int] = []

    @flow(retry=Retry(attempts=2, delay="1ms"))
    async def everything() -> None:
        await twice([])
        now()
        uuid()
        await foreach([1, 2], plain)
        await inner(3)
        await sleep("1ms")
        await (await spawn(spawned))
        await wait_for("go", timeout="1h")
        with pytest.raises(KeyError):
            await failing()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await wait_for("never")
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("once more")

    tries: list[int] = []
    rl = await world.open()
    run = await rl.start(everything)
    await run.signal("go")

    async def over() -> bool:
        world.clock.advance("1ms")
        return (await run.status()).terminal

    await until(over)
    await run.result()
    events = await world.events(run.id)
    without = [event for event in events if not (getattr(event, "at", 0) or getattr(event, "at_us", 0))]
    assert not without
    kinds = {type(event).__name__ for event in events}
    assert {"StepRetrying", "StepFailed", "ValueRecorded", "ItemCompleted", "RunSpawned", "RunJoined"} <= kinds
    assert {"SignalReceived", "RunRetrying", "TimerFired", "OperationCancelled"} <= kinds


async def test_the_times_of_steps(world: World):
    @step
    async def slow(seconds: str) -> str:
        world.clock.advance(seconds)
        return seconds

    @step
    def in_a_thread(seconds: str) -> None:
        world.clock.advance(seconds)
        raise ValueError("as expected")

    @flow
    async def both() -> None:
        await slow("3s")
        with pytest.raises(ValueError, match="expected"):
            await in_a_thread("5s")
        await slow("0.5s")

    rl = await world.open(checkpoint={"every": 2})
    run = await rl.start(both)
    await run.result()
    page = await run.steps()
    assert page.next_cursor is None
    assert [(one.key, one.state, one.started_at, one.ended_at, one.seconds) for one in page.steps] == [
        ("slow", "done", START, START + 3, 3),
        ("in_a_thread", "failed", START + 3, START + 8, 5),
        ("slow:1", "done", START + 8, START + 8.5, 0.5),
    ]
    assert [one.error for one in page.steps] == [None, "ValueError: as expected", None]
    assert (await rl.get(run.id)).id == run.id


async def test_times_outlive_checkpoints(world: World):
    @step(retry=Retry(attempts=2, delay="1m"))
    async def once_more() -> None:
        tries.append(1)
        world.clock.advance("1s")
        if len(tries) == 1:
            raise ConnectionError("not yet")

    @step
    async def count(n: int) -> int:
        return n

    @flow
    async def long() -> None:
        await once_more()
        for n in range(10):
            await count(n)
        await wait_for("go")

    tries: list[int] = []
    rl = await world.open(checkpoint={"every": 4})
    run = await rl.start(long)
    await until(lambda: world.asleep(run))
    world.clock.advance("1m")
    await until(lambda: world.is_("waiting", run))
    await until(lambda: rl.services.store.get_checkpoint(run.id))
    first = (await run.steps(limit=1)).steps[0]
    assert (first.key, first.started_at, first.ended_at, first.seconds) == ("once_more", START, START + 62, 62)
    assert (first.attempt, first.last_error, first.error) == (2, "ConnectionError: not yet", None)


async def test_a_long_step_can_be_seen_while_it_runs(world: World):
    gate = asyncio.Event()

    @step
    async def short() -> None:
        await asyncio.sleep(0)

    @step
    async def long(n: int) -> int:
        await gate.wait()
        return n

    @flow
    async def working() -> int:
        await short()
        return sum(await asyncio.gather(long(1), long(2)))

    rl = await world.open()
    run = await rl.start(working)
    await until(lambda: len(rl.orchestrator.live[run.id].inflight) == 2)
    commits = rl.services.recorder.commits
    world.clock.advance(LONG_SECONDS)
    await until(lambda: rl.services.recorder.commits > commits)
    assert rl.services.recorder.commits == commits + 1  # for both
    world.clock.advance("9s")
    running = (await run.steps()).steps[1:]
    assert [(one.state, one.attempt, one.started_at, one.seconds) for one in running] == [("running", 1, START, 10)] * 2
    explained = await rl.explain(run.id)
    assert "it is at step ~long/long (for 10.0s), ~long:1/long (for 10.0s)" in explained.sentence
    assert [one.key for one in explained.steps] == ["~long/long", "~long:1/long"]
    gate.set()
    assert await run.result() == 3
    ended = (await run.steps()).steps
    assert [(one.state, one.seconds) for one in ended] == [("done", 0), ("done", 10), ("done", 10)]
    assert not rl.services.long_steps._under_way


async def test_a_long_step_in_a_thread_can_be_seen(world: World):
    gate = threading.Event()

    @step
    def long() -> int:
        gate.wait()
        return 1

    @flow
    def working() -> int:
        return long()

    rl = await world.open()
    run = await rl.start(working)
    await until(lambda: rl.orchestrator.live[run.id].inflight)
    world.clock.advance(LONG_SECONDS)
    try:
        (seen,) = await until(lambda: steps_of(run))
    finally:
        gate.set()
    assert (seen.key, seen.state) == ("long", "running")
    assert await run.result() == 1


async def steps_of(run: Any) -> list[Any]:
    found: list[Any] = (await run.steps()).steps
    return found


async def test_short_steps_announce_nothing(world: World):
    @step
    async def short() -> None:
        await asyncio.sleep(0)

    @flow
    async def many() -> None:
        for _ in range(20):
            await short()

    rl = await world.open()
    run = await rl.start(many)
    await run.result()
    world.clock.advance("10s")
    assert not any(isinstance(event, StepStarted) for event in await world.events(run.id))
    assert all("look" not in repr(timer.callback) for timer in world.clock.pending)  # and no timer is left


async def test_a_long_step_is_executed_again_after_a_crash_and_counts_its_start_anew(world: World):
    gate = asyncio.Event()

    @step(retry=Retry(attempts=3, delay="1m"))
    async def long() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("not yet")
        await gate.wait()
        return len(calls)

    @flow
    async def working() -> int:
        return await long()

    calls: list[int] = []
    rl = await world.open()
    run = await rl.start(working.with_id("run"))
    await until(lambda: world.asleep(run))
    (waiting,) = (await run.steps()).steps
    assert (waiting.state, waiting.attempt, waiting.last_error) == ("backing off", 2, "ConnectionError: not yet")
    assert waiting.until == START + 60
    assert (await run.steps(failed=True)).steps == [waiting], "one that is tried again has failed, so far"
    assert "not yet" in str(waiting.traceback)
    assert "attempt 2 of long until" in (await rl.explain("run")).sentence
    assert "(after ConnectionError: not yet)" in (await rl.explain("run")).sentence
    world.clock.advance("1m")
    await until(lambda: len(calls) == 2)
    world.clock.advance(LONG_SECONDS)
    await until(lambda: is_running(run))
    rl = await world.crash_and_reopen()
    await until(lambda: len(calls) == 3)
    world.clock.advance("5s")
    run = await rl.get("run")
    (running,) = (await run.steps()).steps
    assert (running.state, running.attempt, running.last_error) == ("running", 2, "ConnectionError: not yet")
    assert running.started_at == START
    await until(lambda: attempt_began(run, START + 61))
    gate.set()
    assert await run.result() == 3


async def is_running(run: Any) -> bool:
    return any(one.state == "running" for one in (await run.steps()).steps)


async def attempt_began(run: Any, at: float) -> bool:
    return bool((await run.steps()).steps[0].attempt_started_at == at)


async def test_pages(world: World):
    @step
    async def count(n: int) -> int:
        return n

    @step(timeout="1h")
    async def waits() -> None:
        await gate.wait()

    @flow
    async def inner() -> None:
        await count(7)

    @flow
    async def many() -> None:
        for n in range(5):
            await count(n)
        await inner()
        await asyncio.gather(waits(), waits())

    gate = asyncio.Event()
    rl = await world.open()
    run = await rl.start(many.with_id("many"))

    async def both_begun() -> bool:  # as the store has it: the starts of the steps may be in two commits
        return len((await run.steps(limit=100)).steps) == 8

    await until(both_begun)
    await until(lambda: is_running(run))
    keys, cursor, pages = [], None, 0
    while True:
        page = await run.steps(limit=3, cursor=cursor)
        assert len(page.steps) <= 3
        keys += [one.key for one in page.steps]
        pages, cursor = pages + 1, page.next_cursor
        if cursor is None:
            break
    assert keys == ["count", *(f"count:{n}" for n in range(1, 5)), "inner/count", "~waits/waits", "~waits:1/waits"]
    assert pages == 3
    newest = await run.steps(limit=7, newest=True)
    assert [one.key for one in newest.steps] == keys[:0:-1]
    assert [one.key for one in (await run.steps(cursor=newest.next_cursor, newest=True)).steps] == keys[:1]
    assert (await run.steps(failed=True)).steps == []
    child = await rl.get("many/inner")
    assert [one.key for one in (await child.steps()).steps] == ["inner/count"]
    for limit in (0, 10_001, True, "3"):
        with pytest.raises(ConfigError, match="steps"):
            await run.steps(limit=limit)  # type: ignore[arg-type]  # as a caller without types would
    for cursor in ("", "ended:", "5", "open:x"):
        with pytest.raises(StoreError, match="next_cursor as it came"):
            await run.steps(cursor=cursor)
    gate.set()


def test_the_blocking_facade_has_step_times_too():
    @step
    def one() -> int:
        return 1

    @flow
    def short() -> int:
        return one()

    with Relight("memory:") as rl:
        run = rl.start(short)
        run.result()
        assert [found.key for found in run.steps(limit=5).steps] == ["one"]
        assert [found.kind for found in run.operations()] == ["step"]


async def test_a_step_that_a_run_left_behind_is_not_shown_as_running(world: World):
    gate = threading.Event()

    @step
    def stubborn() -> None:
        gate.wait()

    @flow
    async def impatient() -> str:
        try:
            async with asyncio.timeout(5):
                await stubborn()
        except TimeoutError:
            return "enough"
        return ""

    rl = await world.open()
    run = await rl.start(impatient)
    await until(lambda: rl.orchestrator.live[run.id].inflight)
    world.clock.advance(LONG_SECONDS)
    await until(lambda: is_running(run))
    world.clock.advance("5s")
    try:
        assert await run.result() == "enough"
        (left,) = (await run.steps()).steps
        assert left.state in ("left behind", "given up")
    finally:
        gate.set()
