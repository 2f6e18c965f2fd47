"""Waiting durably: timers and signals."""

import asyncio
import datetime as dt
from typing import Any

import msgspec
import pytest

from relight import (
    Handle,
    OutsideRunError,
    Relight,
    RunFailedError,
    flow,
    now,
    sleep,
    step,
    wait_for,
)
from relight.errors import DefinitionError
from relight.model.run import Message, MessageKind
from relight.orchestrator import waking
from relight.testing.clock import START
from tests.flows.watching import waits_for
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
    assert live.departure.outcome is not None  # the object that began the sleep also ended it


async def test_a_sleep_of_nothing_is_no_wait(world: World):
    @flow
    async def nap() -> str:
        await sleep(0)
        return "rested"

    rl = await world.open()
    assert await rl.run(nap) == "rested"


@pytest.mark.parametrize("how", ["crash", "close"])
async def test_a_sleep_that_came_due_while_no_process_ran_fires_at_once(world: World, how: str):
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

    monkeypatch.setattr(waking, "CHECK_SECONDS", 3600.0)  # the poll would find it later
    rl = await world.open()
    runs = [await rl.start(rest, seconds) for seconds in (600, 601)]
    for run in runs:
        await until(lambda run=run: world.asleep(run))
    for run in runs:
        await world.park(run)
    store: Any = rl.services.store
    claim_due = store.inner.claim_due

    async def slow(*given: Any) -> Any:
        """One run is due. When the answer arrives, the other is due, too, and no timer was set for it."""
        monkeypatch.setattr(store.inner, "claim_due", claim_due)
        found = await claim_due(*given)
        world.clock.advance("1s")
        return found

    monkeypatch.setattr(store.inner, "claim_due", slow)
    world.clock.advance(START + 600 - world.clock.now())
    assert [await run.result(timeout="60s") for run in runs] == ["rested"] * 2


async def test_a_wall_clock_set_back_does_not_end_a_sleep_early(world: World):
    @flow
    async def rest() -> str:
        await sleep("2h")
        return "rested"

    rl = await world.open()
    run = await rl.start(rest)
    await until(lambda: world.asleep(run))
    world.clock.set(START - 3600)  # an hour back: three hours are left
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
    run = await rl.start(approval.with_id("r"))
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
    await until(lambda: waits_for(world, run, "n"))
    await run.signal("n", 3)
    assert await run.result() == [0, 1, 2, 3, "last"]


async def test_a_signal_is_taken_once_also_across_a_crash(world: World):
    taken: list[str] = []

    @flow
    async def two() -> list[str]:
        first = await wait_for("n", str)
        taken.append(first)
        second = await wait_for("n", str)
        return [first, second]

    rl = await world.open()
    run = await rl.start(two.with_id("r"))
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
    run = await rl.start(carrying.with_id("r"))
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
    run = await rl.start(patient.with_id("r"))
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


async def _due_at(world: World, run: Handle[Any], when: float) -> bool:
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


async def _sleeps(world: World, run: Handle[Any]) -> bool:
    return any(open_.what == "sleep" for open_ in (await world.state(run.id)).open.values())


@pytest.mark.parametrize("name", ["", 3, None])
async def test_a_signal_needs_a_name(world: World, name: Any):
    @flow
    async def wrong() -> None:
        await wait_for(name)

    rl = await world.open()
    with pytest.raises(RunFailedError, match="signal name") as raised:
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


# ---- real time, once


async def test_sleeping_parking_and_waking_in_real_time():
    calls = 0

    @flow
    async def rest() -> str:
        nonlocal calls
        calls += 1
        await sleep("500ms")
        return "rested"

    async with Relight("memory:", park_after="10ms") as rl:
        run = await rl.start(rest)
        assert await run.result("60s") == "rested"
    assert calls == 2, "it was parked, and replayed"


async def test_signals_are_heard_in_the_order_of_their_posting_whichever_process_posted_them(world: World):
    """Another process posts the first signal. This process has not been told of it yet when it posts the second."""

    @flow
    async def waiting() -> list[int]:
        return [await wait_for("number", int), await wait_for("number", int)]

    rl = await world.open()
    run = await rl.start(waiting.with_id("r"))
    await world.until_status("waiting", run)
    first = Message(run_id="r", kind=MessageKind.SIGNAL, name="number", payload=b"1", at=world.clock.now())
    await rl.services.store.post([first])
    await run.signal("number", 2)
    assert await run.result(timeout="60s") == [1, 2]


async def test_a_signal_that_is_still_being_read_when_its_wait_is_given_up_is_for_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    large, asked, given_up, gate = "x" * 2000, asyncio.Event(), asyncio.Event(), asyncio.Event()

    @flow
    async def changes_its_mind() -> str:
        waiting = asyncio.create_task(wait_for("text", str))
        await wait_for("stop")
        waiting.cancel()
        await asyncio.wait([waiting])
        given_up.set()
        return await wait_for("text", str)  # type: ignore[no-any-return]

    rl = await world.open(payload_blob_threshold=1000)
    run = await rl.start(changes_its_mind)
    await until(lambda: waits_for(world, run, "text"))
    await until(lambda: waits_for(world, run, "stop"))
    store = rl.services.store
    get_blob = store.get_blob

    async def slow(digest: str) -> Any:
        asked.set()
        await gate.wait()
        return await get_blob(digest)

    monkeypatch.setattr(store, "get_blob", slow, raising=False)
    await run.signal("text", large)
    await asked.wait()
    await run.signal("stop")
    await given_up.wait()
    gate.set()
    assert await run.result(timeout="60s") == large
