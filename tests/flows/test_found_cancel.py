"""What readers and random programs found: all clean-up of a cancelled run is done, and steps that were given up on are not."""

import asyncio
from typing import Any

import pytest

from relight import Handle, Retry, RunCancelled, RunCancelledError, flow, foreach, sleep, step, wait_for
from tests.flows.watching import turns
from tests.flows.ways import Gate, Held, ThreadGate, Ways, cancel_is_heard, waits
from tests.flows.world import World, until

CRASH = pytest.mark.parametrize("crash", [False, True], ids=["live", "killed"])


async def at_rest(world: World, run: Handle[Any]) -> bool:
    live = world.rl.orchestrator.live.get(run.id)
    return await world.is_("waiting", run) or (live is not None and bool(live.inflight))


async def is_cancelled(run: Handle[Any], reason: str = "sold") -> None:
    with pytest.raises(RunCancelledError, match=reason):
        await run.result("60s")


# ---- clean-up, wherever the branch was


@step
async def hang() -> None:
    await asyncio.Event().wait()


async def within(waiting: Any) -> None:
    async with asyncio.timeout(600):
        await waiting


PLACES: dict[str, Any] = {
    "asyncio.sleep": lambda child: asyncio.sleep(500),
    "sleep": lambda child: sleep(500),
    "wait_for": lambda child: wait_for("x"),
    "step": lambda child: hang(),
    "sleep in a timeout": lambda child: within(asyncio.sleep(500)),
    "step in a timeout": lambda child: within(hang()),
    "wait_for in a timeout": lambda child: within(wait_for("y")),
    "event in a timeout": lambda child: within(asyncio.Event().wait()),
    "asyncio.wait_for": lambda child: asyncio.wait_for(asyncio.sleep(500), 600),
    "child": lambda child: child(),
}
SHAPES = ["plain", "group", "gather", "gather two", "group with a body", "group of two", "left behind"]


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_cancelled_branch_cleans_up_wherever_it_was(world: World, shape: str):
    done: dict[str, list[int]] = {}

    @step
    async def clean(place: str, number: int) -> None:
        done.setdefault(place, []).append(number)

    @flow
    async def child() -> None:
        await asyncio.sleep(500)

    async def branch(place: str) -> None:
        try:
            await PLACES[place](child)
        finally:
            for number in range(2):
                await clean(place, number)

    async def other() -> None:
        await hang()

    @flow
    async def leased(place: str) -> None:
        if shape == "plain":
            await branch(place)
        elif shape == "gather":
            await asyncio.gather(branch(place))
        elif shape == "gather two":
            await asyncio.gather(branch(place), other())
        elif shape == "left behind":
            task = asyncio.create_task(branch(place))
            await wait_for("never")
            await task
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(branch(place))
                if shape == "group of two":
                    group.create_task(other())
                if shape == "group with a body":
                    await wait_for("never")

    rl = await world.open()
    runs = [await rl.start(leased, place) for place in PLACES]
    for run in runs:
        await until(lambda run=run: at_rest(world, run))
        await run.cancel("sold")
    for run in runs:
        await is_cancelled(run)
    assert done == {place: [0, 1] for place in PLACES}


@CRASH
@pytest.mark.parametrize("place", ["step", "wait_for", "sleep", "asyncio.sleep"])
@pytest.mark.parametrize("shape", ["group", "gather", "gather all"])
async def test_a_branch_that_has_cleaned_up_does_not_cut_off_its_siblings_clean_up(
    world: World, shape: str, place: str, crash: bool
):
    done, gate = set[str](), Gate()

    @step
    async def clean(name: str, number: int) -> None:
        if (name, number) == ("long", 2):
            await gate.pass_by()
        done.add(f"{name} {number}")

    async def branch(name: str, count: int) -> None:
        try:
            await PLACES[place](None)
        finally:
            for number in range(count):
                await clean(name, number)

    @flow
    async def leased() -> None:
        both = branch("short", 1), branch("long", 4)
        if shape == "group":
            async with asyncio.TaskGroup() as group:
                for one in both:
                    group.create_task(one)
        else:
            await asyncio.gather(*both, return_exceptions=shape == "gather all")

    rl = await world.open()
    run = await rl.start(leased)
    await until(lambda: at_rest(world, run))
    await run.cancel("sold")
    await until(lambda: gate.entered)
    if crash:
        rl = await world.crash_and_reopen()
        run = await rl.get(run.id)
    await gate.open(after=2 if crash else 1)
    await is_cancelled(run)
    assert done == {"short 0", "long 0", "long 1", "long 2", "long 3"}


@pytest.mark.parametrize("place", ["step", "wait_for", "sleep", "asyncio.sleep"])
async def test_clean_up_may_wait_by_asyncios_means(world: World, place: str):
    done = list[str]()

    @step
    async def release() -> None:
        done.append("released")

    @flow
    async def leased() -> None:
        try:
            await PLACES[place](None)
        finally:
            done.append("cleaning up")
            await asyncio.sleep(5)
            await release()

    rl = await world.open()
    run = await rl.start(leased)
    await until(lambda: at_rest(world, run))
    await run.cancel("sold")
    await until(lambda: done)
    await turns()
    world.clock.advance(5)
    await is_cancelled(run)
    assert done == ["cleaning up", "released"]


@pytest.mark.parametrize("what", ["event", "queue", "lock"])
async def test_a_flow_that_waits_for_what_its_branch_would_give_hears_of_it(world: World, what: str):
    """The branch is told of the cancellation. The flow does not wait for the branch, but for an event that it would have set."""
    done = list[str]()

    @step
    async def release() -> None:
        done.append("released")

    @flow
    async def leased() -> None:
        event, queue = asyncio.Event(), asyncio.Queue[int]()
        lock = asyncio.Lock()

        async def give() -> None:
            async with lock:
                await hang()
            event.set()
            await queue.put(1)

        task = asyncio.create_task(give())
        try:
            if what == "event":
                await event.wait()
            elif what == "queue":
                await queue.get()
            else:
                await asyncio.sleep(0)
                await lock.acquire()
                await hang()
            await task
        finally:
            await release()

    rl = await world.open()
    run = await rl.start(leased)
    await until(lambda: at_rest(world, run))
    await run.cancel("sold")
    await is_cancelled(run)
    assert done == ["released"]


async def test_a_timer_made_between_the_request_and_its_telling_goes_off(world: World):
    """A timer that was due is told first. Because of it, the flow makes another timer, and its clean-up waits for that."""
    done = list[str]()

    @step
    async def release() -> None:
        done.append("released")

    @flow
    async def leased() -> None:
        await asyncio.sleep(10)
        done.append("made")
        lapse = asyncio.create_task(asyncio.sleep(5))
        try:
            await wait_for("never")
        finally:
            await asyncio.wait([lapse])
            await release()

    rl = await world.open()
    run = await rl.start(leased)
    await until(lambda: world.asleep(run))
    commits = Held(world, "commit")
    world.clock.advance(10)
    await turns()
    await run.cancel("sold")
    await cancel_is_heard(world, run)
    commits.let_go()
    await until(lambda: done)
    world.clock.advance(5)
    await is_cancelled(run)
    assert done == ["made", "released"]


async def test_a_cancelled_flow_is_not_called_again_by_its_retry(world: World):
    calls = list[str]()

    @flow(retry=Retry(3))
    async def leased() -> None:
        calls.append("called")
        try:
            await hang()
        finally:
            raise ValueError("its clean-up failed")

    rl = await world.open()
    run = await rl.start(leased)
    await until(lambda: at_rest(world, run))
    await run.cancel("sold")
    await is_cancelled(run)
    assert calls == ["called"]


# ---- in the moment of something else


async def test_cancelled_in_whatever_moment_it_is_heard(world: World):
    """The run is cancelled while it begins, works, waits, is being parked, or is parked."""
    done: dict[int, list[str]] = {}

    @step
    def mark(number: int, what: str) -> None:
        done.setdefault(number, []).append(what)

    @flow
    def leased(number: int) -> None:
        try:
            mark(number, "work")
            wait_for("never")
        except RunCancelled:
            mark(number, "first")
            raise
        finally:
            mark(number, "second")

    rl = await world.open(park_after=0)
    for number in range(40):
        run = await rl.start(leased, number)
        await until(lambda run=run: waits(world, run, "never"))
        await turns(number)
        await run.cancel("sold")
        await is_cancelled(run)
        assert done[number] == ["work", "first", "second"], number


@pytest.mark.parametrize("item", [False, True], ids=["timeout", "item"])
async def test_an_end_is_recorded_and_not_told_when_the_request_comes(world: World, item: bool):
    """The end of a step, and after it the end of a timeout around the step: that gives up on the step, and is told before the
    cancellation. Or the end of a foreach's item: the flow is told the item's entry, not the step's."""
    gate, last, ways = Gate(), Gate(), Ways()

    @step
    async def work(number: int) -> None:
        await gate.pass_by()

    @step
    async def note(what: str) -> None:
        if what == "last":
            await last.pass_by()

    @flow
    async def leased() -> None:
        way = ways.begin()
        try:
            try:
                async with asyncio.timeout(10):
                    await (foreach([1], work) if item else work(1))
                    way.append("worked")
            except TimeoutError:
                way.append("timed out")
                await note("instead")
        except BaseException as error:
            way.append(type(error).__name__)
            await note("clean")
            await note("last")
            raise

    rl = await world.open()
    run = await rl.start(leased)
    await until(lambda: gate.entered)
    commits = Held(world, "commit")
    await gate.open()
    await until(lambda: not rl.orchestrator.live[run.id].inflight)
    world.clock.advance(0 if item else 11)
    await run.cancel("sold")
    await cancel_is_heard(world, run)
    commits.let_go()
    await until(lambda: last.entered)
    rl = await world.crash_and_reopen()
    await last.open(after=2)
    await is_cancelled(await rl.get(run.id))
    assert ways.check() == (["RunCancelled"] if item else ["timed out", "RunCancelled"])


# ---- given up on


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
async def test_a_step_that_is_given_up_on_before_it_begins_is_not_executed(world: World, sync: bool):
    """Two outcomes in one commit: after the first a branch asks for the step, and after the second the group cancels
    the branch."""
    gate, done = Gate(), list[str]()

    @step
    async def work(fails: bool) -> None:
        await gate.pass_by()
        if fails:
            raise ValueError("no")

    @step
    async def charge() -> None:
        done.append("charged")

    @step
    def charge_sync() -> None:
        done.append("charged")

    @step
    def undo() -> None:
        done.append("undone")

    @flow
    async def order() -> str:
        async def branch() -> None:
            await work(False)
            await (charge_sync() if sync else charge())

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(branch())
                group.create_task(work(True))
        except* ValueError:
            await undo()
        await undo()
        return "compensated"

    rl = await world.open()
    run = await rl.start(order)
    await gate.open(after=2)
    assert await run.result("60s") == "compensated"
    await world.close()  # when all threads have ended
    assert done == ["undone", "undone"]


async def test_a_sync_step_that_waits_for_a_thread_does_not_begin_once_its_run_is_cancelled(world: World):
    gate, calls = ThreadGate(), list[str]()

    @step
    def occupy() -> None:
        gate.pass_by()

    @step
    def charge() -> None:
        calls.append("charged")

    @flow
    async def occupying() -> None:
        await occupy()

    @flow
    async def paying() -> None:
        await charge()

    rl = await world.open(max_threads=1)
    first = await rl.start(occupying)
    await gate.entered.wait()
    run = await rl.start(paying)
    await until(lambda: rl.services.threads.wanted)
    await run.cancel("sold")
    await is_cancelled(run)
    gate.open()
    await is_cancelled(run)
    await first.result("60s")
    assert calls == []


async def test_a_timeout_in_clean_up_does_not_swallow_the_cancellation(world: World):
    """asyncio.timeout() raises TimeoutError only if its task was not cancelled for another reason meanwhile."""
    done = list[str]()

    @step
    async def close(name: str) -> None:
        done.append(name)
        if name == "item":
            await asyncio.Event().wait()

    @flow
    async def serving() -> None:
        async def worker(queue: asyncio.Queue[int]) -> None:
            try:
                while True:
                    await queue.get()
                    try:
                        async with asyncio.timeout(3):
                            try:
                                await hang()
                            finally:
                                await close("item")
                    except TimeoutError:
                        done.append("swallowed")
            finally:
                await close("worker")

        queue = asyncio.Queue[int]()
        queue.put_nowait(1)
        task = asyncio.create_task(worker(queue))
        try:
            await hang()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await close("top")

    rl = await world.open()
    run = await rl.start(serving)
    await until(lambda: at_rest(world, run))
    await run.cancel("sold")
    await until(lambda: done == ["item"])
    world.clock.advance(3)
    await is_cancelled(run)
    assert done == ["item", "worker", "top"]


async def test_clean_up_that_nothing_can_wake_is_cleaned_up_after(world: World):
    done = list[str]()

    @step
    async def release() -> None:
        done.append("released")

    @flow
    async def stuck() -> None:
        try:
            try:
                await hang()
            finally:
                await asyncio.Event().wait()
        finally:
            await release()

    rl = await world.open()
    run = await rl.start(stuck)
    await until(lambda: at_rest(world, run))
    await run.cancel("sold")
    await is_cancelled(run)
    assert done == ["released"]
