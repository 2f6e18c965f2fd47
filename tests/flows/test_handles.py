"""Runs seen from outside: start, list, cancel, pause, resume, signal, fork; several engines; the blocking façade."""

import asyncio
import contextlib
import datetime as dt
import inspect
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relight import (
    ConflictError,
    Flow,
    Relight,
    RelightError,
    Retry,
    RunCancelledError,
    RunFailedError,
    RunNotFoundError,
    RunStateError,
    Status,
    flow,
    foreach,
    sleep,
    spawn,
    step,
    wait_for,
)
from relight.blocking import BlockingHandle, BlockingRelight
from relight.errors import ConfigError, DefinitionError, RunCancelled
from relight.flow.registry import REGISTRY
from relight.handle import Handle
from relight.model import journal as j
from relight.model.journal import CancelRequested
from relight.model.run import Message, MessageKind
from relight.testing.clock import START, FakeClock
from tests.flows.calls import finish
from tests.flows.world import World, until


async def cancelled(world: World, run_id: str, reason: str = "cancelled by request") -> None:
    with pytest.raises(RunCancelledError, match=reason) as raised:
        await finish(world, run_id)
    assert raised.value.run_id == run_id
    assert raised.value.reason == reason


# ---- start, get, list


async def test_the_same_id_and_input_is_the_same_run(world: World):
    calls: list[int] = []

    @flow
    async def adding(a: int, b: int = 1) -> int:
        calls.append(a)
        await wait_for("go")
        return a + b

    rl = await world.open()
    first = await rl.start(adding.with_id("r"), 1)
    again = await rl.start("adding", 1, b=1, id="r")
    assert first.id == again.id == "r"
    await world.until_status("waiting", first)
    rl = await world.crash_and_reopen()
    await (await rl.start(adding.with_id("r"), a=1)).signal("go")
    assert await finish(world, "r") == 2
    assert await rl.run(adding.with_id("r"), 1) == 2
    assert calls == [1, 1]
    assert len((await rl.list()).runs) == 1


@pytest.mark.parametrize("threshold", [65_536, 1])
async def test_another_flow_or_input_under_a_taken_id_is_a_conflict(world: World, threshold: int):
    @flow
    async def adding(a: int) -> int:
        return a

    @flow
    async def other(a: int) -> int:
        return a

    rl = await world.open(payload_blob_threshold=threshold)
    await rl.run(adding.with_id("r"), 1)
    with pytest.raises(ConflictError, match=r"'r' is taken by flow 'adding'.* not flow 'adding' with input .*2"):
        await rl.start(adding.with_id("r"), 2)
    with pytest.raises(ConflictError, match=r"'r' is taken by flow 'adding'.* not flow 'other'"):
        await rl.start(other.with_id("r"), 1)
    assert await rl.run(adding.with_id("r"), 1) == 1
    assert len((await rl.list()).runs) == 1


@pytest.mark.parametrize("bad", ["", "a/b", "x" * 256, "line\nbreak", 7])
async def test_ids_that_are_refused(world: World, bad: Any):
    @flow
    async def nothing() -> None: ...

    rl = await world.open()
    with pytest.raises(DefinitionError, match="cannot be a run id"):
        await rl.start(nothing.with_id(bad))


async def test_unknown_runs(world: World):
    rl = await world.open()
    with pytest.raises(RunNotFoundError, match="'nobody'"):
        await rl.get("nobody")
    with pytest.raises(RunNotFoundError, match="'nobody'"):
        await rl.fork("nobody")


async def test_listing(world: World):
    @flow
    async def waiting(n: int) -> None:
        await wait_for("go")

    @flow
    async def ending(n: int) -> None:
        if n == 3:
            raise ValueError("three")

    rl = await world.open()
    for n in range(4):
        world.clock.advance(10)
        await rl.start((waiting if n % 2 else ending).with_id(f"r{n}"), n)
    last = await rl.start(ending.with_id("bad"), 3)
    await until(lambda: world.is_("failed", last))
    await until(lambda: statuses(rl, "running", []))

    async def ids(**where: Any) -> list[str]:
        return [row.id for row in (await rl.list(**where)).runs]

    assert await ids() == ["r3", "bad", "r2", "r1", "r0"]
    assert await ids(status="waiting") == ["r3", "r1"]
    assert await ids(status=("completed", Status.FAILED)) == ["bad", "r2", "r0"]
    assert await ids(flow="waiting") == ["r3", "r1"]
    assert await ids(flow="nobody's") == []
    assert await ids(since=START + 30) == ["r3", "bad", "r2"]
    assert await ids(since=dt.datetime.fromtimestamp(START + 40, dt.UTC)) == ["r3", "bad"]
    assert await ids(since=START + 20, flow="ending", status="completed") == ["r2"]

    seen: list[list[str]] = []
    cursor: str | None = None
    while True:
        page = await rl.list(limit=2, cursor=cursor)
        seen.append([row.id for row in page.runs])
        await rl.start(waiting.with_id(f"new{len(seen)}"), 100 + len(seen))  # a new run does not shift the pages
        cursor = page.next_cursor
        if cursor is None:
            break
        world.clock.advance(1)
    assert seen == [["r3", "bad"], ["r2", "r1"], ["r0"]]


async def statuses(rl: Relight, status: str, expected: list[str]) -> bool:
    return [row.id for row in (await rl.list(status=status)).runs] == expected


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"status": "sleeping"}, "status='sleeping'.*there are pending, running"),
        ({"limit": 0}, "limit=0"),
        ({"limit": True}, "limit=True"),
        ({"limit": 10_001}, "limit=10001"),
        ({"cursor": "x"}, "cursor 'x'"),
    ],
)
async def test_listing_with_bad_values(world: World, where: dict[str, Any], message: str):
    rl = await world.open()
    with pytest.raises(RelightError, match=message):
        await rl.list(**where)


class Order(msgspec.Struct):
    number: int
    at: dt.datetime


async def test_describe_gives_values_as_they_are(world: World):
    order = Order(7, dt.datetime(2026, 11, 18, tzinfo=dt.UTC))

    @flow
    async def ship(order: Order, copies: int = 2, text: str = "") -> Order:
        if text == "bad":
            raise ValueError("no\nsuch\0order " + 400 * "x")
        return order

    rl = await world.open(payload_blob_threshold=1000)
    run = await rl.start(ship.with_id("r"), order)
    assert await run.result() == order
    found = await run.describe()
    assert (found.input, found.output) == ({"order": order, "copies": 2, "text": ""}, order)
    assert (found.error, found.traceback, found.reason, found.wake_at) == (None, None, "", None)
    assert found.created_at == dt.datetime.fromtimestamp(START, dt.UTC)
    large = await rl.start(ship, order, text="x" * 2000)
    assert (await large.describe()).input["text"] == "x" * 2000, "what is stored as a blob is read"
    bad = await rl.start(ship, order, text="bad")
    with pytest.raises(RunFailedError):
        await bad.result()
    failed = await bad.describe()
    assert failed.reason.startswith("ValueError: no such\N{REPLACEMENT CHARACTER}order xxx")
    assert (len(failed.reason), failed.reason[-1]) == (300, "…")
    assert failed.error is not None
    assert failed.error.startswith("ValueError: no\nsuch")
    assert "in ship" in str(failed.traceback)
    REGISTRY.remove("ship")
    unknown = await run.describe()
    assert unknown.output == {"number": 7, "at": "2026-11-18T00:00:00Z"}, "JSON, where the flow is not known"


async def test_why_a_child_run_has_failed_is_in_its_row(world: World):
    @flow
    async def inner() -> None:
        raise KeyError("gone")

    @flow
    async def outer() -> str:
        try:
            await inner()
        except KeyError:
            return "caught"
        return ""

    rl = await world.open()
    run = await rl.start(outer.with_id("r"))
    assert await run.result() == "caught"
    assert (await (await rl.get("r/inner")).describe()).reason == "KeyError: 'gone'"


async def test_describe_and_the_timeout_of_result(world: World):
    @flow
    async def waiting(a: int) -> str:
        return str(await wait_for("go"))

    rl = await world.open()
    run = await rl.start(waiting.with_id("r"), 7)
    assert repr(run) == "<run 'r'>"
    with pytest.raises(TimeoutError, match=r"run 'r' has not ended within 0.01s"):
        await run.result(timeout="10ms")
    await world.until_status("waiting", run)
    row = await run.describe()
    assert (row.flow, row.created_at, row.parent_id, row.input) == (
        "waiting",
        dt.datetime.fromtimestamp(START, dt.UTC),
        None,
        {"a": 7},
    )
    with pytest.raises(ConfigError, match="3 bananas"):
        await run.result(timeout="3 bananas")
    await run.signal("go", "done")
    assert await run.result() == "done"
    assert await run.result(timeout="60s") == "done"


# ---- cancel


@pytest.mark.parametrize("state", ["waiting", "parked", "paused", "crashed", "sleeping", "back-off", "flow back-off"])
async def test_cancel_wins_over_whatever_a_run_waits_for(world: World, state: str):
    @step(retry=Retry(9, delay="1h"))
    async def failing() -> None:
        raise ValueError

    @flow(retry=Retry(9, delay="1h"))
    async def stubborn(what: str) -> None:
        if what == "back-off":
            await failing()
        elif what == "flow back-off":
            raise ValueError
        elif what == "sleeping":
            await sleep("1h")
        else:
            await wait_for("never")

    rl = await world.open()
    run = await rl.start(stubborn.with_id("r"), state)
    await world.until_status("waiting", run)
    if state == "parked":
        await world.park(run)
    elif state == "paused":
        await run.pause()
        await world.until_status("paused", run)
    elif state == "crashed":
        await world.crash()
        rl = await world.open(recovery_enabled=False)
        await (await rl.get("r")).cancel()
        rl = await world.close_and_reopen(recovery_enabled=True)
        await cancelled(world, "r")
        return
    await run.cancel()
    await cancelled(world, "r")
    assert (await run.describe()).owner is None


async def test_cancel_of_a_step_in_flight_and_of_retries_that_never_end(world: World):
    attempts: list[int] = []
    ended: list[str] = []

    @step(retry=Retry(1_000_000))
    async def failing() -> None:
        attempts.append(1)
        await asyncio.sleep(0)
        raise ValueError

    @step
    async def hanging() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hanging")

    @flow
    async def both(which: str) -> None:
        try:
            await (failing() if which == "failing" else hanging())
        except Exception:
            ended.append("caught")

    rl = await world.open()
    for which in ("failing", "hanging"):
        run = await rl.start(both.with_id(which), which)
        await until(lambda: len(attempts) > 3)
        await until(lambda: world.is_("running", run))
        await until(lambda: which == "failing" or rl.orchestrator.live["hanging"].inflight)
        await run.cancel("enough")
        await cancelled(world, which, "enough")
    assert ended == ["hanging"]


async def test_cancel_reaches_children_and_spawned_runs(world: World):
    cleaned: list[str] = []

    @step
    async def clean(name: str) -> None:
        cleaned.append(name)

    @flow
    async def spawned(name: str) -> None:
        try:
            if name == "spawned":
                await spawn(spawned.with_id("grandchild"), "grandchild")
            await wait_for("never")
        finally:
            await clean(name)

    @flow
    async def child() -> None:
        try:
            await wait_for("never")
        finally:
            await clean("child")

    @flow
    async def top() -> None:
        try:
            await spawn(spawned.with_id("spawned"), "spawned")
            await child()
        finally:
            await clean("top")

    rl = await world.open()
    run = await rl.start(top.with_id("t"))
    await until(lambda: three_wait(rl))
    await run.cancel("all of it")
    for run_id in ("t", "spawned", "grandchild"):
        await cancelled(world, run_id, "all of it")
    assert (await world.row("t/child")).status == "cancelled"
    assert sorted(cleaned) == ["child", "grandchild", "spawned", "top"]


async def three_wait(rl: Relight) -> bool:
    return len((await rl.list(status="waiting")).runs) == 3


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_clean_up_is_durable_across_a_crash_in_it(world: World, kind: str):
    calls: list[str] = []
    gate = threading.Event()

    @step
    def mark(name: str) -> str:
        calls.append(name)
        if name == "second" and calls.count("second") == 1:
            gate.wait()
        return name

    @flow
    async def cleaning_async() -> None:
        try:
            await mark("work")
            await wait_for("never")
        except RunCancelled:
            await mark("first")
            raise
        finally:
            await mark("second")
            await mark("third")

    @flow
    def cleaning_sync() -> None:
        try:
            mark("work")
            wait_for("never")
        except RunCancelled:
            mark("first")
            raise
        finally:
            mark("second")
            mark("third")

    rl = await world.open()
    cleaning: Flow[..., Any] = cleaning_async if kind == "async" else cleaning_sync
    run = await rl.start(cleaning.with_id("r"))
    await world.until_status("waiting", run)
    await run.cancel("stop")
    await until(lambda: "second" in calls)
    crashing = asyncio.create_task(world.crash_and_reopen())
    await until(lambda: rl not in world._engines)
    gate.set()
    await crashing
    await cancelled(world, "r", "stop")
    assert calls == ["work", "first", "second", "second", "third"]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_clean_up_that_takes_too_long_is_cut_off(world: World, kind: str):
    entered: list[str] = []
    gate = threading.Event()

    @step
    async def endless() -> None:
        entered.append("async")
        await asyncio.Event().wait()

    @step
    def endless_sync() -> None:
        entered.append("sync")
        gate.wait()

    @flow
    async def cleaning() -> None:
        try:
            await wait_for("never")
        finally:
            await (endless() if kind == "async" else endless_sync())

    rl = await world.open(cancel_grace="1m")
    run = await rl.start(cleaning.with_id("r"))
    await world.until_status("waiting", run)
    await run.cancel()
    await until(lambda: entered)
    await world.until_status("running", run)
    world.clock.advance("1m")
    await cancelled(world, "r")
    gate.set()


async def test_a_cancelled_flow_may_sleep_in_its_clean_up_within_the_grace(world: World):
    @flow
    async def cleaning() -> None:
        try:
            await wait_for("never")
        finally:
            await sleep("10s")

    rl = await world.open()
    run = await rl.start(cleaning.with_id("r"))
    await world.until_status("waiting", run)
    await run.cancel()
    await until(lambda: "$sleep" in rl.orchestrator.live["r"].pending)
    world.clock.advance("10s")
    await cancelled(world, "r")


async def test_cancel_before_the_run_was_taken_up(world: World):
    calls: list[str] = []

    @step
    async def mark(name: str) -> None:
        calls.append(name)

    @flow
    async def blocking() -> None:
        await hold()

    @step
    async def hold() -> None:
        await gate.wait()

    @flow
    async def queued() -> None:
        await mark("queued")

    gate = asyncio.Event()
    rl = await world.open(max_concurrent_runs=1)
    first = await rl.start(blocking)
    run = await rl.start(queued.with_id("r"))
    assert await run.status() == "pending"
    await run.cancel()
    gate.set()
    await first.result(timeout="60s")
    await cancelled(world, "r")
    assert calls == []


async def test_cancelling_twice_and_after_the_end(world: World):
    @flow
    async def waiting() -> str:
        return str(await wait_for("go"))

    rl = await world.open()
    run = await rl.start(waiting.with_id("r"))
    await world.until_status("waiting", run)
    await run.cancel("first")
    await run.cancel("second")  # perhaps the run is cancelled already
    await cancelled(world, "r", "first")
    await run.cancel("third")  # it is cancelled: nothing to do
    await cancelled(world, "r", "first")
    done = await rl.start(waiting.with_id("done"))
    await done.signal("go", "x")
    assert await done.result(timeout="60s") == "x"
    with pytest.raises(RunStateError, match=r"'done' is completed: it can no longer receive cancel"):
        await done.cancel()
    for refused in (done.signal("go"), done.pause(), done.resume()):
        with pytest.raises(RunStateError, match=r"'done' is completed"):
            await refused
    assert await done.status() == "completed"


async def test_a_second_cancel_during_the_clean_up_changes_nothing(world: World):
    gate = asyncio.Event()

    @step
    async def clean() -> None:
        await gate.wait()

    @flow
    async def cleaning() -> None:
        try:
            await wait_for("never")
        finally:
            await clean()

    rl = await world.open()
    run = await rl.start(cleaning.with_id("r"))
    await world.until_status("waiting", run)
    await run.cancel("first")
    await until(lambda: "clean" in rl.orchestrator.live["r"].inflight)
    await run.cancel("second")
    gate.set()
    await cancelled(world, "r", "first")


async def test_of_two_cancels_at_once_one_is_the_reason(world: World):
    @flow
    async def waiting() -> None:
        await wait_for("never")

    rl = await world.open()
    for n in range(10):
        run = await rl.start(waiting.with_id(f"r{n}"))
        await world.until_status("waiting", run)
        await asyncio.gather(run.cancel("one"), run.cancel("the other"))  # the request that the store had first
        with pytest.raises(RunCancelledError) as raised:
            await finish(world, run.id)
        assert raised.value.reason in ("one", "the other")
        events = await world.events(run.id)
        assert sum(isinstance(event, CancelRequested) for event in events) == 1
        assert (await world.row(run.id)).reason == raised.value.reason


async def test_a_cancel_that_finds_the_run_cancelled_by_another_has_nothing_to_do(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    @flow
    async def waiting() -> None:
        await wait_for("never")

    rl = await world.open()
    run = await rl.start(waiting.with_id("r"))
    await world.until_status("waiting", run)
    store: Any = rl.services.store
    post = store.inner.post

    async def late(messages: Any) -> Any:
        """The caller saw a run that goes on. When the request reaches the store, the run is cancelled."""
        monkeypatch.undo()
        await run.cancel("first")
        await cancelled(world, "r", "first")
        return await post(messages)

    monkeypatch.setattr(store.inner, "post", late)
    await run.cancel("second")
    await cancelled(world, "r", "first")


async def test_a_child_is_told_nothing_but_through_its_root(world: World):
    @flow
    async def child() -> None:
        await wait_for("never")

    @flow
    async def top() -> None:
        await child()

    rl = await world.open()
    run = await rl.start(top.with_id("t"))
    await world.until_status("waiting", run)
    inner = await rl.get("t/child")
    for refused in (inner.cancel(), inner.pause(), inner.resume(), inner.signal("x")):
        with pytest.raises(RunStateError, match=r"'t/child' is a child run: \w+ its root 't' instead"):
            await refused


async def test_a_flow_that_swallows_its_cancellation_is_cancelled_all_the_same(world: World):
    @flow
    async def deaf() -> str:
        with contextlib.suppress(BaseException):  # no flow should do this
            await wait_for("never")
        return "went on"

    rl = await world.open()
    run = await rl.start(deaf.with_id("r"))
    await world.until_status("waiting", run)
    await run.cancel()
    await cancelled(world, "r")


# ---- pause and resume


@pytest.mark.parametrize("restart", ["no", "crash", "close"])
async def test_pause_lets_a_step_in_flight_finish_and_starts_nothing_new(world: World, restart: str):
    calls: list[str] = []
    gate = asyncio.Event()

    @step
    async def slow() -> str:
        calls.append("slow")
        await gate.wait()
        return "slow"

    @step
    async def after() -> str:
        calls.append("after")
        return "after"

    @flow
    async def working() -> list[str]:
        return [await slow(), await after(), await wait_for("go", str)]

    rl = await world.open()
    run = await rl.start(working.with_id("r"))
    await until(lambda: calls)
    await run.pause()
    assert await run.status() == "running"
    gate.set()
    row = await world.until_status("paused", run)
    assert (row.hold, row.owner) == ("user", None)
    assert "resume()" in row.reason
    assert await world.recorded("r") == ["slow"]
    await run.pause()  # it is paused: nothing to do
    if restart == "crash":
        rl = await world.crash_and_reopen()
    elif restart == "close":
        rl = await world.close_and_reopen()
    run = await rl.get("r")
    await run.signal("go", "kept")  # the request waits in the inbox
    world.clock.advance("1d")
    await rl.run(nothing_else())  # the engine has looked around
    assert await run.status() == "paused"
    assert calls == ["slow"]
    await run.resume()
    assert await run.result(timeout="60s") == ["slow", "after", "kept"]
    assert calls == ["slow", "after"]


def nothing_else() -> Any:
    @flow
    async def nothing() -> None: ...

    return nothing


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_paused_sleep_goes_on_after_resume(world: World, kind: str):
    @flow
    async def sleeping_async() -> str:
        await sleep("1h")
        return "slept"

    @flow
    def sleeping_sync() -> str:
        sleep("1h")
        return "slept"

    rl = await world.open()
    sleeping: Flow[..., Any] = sleeping_async if kind == "async" else sleeping_sync
    run = await rl.start(sleeping.with_id("r"))
    await world.until_status("waiting", run)
    await run.pause()
    await world.until_status("paused", run)
    world.clock.advance("2h")
    assert await run.status() == "paused"
    await run.resume()
    assert await run.result(timeout="60s") == "slept"


async def test_pause_and_resume_at_once_and_resume_of_what_is_not_paused(world: World):
    @flow
    async def waiting() -> str:
        return str(await wait_for("go"))

    rl = await world.open()
    run = await rl.start(waiting.with_id("r"))
    await world.until_status("waiting", run)
    await run.pause()
    await run.resume()
    await run.resume()
    await run.signal("go", "x")
    assert await run.result(timeout="60s") == "x"


async def test_a_pause_and_a_resume_that_are_heard_together(world: World):
    """As if another process had posted both. The run must not act on the resume before the pause has taken effect."""

    @flow
    async def waiting() -> str:
        return str(await wait_for("go"))

    rl = await world.open()
    run = await rl.start(waiting.with_id("r"))
    await world.until_status("waiting", run)
    kinds = (MessageKind.PAUSE, MessageKind.RESUME)
    await rl.services.store.post([Message(run_id="r", kind=kind) for kind in kinds])
    rl.orchestrator.look_for_messages()
    await until(lambda: inbox_is_empty(world))
    await run.signal("go", "x")
    assert await run.result(timeout="60s") == "x"


async def inbox_is_empty(world: World) -> bool:
    return not await world.rl.services.store.inbox(["r"])


async def test_pause_of_a_parked_run_and_of_one_not_taken_up(world: World):
    gate = asyncio.Event()
    calls: list[str] = []

    @step
    async def hold() -> None:
        calls.append("hold")
        await gate.wait()

    @flow
    async def blocking() -> None:
        await hold()

    @flow
    async def waiting() -> str:
        return str(await wait_for("go"))

    rl = await world.open(max_concurrent_runs=1)
    parked = await rl.start(waiting.with_id("parked"))
    await world.park(parked)
    await parked.pause()
    await world.until_status("paused", parked)
    await parked.signal("go", "x")
    first = await rl.start(blocking.with_id("first"))
    await until(lambda: calls == ["hold"])
    queued = await rl.start(blocking.with_id("queued"))
    await queued.pause()
    await parked.resume()
    gate.set()
    await first.result(timeout="60s")
    assert await parked.result(timeout="60s") == "x"
    await world.until_status("paused", queued)
    await queued.resume()
    await queued.result(timeout="60s")


# ---- signals


async def test_a_signal_with_an_id_counts_once(world: World):
    @flow
    async def counting() -> list[str]:
        await sleep("1h")
        return [await wait_for("n", str), await wait_for("n", str)]

    rl = await world.open()
    run = await rl.start(counting.with_id("r"))
    await world.until_status("waiting", run)
    for _ in range(3):
        await run.signal("n", "one", id="m-1")
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    await run.signal("n", "one", id="m-1")
    await run.signal("n", "two", id="m-2")
    await until(lambda: "r" in rl.orchestrator.live)
    world.clock.advance("1h")
    assert await run.result(timeout="60s") == ["one", "two"]


async def test_a_signal_id_counts_once_also_after_an_earlier_life_took_it(world: World):
    """It is the first message of the store. A run that comes back has received no message in this life, and must not
    receive this one again."""

    @flow
    async def counting() -> list[int]:
        return [await once(await wait_for("n", int)), await once(await wait_for("n", int))]

    @step
    async def once(number: int) -> int:
        return number

    rl = await world.open()
    run = await rl.start(counting.with_id("r"))
    await world.until_status("waiting", run)
    await run.signal("n", 1, id="m-1")
    await until(lambda: two_waits_begun(world))
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    await until(lambda: "r" in rl.orchestrator.live and rl.orchestrator.live["r"].replay is None)
    await run.signal("n", 1, id="m-1")
    await run.signal("n", 2, id="m-2")
    assert await run.result(timeout="60s") == [1, 2]


async def two_waits_begun(world: World) -> bool:
    return sum(isinstance(one, j.WaitStarted) for one in await world.events("r")) == 2


async def test_a_signal_id_counts_once_also_after_it_was_taken(world: World):
    @flow
    async def counting() -> list[str]:
        return [await wait_for("n", str), await wait_for("n", str)]

    rl = await world.open()
    run = await rl.start(counting.with_id("r"))
    await run.signal("n", "one", id="m-1")
    await until(lambda: taken(world))
    await run.signal("n", "one", id="m-1")
    await run.signal("n", "two", id="m-2")
    assert await run.result(timeout="60s") == ["one", "two"]


async def taken(world: World) -> bool:
    return "$wait.n" in await world.recorded("r")


async def test_signals_with_bad_names_are_refused(world: World):
    @flow
    async def waiting() -> None:
        await wait_for("go")

    rl = await world.open()
    run = await rl.start(waiting)
    with pytest.raises(RelightError, match="signal name"):
        await run.signal("")


# ---- fork


@pytest.mark.parametrize("ended", ["completed", "failed", "waiting"])
async def test_fork_keeps_what_came_before_the_step(world: World, ended: str):
    calls: list[str] = []

    @step
    async def a() -> str:
        calls.append("a")
        return f"a{calls.count('a')}"

    @step
    async def b() -> str:
        calls.append("b")
        return f"b{calls.count('b')}"

    @flow
    async def inner() -> str:
        return await b()

    @flow
    async def both(how: str) -> list[str]:
        found = [await a(), await inner(), await a()]
        if len(calls) == 3 and how == "failed":
            raise ValueError("the first time")
        if len(calls) == 3 and how == "waiting":
            await wait_for("never")
        return found

    rl = await world.open()
    run = await rl.start(both.with_id("r"), ended)
    await world.until_status(ended, run)
    before = (await run.describe(), await world.events("r"))
    forked = await rl.fork("r", from_step="inner/b")
    assert await forked.result(timeout="60s") == ["a1", "b2", "a3"]
    assert calls == ["a", "b", "a", "b", "a"]
    whole = await rl.fork("r", new_id="whole")
    assert whole.id == "whole"
    assert await whole.result(timeout="60s") == ["a4", "b3", "a5"]
    late = await rl.fork("r", from_step="a:1")
    assert await late.result(timeout="60s") == ["a1", "b1", "a6"]
    assert (await run.describe(), await world.events("r")) == before
    assert (await (await world.rl.get(forked.id)).describe()).flow == "both"


async def test_a_fork_survives_a_crash_and_can_be_forked(world: World):
    calls: list[str] = []

    @step
    async def mark(name: str) -> str:
        calls.append(name)
        return name

    @flow
    async def three() -> list[str]:
        found = [await mark("1"), await mark("2")]
        await wait_for("go")
        return [*found, await mark("3")]

    rl = await world.open()
    run = await rl.start(three.with_id("r"))
    await world.until_status("waiting", run)
    await rl.fork("r", from_step="mark:1", new_id="f")
    await until(lambda: len(calls) == 3)
    await world.until_status("waiting", await rl.get("f"))
    rl = await world.crash_and_reopen()
    await (await rl.get("f")).signal("go")
    assert await finish(world, "f") == ["1", "2", "3"]
    await rl.fork("f", from_step="mark:2", new_id="g")
    await (await rl.get("r")).cancel()
    assert await finish(world, "g") == ["1", "2", "3"]
    assert calls == ["1", "2", "2", "3", "3"]


async def test_forks_that_are_impossible(world: World):
    @step
    async def a() -> None: ...

    @flow
    async def inner() -> None:
        await a()

    @flow
    async def both() -> None:
        await inner()

    rl = await world.open()
    await rl.run(both.with_id("r"))
    with pytest.raises(DefinitionError, match=r"'r' has no recorded step 'b'; it has: inner/a, inner"):
        await rl.fork("r", from_step="b")
    with pytest.raises(RunStateError, match=r"'r/inner' is a child run; fork its root 'r'"):
        await rl.fork("r/inner")
    with pytest.raises(ConflictError, match=r"'r' is taken"):
        await rl.fork("r", new_id="r")
    with pytest.raises(DefinitionError, match="cannot be a run id"):
        await rl.fork("r", new_id="a/b")


# ---- several engines, closed engines


async def test_several_engines_in_one_process(tmp_path: Path):
    @step
    async def where(name: str) -> str:
        await asyncio.sleep(0)
        return name

    @flow
    async def saying(name: str) -> str:
        return await where(name)

    async with Relight(tmp_path / "one.db") as one, Relight(tmp_path / "two.db") as two, Relight("memory:") as three:
        engines = (one, two, three)
        found = await asyncio.gather(*(rl.run(saying.with_id("same"), f"n{n}") for n, rl in enumerate(engines)))
        assert found == ["n0", "n1", "n2"]
        for rl in engines:
            assert [row.id for row in (await rl.list()).runs] == ["same"]
    async with Relight(tmp_path / "one.db") as one:
        assert await (await one.get("same")).result() == "n0"
    assert asyncio.get_running_loop().get_task_factory() is None


async def test_a_closed_engine_says_so(tmp_path: Path):
    @flow
    async def nothing() -> None: ...

    rl = Relight(tmp_path / "x.db")
    with pytest.raises(RelightError, match="this Relight is not open"):
        await rl.start(nothing)
    async with rl:
        run = await rl.start(nothing)
        with pytest.raises(RelightError, match="open already"):
            await rl.open()
        await run.result()
    for refused in (rl.start(nothing), rl.get("x"), rl.list(), rl.fork("x"), rl.items("x"), run.status(), run.result()):
        with pytest.raises(RelightError, match="this Relight is not open"):
            await refused
    await rl.close()  # it is
    async with rl:  # and may be opened again
        assert await (await rl.get(run.id)).status() == "completed"


@pytest.mark.parametrize("turns", [0, 1000])  # for one read of the store: longer than all else in closing
async def test_a_caller_that_waits_for_a_result_is_told_that_the_engine_closes(world: World, turns: int):
    @flow
    async def waiting() -> None:
        await wait_for("never")

    rl = await world.open()
    run = await rl.start(waiting)
    waiter = asyncio.create_task(run.result())
    await world.until_status("waiting", run)
    world.slow["get_run"] = turns
    await world.close()
    with pytest.raises(RelightError, match="is waiting, and this Relight is closed"):
        await asyncio.wait_for(waiter, 60)


# ---- the blocking façade


def test_the_blocking_facade(tmp_path: Path):
    clock = FakeClock()

    @step
    def double(n: int) -> int:
        return 2 * n

    @flow
    def doubling(ns: list[int]) -> list[int]:
        return foreach(ns, double)  # type: ignore[no-any-return]

    @flow
    async def waiting() -> str:
        return str(await wait_for("go"))

    @flow
    def failing() -> None:
        raise ValueError("no")

    with Relight(tmp_path / "x.db", clock=clock) as rl:
        assert rl.fault is None
        assert rl.run(doubling.with_id("d"), [1, 2]) == [2, 4]
        assert [item.index for item in rl.items("d")] == [0, 1]
        with pytest.raises(RunFailedError, match="ValueError: no"):
            rl.run(failing)
        run = rl.start(waiting.with_id("w"))
        assert repr(run) == "<run 'w'>"
        with pytest.raises(TimeoutError):
            run.result(timeout="1ms")
        run.pause()
        blocking_until(lambda: run.status() == "paused")
        run.resume()
        run.signal("go", "x")
        assert run.result(timeout="60s") == "x"
        assert run.describe().status == rl.get("w").status() == "completed"
        other = rl.start("waiting", id="c")
        other.cancel("why not")
        with pytest.raises(RunCancelledError, match="why not"):
            other.result(timeout="60s")
        assert rl.fork("d", new_id="f").result(timeout="60s") == [2, 4]
        page = rl.list(flow="doubling", limit=1)
        assert len(page.runs) == 1
        assert len(rl.list(flow="doubling", cursor=page.next_cursor).runs) == 1
        with pytest.raises(RunNotFoundError):
            rl.get("nobody")
        engine = rl.relight
    with pytest.raises(RelightError, match="this Relight is closed"):
        rl.run(doubling, [1])
    with engine as again:  # it may be opened again
        assert again.run(doubling.with_id("d"), [1, 2]) == [2, 4]


# These are methods of `rl.relight`, not of `rl`. signalled() is for the main thread's loop. The others are for
# Relight's own parts.
NOT_BLOCKING = {
    Relight: {"config", "metrics", "store_name", "signalled", "services", "orchestrator", "row", "post"},
    Handle: set(),
}


@pytest.mark.parametrize(("plain", "blocking"), [(Relight, BlockingRelight), (Handle, BlockingHandle)])
def test_the_blocking_facade_has_every_method(plain: type, blocking: type):
    names = {name for name in dir(plain) if not name.startswith("_")}
    assert names - NOT_BLOCKING[plain] - set(dir(blocking)) == set()
    for name in names & set(dir(blocking)):
        if inspect.isfunction(getattr(plain, name)):
            mine, its = (inspect.signature(getattr(one, name)).parameters for one in (plain, blocking))
            assert list(mine.values()) == list(its.values()), name


def test_a_blocking_engine_tells_its_health():
    with Relight("memory:") as rl:
        health = rl.health()
        assert (health.ok, health.holds_lease, health.fault) == (True, True, None)
        assert rl.relight.health().owner == health.owner
    with pytest.raises(RelightError, match="is not open"):
        rl.health()


def blocking_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def test_a_blocking_engine_refuses_its_own_loop():
    @flow
    def nothing() -> None: ...

    with Relight("memory:") as rl:

        @step
        async def misuse() -> str:
            try:
                rl.run(nothing)
            except RelightError as error:
                return str(error)
            return "no error"

        @flow
        async def misusing() -> str:
            return await misuse()

        assert "was used on its own event loop" in rl.run(misusing)


def test_a_blocking_engine_that_cannot_open_leaves_no_thread(tmp_path: Path):
    before = threading.active_count()
    rl = Relight(tmp_path)  # a directory
    with pytest.raises(RelightError, match="directory"), rl:
        pass
    assert threading.active_count() <= before  # a thread of an earlier test may just have ended
    with pytest.raises(RelightError, match="directory"), rl:  # and the store was not left open
        pass
