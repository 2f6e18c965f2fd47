"""Limits: room for few runs, few threads, and a shutdown while runs are in flight. Nothing deadlocks, and nothing is lost."""

import asyncio
import threading
from typing import Any

import pytest

from relight import RelightError, Retry, flow, foreach, parallel, sleep, spawn, step, wait_for
from relight.errors import StoreUnavailableError
from relight.model.lease import Process
from relight.orchestrator import waking
from relight.run import leaving
from tests.flows.watching import turns
from tests.flows.world import World, until

MANY = 40


@pytest.fixture(autouse=True)
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """The poll would find a run that was forgotten. Here it comes too late for that."""
    monkeypatch.setattr(waking, "CHECK_SECONDS", 3600.0)


@step
async def double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


@step
def double_sync(x: int) -> int:
    return 2 * x


# ---- max_concurrent_runs


@pytest.mark.parametrize("rooms", [1, 3])
async def test_more_runs_than_fit_into_memory_all_complete(world: World, rooms: int):
    most = 0

    @flow
    async def calculate(x: int) -> int:
        nonlocal most
        most = max(most, len(live))
        return await double(await double(x))

    rl = await world.open(max_concurrent_runs=rooms)
    live = rl.orchestrator.live
    runs = await asyncio.gather(*(rl.start(calculate.with_id(f"r{n}"), n) for n in range(MANY)))
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [4 * n for n in range(MANY)]
    assert 1 <= most <= rooms


@pytest.mark.parametrize("rooms", [1, 3])
async def test_runs_that_wait_make_room_for_others(world: World, rooms: int):
    @flow
    async def waiting(x: int) -> int:
        return x + await wait_for("go", int)  # type: ignore[no-any-return]

    rl = await world.open(max_concurrent_runs=rooms)
    runs = [await rl.start(waiting, n) for n in range(MANY)]
    for run in runs:
        await world.until_status("waiting", run)
    for run in runs:
        await run.signal("go", 1)
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [n + 1 for n in range(MANY)]


@pytest.mark.parametrize("rooms", [1, 3])
async def test_more_sleepers_than_fit_into_memory_all_wake(world: World, rooms: int):
    @flow
    async def sleeping(x: int) -> int:
        await sleep("1h")
        return await double(x)

    rl = await world.open(max_concurrent_runs=rooms)
    runs = [await rl.start(sleeping, n) for n in range(MANY)]
    for run in runs:
        await world.until_status("waiting", run)
    world.clock.advance("1h")
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [2 * n for n in range(MANY)]


async def test_a_run_that_awaits_a_spawned_one_gives_it_its_room(world: World):
    @flow
    async def inner(x: int) -> int:
        return await double(x)

    @flow
    async def outer(x: int) -> int:
        spawned = [await spawn(inner, x), await spawn(inner, x + 1)]
        return await spawned[0] + await spawned[1]  # type: ignore[no-any-return]

    rl = await world.open(max_concurrent_runs=1)
    runs = [await rl.start(outer, n) for n in range(5)]
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [4 * n + 2 for n in range(5)]


async def test_more_crashed_runs_than_fit_into_memory_are_all_recovered(world: World):
    gate = asyncio.Event()
    begun: list[int] = []

    @step
    async def hang(x: int) -> int:
        begun.append(x)
        await gate.wait()
        return x

    @flow
    async def hanging(x: int) -> int:
        return await double(await hang(x))

    rl = await world.open()
    for n in range(MANY):
        await rl.start(hanging.with_id(f"r{n}"), n)
    await until(lambda: len(begun) == MANY)
    await world.crash()
    gate.set()
    rl = await world.open(max_concurrent_runs=2, recovery_max_startup_recovery=3)
    runs = [await rl.get(f"r{n}") for n in range(MANY)]
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [2 * n for n in range(MANY)]


# ---- max_threads


def threads_in_use(world: World) -> int:
    return world.rl.services.threads.in_use


@pytest.mark.parametrize("threads", [1, 2])
async def test_more_sync_flows_than_threads_all_complete(world: World, threads: int):
    at_once: list[int] = []
    here = 0
    lock = threading.Lock()

    @step
    def work(x: int) -> int:
        nonlocal here
        with lock:
            here += 1
            at_once.append(here)
        with lock:
            here -= 1
        return x + 1

    @flow
    def calculate(x: int) -> int:
        return work(work(x))  # type: ignore[no-any-return]

    rl = await world.open(max_threads=threads)
    runs = [await rl.start(calculate, n) for n in range(MANY)]
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [n + 2 for n in range(MANY)]
    assert max(at_once) <= threads
    await until(lambda: threads_in_use(world) == 0)


async def test_sync_steps_of_async_flows_share_the_threads(world: World):
    @flow
    async def fan(x: int) -> int:
        return sum(await asyncio.gather(*(double_sync(x + n) for n in range(5))))

    rl = await world.open(max_threads=1)
    runs = [await rl.start(fan, n) for n in range(10)]
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [10 * n + 20 for n in range(10)]


# What a sync flow may do that needs another thread while the flow has its own.


@step(timeout="1m")
def with_timeout(x: int) -> int:
    return 2 * x


def sync_inside_async(kind: str) -> Any:
    @flow(name="sync-grandchild")
    def grandchild(x: int) -> int:
        return double_sync(x)  # type: ignore[no-any-return]

    @flow(name="async-child")
    async def child(x: int) -> int:
        if kind == "step":
            return await double_sync(x)  # type: ignore[no-any-return]
        if kind == "gather":
            return sum(await asyncio.gather(double_sync(x), double_sync(0)))
        return await grandchild(x)  # type: ignore[no-any-return]

    return child


@pytest.mark.parametrize(
    "shape",
    [
        "parallel",
        "nested-parallel",
        "foreach",
        "foreach-flows",
        "timeout",
        "async-step",
        "child-step",
        "child-gather",
        "child-flow",
    ],
)
async def test_a_sync_flow_never_waits_for_a_thread_it_holds_itself(world: World, shape: str):
    child = sync_inside_async(shape.removeprefix("child-"))

    @flow
    def calculate(x: int) -> int:
        if shape == "parallel":
            return sum(parallel(lambda: double_sync(x), lambda: double_sync(0), lambda: double_sync(0)))
        if shape == "nested-parallel":
            return sum(parallel(lambda: sum(parallel(lambda: double_sync(x), lambda: 0)), lambda: double_sync(0)))  # type: ignore[arg-type, return-value]
        if shape == "foreach":
            return sum(foreach([x, 0, 0], double_sync, concurrency=3))
        if shape == "foreach-flows":
            return sum(foreach([x, 0, 0], child, concurrency=3))
        if shape == "timeout":
            return with_timeout(x)  # type: ignore[no-any-return]
        if shape == "async-step":
            return double(x)  # type: ignore[return-value]
        return child(x)  # type: ignore[no-any-return]

    rl = await world.open(max_threads=2)
    runs = [await rl.start(calculate, n) for n in range(8)]
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [2 * n for n in range(8)]


async def test_sync_flows_that_wait_hold_no_thread(world: World):
    @flow
    def inner(x: int) -> int:
        sleep("1h")
        return double_sync(x)  # type: ignore[no-any-return]

    @flow
    def outer(x: int) -> int:
        child = spawn(inner, x)
        return child.result() + wait_for("go", int)  # type: ignore[no-any-return]

    rl = await world.open(max_threads=1)
    runs = [await rl.start(outer, n) for n in range(10)]

    async def asleep() -> bool:
        return len((await rl.list(status="waiting")).runs) == 20

    await until(asleep)
    await until(lambda: threads_in_use(world) == 0)
    world.clock.advance("1h")
    for run in runs:
        await run.signal("go", 1)
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [2 * n + 1 for n in range(10)]


async def test_a_checkpoint_waits_for_no_thread_when_all_are_in_use(world: World):
    @flow
    def long(x: int) -> int:
        for _ in range(20):
            x = double_sync(x) - x
        return x

    rl = await world.open(max_threads=1, checkpoint_every=3)
    runs = [await rl.start(long, n) for n in range(10)]
    assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == list(range(10))


# ---- shutdown


async def begin_closing(world: World) -> asyncio.Task[None]:
    """Close the engine, until closing waits for something and nothing is left that could be done at once."""
    orchestrator = world.rl.orchestrator
    closing = asyncio.create_task(world.close())
    await until(lambda: orchestrator.stopping)
    await turns(100)
    assert orchestrator.live
    return closing


class Slow:
    """A flow whose middle step, async or sync, lasts until the test opens its gate."""

    def __init__(self, kind: str) -> None:
        self.entered: list[str] = []
        self.gate = threading.Event()

        @step
        async def hang_async() -> str:
            self.entered.append("hang")
            while not self.gate.is_set():  # noqa: ASYNC110 - one gate for threads and tasks
                await asyncio.sleep(0.001)
            return "hung"

        @step
        def hang_sync() -> str:
            self.entered.append("hang")
            self.gate.wait()
            return "hung"

        @step
        async def after() -> str:
            self.entered.append("after")
            return "after"

        hang: Any = hang_async if kind == "async" else hang_sync

        @flow(name="slow")
        async def slow_async() -> list[str]:
            return [await hang(), await after()]

        if kind == "sync-flow":

            @flow(name="slow-sync")
            def slow_sync() -> list[str]:
                return [hang(), after()]

            self.flow: Any = slow_sync
        else:
            self.flow = slow_async


@pytest.mark.parametrize("kind", ["async", "sync", "sync-flow"])
async def test_a_step_in_flight_at_shutdown_finishes_and_is_recorded(world: World, kind: str):
    slow = Slow(kind)
    rl = await world.open(shutdown_grace="20s")
    run = await rl.start(slow.flow)
    await until(lambda: slow.entered)
    closing = await begin_closing(world)
    slow.gate.set()
    await asyncio.wait_for(closing, 60)
    assert slow.entered == ["hang"]  # nothing begins any more
    rl = await world.open(recovery_enabled=False)
    row = await rl.row(run.id)
    assert (row.status, row.owner) == ("pending", None)
    assert len([key for key in await world.recorded(run.id) if key]) == 1
    rl = await world.close_and_reopen(recovery_enabled=True)
    assert await (await rl.get(run.id)).result(timeout="60s") == ["hung", "after"]
    assert slow.entered == ["hang", "after"]


@pytest.mark.parametrize("kind", ["async", "sync", "sync-flow"])
async def test_a_step_longer_than_the_grace_is_abandoned_and_repeated(world: World, kind: str):
    slow = Slow(kind)
    rl = await world.open(shutdown_grace="50ms")
    run = await rl.start(slow.flow)
    await until(lambda: slow.entered)
    await asyncio.wait_for(world.close(), 60)
    slow.gate.set()  # the outcome of an abandoned thread is ignored
    rl = await world.open()
    assert await (await rl.get(run.id)).result(timeout="60s") == ["hung", "after"]
    assert slow.entered == ["hang", "hang", "after"]
    assert (await world.state(run.id)).crashes.count == 0  # a shutdown is no crash


@pytest.mark.parametrize("kind", ["async", "sync", "sync-flow"])
async def test_a_run_that_is_being_paused_at_shutdown_finishes_its_step_and_is_paused(world: World, kind: str):
    slow = Slow(kind)
    rl = await world.open(shutdown_grace="20s")
    run = await rl.start(slow.flow)
    await until(lambda: slow.entered)
    await run.pause()
    await until(lambda: rl.orchestrator.live[run.id].departing)
    closing = await begin_closing(world)
    slow.gate.set()
    await asyncio.wait_for(closing, 60)
    rl = await world.open()
    assert (await rl.row(run.id)).status == "paused"
    await (await rl.get(run.id)).resume()
    assert await (await rl.get(run.id)).result(timeout="60s") == ["hung", "after"]
    assert slow.entered == ["hang", "after"]


async def test_a_run_that_is_being_parked_at_shutdown_is_parked(world: World):
    leaving, gate = threading.Event(), threading.Event()

    @flow
    def tidy() -> object:
        try:
            return wait_for("go")
        finally:
            leaving.set()
            gate.wait()

    rl = await world.open(shutdown_grace="20s", park_after=0)
    run = await rl.start(tidy)
    await until(leaving.is_set)
    closing = await begin_closing(world)
    gate.set()
    await asyncio.wait_for(closing, 60)
    rl = await world.open(recovery_enabled=False)
    row = await rl.row(run.id)
    assert (row.status, row.owner) == ("waiting", None)


@pytest.mark.parametrize("retry", [None, Retry(attempts=2)], ids=["plain", "retried"])
async def test_a_step_that_fails_at_shutdown_does_not_use_up_the_grace(world: World, retry: Retry | None):
    gate = asyncio.Event()
    calls: list[str] = []

    @step(retry=retry)
    async def failing() -> str:
        calls.append("failing")
        await gate.wait()
        if len(calls) == 1:
            raise ValueError("at a bad time")
        return "done"

    @flow
    async def careful() -> str:
        try:
            return await failing()
        except ValueError as error:
            return str(error)

    rl = await world.open(shutdown_grace="1h")
    run = await rl.start(careful)
    await until(lambda: calls)
    closing = await begin_closing(world)
    gate.set()
    await asyncio.wait_for(closing, 60)
    rl = await world.open(shutdown_grace="1h")
    assert await (await rl.get(run.id)).result(timeout="60s") == ("done" if retry else "at a bad time")


@pytest.mark.parametrize("kind", ["async", "sync", "sync-flow"])
async def test_a_run_that_is_fenced_makes_room_as_soon_as_no_step_is_under_way(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leaving, "PARK_GRACE_SECONDS", 3600.0)
    slow = Slow(kind)
    rl = await world.open()
    run = await rl.start(slow.flow)
    await until(lambda: slow.entered)
    row = await rl.row(run.id)
    await rl.services.store.note_session("another", Process(), 3600.0)  # otherwise recovery would claim the run from it
    assert await rl.services.store.claim({run.id: row.epoch}, "another")
    live = rl.orchestrator.live[run.id]
    live.writer.confirm_ownership()
    await until(lambda: live.writer.fenced)
    slow.gate.set()
    await until(lambda: run.id not in rl.orchestrator.live)
    assert slow.entered == ["hang"]


@pytest.mark.parametrize("how", ["taken up", "started"])
async def test_what_comes_into_memory_while_the_engine_stops_is_let_go_as_well(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str
):
    slow = Slow("async")
    effects: list[str] = []

    @step
    async def mark() -> str:
        effects.append("marked")
        return "marked"

    @flow
    async def late() -> str:
        if how == "taken up":
            await wait_for("go")
        return await mark()

    rl = await world.open(shutdown_grace="20s")
    await rl.start(slow.flow.with_id("slow"))  # what stopping waits for
    await until(lambda: slow.entered)
    store: Any = rl.services.store
    name = "claim_due" if how == "taken up" else "commit"
    real, held_up = getattr(store.inner, name), asyncio.Event()

    async def delayed(*args: Any) -> Any:
        """The call begins before the engine stops. Its answer comes after the engine has looked which runs it has to
        let go of."""
        monkeypatch.undo()
        held_up.set()
        await until(lambda: rl.orchestrator.stopping)
        for _ in range(100):
            await asyncio.sleep(0)
        return await real(*args)

    if how == "taken up":
        run = await rl.start(late.with_id("late"))
        await world.park(run)
        monkeypatch.setattr(store.inner, name, delayed)
        await run.signal("go")
        starting = None
    else:
        monkeypatch.setattr(store.inner, name, delayed)
        starting = asyncio.create_task(rl.start(late.with_id("late")))
    await held_up.wait()
    closing = asyncio.create_task(world.close())
    await until(lambda: not rl.orchestrator.has("late") or "late" in rl.orchestrator.live)
    slow.gate.set()
    await asyncio.wait_for(closing, 60)
    if starting is not None:
        await starting  # it was accepted
    assert [task for task in asyncio.all_tasks() if task.get_name() == "relight-run"] == []
    assert effects == []  # nothing begins any more
    rl = await world.open()
    assert await (await rl.get("late")).result(timeout="60s") == "marked"
    assert effects == ["marked"]
    assert (await world.state("late")).crashes.count == 0  # a shutdown is no crash


async def test_waiting_runs_are_parked_at_shutdown_and_wake_later(world: World):
    @flow
    async def sleeping() -> str:
        await sleep("1h")
        return "woken"

    rl = await world.open()
    run = await rl.start(sleeping)
    await world.until_status("waiting", run)
    await world.close()
    world.clock.advance("2h")
    rl = await world.open()
    assert await (await rl.get(run.id)).result(timeout="60s") == "woken"


async def test_many_runs_in_flight_at_shutdown_all_complete_later(world: World):
    count: dict[int, int] = {}

    @step
    async def work(x: int, n: int) -> int:
        await asyncio.sleep(0)
        count[x] = count.get(x, 0) + 1
        return n

    @flow
    async def working(x: int) -> int:
        return sum([await work(x, n) for n in range(20)])

    rl = await world.open()
    runs = [await rl.start(working, n) for n in range(MANY)]
    await until(lambda: len(count) == MANY)
    rl = await world.close_and_reopen()
    results = [await (await rl.get(run.id)).result(timeout="60s") for run in runs]
    assert results == [190] * MANY
    assert set(count.values()) == {20}  # no step was repeated


async def test_nothing_is_started_while_stopping(world: World):
    slow = Slow("async")
    rl = await world.open(shutdown_grace="20s")
    await rl.start(slow.flow)
    await until(lambda: slow.entered)
    closing = await begin_closing(world)
    before = world.rows_in("runs")
    with pytest.raises(StoreUnavailableError, match="this Relight is stopping: nothing can be started any more"):
        await rl.start(slow.flow)
    assert world.rows_in("runs") == before
    slow.gate.set()
    await asyncio.wait_for(closing, 60)
    with pytest.raises(RelightError, match="is not open"):
        await rl.start(slow.flow)


@pytest.mark.parametrize("parked", [False, True])
async def test_a_caller_that_awaits_a_result_is_told_of_the_shutdown(world: World, parked: bool):
    slow = Slow("async")

    @flow
    async def waiting() -> Any:
        return await wait_for("go")

    rl = await world.open(shutdown_grace="20s")
    run = await rl.start(waiting if parked else slow.flow)
    if parked:
        await world.until_status("waiting", run)
    else:
        await until(lambda: slow.entered)
    result = asyncio.create_task(run.result())
    await asyncio.sleep(0)
    orchestrator = rl.orchestrator
    closing = asyncio.create_task(world.close())
    await until(lambda: orchestrator.stopping)
    slow.gate.set()
    await asyncio.wait_for(closing, 60)
    with pytest.raises(RelightError, match=r"is closed|not open"):
        await asyncio.wait_for(result, 60)
