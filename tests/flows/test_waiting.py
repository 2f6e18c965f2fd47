"""Waiting durably: timers and signals; parking, which nothing in a flow can see; values that replay sees again."""

import asyncio
import contextlib
import datetime as dt
import gc
import threading
import uuid as uuid_module
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest

from relight import (
    Handle,
    OutsideRunError,
    Relight,
    RunFailedError,
    Status,
    flow,
    now,
    random,
    sleep,
    step,
    uuid,
    wait_for,
)
from relight.errors import DefinitionError
from relight.lifecycle import lookout
from relight.model import journal as j
from relight.model.run import Message, MessageKind
from relight.testing.clock import START
from tests.flows.world import World, until

# ---- sleep


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_sleep_of_days_takes_as_long_as_the_clock_says(world: World, kind: str):
    if kind == "async":

        @flow(name="rest")
        async def rest() -> str:
            await sleep("3d")
            return "rested"

    else:

        @flow(name="rest")
        def rest() -> str:  # type: ignore[misc]  # the other kind of the same flow
            sleep(dt.timedelta(days=3))
            return "rested"

    rl = await world.open()
    run = await rl.start("rest")
    row = await until(lambda: world.asleep(run))
    assert row.wake_at == START + 3 * 86_400
    await world.park(run)
    world.clock.advance(3 * 86_400 - 10)
    assert await run.status() == "waiting"
    world.clock.advance("10s")
    assert await run.result() == "rested"


async def test_a_short_sleep_stays_in_memory(world: World):
    @flow
    async def nap() -> str:
        await sleep("500ms")
        return "rested"

    rl = await world.open()
    run = await rl.start(nap)
    await until(lambda: world.asleep(run))
    live = rl.orchestrator.live[run.id]
    world.clock.advance("500ms")
    assert await run.result() == "rested"
    assert live.outcome is not None  # the very object that began it also ended it


async def test_a_sleep_of_nothing_is_no_wait(world: World):
    @flow
    async def nap() -> str:
        await sleep(0)
        return "rested"

    rl = await world.open()
    assert await rl.run(nap) == "rested"


@pytest.mark.parametrize("how", ["crash", "close"])
async def test_a_sleep_that_came_due_while_nobody_ran_fires_at_once(world: World, how: str):
    @flow
    async def rest() -> list[float]:
        before = now()
        await sleep("1h")
        return [before.timestamp(), now().timestamp()]

    rl = await world.open()
    run = await rl.start(rest)
    await until(lambda: world.asleep(run))
    await (world.crash() if how == "crash" else world.close())
    world.clock.advance("5h")
    rl = await world.open()
    assert await (await rl.get(run.id)).result() == [START, START + 5 * 3600]


async def test_a_restart_does_not_renew_a_sleep(world: World):
    @flow
    async def rest() -> str:
        await sleep("1h")
        return "rested"

    rl = await world.open()
    run = await rl.start(rest)
    await until(lambda: world.asleep(run))
    for _ in range(3):
        world.clock.advance("15m")
        rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    assert (await until(lambda: world.asleep(run))).wake_at == START + 3600
    world.clock.advance("15m")
    assert await run.result() == "rested"


async def test_many_sleepers_wake_in_order(world: World):
    woken: list[int] = []

    @flow
    async def sleeper(n: int) -> None:
        await sleep(60 * n)
        woken.append(n)

    rl = await world.open()
    runs = [await rl.start(sleeper, n) for n in (5, 1, 4, 2, 3)]
    for run in runs:
        await world.park(run)
    for count in range(1, 6):
        world.clock.advance("1m")
        await until(lambda count=count: len(woken) == count)
    assert woken == [1, 2, 3, 4, 5]


async def test_a_sleep_that_falls_due_while_the_store_is_asked_is_not_passed_over(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    @flow
    async def rest(seconds: float) -> str:
        await sleep(seconds)
        return "rested"

    monkeypatch.setattr(lookout, "CHECK_SECONDS", 3600.0)  # the poll would find it, in the end
    rl = await world.open()
    runs = [await rl.start(rest, seconds) for seconds in (600, 601)]
    for run in runs:
        await until(lambda run=run: world.asleep(run))
    for run in runs:
        await world.park(run)
    store: Any = rl.services.store
    due = store.inner.due

    async def slow(now: float, limit: int) -> Any:
        """One is due; when the answer arrives the other is as well, and no timer was set for it."""
        monkeypatch.setattr(store.inner, "due", due)
        found = await due(now, limit)
        world.clock.advance("1s")
        return found

    monkeypatch.setattr(store.inner, "due", slow)
    world.clock.advance(START + 600 - world.clock.now())
    assert [await run.result(timeout="10s") for run in runs] == ["rested"] * 2


async def test_a_wall_clock_set_back_does_not_end_a_sleep_early(world: World):
    @flow
    async def rest() -> str:
        await sleep("2h")
        return "rested"

    rl = await world.open()
    run = await rl.start(rest)
    await until(lambda: world.asleep(run))
    world.clock.set(START - 3600)  # an hour back: three to go
    world.clock.advance("2h30m")
    assert await run.status() == "waiting"
    world.clock.advance("30m")
    assert await run.result() == "rested"


# ---- signals


@pytest.mark.parametrize("when", ["before", "while waiting", "while parked", "after a crash", "while nobody runs"])
async def test_a_signal_arrives_whenever_it_is_sent(world: World, when: str):
    gate = asyncio.Event()
    if when != "before":
        gate.set()

    @step
    async def prepare() -> None:
        await gate.wait()

    @flow
    async def approval() -> str:
        await prepare()
        return await wait_for("approval", str)

    rl = await world.open()
    run = await rl.start(approval, id="r")
    if when == "before":
        await run.signal("approval", "yes")
        gate.set()
    else:
        await world.until_status("waiting", run)
    if when == "while parked":
        await world.park(run)
    elif when == "after a crash":
        rl = await world.crash_and_reopen()
    elif when == "while nobody runs":
        await world.crash()
        rl = await world.open(recovery_enabled=False)
    run = await rl.get("r")
    if when != "before":
        await run.signal("approval", "yes")
    if when == "while nobody runs":
        assert await run.status() == "waiting"
        rl = await world.close_and_reopen(recovery_enabled=True)
    assert await (await rl.get("r")).result() == "yes"


@pytest.mark.parametrize("parked", [False, True])
async def test_signals_of_one_name_are_taken_in_order(world: World, parked: bool):
    @flow
    async def collect() -> list[Any]:
        await wait_for("begin")
        return [await wait_for("n", int) for _ in range(4)] + [await wait_for("other", str)]

    rl = await world.open()
    run = await rl.start(collect)
    await world.until_status("waiting", run)
    if parked:
        await world.park(run)
    await run.signal("other", "last")
    for n in range(3):
        await run.signal("n", n)
    await run.signal("begin")
    await until(lambda: _waits(world, run, "n"))
    await run.signal("n", 3)
    assert await run.result() == [0, 1, 2, 3, "last"]


async def _waits(world: World, run: Handle, name: str) -> bool:
    events = await world.events(run.id)
    return any(isinstance(event, j.WaitStarted) and event.name == name for event in events)


async def test_a_signal_is_taken_once_also_across_a_crash(world: World):
    taken: list[str] = []

    @flow
    async def two() -> list[str]:
        first = await wait_for("n", str)
        taken.append(first)
        second = await wait_for("n", str)
        return [first, second]

    rl = await world.open()
    run = await rl.start(two, id="r")
    await run.signal("n", "one")
    await until(lambda: taken)
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    await run.signal("n", "two")
    assert await run.result() == ["one", "two"]


class Decision(msgspec.Struct):
    approved: bool
    at: dt.datetime


async def test_a_signal_is_decoded_as_its_type(world: World):
    seen: list[Any] = []
    sent = Decision(True, dt.datetime(2024, 1, 1, tzinfo=dt.UTC))

    @flow
    async def deciding() -> None:
        seen.append(await wait_for("decision", Decision))
        seen.append(await wait_for("anything"))
        await wait_for("go")

    rl = await world.open()
    run = await rl.start(deciding)
    await run.signal("decision", sent)
    await run.signal("anything", {"a": [1, None]})
    await until(lambda: len(seen) == 2)
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 4)
    assert seen == [sent, {"a": [1, None]}] * 2


async def test_a_large_signal_travels_as_a_blob(world: World):
    @flow
    async def carrying() -> list[Any]:
        first = await wait_for("data", str)
        await wait_for("go")
        return [len(first), len(await wait_for("data", str))]

    rl = await world.open(payload_blob_threshold=100)
    run = await rl.start(carrying, id="r")
    await run.signal("data", "x" * 1000)
    await world.park(run)
    await run.signal("data", "y" * 2000)
    rl = await world.crash_and_reopen()
    await (await rl.get("r")).signal("go")
    assert await (await rl.get("r")).result() == [1000, 2000]


@pytest.mark.parametrize("how", ["live", "parked", "crash", "due while nobody ran"])
async def test_a_wait_times_out(world: World, how: str):
    @flow
    async def patient() -> str:
        try:
            return str(await wait_for("answer", timeout="1h"))
        except TimeoutError as error:
            return str(error)

    rl = await world.open()
    run = await rl.start(patient, id="r")
    row = await until(lambda: world.asleep(run))
    assert row.wake_at == START + 3600
    if how == "parked":
        await world.park(run)
    elif how == "crash":
        rl = await world.crash_and_reopen()
    elif how == "due while nobody ran":
        await world.crash()
        world.clock.advance("2h")
        rl = await world.open()
    run = await rl.get("r")
    if how != "due while nobody ran":
        await until(lambda: world.asleep(run))
        world.clock.advance("1h")
    assert await run.result() == "no signal 'answer' arrived in time"


async def test_a_default_is_returned_instead_of_the_timeout(world: World):
    seen: list[Any] = []

    @flow
    async def patient() -> None:
        seen.append(await wait_for("answer", timeout="1h", default=None))
        seen.append(await wait_for("answer", timeout="0s", default="none"))
        await wait_for("go")

    rl = await world.open()
    run = await rl.start(patient)
    await until(lambda: world.asleep(run))
    world.clock.advance("1h")
    await until(lambda: len(seen) == 2)
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 4)
    assert seen == [None, "none"] * 2


async def test_a_signal_in_time_beats_the_timeout_and_the_next_wait_has_its_own(world: World):
    @flow
    async def patient() -> list[Any]:
        first = await wait_for("answer", timeout="1h")
        second = await wait_for("answer", timeout="1h", default="late")
        return [first, second]

    rl = await world.open()
    run = await rl.start(patient)
    await until(lambda: world.asleep(run))
    world.clock.advance("59m")
    await run.signal("answer", "in time")
    await until(lambda: _due_at(world, run, START + 59 * 60 + 3600))
    world.clock.advance("1h")
    assert await run.result() == ["in time", "late"]


async def _due_at(world: World, run: Handle, when: float) -> bool:
    row = await world.asleep(run)
    return row is not None and row.wake_at == when


async def test_a_signal_after_the_timeout_waits_for_the_next_wait(world: World):
    @flow
    async def patient() -> list[Any]:
        first = await wait_for("answer", timeout="1m", default="late")
        await sleep("1h")
        return [first, await wait_for("answer", timeout="1m", default="none")]

    rl = await world.open()
    run = await rl.start(patient)
    await until(lambda: world.asleep(run))
    world.clock.advance("1m")
    await until(lambda: _sleeps(world, run))
    await run.signal("answer", "after all")
    world.clock.advance("1h")
    assert await run.result() == ["late", "after all"]


async def _sleeps(world: World, run: Handle) -> bool:
    return any(open_.what == "sleep" for open_ in (await world.state(run.id)).open.values())


@pytest.mark.parametrize("name", ["", 3, None])
async def test_a_signal_needs_a_name(world: World, name: Any):
    @flow
    async def wrong() -> None:
        await wait_for(name)

    rl = await world.open()
    with pytest.raises(RunFailedError, match="name the signal") as raised:
        await rl.run(wrong)
    assert isinstance(raised.value.__cause__, DefinitionError)


async def test_odd_names_are_names_too(world: World):
    names = ["a/b", "a_b", "a:b", "[0@x]", "$join", "ünï ☃", " "]

    @flow
    async def odd() -> list[Any]:
        return [await wait_for(name) for name in names]

    rl = await world.open()
    run = await rl.start(odd)
    for name in reversed(names):
        await run.signal(name, name)
    await until(lambda: run.id not in rl.orchestrator.live)
    assert await run.result() == names


def test_wait_for_outside_a_run_says_what_is_missing():
    with pytest.raises(OutsideRunError, match="needs a run to be signalled"):
        wait_for("x")


# ---- parking: leaving memory


class Anchor:
    """Something only a flow's own frame refers to."""


async def test_a_parked_run_is_no_longer_in_memory(world: World):
    anchors: list[weakref.ref[Anchor]] = []

    @flow
    async def waiting() -> str:
        anchor = Anchor()
        anchors.append(weakref.ref(anchor))
        found = await wait_for("go", str)
        assert anchor is not None
        return found

    rl = await world.open()
    runs = [await rl.start(waiting) for _ in range(5)]
    lives = [weakref.ref(rl.orchestrator.live[run.id]) for run in runs]
    for run in runs:
        row = await world.park(run)
        assert (row.status, row.owner) == (Status.WAITING, None)
    assert rl.orchestrator.live == {}
    gc.collect()
    assert [anchor() for anchor in anchors] == [None] * 5
    assert [live() for live in lives] == [None] * 5
    assert [task.get_name() for task in asyncio.all_tasks() if "run" in task.get_name()] == []
    assert world.clock.pending == []  # no timer is kept for any of them
    for run in runs:
        await run.signal("go", "on")
        assert await run.result() == "on"


async def test_a_parked_sync_flow_holds_no_thread(world: World):
    @flow
    def waiting(n: int) -> str:
        wait_for("go")
        return f"{n} went on in {threading.current_thread().name}"

    rl = await world.open(max_threads=2)
    before = threading.active_count()
    runs = [await rl.start(waiting, n) for n in range(20)]
    for run in runs:
        await until(lambda run=run: _parked(world, run))
    assert threading.active_count() <= before + 2
    assert rl.services.threads._busy == 0
    for n, run in enumerate(runs):
        await run.signal("go")
        assert (await run.result()).startswith(f"{n} went on")


async def _parked(world: World, run: Handle) -> bool:
    row = await world.row(run.id)
    return row.status is Status.WAITING and row.owner is None


async def test_a_sync_flow_leaves_its_thread_without_waiting_for_park_after(world: World):
    @flow
    def waiting() -> None:
        wait_for("go")

    rl = await world.open(park_after="1h")
    run = await rl.start(waiting)
    await until(lambda: _parked(world, run))
    assert world.clock.now() == START


async def test_a_parked_run_comes_back_again_and_again(world: World):
    calls: list[int] = []

    @step
    async def note(n: int) -> int:
        calls.append(n)
        return n

    @flow
    async def loop() -> list[int]:
        found = []
        for n in range(5):
            found.append(await note(n))
            await (sleep("1h") if n % 2 else wait_for("next"))
        return found

    rl = await world.open()
    run = await rl.start(loop)
    for n in range(5):
        await until(lambda n=n: len(calls) == n + 1)
        await world.park(run)
        if n % 2:
            world.clock.advance("1h")
        else:
            await run.signal("next")
    assert await run.result() == [0, 1, 2, 3, 4]
    assert calls == [0, 1, 2, 3, 4]


async def test_park_after_decides_when(world: World):
    @flow
    async def waiting() -> None:
        await wait_for("go")

    rl = await world.open(park_after="10m")
    run = await rl.start(waiting)
    await world.until_status("waiting", run)
    await until(lambda: world.clock.pending)
    world.clock.advance("9m59s")
    await _turns()
    assert run.id in rl.orchestrator.live
    world.clock.advance("1s")
    await until(lambda: run.id not in rl.orchestrator.live)


async def _turns(count: int = 50) -> None:
    """Let everything that is ready to happen happen."""
    for _ in range(count):
        await asyncio.sleep(0)


# ---- parking is invisible

SURROUNDINGS: dict[str, Callable[[list[str], Any], Callable[[], Any]]] = {}


def surrounding(make: Callable[[list[str], Any], Callable[[], Any]]) -> Callable[[list[str], Any], Callable[[], Any]]:
    """Code around a wait. It gets a list for what must not happen, and a durable step to call in its clean-up."""
    SURROUNDINGS[make.__name__] = make
    return make


@surrounding
def except_exception(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        try:
            return await wait_for("go", str)
        except Exception:
            seen.append("except")
            raise

    return body


@surrounding
def except_exception_swallowed(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        while True:
            try:
                return await wait_for("go", str)
            except Exception:
                seen.append("except")

    return body


@surrounding
def finally_with_steps(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        try:
            return await wait_for("go", str)
        finally:
            await note("finally")

    return body


@surrounding
def nested_finally_with_steps_and_waits(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        try:
            try:
                return await wait_for("go", str)
            finally:
                await note("inner")
                await sleep(0)
        finally:
            await note("outer")

    return body


@surrounding
def sync_context_manager(seen: list[str], note: Any) -> Callable[[], Any]:
    @contextlib.contextmanager
    def manager() -> Iterator[None]:
        try:
            yield
        except Exception:
            seen.append("manager")
            raise

    async def body() -> str:
        with manager():
            return await wait_for("go", str)

    return body


@surrounding
def async_context_manager(seen: list[str], note: Any) -> Callable[[], Any]:
    @contextlib.asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        try:
            yield
        except Exception:
            seen.append("manager")
            raise
        finally:
            await note("exit")

    async def body() -> str:
        async with manager():
            return await wait_for("go", str)

    return body


@surrounding
def suppress_exception(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        with contextlib.suppress(Exception):
            return await wait_for("go", str)
        seen.append("suppressed")
        return "suppressed"

    return body


@surrounding
def exit_stacks(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(note, "pushed")
            stack.enter_context(contextlib.suppress(Exception))
            with contextlib.ExitStack() as inner:
                inner.enter_context(contextlib.suppress(Exception))
                return await wait_for("go", str)
        seen.append("suppressed")
        return "suppressed"

    return body


@surrounding
def task_group(seen: list[str], note: Any) -> Callable[[], Any]:
    async def wait() -> str:
        try:
            return await wait_for("go", str)
        except Exception:
            seen.append("task")
            raise

    async def body() -> str:
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(wait())
                group.create_task(note("sibling"))
        except* Exception:
            seen.append("group")
        return task.result()

    return body


@surrounding
def gathered(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        found = await asyncio.gather(wait_for("go", str), note("sibling"), return_exceptions=True)
        if isinstance(found[0], BaseException):
            seen.append("gathered")
        return str(found[0])

    return body


@surrounding
def waited_for_in_a_task(seen: list[str], note: Any) -> Callable[[], Any]:
    async def body() -> str:
        task = asyncio.create_task(wait_for("go", str))
        await asyncio.wait([task])
        if task.cancelled() or task.exception() is not None:
            seen.append("task")
        return str(task.result())

    return body


@surrounding
def async_iterator(seen: list[str], note: Any) -> Callable[[], Any]:
    async def numbers() -> AsyncIterator[str]:
        try:
            yield await wait_for("go", str)
        except Exception:
            seen.append("iterator")
            raise

    async def body() -> str:
        async for number in numbers():
            return number
        return "none"

    return body


@pytest.mark.parametrize("leaving", ["parked", "closed", "paused"])
@pytest.mark.parametrize("name", SURROUNDINGS)
async def test_leaving_memory_is_invisible_to_a_flow(world: World, name: str, leaving: str):
    seen: list[str] = []
    notes: list[str] = []

    @step
    async def note(what: str) -> str:
        notes.append(what)
        return what

    body = SURROUNDINGS[name](seen, note)

    @flow
    async def surrounded() -> str:
        await note("begin")
        found = await body()
        await note("end")
        return str(found)

    rl = await world.open()
    run = await rl.start(surrounded, id="r")
    await until(lambda: _waits(world, run, "go"))
    before = list(notes)
    for _ in range(3):
        if leaving == "parked":
            await until(lambda: _parks(world, run))
        elif leaving == "closed":
            rl = await world.close_and_reopen()
            run = await rl.get("r")
            await until(lambda: "r" in rl.orchestrator.live or _parked(world, run))
        else:
            await run.pause()
            await world.until_status("paused", run)
            await run.resume()
            await until(lambda: _is_not(world, run, Status.PAUSED))
    assert [what for what in notes if what != "sibling"] == [what for what in before if what != "sibling"]
    await run.signal("go", "on")
    assert await run.result() == "on"
    assert seen == []
    assert notes.count("begin") == notes.count("end") == 1
    assert max(notes.count(what) for what in notes) == 1


async def _parks(world: World, run: Handle) -> bool:
    if await _parked(world, run):
        return True
    world.clock.advance("1s")
    return False


async def _is_not(world: World, run: Handle, status: Status) -> bool:
    return (await world.row(run.id)).status is not status


@pytest.mark.parametrize("kind", ["except", "finally", "manager", "suppress", "stack", "parallel"])
async def test_leaving_memory_is_invisible_to_a_sync_flow(world: World, kind: str):
    seen: list[str] = []
    notes: list[str] = []

    @step
    def note(what: str) -> str:
        notes.append(what)
        return what

    @contextlib.contextmanager
    def manager() -> Iterator[None]:
        try:
            yield
        except Exception:
            seen.append("manager")
            raise
        finally:
            note("exit")

    def body() -> Any:
        if kind == "except":
            try:
                return wait_for("go")
            except Exception:
                seen.append("except")
        elif kind == "finally":
            try:
                return wait_for("go")
            finally:
                note("finally")
        elif kind == "manager":
            with manager():
                return wait_for("go")
        elif kind == "suppress":
            with contextlib.suppress(Exception):
                return wait_for("go")
        elif kind == "stack":
            with contextlib.ExitStack() as stack:
                stack.callback(note, "pushed")
                return wait_for("go")
        else:
            from relight import parallel

            return parallel(lambda: wait_for("go"), lambda: note("sibling"))[0]
        seen.append("suppressed")
        return None

    @flow
    def surrounded() -> Any:
        note("begin")
        found = body()
        note("end")
        return found

    rl = await world.open()
    run = await rl.start(surrounded)
    await until(lambda: _waits(world, run, "go"))
    await until(lambda: _parks(world, run))
    if kind == "parallel":
        await until(lambda: "sibling" in notes)
    assert notes == ["begin"] + (["sibling"] if kind == "parallel" else [])
    await run.signal("go", "on")
    assert await run.result() == "on"
    assert seen == []
    assert max(notes.count(what) for what in notes) == 1


async def test_plain_clean_up_runs_when_a_run_leaves_memory(world: World):
    """Invisible to its logic, but what it holds is given back: a flow in memory no longer is no reason to leak a socket."""
    held: list[str] = []

    @flow
    async def holding() -> str:
        held.append("open")
        try:
            return await wait_for("go", str)
        finally:
            held.append("closed")

    rl = await world.open()
    run = await rl.start(holding)
    await world.park(run)
    assert held == ["open", "closed"]
    await run.signal("go", "on")
    assert await run.result() == "on"
    assert held == ["open", "closed"] * 2


async def test_leaving_memory_lets_a_step_of_another_branch_finish(world: World):
    """Also in a TaskGroup, which would cancel the step because its sibling was broken off."""
    gate = asyncio.Event()
    calls: list[str] = []

    @step
    async def slow() -> str:
        calls.append("begun")
        await gate.wait()
        calls.append("finished")
        return "slow"

    @flow
    async def grouped() -> list[str]:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(wait_for("go", str))
            working = group.create_task(slow())
        return [waiting.result(), working.result()]

    rl = await world.open()
    run = await rl.start(grouped, id="r")
    await until(lambda: calls)
    await until(lambda: _waits(world, run, "go"))
    await run.pause()
    await _turns()
    gate.set()
    await world.until_status("paused", run)
    assert calls == ["begun", "finished"]
    assert "~slow/slow" in await world.recorded("r")
    await run.resume()
    await run.signal("go", "on")
    assert await run.result() == ["on", "slow"]
    assert calls == ["begun", "finished"]


@pytest.mark.parametrize("operation", ["wait", "step", "sleep"])
async def test_an_operation_that_begins_as_its_run_is_paused_does_not_break_off_a_step_of_another_branch(
    world: World, operation: str
):
    begun, gate = asyncio.Event(), asyncio.Event()
    calls: list[str] = []

    @step
    async def slow() -> str:
        begun.set()
        await gate.wait()
        calls.append("finished")
        return "slow"

    @step
    async def quick() -> str:
        return "quick"

    async def told_just_now() -> None:
        await begun.wait()
        live = rl.orchestrator.live["r"]
        if not live.recovered and not gate.is_set():
            live.deliver(Message(run_id="r", kind=MessageKind.PAUSE, id=1_000_000))
        operations: dict[str, Callable[[], Any]] = {
            "wait": lambda: wait_for("go", timeout=0, default=None),
            "step": quick,
            "sleep": lambda: sleep(0),
        }
        await operations[operation]()

    @flow
    async def grouped() -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(told_just_now())
            working = group.create_task(slow())
        return working.result()

    rl = await world.open()
    run = await rl.start(grouped, id="r")
    await begun.wait()
    await _turns()
    gate.set()
    await world.until_status("paused", run)
    assert calls == ["finished"]
    await run.resume()
    assert await run.result(timeout="10s") == "slow"
    assert calls == ["finished"]


async def test_code_between_two_operations_does_not_break_off_a_step_of_another_branch(world: World):
    gate, between = asyncio.Event(), asyncio.Event()
    calls: list[str] = []

    @step
    async def slow() -> str:
        calls.append("begun")
        await gate.wait()
        calls.append("finished")
        return "slow"

    @step
    async def next_one() -> str:
        calls.append("next")
        return "next"

    async def other() -> str:
        await between.wait()  # plain code, which no shutdown waits for
        return await next_one()

    @flow
    async def grouped() -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(slow()), group.create_task(other())]
        return [task.result() for task in tasks]

    rl = await world.open()
    run = await rl.start(grouped, id="r")
    await until(lambda: calls)
    await run.pause()
    await until(lambda: rl.orchestrator.live["r"].departing)
    between.set()  # asks for its step now, and is held back
    await _turns()
    gate.set()
    await world.until_status("paused", run)
    assert calls == ["begun", "finished"]
    await run.resume()
    assert await run.result() == ["slow", "next"]
    assert calls == ["begun", "finished", "next"]


# ---- what keeps a run in memory


def plain_sleep(events: dict[str, Any]) -> Any:
    return asyncio.sleep(3600)


def plain_event(events: dict[str, Any]) -> Any:
    return events["event"].wait()


async def under_a_lock(events: dict[str, Any]) -> None:
    async with events["lock"]:
        pass


async def under_a_timeout(events: dict[str, Any]) -> None:
    async with asyncio.timeout(3600):
        await wait_for("never")


async def wait_for_with_a_timeout(events: dict[str, Any]) -> None:
    await asyncio.wait_for(wait_for("never"), 3600)


async def waiting_with_a_timeout(events: dict[str, Any]) -> None:
    await asyncio.wait([asyncio.create_task(wait_for("never"))], timeout=3600)


def in_a_queue(events: dict[str, Any]) -> Any:
    return events["queue"].get()


def in_a_thread(events: dict[str, Any]) -> Any:
    return asyncio.to_thread(events["gate"].wait)


@pytest.mark.parametrize(
    "busy",
    [
        plain_sleep,
        plain_event,
        under_a_lock,
        under_a_timeout,
        wait_for_with_a_timeout,
        waiting_with_a_timeout,
        in_a_queue,
        in_a_thread,
    ],
)
async def test_a_branch_that_waits_for_something_of_its_own_keeps_the_run_in_memory(world: World, busy: Any):
    events = {
        "event": asyncio.Event(),
        "lock": asyncio.Lock(),
        "queue": asyncio.Queue(),
        "gate": threading.Event(),
    }
    await events["lock"].acquire()  # type: ignore[attr-defined]
    begun: list[int] = []

    @flow
    async def mixed() -> str:
        async def other() -> None:
            begun.append(1)
            await busy(events)

        task = asyncio.create_task(other())
        found = await wait_for("go", str)
        events["gate"].set()  # type: ignore[attr-defined]
        task.cancel()
        await asyncio.wait([task])
        return found

    rl = await world.open()
    run = await rl.start(mixed)
    await until(lambda: _waits(world, run, "go"))
    await until(lambda: begun)
    for _ in range(20):
        world.clock.advance("10m")
        await _turns(10)
    assert run.id in rl.orchestrator.live
    assert len(begun) == 1
    await run.signal("go", "on")
    assert await run.result() == "on"


async def test_a_run_parks_once_its_busy_branch_has_ended(world: World):
    event = asyncio.Event()

    @flow
    async def mixed() -> str:
        task = asyncio.create_task(event.wait())
        found = await wait_for("go", str)
        await task
        return found

    rl = await world.open()
    run = await rl.start(mixed)
    await until(lambda: _waits(world, run, "go"))
    world.clock.advance("1m")
    await _turns()
    assert run.id in rl.orchestrator.live
    event.set()
    await until(lambda: _parks(world, run))
    await run.signal("go", "on")
    assert await run.result() == "on"


async def test_a_step_in_flight_keeps_the_run_in_memory(world: World):
    gate = asyncio.Event()
    calls: list[int] = []

    @step
    async def slow() -> str:
        calls.append(1)
        await gate.wait()
        return "slow"

    @step
    def slow_in_a_thread() -> str:
        calls.append(2)
        release.wait(20)
        return "thread"

    release = threading.Event()

    @flow
    async def mixed() -> list[str]:
        return await asyncio.gather(wait_for("go", str), slow(), slow_in_a_thread())

    rl = await world.open()
    run = await rl.start(mixed)
    await until(lambda: len(calls) == 2)
    await until(lambda: _waits(world, run, "go"))
    for _ in range(10):
        world.clock.advance("10m")
        await _turns(10)
    gate.set()
    for _ in range(10):
        world.clock.advance("10m")
        await _turns(10)
    assert run.id in rl.orchestrator.live
    release.set()
    await until(lambda: _parks(world, run))
    await run.signal("go", "on")
    assert await run.result() == ["on", "slow", "thread"]
    assert sorted(calls) == [1, 2]


@pytest.mark.parametrize("structure", ["gather", "nested gather", "group", "wait", "task", "shield-free chain"])
async def test_structure_around_durable_waits_does_not_keep_a_run_in_memory(world: World, structure: str):
    async def wait(name: str) -> str:
        return await wait_for(name, str)

    @flow
    async def structured() -> list[str]:
        names = ["a", "b"]
        if structure == "gather":
            return list(await asyncio.gather(*map(wait, names)))
        if structure == "nested gather":
            inner = asyncio.gather(wait("a"))
            return [one for (one,) in await asyncio.gather(inner, asyncio.gather(wait("b")))]
        if structure == "group":
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(wait(name)) for name in names]
            return [task.result() for task in tasks]
        if structure == "wait":
            tasks = [asyncio.create_task(wait(name)) for name in names]
            await asyncio.wait(tasks)
            return [task.result() for task in tasks]
        task = asyncio.create_task(wait("a"))
        return [await task, await wait("b")]

    rl = await world.open()
    run = await rl.start(structured)
    await until(lambda: _waits(world, run, "a"))
    await until(lambda: _parks(world, run))
    await run.signal("b", "2")
    await run.signal("a", "1")
    assert await run.result() == ["1", "2"]


# ---- values


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_recorded_values_replay_as_they_were(world: World, kind: str):
    seen: list[list[Any]] = []

    def draw() -> list[Any]:
        return [now(), random(), uuid(), random(), now()]

    if kind == "async":

        @flow(name="drawing")
        async def drawing() -> None:
            seen.append(draw())
            await wait_for("go")

    else:

        @flow(name="drawing")
        def drawing() -> None:  # type: ignore[misc]  # the other kind of the same flow
            seen.append(draw())
            wait_for("go")

    world.entropy.number = 0.125
    rl = await world.open()
    run = await rl.start("drawing")
    await world.until_status("waiting", run)
    world.entropy.number = 0.875
    world.clock.advance("1h")
    rl = await world.crash_and_reopen()
    await (await rl.get(run.id)).signal("go")
    await (await rl.get(run.id)).result()
    assert seen[0] == seen[1]
    first = seen[0]
    assert first[0] == dt.datetime.fromtimestamp(START, dt.UTC)
    assert first[0].tzinfo is dt.UTC
    assert first[1] == first[3] == 0.125
    assert isinstance(first[2], uuid_module.UUID)


async def test_a_value_is_durable_before_a_step_acts_on_it(world: World):
    """A crash right behind the step must not give another value to whoever compares the two."""
    acted: list[str] = []
    gate = asyncio.Event()

    @step
    async def act(key: str) -> str:
        acted.append(key)
        await gate.wait()
        return key

    @flow
    async def acting() -> list[str]:
        key = str(uuid())
        return [key, await act(key)]

    rl = await world.open()
    run = await rl.start(acting)
    await until(lambda: acted)
    rl = await world.crash_and_reopen()
    gate.set()
    result = await (await rl.get(run.id)).result()
    assert acted == [result[0]] * 2
    assert result[0] == result[1]


async def test_a_step_waits_for_the_values_it_may_act_on_to_be_durable(world: World):
    acted: list[str] = []
    gate = asyncio.Event()

    @step
    async def act(key: str) -> str:
        acted.append(key)
        return key

    @flow
    async def acting() -> str:
        await wait_for("begin")
        return await act(str(uuid()))

    rl = await world.open()
    run = await rl.start(acting)
    await world.until_status("waiting", run)
    store: Any = rl.services.store
    commit, batches = store.commit, 0

    async def slow_commit(batch: Any) -> Any:
        nonlocal batches
        batches += 1
        if batches == 2:  # the first is that of the signal
            await gate.wait()
        return await commit(batch)

    store.commit = slow_commit
    await run.signal("begin")
    await until(lambda: batches == 2)
    await _turns()
    assert acted == []
    gate.set()
    assert await run.result() == acted[0]


async def test_values_in_a_step_are_plain(world: World):
    @step
    async def inside() -> list[str]:
        return [str(now()), str(random()), str(uuid())]

    @flow
    async def drawing() -> list[str]:
        return await inside()

    rl = await world.open()
    run = await rl.start(drawing)
    assert len(await run.result()) == 3
    assert not any(isinstance(event, j.ValueRecorded) for event in await world.events(run.id))


# ---- real time, once


async def test_sleeping_parking_and_waking_in_real_time():
    @flow
    async def rest() -> str:
        await sleep("500ms")
        return "rested"

    async with Relight("memory:", park_after="10ms") as rl:
        run = await rl.start(rest)
        await until(lambda: run.id not in rl.orchestrator.live)
        assert await run.status() == "waiting"
        assert await run.result("10s") == "rested"
