"""If the system refuses a thread, it has no room for a while. Nothing has failed, and nothing has begun."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relight import Relight, flow, parallel, step
from relight.backends.postgres import PostgresStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import RelightError, StoreUnavailableError
from tests.flows.world import World, until

NO_SYSTEM_HAS = 2**46  # bytes, for the stack of a thread


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Make the real system refuse every new thread of this process."""
    size = threading.stack_size(NO_SYSTEM_HAS)
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=bool).start()
        yield
    finally:
        threading.stack_size(size)


def waiting(rl: Relight, count: int = 1) -> Any:
    return lambda: rl.health().waiting_for_threads == count


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "[THREAD_REFUSED]" in record.getMessage()]


async def test_a_sync_step_waits_for_a_thread_and_its_timeout_does_not_run(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[int] = []

    @step(timeout="0.2s")
    def work(number: int) -> int:
        called.append(number)
        return number

    @flow
    async def works(number: int) -> int:
        return int(await work(number))

    rl = await world.open(max_threads=5)
    with refused():
        runs = [await rl.start(works, number) for number in range(3)]
        await until(waiting(rl, 3))
        world.clock.advance(5.0)  # many times their timeout
        assert not rl.health().ok
        assert len(said(caplog)) == 1
    assert [await run.result(timeout="60s") for run in runs] == [0, 1, 2]
    assert sorted(called) == [0, 1, 2]
    assert [one.attempt for run in runs for one in (await run.steps()).steps] == [1, 1, 1]
    await until(lambda: rl.health().ok)
    assert len(said(caplog)) == 2  # and that it is over


async def test_a_sync_flow_waits_for_a_thread(world: World) -> None:
    @flow
    def works(number: int) -> int:
        return number

    rl = await world.open(max_threads=2)
    with refused():
        runs = [await rl.start(works, number) for number in range(4)]
        await until(waiting(rl, 2))  # the others wait for a slot
    assert [await run.result(timeout="60s") for run in runs] == [0, 1, 2, 3]
    await until(lambda: rl.services.threads.in_use == 0)


async def test_what_a_sync_flow_needs_more_threads_for_waits(world: World) -> None:
    """These threads are not limited, because the flow has a thread already. The step's own timeout does not run meanwhile."""
    begun, gate = threading.Event(), threading.Event()

    @step(timeout="0.2s")
    def hurried(number: int) -> int:
        return number

    @flow
    def branches() -> list[int]:
        begun.set()
        gate.wait(60)
        return [hurried(7), *parallel(lambda: hurried(1), lambda: hurried(2))]

    rl = await world.open(max_threads=1)
    run = await rl.start(branches)
    await until(begun.is_set)
    with refused():
        gate.set()
        await until(waiting(rl))
        world.clock.advance(5.0)
    assert await run.result(timeout="60s") == [7, 1, 2]


async def test_a_thread_that_comes_free_is_used_though_no_other_can_be_had(world: World) -> None:
    begun, gate = threading.Event(), threading.Event()

    @step
    def first() -> int:
        begun.set()
        gate.wait(60)
        return threading.get_ident()

    @step
    def second() -> int:
        return threading.get_ident()

    @flow
    async def one() -> int:
        return int(await first())

    @flow
    async def other() -> int:
        return int(await second())

    rl = await world.open()
    run = await rl.start(one)
    await until(begun.is_set)
    with refused():
        late = await rl.start(other)
        await until(waiting(rl))
        gate.set()
        assert await late.result(timeout="60s") == await run.result(timeout="60s")


@pytest.mark.parametrize("kind", ["step", "flow"])
async def test_a_run_can_be_cancelled_while_it_waits_for_a_thread(world: World, kind: str) -> None:
    called: list[str] = []

    @step
    def work() -> None:
        called.append("step")

    @flow(name="async-one")
    async def awaits() -> None:
        await work()

    @flow(name="sync-one")
    def blocks() -> None:
        called.append("flow")

    rl = await world.open(max_threads=1)
    with refused():
        run = await rl.start(awaits if kind == "step" else blocks)
        await until(waiting(rl))
        await run.cancel()
        if kind == "step":
            await world.until_status("cancelled", run)
            await until(waiting(rl, 0))
            assert rl.services.threads.in_use == 0
    await world.until_status("cancelled", run)
    assert called == ([] if kind == "step" else ["flow"])  # a flow is told of it where it asks for an operation
    await until(lambda: rl.services.threads.in_use == 0)


async def test_async_flows_go_on_without_threads(world: World) -> None:
    @step
    async def work(number: int) -> int:
        await asyncio.sleep(0)
        return number

    @flow
    async def works() -> int:
        return sum([await work(number) for number in range(3)])

    rl = await world.open()
    with refused():
        assert await rl.run(works) == 3


# ---- the engine's own threads


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("relight-")}


async def test_closing_needs_no_thread(tmp_path: Path) -> None:
    before = ours()
    rl = Relight(tmp_path / "relight.db")
    await rl.open()
    with refused():
        await rl.close()
    await until(lambda: not ours() - before)


async def test_opening_without_threads_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = ours()
    with refused(), pytest.raises(RelightError, match="can't start new thread"):
        await Relight(tmp_path / "relight.db").open()
    with refused(), pytest.raises(RelightError, match="can't start new thread"):
        await Relight("memory:").open()
    assert not ours() - before
    async with Relight(tmp_path / "relight.db"):
        pass


async def test_a_name_that_cannot_be_looked_up_for_want_of_a_thread_is_an_outage() -> None:
    store = PostgresStore("postgresql://nobody@localhost:1/nothing", clock=SYSTEM_CLOCK)
    with refused(), pytest.raises(StoreUnavailableError, match="can't start new thread"):
        await store.open()


def test_a_blocking_engine_without_threads_says_so(tmp_path: Path) -> None:
    blocking = Relight(tmp_path / "relight.db")
    with refused(), pytest.raises(RelightError, match="can't start new thread"):
        blocking.__enter__()
    with blocking as rl:
        assert rl.fault is None
