"""continue_as(): a run ends its generation and begins the next under the same id."""

import asyncio
from typing import Any

import pytest

from relight import (
    ContinueAs,
    FlowCodeError,
    PayloadError,
    Retry,
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
from tests.flows.watching import begins_a_generation, is_in_generation, waits_for
from tests.flows.ways import Held
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
    run = await rl.start(counting.with_id("c"), 0, end=4)
    assert await run.result() == 4
    assert calls == [f"turn {n}" for n in range(5)]
    assert world.rows_in("journal") == 2, "its last step and its end: the earlier generations left nothing"
    state = await world.state("c")
    assert (state.generation, list(state.outcomes)) == (5, ["@5/mark", ""])


async def test_the_row_keeps_its_creation_and_its_first_input(world: World):
    """So a second start under its id finds the same run, in whatever generation it is."""

    @flow
    async def counting(n: int) -> int:
        return n if n == 3 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(counting.with_id("c"), 0)
    before = await run.describe()
    assert await run.result() == 3
    again = await rl.start(counting.with_id("c"), 0)
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
    run = await rl.start(turning.with_id("t"), 0)
    for n in range(4):
        await until(lambda: waits_for(world, run, "go"))
        await world.crash_and_reopen()
        run = await world.rl.get("t")
        await run.signal("go")
        if n < 3:
            await until(lambda n=n: is_in_generation(world, "t", n + 2))
    assert await finish(world, "t") == 3
    assert calls == [f"{when} {n}" for n in range(4) for when in ("before", "after")], (
        "no step of any turn was repeated"
    )


async def test_a_generation_that_had_ended_and_was_not_committed_ends_again(world: World):
    """The process dies between the last step and the commit that begins the next generation."""
    calls = Calls()
    mark = marking(calls)

    @flow
    async def turning(n: int) -> int:
        await mark(f"turn {n}")
        if n == 1:
            return n
        return continue_as(n + 1)

    rl = await world.open()
    next_one = Held(world, "commit", begins_a_generation)
    await rl.start(turning.with_id("t"), 0)
    await next_one.reached.wait()
    await world.crash()
    next_one.let_go()
    await world.open()
    assert await finish(world, "t") == 1
    assert calls == ["turn 0", "turn 1"]


async def test_explain_shows_the_generation_of_a_run(world: World):
    @flow
    async def turning(n: int) -> int:
        await wait_for("go")
        return n if n == 1 else continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(turning.with_id("t"), 0)
    await until(lambda: waits_for(world, run, "go"))
    await run.signal("go")
    await until(lambda: is_in_generation(world, "t", 2))
    explained = await rl.explain("t")
    assert explained.generation == 2
    events = [type(event) for event in await world.events("t")]
    assert j.RunContinued not in events
    assert (await run.describe()).status in (Status.WAITING, Status.RUNNING)


# ---- what the next generation keeps


async def test_the_deadline_is_the_runs_and_not_the_generations(world: World):
    @flow(timeout="100s")
    async def turning(n: int) -> int:
        await sleep("30s")
        return continue_as(n + 1)

    rl = await world.open()
    run = await rl.start(turning.with_id("t"), 0)
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


async def test_callers_that_wait_for_a_run_hear_of_its_end_only(world: World):
    @flow
    async def turning(n: int) -> str:
        await wait_for("go")
        return "over" if n == 3 else continue_as(n + 1)

    @flow
    async def parent() -> str:
        return str(await (await spawn(turning.with_id("t"), 0)))

    @flow
    async def joiner() -> str:
        return str(await (await spawn(turning.with_id("t"), 0)))

    rl = await world.open()
    first = await rl.start(parent.with_id("p"))
    await until(lambda: _exists(world, "t"))
    second = await rl.start(joiner.with_id("j"))
    await until(lambda: _joined(world, "t"))
    run = await rl.get("t")
    outside = asyncio.ensure_future(run.result())
    for n in range(4):
        await until(lambda n=n: is_in_generation(world, "t", n + 1))
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
    shipped = await rl.run(billing.with_id("b"), 1, [])
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
    assert await rl.run(turning.with_id("t"), 0) == ["2a", "2b"]
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
    run = await rl.start(turning.with_id("t"), [])
    for n in range(3):
        await until(lambda n=n: _sleeps_in(world, "t", n + 1))
        world.clock.advance("1s")
    first, second, third = await run.result()
    assert first < second < third


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
    run = await rl.start(turning.with_id("t"), 0)
    assert await run.result() == "second"
    forked = await rl.fork("t", "@3/mark:1", new_id="f")
    assert await forked.result() == "second"
    assert calls == ["first", "second", "second"]


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
    assert await rl.run(turning.with_id("t"), 0) == 2
    assert ended == [0, 1, 2]


async def test_continue_as_in_a_task_group_of_the_flow(world: World):
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
    run = await rl.start(growing.with_id("g"), "ab")
    assert await run.result() == 1458 / 3 * 3
    assert (await world.state("g")).created is not None


@pytest.mark.parametrize(
    ("wrong", "error"),
    [("type", PayloadError), ("count", Exception), ("child", FlowCodeError), ("task", FlowCodeError)],
)
async def test_a_wrong_call_of_continue_as_raises_where_it_is_made(world: World, wrong: str, error: type[Exception]):
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


async def test_continue_as_in_a_branch_of_a_sync_flow_is_refused(world: World):
    @flow
    def turning(n: int) -> str:
        parallel(lambda: continue_as(1))
        return "went on"

    rl = await world.open()
    with pytest.raises(RunFailedError, match="in the code of the flow itself"):
        await rl.run(turning, 0)


async def test_a_flow_that_swallows_continue_as_fails_and_says_so(world: World):
    @flow
    async def turning(n: int) -> str:
        try:
            continue_as(1)
        except BaseException:
            return "swallowed"

    rl = await world.open()
    with pytest.raises(RunFailedError, match="has swallowed what it raises"):
        await rl.run(turning, 0)


async def test_a_second_continue_as_after_a_swallowed_one_says_so(world: World):
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


@pytest.mark.parametrize("how", ["raise", "return"])
async def test_a_continue_as_exception_that_the_flow_has_made_is_refused(world: World, how: str):
    """Its arguments were never checked. The checkpoint that replaces the journal could not be read."""

    @flow
    async def turning(n: int) -> Any:
        if how == "raise":
            raise ContinueAs((1,), {})
        return ContinueAs((1,), {})

    rl = await world.open()
    with pytest.raises(RunFailedError, match="of its own making"):
        await rl.run(turning, 0)


async def test_a_forgotten_await_is_reported_also_with_continue_as(world: World):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def turning(n: int) -> int:
        mark("forgotten")
        return continue_as(n + 1)

    rl = await world.open()
    with pytest.raises(RunFailedError, match="never awaited"):
        await rl.run(turning, 0)


async def test_outside_a_run_the_arguments_of_continue_as_reach_the_caller():
    @flow
    async def turning(n: int, *, end: int) -> int:
        return n if n == end else continue_as(n + 1, end=end)

    assert await turning(2, end=2) == 2
    with pytest.raises(ContinueAs) as continued:
        await turning(0, end=2)
    assert (continued.value.arguments, continued.value.keywords) == ((1,), {"end": 2})
