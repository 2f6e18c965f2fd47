"""The signals of a run over its generations: none is lost, none is received twice, and all keep their order."""

import asyncio
from typing import Any

import pytest

from relight import (
    continue_as,
    flow,
    spawn,
    wait_for,
)
from relight.model.run import MessageKind
from relight.run.next_generation import TRIM_EVERY
from tests.flows.calls import finish
from tests.flows.watching import begins_a_generation, gives_up, is_in_generation, turns, waits_for
from tests.flows.ways import Held
from tests.flows.world import World, until


async def _wait(name: str) -> Any:
    return await wait_for(name)


async def test_signals_are_taken_by_whichever_generation_asks(world: World):
    """Ten signals come at once, and each generation receives one: none is lost or received twice, and all keep their order."""

    @flow
    async def taking(found: list[int]) -> list[int]:
        found.append(await wait_for("n", int))
        return found if len(found) == 10 else continue_as(found)

    rl = await world.open()
    run = await rl.start(taking.with_id("t"), [])
    for n in range(10):
        await run.signal("n", n)
    assert await run.result() == list(range(10))


async def test_the_inbox_of_a_run_that_goes_on_for_ever_does_not_grow(world: World, monkeypatch: pytest.MonkeyPatch):
    """Signals that were taken stay in it, for their dedup: every hundredth generation drops all but the newest."""
    for module in ("memory.rows", "sqlite.writes", "postgres.commit"):
        monkeypatch.setattr(f"relight.backends.{module}.KEPT_DEDUPS", 10)
    count = 2 * TRIM_EVERY + TRIM_EVERY // 2

    @flow
    async def taking(n: int) -> int:
        assert await wait_for("n", int) == n
        return continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(taking.with_id("t"), 0)
    for n in range(count):
        await run.signal("n", n, id=str(n))
    await until(lambda: is_in_generation(world, "t", count + 1))
    assert 10 <= world.remembered("t") <= 10 + TRIM_EVERY
    await run.cancel()


async def test_signals_that_come_while_the_next_generation_is_committed(world: World):
    @flow
    async def taking(found: list[int]) -> list[int]:
        found.append(await wait_for("n", int))
        return found if len(found) == 50 else continue_as(found)

    world.slow["commit"] = 20
    rl = await world.open()
    run = await rl.start(taking.with_id("t"), [])
    for n in range(50):
        await run.signal("n", n)
        for _ in range(n % 23):
            await asyncio.sleep(0)
    assert await run.result() == list(range(50))


async def test_signals_to_a_parked_generation_wake_it(world: World):
    @flow
    async def taking(found: list[int]) -> list[int]:
        found.append(await wait_for("n", int))
        return found if len(found) == 3 else continue_as(found)

    rl = await world.open()
    run = await rl.start(taking.with_id("t"), [])
    for n in range(3):
        await until(lambda: waits_for(world, run, "n"))
        await world.park(run)
        await run.signal("n", n)
        if n < 2:
            await until(lambda n=n: is_in_generation(world, "t", n + 2))
    assert await run.result() == [0, 1, 2]


@pytest.mark.parametrize("crash", [False, True])
async def test_a_signal_that_was_taken_and_given_up_on_is_the_next_generations(world: World, crash: bool):
    """It is not in the inbox any more. The checkpoint has it."""

    @flow
    async def taking(turn: int) -> str:
        if turn == 0:
            task = asyncio.create_task(_wait("go"))
            await wait_for("now")  # both have come when the flow is told this one
            task.cancel()
            return continue_as(1)
        await wait_for("on")
        return str(await wait_for("go"))

    rl = await world.open()
    world.slow["commit"] = 5
    run = await rl.start(taking.with_id("t"), 0)
    await until(lambda: waits_for(world, run, "now"))
    await asyncio.gather(run.signal("now"), run.signal("go", "kept"))
    await until(lambda: is_in_generation(world, "t", 2))
    if crash:
        await world.crash_and_reopen()
        run = await world.rl.get("t")
    await run.signal("on")
    assert await run.result() == "kept"


async def test_a_signal_whose_blob_is_being_read_when_the_flow_gives_up_on_it(world: World):
    """At that moment the signal is neither in the mailbox nor recorded."""
    text = "x" * 500

    @flow
    async def taking(turn: int) -> str:
        if turn == 0:
            task = asyncio.create_task(_wait("go"))
            await wait_for("now")
            task.cancel()
            return continue_as(1)
        return str(await wait_for("go"))

    rl = await world.open(payload={"blob_threshold": 16})
    blob = Held(world, "get_blob")
    run = await rl.start(taking.with_id("t"), 0)
    await until(lambda: waits_for(world, run, "now"))
    await run.signal("go", text)
    await blob.reached.wait()
    await run.signal("now")
    await until(lambda: is_in_generation(world, "t", 2))
    await turns(200)  # until that generation waits, too
    blob.let_go()
    assert await run.result() == text


async def test_a_blob_that_is_missing_is_no_matter_of_a_generation_that_has_ended(world: World):
    """The blob is found to be missing while the next generation is committed. That generation waits for another signal,
    and gets it."""

    @flow
    async def taking(turn: int) -> str:
        if turn == 0:
            task = asyncio.create_task(_wait("large"))
            await wait_for("now")
            task.cancel()
            return continue_as(1)
        return str(await wait_for("small"))

    rl = await world.open(payload={"blob_threshold": 16})
    next_one = Held(world, "commit", begins_a_generation)
    blob = Held(world, "get_blob")
    run = await rl.start(taking.with_id("t"), 0)
    await until(lambda: waits_for(world, run, "now"))
    await run.signal("large", "x" * 500)
    await blob.reached.wait()
    world.lose_blobs()
    await run.signal("now")
    await next_one.reached.wait()
    blob.let_go()
    await turns(100)
    await run.signal("small", "taken")
    next_one.let_go()
    assert await run.result() == "taken"


@pytest.mark.parametrize("how", ["crash", "close", "pause"])
@pytest.mark.parametrize("continues", [True, False])
async def test_a_signal_that_was_recorded_for_a_wait_which_the_flow_gave_up_on_is_not_lost(
    world: World, how: str, continues: bool
):
    """The run leaves memory before the journal has that the flow gave up. The journal only says that the signal was received."""

    @flow
    async def taking(turn: int) -> str:
        if turn == 0:
            task = asyncio.create_task(_wait("go"))
            await wait_for("now")
            task.cancel()
            if continues:
                return continue_as(1)
        return str(await wait_for("go"))

    rl = await world.open()
    commit = Held(world, "commit", gives_up)
    world.slow["commit"] = 5
    run = await rl.start(taking.with_id("t"), 0)
    await until(lambda: waits_for(world, run, "now"))
    await asyncio.gather(run.signal("now"), run.signal("go", "kept"))
    await commit.reached.wait()
    if how == "crash":
        await world.crash()
        commit.let_go()
        await world.open()
    elif how == "close":
        closing = asyncio.ensure_future(world.close())
        await turns()
        commit.let_go()
        await closing
        await world.open()
    else:
        await run.pause()
        commit.let_go()
        await world.until_status("paused", run)
        await run.resume()
    assert await finish(world, "t") == "kept"


async def test_a_signal_that_was_taken_back_from_the_journal_is_taken_once(world: World):
    """The next wait gets it, also if the run comes back once more after that."""

    @flow
    async def taking() -> list[Any]:
        task = asyncio.create_task(_wait("go"))
        await wait_for("now")
        task.cancel()
        first = await wait_for("go")
        await wait_for("on")
        return [first, await wait_for("go", timeout="1s", default="nothing")]

    rl = await world.open()
    commit = Held(world, "commit", gives_up)
    world.slow["commit"] = 5
    run = await rl.start(taking.with_id("t"))
    await until(lambda: waits_for(world, run, "now"))
    await asyncio.gather(run.signal("now"), run.signal("go", "kept"))
    await commit.reached.wait()
    await world.crash()
    commit.let_go()
    await world.open()
    run = await world.rl.get("t")
    await until(lambda: waits_for(world, run, "on"))
    await world.crash_and_reopen()
    run = await world.rl.get("t")
    await run.signal("on")
    await until(lambda: world.asleep(run))
    world.clock.advance("1s")
    assert await run.result() == ["kept", "nothing"]


@pytest.mark.parametrize("how", ["crash", "close"])
async def test_signals_keep_their_order_when_some_were_taken_back(world: World, how: str):
    """The first signal is large and is being read. The second is recorded. The flow gives up on both waits."""

    @flow
    async def taking(turn: int) -> list[int]:
        if turn == 0:
            tasks = [asyncio.create_task(_wait("x")) for _ in range(2)]
            await wait_for("now")
            for task in tasks:
                task.cancel()
            return continue_as(1)
        await wait_for("on")
        return [len(await wait_for("x")), len(await wait_for("x"))]

    rl = await world.open(payload={"blob_threshold": 16})
    blob = Held(world, "get_blob")
    run = await rl.start(taking.with_id("t"), 0)
    await until(lambda: waits_for(world, run, "now"))
    await run.signal("x", "large" * 100)
    await blob.reached.wait()
    world.slow["commit"] = 5
    await asyncio.gather(run.signal("now"), run.signal("x", "small"))
    await until(lambda: is_in_generation(world, "t", 2))
    assert len((await world.state("t")).unclaimed) == 1
    blob.let_go()
    await (world.crash_and_reopen() if how == "crash" else world.close_and_reopen())
    await (await world.rl.get("t")).signal("on")
    assert await finish(world, "t") == [500, 5]


async def test_ends_of_spawned_runs_that_are_not_awaited_do_not_pile_up(world: World):
    @flow
    async def errand(n: int) -> int:
        return n

    @flow
    async def dispatching(n: int) -> int:
        spawned = await spawn(errand, n)
        await wait_for("next")
        return int(await spawned) if n == 5 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(dispatching.with_id("d"), 0)
    for n in range(6):
        await until(lambda: waits_for(world, run, "next"))
        await until(lambda n=n: _has_ended(world, "d/$spawn.errand" if n == 0 else f"d/@{n + 1}/$spawn.errand"))
        await run.signal("next")
        if n < 5:
            await until(lambda n=n: is_in_generation(world, "d", n + 2))
            told = await rl.services.store.inbox(["d"])
            assert sum(message.kind is MessageKind.ENDED for message in told) <= 1
    assert await run.result() == 5


async def _has_ended(world: World, run_id: str) -> bool:
    row = await world.rl.services.store.get_run(run_id)
    return row is not None and row.status.terminal
