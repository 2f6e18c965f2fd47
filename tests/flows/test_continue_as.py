"""continue_as(): a run that ends its generation and begins the next under the same id, and does not grow."""

import asyncio
import gc
from typing import Any

import pytest

from relight import (
    ContinueAs,
    FlowCodeError,
    PayloadError,
    Retry,
    RunCancelled,
    RunCancelledError,
    RunFailedError,
    continue_as,
    current_step,
    flow,
    foreach,
    now,
    parallel,
    sleep,
    spawn,
    step,
    wait_for,
)
from relight.model import journal as j
from relight.model.run import MessageKind, Status
from tests.flows.calls import Calls, finish, marking
from tests.flows.watching import turns, waits_for
from tests.flows.world import World, until


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_the_next_generation_begins_with_the_new_arguments(world: World, kind: str):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def counting_async(n: int, *, end: int) -> int:
        await mark(f"turn {n}")
        if n < end:
            return continue_as(n + 1, end=end)
        return n

    @flow
    def counting_sync(n: int, *, end: int) -> int:
        mark(f"turn {n}")
        if n < end:
            return continue_as(n + 1, end=end)
        return n

    rl = await world.open()
    counting: Any = counting_async if kind == "async" else counting_sync
    run = await rl.start(counting, 0, end=4, id="c")
    assert await run.result() == 4
    assert calls == [f"turn {n}" for n in range(5)]
    assert world.rows_in("journal") == 2, "its last step and its end: the earlier generations left nothing"
    state = await world.state("c")
    assert (state.generation, list(state.outcomes)) == (5, ["@5/mark", ""])


async def test_the_row_keeps_its_creation_and_its_first_input(world: World):
    """So that starting it once more under its id is the same run, in whatever generation."""

    @flow
    async def counting(n: int) -> int:
        return n if n == 3 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(counting, 0, id="c")
    before = await run.describe()
    assert await run.result() == 3
    again = await rl.start(counting, 0, id="c")
    after = await again.describe()
    assert (after.created_at, after.input) == (before.created_at, before.input)
    assert await again.result() == 3


async def test_every_crash_finds_the_generation_that_was_committed(world: World):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def turning(n: int) -> int:
        await mark(f"before {n}")
        await wait_for("go")
        await mark(f"after {n}")
        return n if n == 3 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(turning, 0, id="t")
    for n in range(4):
        await until(lambda: waits_for(world, run, "go"))
        await world.crash_and_reopen()
        run = await world.rl.get("t")
        await run.signal("go")
        if n < 3:
            await until(lambda n=n: _generation(world, "t", n + 2))
    assert await finish(world, "t") == 3
    assert calls == [f"{when} {n}" for n in range(4) for when in ("before", "after")], (
        "no step of any turn was repeated"
    )


async def test_a_generation_that_had_ended_and_was_not_committed_ends_again(world: World):
    """The process dies between the last step and the commit that begins the next generation."""
    calls = Calls()
    mark = marking(calls)
    ready, held = asyncio.Event(), asyncio.Event()

    @flow
    async def turning(n: int) -> int:
        await mark(f"turn {n}")
        if n == 1:
            return n
        return continue_as(n + 1)

    rl = await world.open()
    store: Any = rl.services.store
    commit = store.inner.commit

    async def slowly(commits: Any) -> Any:
        if any(one.next is not None for one in commits) and not ready.is_set():
            ready.set()
            await held.wait()
        return await commit(commits)

    store.inner.commit = slowly
    await rl.start(turning, 0, id="t")
    await ready.wait()
    await world.crash()
    held.set()
    store.inner.commit = commit
    await world.open()
    assert await finish(world, "t") == 1
    assert calls == ["turn 0", "turn 1"]


# ---- what it was told


async def test_signals_are_taken_by_whichever_generation_asks(world: World):
    """Ten signals at once, one taken per generation: none is lost, none taken twice, all in their order."""

    @flow
    async def taking(found: list[int]) -> list[int]:
        found.append(await wait_for("n", int))
        return found if len(found) == 10 else continue_as(found)

    rl = await world.open()
    run = await rl.start(taking, [], id="t")
    for n in range(10):
        await run.signal("n", n)
    assert await run.result() == list(range(10))


async def test_signals_that_come_while_the_next_generation_is_committed(world: World):
    @flow
    async def taking(found: list[int]) -> list[int]:
        found.append(await wait_for("n", int))
        return found if len(found) == 50 else continue_as(found)

    world.slow["commit"] = 20
    rl = await world.open()
    run = await rl.start(taking, [], id="t")
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
    run = await rl.start(taking, [], id="t")
    for n in range(3):
        await until(lambda: waits_for(world, run, "n"))
        await world.park(run)
        await run.signal("n", n)
        if n < 2:
            await until(lambda n=n: _generation(world, "t", n + 2))
    assert await run.result() == [0, 1, 2]


async def _generation(world: World, run_id: str, number: int) -> bool:
    return (await world.state(run_id)).generation == number


@pytest.mark.parametrize("crash", [False, True])
async def test_a_signal_that_was_taken_and_given_up_on_is_the_next_generations(world: World, crash: bool):
    """It is in the inbox no more: it goes along in the checkpoint."""

    @flow
    async def taking(turn: int) -> str:
        if turn == 0:
            task = asyncio.create_task(_wait("go"))
            await wait_for("now")  # both have come when the flow is told of this one
            task.cancel()
            return continue_as(1)
        await wait_for("on")
        return str(await wait_for("go"))

    async def _wait(name: str) -> Any:
        return await wait_for(name)

    rl = await world.open()
    world.slow["commit"] = 5
    run = await rl.start(taking, 0, id="t")
    await until(lambda: waits_for(world, run, "now"))
    await asyncio.gather(run.signal("now"), run.signal("go", "kept"))
    await until(lambda: _generation(world, "t", 2))
    if crash:
        await world.crash_and_reopen()
        run = await world.rl.get("t")
    await run.signal("on")
    assert await run.result() == "kept"


async def test_a_signal_whose_blob_is_being_read_when_the_flow_gives_up_on_it(world: World):
    """It is neither in the mailbox nor recorded in that moment."""
    text = "x" * 500

    @flow
    async def taking(turn: int) -> str:
        if turn == 0:
            task = asyncio.create_task(_wait("go"))
            await wait_for("now")
            task.cancel()
            return continue_as(1)
        return str(await wait_for("go"))

    async def _wait(name: str) -> Any:
        return await wait_for(name)

    rl = await world.open(payload={"blob_threshold": 16})
    store: Any = rl.services.store
    get_blob, reading, go_on = store.inner.get_blob, asyncio.Event(), asyncio.Event()

    async def slowly(digest: str) -> Any:
        reading.set()
        await go_on.wait()
        return await get_blob(digest)

    store.inner.get_blob = slowly
    run = await rl.start(taking, 0, id="t")
    await until(lambda: waits_for(world, run, "now"))
    await run.signal("go", text)
    await reading.wait()
    await run.signal("now")
    await until(lambda: _generation(world, "t", 2))
    await turns(200)  # until that waits, too
    go_on.set()
    assert await run.result() == text


async def test_ends_of_spawned_runs_that_nobody_waits_for_do_not_pile_up(world: World):
    @flow
    async def errand(n: int) -> int:
        return n

    @flow
    async def dispatching(n: int) -> int:
        spawned = await spawn(errand, n)
        await wait_for("next")
        return int(await spawned) if n == 5 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(dispatching, 0, id="d")
    for n in range(6):
        await until(lambda: waits_for(world, run, "next"))
        await until(lambda n=n: _has_ended(world, "d/$spawn.errand" if n == 0 else f"d/@{n + 1}/$spawn.errand"))
        await run.signal("next")
        if n < 5:
            await until(lambda n=n: _generation(world, "d", n + 2))
            told = await rl.services.store.inbox(["d"])
            assert sum(message.kind is MessageKind.ENDED for message in told) <= 1
    assert await run.result() == 5


async def _has_ended(world: World, run_id: str) -> bool:
    row = await world.rl.services.store.get_run(run_id)
    return row is not None and row.status.terminal


# ---- what is carried over


async def test_the_deadline_is_the_runs_and_not_the_generations(world: World):
    @flow(timeout="100s")
    async def turning(n: int) -> int:
        await sleep("30s")
        return continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(turning, 0, id="t")
    for n in range(3):
        await until(lambda n=n: _sleeps_in(world, "t", n + 1))
        world.clock.advance("30s")
    await until(lambda: _sleeps_in(world, "t", 4))
    world.clock.advance("10s")
    with pytest.raises(RunFailedError, match="did not finish within its timeout"):
        await run.result()


async def _sleeps_in(world: World, run_id: str, generation: int) -> bool:
    state = await world.state(run_id)
    return state.generation == generation and any(one.what == "sleep" for one in state.open.values())


async def test_whoever_waits_for_it_hears_of_its_end_only(world: World):
    @flow
    async def turning(n: int) -> str:
        await wait_for("go")
        return "over" if n == 3 else continue_as(n + 1)

    @flow
    async def parent() -> str:
        return str(await (await spawn(turning, 0, id="t")))

    @flow
    async def joiner() -> str:
        return str(await (await spawn(turning, 0, id="t")))

    rl = await world.open()
    first = await rl.start(parent, id="p")
    await until(lambda: _exists(world, "t"))
    second = await rl.start(joiner, id="j")
    await until(lambda: _joined(world, "t"))
    run = await rl.get("t")
    outside = asyncio.ensure_future(run.result())
    for n in range(4):
        await until(lambda n=n: _generation(world, "t", n + 1))
        await until(lambda: waits_for(world, run, "go"))
        assert not outside.done()
        if n == 2:
            await world.park(run)
        await run.signal("go")
    assert await outside == await first.result() == await second.result() == "over"


async def _exists(world: World, run_id: str) -> bool:
    return await world.rl.services.store.get_run(run_id) is not None


async def _joined(world: World, run_id: str) -> bool:
    return any(message.kind is MessageKind.JOIN for message in await world.rl.services.store.inbox([run_id]))


async def test_idempotency_keys_and_spawned_ids_are_new_in_every_generation(world: World):
    keys: list[str] = []

    @step
    async def charge() -> None:
        keys.append(current_step().idempotency_key)

    @flow
    async def ship(n: int) -> int:
        return n

    @flow
    async def child(n: int) -> int:
        await charge()
        return n

    @flow
    async def billing(month: int, shipped: list[str]) -> list[str]:
        await charge()
        await child(month)
        spawned = await spawn(ship, month)
        assert await spawned == month
        shipped.append(spawned.id)
        return shipped if month == 3 else continue_as(month + 1, shipped)

    rl = await world.open()
    shipped = await rl.run(billing, 1, [], id="b")
    assert len(set(keys)) == len(keys) == 6, keys
    assert shipped == ["b/$spawn.ship", "b/@2/$spawn.ship", "b/@3/$spawn.ship"]
    assert keys[:2] == ["b/charge", "b/child/charge"], "the first generation's are as ever"


async def test_child_runs_and_items_go_with_their_generation(world: World):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def child(n: int) -> str:
        return str(await mark(f"child {n}"))

    @flow
    async def turning(n: int) -> list[str]:
        found = await foreach([f"{n}a", f"{n}b"], mark)
        await child(n)
        return found if n == 2 else continue_as(n + 1)

    rl = await world.open()
    assert await rl.run(turning, 0, id="t") == ["2a", "2b"]
    children = await rl.services.store.get_runs(["t/child", "t/@2/child", "t/@3/child"])
    assert [row.id for row in children] == ["t/@3/child"]
    items = await rl.services.store.item_results("t")
    assert {item.key.partition("/")[0] for item in items} <= {"@3"}


async def test_recorded_values_are_new_in_every_generation(world: World):
    @flow
    async def turning(seen: list[float]) -> list[float]:
        seen.append(now().timestamp())
        await sleep("1s")
        return seen if len(seen) == 3 else continue_as(seen)

    rl = await world.open()
    run = await rl.start(turning, [], id="t")
    for n in range(3):
        await until(lambda n=n: _sleeps_in(world, "t", n + 1))
        world.clock.advance("1s")
    first, second, third = await run.result()
    assert first < second < third


# ---- cancelling, pausing, closing


async def test_cancelling_ends_it_in_whatever_generation(world: World):
    @flow
    async def turning(n: int) -> int:
        try:
            await wait_for("go")
        except RunCancelled:
            return continue_as(n + 1)  # it is cancelled all the same
        return continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(turning, 0, id="t")
    await until(lambda: waits_for(world, run, "go"))
    await run.signal("go")
    await until(lambda: _generation(world, "t", 2))
    await run.cancel("enough")
    with pytest.raises(RunCancelledError, match="enough"):
        await run.result()


async def test_one_that_never_waits_can_be_cancelled_and_paused(world: World):
    @flow
    async def spinning(n: int) -> int:
        return continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(spinning, 0, id="s")
    await until(lambda: _is_beyond(world, "s", 5))
    await run.pause()
    await world.until_status("paused", run)
    stood_at = (await world.state("s")).generation
    await run.resume()
    await until(lambda: _is_beyond(world, "s", stood_at + 5))
    await run.cancel()
    with pytest.raises(RunCancelledError):
        await run.result()


async def _is_beyond(world: World, run_id: str, generation: int) -> bool:
    return (await world.state(run_id)).generation > generation


async def test_closing_lets_go_of_it_and_it_goes_on_elsewhere(world: World):
    @flow
    async def spinning(n: int) -> int:
        return n if n == 10_000_000 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(spinning, 0, id="s")
    for _ in range(8):
        stood_at = (await world.state("s")).generation
        await until(lambda at=stood_at: _is_beyond(world, "s", at + 3))
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
    run = await rl.start(turning, 0, id="t")
    await until(lambda: waits_for(world, run, "go"))
    store: Any = rl.services.store
    commit, keeper = store.inner.commit, rl.services.keeper
    lost = False

    async def lost_first(commits: Any) -> Any:
        nonlocal lost
        if not lost and any(one.next is not None for one in commits):
            lost = keeper._lost = True
            rl.orchestrator.let_go_of_all()
        return await commit(commits)

    store.inner.commit = lost_first
    await run.signal("go")
    row = await world.until_status("pending", run)
    assert row.owner is None
    assert rl.orchestrator.live == {}
    keeper._lost = False
    rl.orchestrator.take_again(lapsed=False)
    await run.signal("go")
    assert await run.result() == 1


async def test_a_lease_that_lapses_fences_the_next_generation(world: World):
    """Another process claims it in the moment in which its next generation is committed."""

    @flow
    async def turning(n: int) -> int:
        await wait_for("go")
        return n if n == 1 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(turning, 0, id="t")
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
    await until(lambda: _generation(world, "t", 2))
    await run.signal("go")
    assert await run.result() == 1


# ---- how it is called


async def test_steps_in_finally_are_of_the_generation_that_ends(world: World):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def turning(n: int) -> int:
        try:
            await mark(f"in {n}")
            if n < 1:
                return continue_as(n + 1)
            return n
        finally:
            await mark(f"out {n}")

    rl = await world.open()
    assert await rl.run(turning, 0) == 1
    assert calls == ["in 0", "out 0", "in 1", "out 1"]


async def test_tasks_that_are_left_behind_end_with_the_generation(world: World):
    ended: list[int] = []

    @flow
    async def turning(n: int) -> int:
        async def forever() -> None:
            try:
                await wait_for("never")
            finally:
                ended.append(n)

        task = asyncio.create_task(forever())
        await sleep(0)
        assert not task.done()
        return n if n == 2 else continue_as(n + 1)

    rl = await world.open()
    assert await rl.run(turning, 0, id="t") == 2
    assert ended == [0, 1, 2]


async def test_in_a_task_group_of_the_flow(world: World):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def turning(n: int) -> int:
        async with asyncio.TaskGroup() as group:
            group.create_task(mark(f"{n}"))
            if n == 0:
                await sleep(0)
                continue_as(n + 1)
        return n

    rl = await world.open()
    assert await rl.run(turning, 0) == 1


async def test_a_flow_that_retries_begins_each_generation_with_its_first_attempt(world: World):
    calls = Calls(**{"turn 0": 1, "turn 1": 2})
    mark = marking(calls)

    @flow(retry=Retry(3, delay="0s"))
    async def turning(n: int) -> int:
        await mark(f"turn {n}")
        return n if n == 1 else continue_as(n + 1)

    rl = await world.open()
    assert await rl.run(turning, 0) == 1
    assert calls == ["turn 0"] * 2 + ["turn 1"] * 3


async def test_the_input_may_be_a_blob(world: World):
    @flow
    async def growing(text: str) -> int:
        return len(text) if len(text) > 500 else continue_as(text * 3)

    rl = await world.open(payload={"blob_threshold": 16})
    run = await rl.start(growing, "ab", id="g")
    assert await run.result() == 1458 / 3 * 3
    assert (await world.state("g")).created is not None


async def test_forking_a_later_generation(world: World):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def turning(n: int) -> str:
        if n < 2:
            return continue_as(n + 1)
        await mark("first")
        return str(await mark("second"))

    rl = await world.open()
    run = await rl.start(turning, 0, id="t")
    assert await run.result() == "second"
    forked = await rl.fork("t", "@3/mark:1", new_id="f")
    assert await forked.result() == "second"
    assert calls == ["first", "second", "second"]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [("type", PayloadError), ("count", Exception), ("child", FlowCodeError), ("task", FlowCodeError)],
)
async def test_a_call_that_cannot_be_raises_where_it_is_made(world: World, wrong: str, error: type[Exception]):
    caught: list[str] = []

    @flow
    async def child() -> None:
        continue_as()

    async def in_task() -> None:
        continue_as(1)

    @flow
    async def turning(n: int) -> str:
        try:
            if wrong == "type":
                continue_as("one")
            elif wrong == "count":
                continue_as(1, 2)
            elif wrong == "child":
                await child()
            else:
                await asyncio.gather(in_task())
        except error as refused:
            caught.append(str(refused))
        return "went on"

    rl = await world.open()
    assert await rl.run(turning, 0) == "went on"
    assert len(caught) == 1


async def test_in_a_branch_of_a_sync_flow_it_is_refused(world: World):
    @flow
    def turning(n: int) -> str:
        parallel(lambda: continue_as(1))
        return "went on"

    rl = await world.open()
    with pytest.raises(RunFailedError, match="in the code of the flow itself"):
        await rl.run(turning, 0)


async def test_one_that_is_swallowed_is_said(world: World):
    @flow
    async def turning(n: int) -> str:
        try:
            continue_as(1)
        except BaseException:
            return "swallowed"

    rl = await world.open()
    with pytest.raises(RunFailedError, match="has swallowed what it raises"):
        await rl.run(turning, 0)


async def test_a_forgotten_await_is_said_also_then(world: World):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def turning(n: int) -> int:
        mark("forgotten")
        return continue_as(n + 1)

    rl = await world.open()
    with pytest.raises(RunFailedError, match="never awaited"):
        await rl.run(turning, 0)


async def test_outside_a_run_its_arguments_reach_the_caller():
    @flow
    async def turning(n: int, *, end: int) -> int:
        return n if n == end else continue_as(n + 1, end=end)

    assert await turning(2, end=2) == 2
    with pytest.raises(ContinueAs) as continued:
        await turning(0, end=2)
    assert (continued.value.arguments, continued.value.keywords) == ((1,), {"end": 2})


# ---- it does not grow


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
    run = await rl.start(turning, 0, id="t")
    sizes: dict[int, tuple[int, ...]] = {}
    for n in range(91):
        await run.signal("go", id=f"{n}")
        if n in (30, 60, 90):
            await until(lambda n=n: _is_beyond(world, "t", n))
            gc.collect()
            count = sum(type(one).__name__ in ("LiveRun", "RunLoop", "FlowTask", "Writer") for one in gc.get_objects())
            sizes[n] = (world.rows_in("runs"), world.rows_in("journal"), count)
    assert await run.result() == 90
    rows, entries, objects = zip(*sizes.values(), strict=True)
    assert max(rows) <= 2, sizes
    assert max(entries) < 10, sizes
    assert max(objects) - min(objects) < 20, sizes


async def test_a_checkpoint_of_the_last_generation_that_comes_late_is_refused(world: World):
    """It is made in the background, from what the journal was."""
    calls = Calls()
    mark = marking(calls)

    @flow
    async def turning(n: int) -> int:
        for _ in range(4):
            await mark("x")
        return n if n == 30 else continue_as(n + 1)

    world.slow["checkpoint"] = 7
    rl = await world.open(checkpoint={"every": 3})
    assert await rl.run(turning, 0, id="t") == 30
    assert len(calls) == 31 * 4


async def test_what_it_is_in_is_shown(world: World):
    @flow
    async def turning(n: int) -> int:
        await wait_for("go")
        return n if n == 1 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(turning, 0, id="t")
    await until(lambda: waits_for(world, run, "go"))
    await run.signal("go")
    await until(lambda: _generation(world, "t", 2))
    explained = await rl.explain("t")
    assert explained.generation == 2
    events = [type(event) for event in await world.events("t")]
    assert j.RunContinued not in events
    assert (await run.describe()).status in (Status.WAITING, Status.RUNNING)


# ---- what a reader found


@pytest.mark.parametrize("how", ["crash", "close", "pause"])
@pytest.mark.parametrize("continues", [True, False])
async def test_a_signal_that_was_recorded_for_a_wait_which_the_flow_gave_up_on_is_not_lost(
    world: World, how: str, continues: bool
):
    """The run leaves memory before it is written that the flow gave up on it: the journal says that it was taken."""

    async def _wait(name: str) -> Any:
        return await wait_for(name)

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
    store: Any = rl.services.store
    commit, ready, go_on = store.inner.commit, asyncio.Event(), asyncio.Event()

    def gives_up(commits: Any) -> bool:
        events = [j.decode_event(entry) for one in commits for entry in one.entries]
        return any(isinstance(event, j.OperationCancelled | j.RunContinued) for event in events)

    async def refused(commits: Any) -> Any:
        if gives_up(commits):
            ready.set()
            await go_on.wait()
        return await commit(commits)

    store.inner.commit = refused
    world.slow["commit"] = 5
    run = await rl.start(taking, 0, id="t")
    await until(lambda: waits_for(world, run, "now"))
    await asyncio.gather(run.signal("now"), run.signal("go", "kept"))
    await ready.wait()
    if how == "crash":
        await world.crash()
        go_on.set()
        store.inner.commit = commit
        await world.open()
    elif how == "close":
        closing = asyncio.ensure_future(world.close())
        await turns()
        go_on.set()
        await closing
        store.inner.commit = commit
        await world.open()
    else:
        await run.pause()
        go_on.set()
        await world.until_status("paused", run)
        await run.resume()
    assert await finish(world, "t") == "kept"


async def test_a_blob_that_is_missing_is_no_matter_of_a_generation_that_has_ended(world: World):
    """It is found missing while the next generation is committed. That one waits for another signal, and takes it."""

    async def _wait(name: str) -> Any:
        return await wait_for(name)

    @flow
    async def taking(turn: int) -> str:
        if turn == 0:
            task = asyncio.create_task(_wait("large"))
            await wait_for("now")
            task.cancel()
            return continue_as(1)
        return str(await wait_for("small"))

    rl = await world.open(payload={"blob_threshold": 16})
    store: Any = rl.services.store
    commit, reading, missing, next_one, go_on = store.inner.commit, *(asyncio.Event() for _ in range(4))

    async def get_blob(digest: str) -> None:
        reading.set()
        await missing.wait()

    async def slowly(commits: Any) -> Any:
        if any(one.next is not None for one in commits):
            next_one.set()
            await go_on.wait()
        return await commit(commits)

    store.inner.get_blob, store.inner.commit = get_blob, slowly
    run = await rl.start(taking, 0, id="t")
    await until(lambda: waits_for(world, run, "now"))
    await run.signal("large", "x" * 500)
    await reading.wait()
    await run.signal("now")
    await next_one.wait()
    missing.set()
    await turns(100)
    await run.signal("small", "taken")
    go_on.set()
    assert await run.result() == "taken"


@pytest.mark.parametrize("how", ["raise", "return"])
async def test_a_continue_as_of_ones_own_making_is_refused(world: World, how: str):
    """Its arguments were never checked, and the checkpoint that would take the journal's place could not be read."""

    @flow
    async def turning(n: int) -> Any:
        if how == "raise":
            raise ContinueAs((1,), {})
        return ContinueAs((1,), {})

    rl = await world.open()
    with pytest.raises(RunFailedError, match="of its own making"):
        await rl.run(turning, 0)


async def test_one_that_is_swallowed_is_said_when_it_is_called_again(world: World):
    caught: list[str] = []

    @flow
    async def turning(n: int) -> None:
        for _ in range(2):
            try:
                continue_as(n + 1)
            except BaseException as error:
                caught.append(str(error))
        raise ValueError(caught[1])

    rl = await world.open()
    with pytest.raises(RunFailedError, match="was called before, and the flow went on"):
        await rl.run(turning, 0)


@pytest.mark.parametrize("how", ["crash", "close"])
async def test_signals_keep_their_order_when_some_were_taken_back(world: World, how: str):
    """The first is large, and being read; the second has been recorded. The flow gives up on both."""

    async def _wait(name: str) -> Any:
        return await wait_for(name)

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
    store: Any = rl.services.store
    get_blob, reading, go_on = store.inner.get_blob, asyncio.Event(), asyncio.Event()

    async def slowly(digest: str) -> Any:
        reading.set()
        await go_on.wait()
        return await get_blob(digest)

    store.inner.get_blob = slowly
    run = await rl.start(taking, 0, id="t")
    await until(lambda: waits_for(world, run, "now"))
    await run.signal("x", "large" * 100)
    await reading.wait()
    world.slow["commit"] = 5
    await asyncio.gather(run.signal("now"), run.signal("x", "small"))
    await until(lambda: _generation(world, "t", 2))
    assert len((await world.state("t")).unclaimed) == 1
    go_on.set()
    await (world.crash_and_reopen() if how == "crash" else world.close_and_reopen())
    await (await world.rl.get("t")).signal("on")
    assert await finish(world, "t") == [500, 5]


async def test_a_generation_that_waited_for_a_moment_is_not_kept_by_its_timer(world: World):
    @flow
    async def turning(n: int) -> int:
        await wait_for("go")
        return n if n == 20 else continue_as(n + 1)

    rl = await world.open(park_after="5m")
    run = await rl.start(turning, 0, id="t")
    for n in range(20):
        await until(lambda n=n: _generation(world, "t", n + 1))
        await until(lambda: waits_for(world, run, "go"))
        await run.signal("go")
    await until(lambda: _generation(world, "t", 21))
    gc.collect()
    assert len(world.clock.pending) < 10
    await run.signal("go")
    assert await run.result() == 20


async def test_one_that_never_waits_makes_room_for_others(world: World):
    @flow
    async def spinning(n: int) -> int:
        return continue_as(n + 1)

    @flow
    async def short(n: int) -> int:
        return n

    rl = await world.open(max_concurrent_runs=1)
    endless = await rl.start(spinning, 0, id="s")
    runs = [await rl.start(short, n) for n in range(3)]
    world.clock.advance("1s")  # it is due after them from now on
    assert [await run.result(timeout="60s") for run in runs] == [0, 1, 2]
    await until(lambda: _is_beyond(world, "s", 10))
    await endless.cancel()
    with pytest.raises(RunCancelledError):
        await endless.result()


async def test_a_signal_that_was_taken_back_from_the_journal_is_taken_once(world: World):
    """By the wait that asks next, also if the run comes back once more after that."""

    async def _wait(name: str) -> Any:
        return await wait_for(name)

    @flow
    async def taking() -> list[Any]:
        task = asyncio.create_task(_wait("go"))
        await wait_for("now")
        task.cancel()
        first = await wait_for("go")
        await wait_for("on")
        return [first, await wait_for("go", timeout="1s", default="nothing")]

    rl = await world.open()
    store: Any = rl.services.store
    commit, ready = store.inner.commit, asyncio.Event()

    async def lost(commits: Any) -> Any:
        events = [j.decode_event(entry) for one in commits for entry in one.entries]
        if any(isinstance(event, j.OperationCancelled) for event in events):
            ready.set()
            await asyncio.Event().wait()
        return await commit(commits)

    store.inner.commit = lost
    world.slow["commit"] = 5
    run = await rl.start(taking, id="t")
    await until(lambda: waits_for(world, run, "now"))
    await asyncio.gather(run.signal("now"), run.signal("go", "kept"))
    await ready.wait()
    store.inner.commit = commit
    await world.crash_and_reopen()
    run = await world.rl.get("t")
    await until(lambda: waits_for(world, run, "on"))
    await world.crash_and_reopen()
    run = await world.rl.get("t")
    await run.signal("on")
    await until(lambda: world.asleep(run))
    world.clock.advance("1s")
    assert await run.result() == ["kept", "nothing"]
