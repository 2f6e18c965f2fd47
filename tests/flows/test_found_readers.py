"""What readers found when exact replay was nearly done. Each of these tests failed before."""

import asyncio
import concurrent.futures
import threading
from typing import Any

import pytest

from relight import (
    OutsideRunError,
    Relight,
    RelightError,
    Retry,
    RunCancelled,
    RunCancelledError,
    RunFailedError,
    flow,
    foreach,
    now,
    step,
)
from tests.flows.ways import Gate
from tests.flows.world import World, until


@step
async def price() -> int:
    return 3


@step
async def charge(amount: Any) -> None:
    pass


async def failure_of(world: World, one: Any) -> str:
    rl = await world.open()
    with pytest.raises(RunFailedError) as failed:
        await (await rl.start(one)).result("60s")
    return str(failed.value)


@pytest.mark.parametrize("where", ["step", "child", "foreach"])
async def test_a_call_that_is_handed_on_instead_of_awaited_is_named(world: World, where: str):
    @flow
    async def child(amount: Any) -> None:
        pass

    @flow
    async def careless() -> None:
        if where == "step":
            await charge(price())
        elif where == "child":
            await child(price())
        else:
            await foreach([price()], charge)

    assert "is not data; was an `await` forgotten?" in await failure_of(world, careless)


async def test_an_error_says_which_call_was_not_awaited(world: World):
    @flow
    async def careless() -> int:
        return price() + 1  # type: ignore[operator, no-any-return]

    rl = await world.open()
    with pytest.raises(RunFailedError) as failed:
        await (await rl.start(careless)).result("60s")
    assert "'price' was called at " in "".join(getattr(failed.value.__cause__, "__notes__", [])), failed.value.__cause__


async def test_a_child_of_a_retried_flow_that_is_called_with_another_input_gives_its_own_result(world: World):
    gate, calls = Gate(), list[str]()

    @step
    async def number() -> int:
        calls.append("number")
        if calls == ["number"]:
            raise ValueError("at first")
        return 2

    @step
    async def work(n: int) -> str:
        if n == 2:
            await gate.pass_by()
        return f"for {n}"

    @step
    async def last(seen: str) -> str:
        if "failed" not in calls:
            calls.append("failed")
            raise RuntimeError("the first attempt ends here")
        return seen

    @flow
    async def child(n: int) -> str:
        return await work(n)

    @flow(retry=Retry(3, delay="0s"))
    async def parent() -> str:
        try:
            n = await number()
        except ValueError:
            n = 1
        return await last(await child(n))

    rl = await world.open()
    run = await rl.start(parent.with_id("r"))
    await until(lambda: gate.entered or world.clock.advance(1))
    rl = await world.crash_and_reopen()
    await gate.open(after=2)
    run = await rl.get("r")
    assert await run.result("60s") == "for 2"


@pytest.mark.parametrize("how", ["thread", "pool", "nested"])
async def test_a_thread_of_flow_code_is_told_at_once_that_it_is_in_no_flow(world: World, how: str):
    executed = list[str]()

    @step
    def in_sync() -> None:
        executed.append("step")

    @flow
    async def threading_flow() -> list[str]:
        told = list[str]()

        def work() -> None:
            for operation in (in_sync, price, now):
                try:
                    operation()
                except OutsideRunError as error:
                    told.append(str(error))

        if how == "pool":
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(work).result()
        else:
            job = work if how == "thread" else lambda: run_in_thread(work)
            run_in_thread(job)
        return told

    def run_in_thread(job: Any) -> None:
        thread = threading.Thread(target=job)
        thread.start()
        thread.join()

    rl = await world.open()
    told = await (await rl.start(threading_flow)).result("60s")
    assert len(told) == 3
    assert all("from a thread that is not its flow's" in one for one in told)
    assert executed == []


async def test_a_relight_that_is_opened_in_a_flow_is_refused(world: World):
    @flow
    async def opening() -> None:
        async with Relight("memory:"):
            pass

    assert "flow code used a Relight" in await failure_of(world, opening)


async def test_a_flow_whose_event_a_step_has_set_fails_whatever_it_catches(world: World):
    @flow
    async def sharing() -> str:
        event = asyncio.Event()

        @step
        async def set_it() -> None:
            event.set()

        waiting = asyncio.create_task(event.wait())
        await asyncio.sleep(0)
        try:
            await set_it()
        except BaseException:
            return "as if nothing had happened"
        await waiting
        return "set"

    assert "other code (perhaps a step's body) has used" in await failure_of(world, sharing)


async def test_only_the_first_steps_of_a_run_that_died_early_may_have_been_in_flight(
    world: World, caplog: pytest.LogCaptureFixture
):
    gate = Gate()

    @flow
    async def many() -> None:
        await hold_up()
        for _ in range(3):
            await price()

    @step
    async def hold_up() -> None:
        await gate.pass_by()

    rl = await world.open()
    await rl.start(many.with_id("r"))
    await until(lambda: gate.entered)
    rl = await world.crash_and_reopen()
    with caplog.at_level("INFO", logger="relight"):
        await gate.open(after=2)
        await (await rl.get("r")).result("60s")
    assert sum("[STEP_REPEATED]" in line.getMessage() for line in caplog.records) <= 1


def test_a_relight_that_another_event_loop_has_opened_is_refused_with_a_sentence():
    @flow
    async def sub() -> None:
        pass

    rl = Relight("memory:")
    first = asyncio.new_event_loop()
    try:
        first.run_until_complete(rl.open())
        with pytest.raises(RelightError, match="opened on another event loop"):
            asyncio.run(rl.run(sub))
        first.run_until_complete(rl.close())
    finally:
        first.close()


async def test_a_cancelled_foreach_whose_steps_ended_all_the_same_is_the_same_in_every_life(world: World):
    seen, begun, gate = list[str](), list[int](), Gate()

    @step
    async def stubborn(n: int) -> int:
        begun.append(n)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return n

    @step
    async def clean_up() -> None:
        await gate.pass_by()

    @flow
    async def fanning_out() -> None:
        try:
            await foreach([1, 2, 3], stubborn, concurrency=3)
            seen.append("results")
        except RunCancelled:
            seen.append("cancelled")
            raise
        finally:
            await clean_up()

    rl = await world.open()
    run = await rl.start(fanning_out.with_id("r"))
    await until(lambda: len(begun) == 3)
    await run.cancel("enough")
    for life in (1, 2):
        await until(lambda life=life: len(gate.entered) == life)
        rl = await world.crash_and_reopen()
    await gate.open(after=3)
    with pytest.raises(RunCancelledError):
        await (await rl.get("r")).result("60s")
    assert seen == ["cancelled"] * 3
    assert not any(type(event).__name__ == "ForeachCut" for event in await world.events("r"))
