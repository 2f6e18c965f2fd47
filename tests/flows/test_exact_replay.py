"""Branches that fail while others succeed: a flow that compensates goes the same way on replay."""

import asyncio

import pytest

from relight import RunFailedError, flow, parallel, sleep, step, wait_for
from tests.flows.ways import Gate, Ways, replay_to_the_end, two_signals
from tests.flows.world import World, until

CRASH = pytest.mark.parametrize("crash", [True, False], ids=["killed", "parked"])


# ---- gather


@CRASH
@pytest.mark.parametrize("names", [["fails", "hotel", "car"], ["hotel", "fails", "car"], ["hotel", "car", "fails"]])
async def test_a_saga_with_gather_undoes_on_replay_what_it_undid_live(world: World, crash: bool, names: list[str]):
    """A branch fails, and its siblings succeed, in one commit."""
    gate, ways, undone = Gate(), Ways(), list[str]()

    @step
    async def book(name: str) -> str:
        await gate.pass_by(name)
        if name == "fails":
            raise ValueError("no")
        return name

    @step
    async def undo(name: str) -> None:
        undone.append(name)

    @flow
    async def trip() -> list[str]:
        way, done = ways.begin(), list[str]()

        async def one(name: str) -> None:
            done.append(await book(name))
            way.append(name)

        tasks = [asyncio.create_task(one(name)) for name in names]
        try:
            await asyncio.gather(*tasks)
        except ValueError:
            way.append(f"compensates {done}")
            for name in list(done):
                await undo(name)
        await asyncio.gather(*tasks, return_exceptions=True)
        await two_signals()
        return done

    rl = await world.open()
    run = await rl.start(trip)
    await gate.open(after=3)
    assert sorted(await replay_to_the_end(world, run, crash)) == ["car", "hotel"]
    assert ways.check()[: names.index("fails")] == names[: names.index("fails")]
    assert undone == names[: names.index("fails")]


async def test_a_saga_that_is_killed_while_it_compensates_goes_on_compensating(world: World):
    gate, undoing, ways = Gate(), Gate(), Ways()
    undone = list[str]()

    @step
    async def book(name: str) -> str:
        await gate.pass_by()
        if name == "fails":
            raise ValueError("no")
        return name

    @step
    async def undo(name: str) -> None:
        if name == "b":
            await undoing.pass_by()
        undone.append(name)

    @flow
    async def trip() -> list[str]:
        way, done = ways.begin(), list[str]()

        async def one(name: str) -> None:
            done.append(await book(name))

        try:
            await asyncio.gather(*(one(name) for name in ["a", "b", "fails", "c"]))
        except ValueError:
            for name in list(done):
                way.append(name)
                await undo(name)
        await two_signals()
        return done

    rl = await world.open()
    run = await rl.start(trip)
    await gate.open(after=4)
    await until(lambda: undoing.entered)
    rl = await world.crash_and_reopen()
    await undoing.open(after=2)
    await replay_to_the_end(world, await rl.get(run.id))
    assert undone == ["a", "b"]
    assert ways.check(at_least=3) == ["a", "b"]


async def test_gather_that_failed_leaves_its_other_branches_going_on_replay_too(world: World):
    """gather does not wait for the other branches when one fails. What they do after that interleaves with what the flow does."""
    first, second, ways = Gate(), Gate(), Ways()

    @step
    async def one(name: str) -> str:
        await first.pass_by()
        if name == "fails":
            raise ValueError("no")
        return name

    @step
    async def two(name: str) -> str:
        if name == "slow":
            await second.pass_by()
        return name

    @flow
    async def going_on() -> list[str]:
        way = ways.begin()

        async def branch() -> None:
            way.append(await one("fine"))
            way.append(await two("slow"))
            way.append(await two("branch"))

        task = asyncio.create_task(branch())
        try:
            await asyncio.gather(one("fails"), task)
        except ValueError:
            way.append(await two("failed"))
        await task
        way.append("joined")
        await two_signals()
        return way

    rl = await world.open()
    run = await rl.start(going_on)
    await first.open(after=2)
    await second.open()
    assert (await replay_to_the_end(world, run))[-3:] == ["slow", "branch", "joined"]
    ways.check()


async def test_a_saga_in_a_child_run_that_fails_is_one_outcome_of_its_parent(world: World):
    gate, ways, undone = Gate(), Ways(), list[str]()

    @step
    async def book(name: str) -> str:
        await gate.pass_by()
        if name == "fails":
            raise ValueError("no")
        return name

    @step
    async def undo(name: str) -> None:
        undone.append(name)

    @flow
    async def booking() -> None:
        way, done = ways.begin(), list[str]()

        async def one(name: str) -> None:
            done.append(await book(name))

        try:
            await asyncio.gather(one("hotel"), one("fails"), one("car"))
        except ValueError:
            way.append(str(done))
            for name in list(done):
                await undo(name)
            await two_signals()
            raise

    @flow
    async def trip() -> str:
        said = "booked"
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(booking())
                group.create_task(sleep("1h"))
        except* ValueError as errors:
            said = f"failed: {errors.exceptions[0]}"
        return said

    rl = await world.open()
    run = await rl.start(trip)
    await gate.open(after=3)
    assert await replay_to_the_end(world, run) == "failed: no"
    assert ways.check() == ["['hotel']"]
    assert undone == ["hotel"]


async def test_a_sync_saga_with_parallel_undoes_on_replay_what_it_undid_live(world: World):
    ways, undone = Ways(), list[str]()

    @step
    def book(name: str) -> str:
        if name == "fails":
            raise ValueError("no")
        return name

    @step
    def undo(name: str) -> None:
        undone.append(name)

    @step
    def finish() -> None:
        pass

    @flow
    def trip() -> list[str]:
        way, done = ways.begin(), list[str]()

        def one(name: str) -> None:
            done.append(book(name))

        try:
            parallel(*(lambda name=name: one(name) for name in ["hotel", "fails", "car"]))  # type: ignore[misc]
        except ValueError:
            way.append(str(done))
            for name in list(done):
                undo(name)
        finish()
        wait_for("go")
        wait_for("go")
        return done

    rl = await world.open()
    run = await rl.start(trip)
    done = await replay_to_the_end(world, run)
    assert sorted(done) == ["car", "hotel"]
    assert undone == done
    ways.check(at_least=3)


# ---- TaskGroup


@CRASH
@pytest.mark.parametrize("failing_first", [True, False])
async def test_a_task_group_cancels_on_replay_what_it_cancelled_live(world: World, crash: bool, failing_first: bool):
    """The branches share nothing. When the group cancels the sibling, that has the result of its first step, or has not."""
    gate, ways, said = Gate(), Ways(), list[str]()

    @step
    async def work(name: str) -> str:
        await gate.pass_by()
        if name == "fails":
            raise ValueError("no")
        return name

    @step
    async def tell(what: str) -> str:
        said.append(what)
        return what

    @flow
    async def trip() -> str:
        way = ways.begin()

        async def book() -> None:
            try:
                way.append(await work("hotel"))
                way.append(await work("flight"))
            finally:
                way.append(await tell("cleaned up"))

        try:
            async with asyncio.TaskGroup() as group:
                for job in (work("fails"), book()) if failing_first else (book(), work("fails")):
                    group.create_task(job)
        except* ValueError:
            way.append("failed")
        await two_signals()
        return "over"

    rl = await world.open()
    run = await rl.start(trip)
    await gate.open(after=2)
    assert await replay_to_the_end(world, run, crash) == "over"
    assert ways.check()[-2:] == ["cleaned up", "failed"]
    assert said == ["cleaned up"]


@CRASH
async def test_a_clean_up_that_was_given_up_on_in_a_group_does_not_hang_after_replay(world: World, crash: bool):
    """The task is cancelled in the commit in which it came to its clean-up. The flow gives up on the clean-up, which
    waits for nothing."""
    start, meeting, leaving, ways = Gate(), Gate(), Gate(), Ways()

    @step
    async def work(name: str) -> str:
        await {"start": start, "exit": leaving}[name].pass_by()
        return name

    @step
    async def meet(name: str) -> str:
        await meeting.pass_by()
        return name

    @flow
    async def trip() -> str:
        way = ways.begin()

        async def book() -> None:
            try:
                way.append(await meet("inside"))
            finally:
                way.append("leaving")
                way.append(await work("exit"))

        async def group() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(book())

        task = asyncio.create_task(group())
        way.append(await work("start"))
        way.append(await meet("main"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        way.append(f"over: {task.cancelled()}")
        await two_signals()
        return "over"

    rl = await world.open()
    run = await rl.start(trip)
    await start.open()
    await meeting.open(after=2)
    await leaving.open(after=0)
    assert await replay_to_the_end(world, run, crash) == "over"
    assert ways.check()[0] == "start"


async def test_nested_groups_that_fail_come_to_the_same_end_on_replay(world: World):
    gate, ways, said = Gate(), Ways(), list[str]()

    @step
    async def work(name: str) -> str:
        await gate.pass_by()
        if name.startswith("fails"):
            raise ValueError(name)
        return name

    @step
    async def tell(what: str) -> None:
        said.append(what)

    @flow
    async def trip() -> str:
        way = ways.begin()

        async def leaf(name: str) -> None:
            try:
                way.append(await work(name))
            finally:
                await tell(f"left {name}")

        async def inner(n: int) -> None:
            async with asyncio.TaskGroup() as group:
                for name in (f"a{n}", f"fails{n}", f"b{n}"):
                    group.create_task(leaf(name))

        try:
            async with asyncio.TaskGroup() as group:
                for n in range(2):
                    group.create_task(inner(n))
        except* ValueError as errors:
            way.append(str(len(errors.exceptions)))
        await two_signals()
        return way[-1]

    rl = await world.open()
    run = await rl.start(trip)
    await gate.open(after=6)
    assert await replay_to_the_end(world, run) in ("1", "2")
    ways.check()
    assert sorted(said) == sorted(f"left {name}{n}" for name in ("a", "b", "fails") for n in range(2))


async def test_a_run_whose_group_failed_fails_with_the_same_error_after_a_crash(world: World):
    gates = {"work": Gate(), "a": Gate(), "rest": Gate()}

    @step
    async def work(name: str) -> str:
        await gates["work"].pass_by()
        raise ValueError(name)

    @step
    async def clean_up(name: str) -> None:
        await gates["a" if name == "a" else "rest"].pass_by(name)

    @flow
    async def trip() -> None:
        async def one(name: str) -> None:
            try:
                await work(name)
            finally:
                await clean_up(name)

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(one(name))

    rl = await world.open()
    run = await rl.start(trip)
    await gates["work"].open(after=3)
    await until(lambda: gates["a"].entered and len(gates["rest"].entered) == 2)
    rl = await world.crash_and_reopen()
    await gates["a"].open(after=2)  # this one fails first: the others are cancelled in their clean-up
    with pytest.raises(RunFailedError, match="1 sub-exception") as failed:
        await (await rl.get(run.id)).result("60s")
    assert isinstance(failed.value.__cause__, ExceptionGroup)
    assert [str(error) for error in failed.value.__cause__.exceptions] == ["a"]
    assert sorted(gates["rest"].entered) == ["b", "b", "c", "c"]
