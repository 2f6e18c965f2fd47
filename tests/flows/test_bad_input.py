"""Bad input: refused with an error that names what is wrong and what to do, and nothing is left half-written."""

import asyncio
import contextlib
import contextvars
import decimal
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from relight import (
    Handle,
    OutsideRunError,
    Relight,
    Retry,
    RunCancelledError,
    RunFailedError,
    flow,
    foreach,
    parallel,
    sleep,
    spawn,
    step,
    wait_for,
)
from relight.errors import (
    ConfigError,
    CorruptionError,
    DefinitionError,
    DurationError,
    PayloadError,
    RelightError,
    RunNotFoundError,
    RunStateError,
    StoreFormatError,
    UnknownFlowError,
)
from relight.model import journal as j
from relight.model.run import Hold, Status
from tests.flows.world import World, until


class Unknown:
    """Neither a dataclass nor a model, so it cannot be journaled."""


# Values that cannot be journaled, and how the message names the place.
UNSERIALISABLE: list[Any] = [
    pytest.param({"rows": [1.0, float("nan")]}, r"\.rows\[1\]", id="nan"),
    pytest.param({"limit": float("inf")}, r"\.limit", id="infinity"),
    pytest.param([{"tags": {1, 2}}], r"\[0\]\.tags", id="set"),
    pytest.param({"by_id": {7: "seven"}}, r"\.by_id", id="int-keys"),
    pytest.param([0, Unknown()], r"\[1\]", id="unknown-class"),
    pytest.param({"half": "\ud800"}, r"\$", id="half-a-surrogate"),
    pytest.param({"price": decimal.Decimal("NaN")}, r"\.price", id="decimal-without-annotation"),
]


def one_line(error: BaseException) -> str:
    """The message. It is one line without a traceback."""
    assert "\n" not in str(error)
    return str(error)


def counts(world: World) -> dict[str, int]:
    return {table: world.rows_in(table) for table in ("runs", "journal", "blobs")}


async def failed(world: World, run: Handle[Any], *events: type) -> str:
    """Check that the run has failed, and that its journal has exactly these events. Returns the message of its error."""
    with pytest.raises(RunFailedError) as raised:
        await run.result(timeout="60s")
    assert await run.status() is Status.FAILED
    assert [type(event) for event in await world.events(run.id)] == [j.RunCreated, *events, j.RunFailed]
    assert isinstance(raised.value.__cause__, PayloadError)
    return str(raised.value)


# ---- values that cannot be journaled


@pytest.mark.parametrize(("value", "path"), UNSERIALISABLE)
async def test_an_unserialisable_argument_of_a_flow_is_refused_at_start(world: World, value: Any, path: str):
    @flow
    async def carry(given: Any) -> None: ...

    rl = await world.open()
    with pytest.raises(PayloadError, match=r"argument \$\.given.* of flow 'carry' cannot be journaled") as raised:
        await rl.start(carry.with_id("r"), value)
    assert re.search(path.replace(r"\$", ""), str(raised.value))
    assert counts(world) == {"runs": 0, "journal": 0, "blobs": 0}
    with pytest.raises(RunNotFoundError, match="'r'"):
        await rl.get("r")


@pytest.mark.parametrize(("value", "path"), UNSERIALISABLE)
async def test_an_unserialisable_result_of_a_step_fails_the_run(world: World, value: Any, path: str):
    @step
    async def make() -> Any:
        return value

    @flow
    async def carry() -> Any:
        return await make()

    rl = await world.open()
    message = await failed(world, await rl.start(carry), j.StepFailed)
    assert re.search(rf"result of step 'make' cannot be journaled: at .*{path}", message)
    assert world.rows_in("blobs") == 0


@pytest.mark.parametrize(("value", "path"), UNSERIALISABLE)
async def test_an_unserialisable_result_of_a_flow_fails_the_run(world: World, value: Any, path: str):
    @flow
    async def carry() -> Any:
        return value

    rl = await world.open()
    message = await failed(world, await rl.start(carry))
    assert re.search(rf"result of flow 'carry' cannot be journaled: at .*{path}", message)
    assert world.rows_in("blobs") == 0


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, {7: "seven"}, Unknown()], ids=["nan", "set", "keys", "class"])
async def test_an_unserialisable_argument_of_a_step_fails_the_run_before_the_step(world: World, value: Any):
    calls: list[Any] = []

    @step
    def take(given: Any) -> None:
        calls.append(given)

    @flow
    def carry() -> None:
        take([value])

    rl = await world.open()
    message = await failed(world, await rl.start(carry))
    assert "argument $.given[0]" in message
    assert "of step 'take' cannot be journaled" in message
    assert calls == []


async def test_a_flow_may_go_on_after_a_value_was_refused(world: World):
    @step
    async def make() -> Any:
        return {1, 2}

    @flow
    async def carry() -> str:
        try:
            await make()
        except PayloadError as error:
            message = str(error)
        else:
            message = "taken"
        await wait_for("go")
        return message

    rl = await world.open()
    run = await rl.start(carry)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    await run.signal("go")
    assert "result of step 'make' cannot be journaled" in await run.result(timeout="60s")


async def test_an_unserialisable_argument_of_a_child_flow_creates_no_child(world: World):
    @flow
    async def inner(given: Any) -> None: ...

    @flow
    async def outer() -> None:
        await inner({1})

    rl = await world.open()
    message = await failed(world, await rl.start(outer))
    assert "argument $.given of flow 'inner' cannot be journaled" in message
    assert world.rows_in("runs") == 1


async def test_an_unserialisable_item_of_foreach_fails_the_run(world: World):
    @step
    async def take(item: Any) -> None: ...

    @flow
    async def each() -> None:
        await foreach([1, {2}], take)

    rl = await world.open()
    with pytest.raises(RunFailedError, match="cannot be journaled") as raised:
        await rl.run(each)
    assert isinstance(raised.value.__cause__, PayloadError)


# ---- values that are too large

LARGE = 100_000_000
TOO_LARGE = r"too large to be journaled: 100,000,\d+ bytes of JSON, payload.max_bytes is 16,777,216"
WHAT_TO_DO = "store the data elsewhere and journal where it is, or raise payload.max_bytes"


async def test_a_100_mb_argument_is_refused_at_start(world: World):
    @flow
    async def carry(given: str) -> None: ...

    rl = await world.open()
    with pytest.raises(PayloadError, match=f"argument 'given' of flow 'carry' is {TOO_LARGE}") as raised:
        await rl.start(carry, "x" * LARGE)
    assert WHAT_TO_DO in one_line(raised.value)
    assert counts(world) == {"runs": 0, "journal": 0, "blobs": 0}


@pytest.mark.parametrize("kind", [str, bytes])
async def test_a_100_mb_result_fails_the_run(world: World, kind: type):
    @step
    def make() -> kind:  # type: ignore[valid-type]
        return "x" * LARGE if kind is str else bytes(LARGE // 4 * 3)

    @flow
    def by_step() -> None:
        make()  # type: ignore[unused-coroutine]

    @flow
    def by_flow() -> str:
        return "x" * LARGE

    rl = await world.open()
    message = await failed(world, await rl.start(by_step), j.StepFailed)
    assert re.search(f"result of step 'make' is {TOO_LARGE}", message)
    assert WHAT_TO_DO in message
    message = await failed(world, await rl.start(by_flow))
    assert re.search(f"result of flow 'by_flow' is {TOO_LARGE}", message)
    assert world.rows_in("blobs") == 0


async def test_the_limit_is_of_all_arguments_together_and_can_be_configured(world: World):
    @flow
    async def carry(a: str, b: str) -> int:
        return len(a + b)

    rl = await world.open(payload_max_bytes=100, payload_blob_threshold=10)
    assert await rl.run(carry, "x" * 30, "y" * 30) == 60
    before = counts(world)
    with pytest.raises(PayloadError, match=r"the arguments of flow 'carry' are too large .* is 100;"):
        await rl.start(carry, "x" * 60, "y" * 60)
    with pytest.raises(PayloadError, match=r"signal 'go' is too large .* is 100;"):
        await (await rl.start(waiting_flow().with_id("w"))).signal("go", "x" * 200)
    assert counts(world) == {**before, "runs": before["runs"] + 1, "journal": before["journal"] + 1}


def waiting_flow() -> Any:
    @flow
    async def waiting() -> Any:
        return await wait_for("go")

    return waiting


@pytest.mark.parametrize(("value", "path"), UNSERIALISABLE)
async def test_an_unserialisable_payload_of_a_signal_is_refused(world: World, value: Any, path: str):
    rl = await world.open()
    run = await rl.start(waiting_flow())
    await world.until_status("waiting", run)
    with pytest.raises(PayloadError, match=rf"signal 'go' cannot be journaled: at .*{path}"):
        await run.signal("go", value)
    assert await rl.services.store.inbox([run.id]) == []
    await run.signal("go", "fine")
    assert await run.result(timeout="60s") == "fine"


@pytest.mark.parametrize("name", ["", None, 7])
async def test_a_signal_has_a_name(world: World, name: Any):
    rl = await world.open()
    run = await rl.start(waiting_flow())
    with pytest.raises(RelightError, match=r"signal name .*: give (a str|1 to 255 characters)"):
        await run.signal(name)


# ---- refused at start


async def test_an_unknown_flow_is_refused(world: World):
    @flow
    async def known() -> None: ...

    rl = await world.open()
    with pytest.raises(
        UnknownFlowError, match=r"flow 'unknown' is not registered .*registered: known.*import or register it"
    ):
        await rl.start("unknown")
    for wrong in (lambda: None, 7, step(name="a step")(lambda: None)):
        with pytest.raises(DefinitionError, match=r"start\(\) takes a flow or its name, not .*@flow"):
            await rl.start(wrong)  # type: ignore[call-overload]
    assert counts(world) == {"runs": 0, "journal": 0, "blobs": 0}


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((), {}, "missing a required argument: 'count'"),
        ((1, "a", 3), {}, "too many positional arguments"),
        ((1,), {"nmae": "a"}, "unexpected keyword argument 'nmae'"),
        ((1,), {"count": 2}, "multiple values for argument 'count'"),
    ],
)
async def test_a_wrong_argument_count_is_refused(world: World, args: Any, kwargs: Any, named: str):
    @flow
    async def take(count: int, name: str = "") -> None: ...

    rl = await world.open()
    with pytest.raises(PayloadError, match=named) as raised:
        await rl.start(take, *args, **kwargs)
    assert "flow 'take' takes (count: int, name: str = '')" in one_line(raised.value)
    assert counts(world) == {"runs": 0, "journal": 0, "blobs": 0}


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("one",), r"\$\.count of flow 'take'"),
        ((1, [1, "2"]), r"\$\.many\[1\]"),
        ((1.5,), r"\$\.count"),
        ((None,), "count"),
    ],
)
async def test_a_wrong_argument_type_is_refused(world: World, args: Any, named: str):
    @flow
    async def take(count: int, many: list[int] = []) -> None: ...  # noqa: B006 - never changed

    rl = await world.open()
    with pytest.raises(PayloadError, match=named) as raised:
        await rl.start("take", *args)
    assert "does not match its annotation" in one_line(raised.value)
    assert counts(world) == {"runs": 0, "journal": 0, "blobs": 0}


@pytest.mark.parametrize("run_id", ["", "a/b", "x" * 256, "line\nbreak", "\0", 7, b"bytes"])
async def test_a_bad_run_id_is_refused(world: World, run_id: Any):
    @flow
    async def nothing() -> None: ...

    rl = await world.open()
    with pytest.raises(DefinitionError, match="cannot be a run id: give 1 to 255 printable characters without '/'"):
        await rl.start(nothing.with_id(run_id))
    assert counts(world) == {"runs": 0, "journal": 0, "blobs": 0}


@pytest.mark.parametrize("run_id", ["x" * 255, "order 42", "ünï-☃", "%", "'; DROP TABLE runs; --"])
async def test_an_odd_run_id_is_fine(world: World, run_id: str):
    @flow
    async def inner() -> str:
        return "ok"

    @flow
    async def outer() -> str:
        return await inner()

    rl = await world.open()
    assert await rl.run(outer.with_id(run_id)) == "ok"
    assert (await (await rl.get(run_id)).describe()).id == run_id


# ---- refused where it is declared or called


async def test_a_flow_name_means_one_flow(world: World, caplog: pytest.LogCaptureFixture):
    @flow(name="shared")
    def first() -> None: ...

    @flow(name="shared")
    def second() -> None: ...

    @flow
    async def other() -> str:
        return "done"

    rl = await world.open()
    for given in (first, second, "shared"):
        with pytest.raises(DefinitionError, match="flow name 'shared' means 2 flows") as raised:
            await rl.start(given)
        message = one_line(raised.value)
        lines = [int(line) for line in re.findall(rf"{re.escape(__file__)}:(\d+)", message)]
        assert lines == [one.fn.__code__.co_firstlineno for one in (first, second)]
        assert "@flow(name=...)" in message
        assert "Relight(flows=[...])" in message
        assert f"[FLOW_NAME_SHARED] {message}" in caplog.text
    assert await rl.run(other) == "done"
    with pytest.raises(DefinitionError, match="flow name 'shared' means 2 flows"):
        Relight("memory:", flows=[first, second])


async def test_the_flow_that_is_started_is_the_one_registered(world: World, registry: Any):
    def define() -> Any:
        @flow(name="defined")
        async def one() -> None: ...

        return one

    old, _ = define(), define()
    rl = await world.open()
    with pytest.raises(
        DefinitionError, match=r"is not the flow registered as 'defined': .* pass what differs .* argument"
    ):
        await rl.start(old)


@pytest.mark.parametrize("wrong", ["3 bananas", "", "-1s", -1, float("nan"), True, None, "1s 1h", "200y", 10**12, [3]])
async def test_a_wrong_duration_is_refused(world: World, wrong: Any):
    @flow
    async def sleepy() -> None:
        await sleep(wrong)

    with pytest.raises(DurationError, match=r"sleep\(\): .* is not accepted; expected a duration such as"):
        sleep(wrong)
    rl = await world.open()
    with pytest.raises(RunFailedError, match=r"DurationError: sleep\(\): ") as raised:
        await rl.run(sleepy)
    assert repr(wrong) in str(raised.value)
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: step(timeout="3 bananas")(waiting_flow().fn), r"timeout of step 'waiting': '3 bananas'"),
        (lambda: step(retry=3)(waiting_flow().fn), r"@step 'waiting': retry takes Retry\(attempts=…\), not 3"),  # type: ignore[call-overload]
        (lambda: step(on_crash="no")(waiting_flow().fn), r"step 'waiting': on_crash takes 'rerun' or 'fail', not 'no"),  # type: ignore[call-overload]
        (lambda: step(name="a/b")(waiting_flow().fn), r"@step\(name='a/b'\): a name has 1 to 100 characters"),
        (lambda: step(name="")(waiting_flow().fn), r"@step\(name=''\): a name has"),
        (lambda: flow(name="$x")(lambda: None), r"@flow\(name='\$x'\): a name has"),
        (lambda: flow(name="a flow", timeout=-1)(lambda: None), r"timeout of flow 'a flow': -1 is not accepted"),
        (lambda: Retry(attempts=0), r"attempts=0"),
        (lambda: Retry(attempts=True), r"attempts=True"),
        (lambda: Retry(delay="soon"), r"Retry\(delay=\): 'soon'"),
        (lambda: Retry(max_delay=-1), r"Retry\(max_delay=\): -1"),
        (lambda: Retry(jitter=float("nan")), r"jitter=nan"),
        (lambda: Retry(jitter="much"), r"jitter='much'"),  # type: ignore[arg-type]
        (lambda: Retry(on=3), r"on=3"),  # type: ignore[arg-type]
        (lambda: Retry(not_on=[int]), r"not_on=\[<class 'int'>\]"),  # type: ignore[list-item]
        (lambda: wait_for(""), r"wait_for\(''\): signal name '': give 1 to 255 characters"),
        (lambda: wait_for("go", timeout="3 bananas"), r"wait_for\('go', timeout=\): '3 bananas'"),
        (lambda: foreach([1], print, concurrency=0), r"foreach\(concurrency=0\)"),
        (lambda: foreach([1], 7), r"foreach\(each=7\)"),  # type: ignore[call-overload]
    ],
)
def test_wrong_options_are_refused_by_name(wrong: Callable[[], Any], named: str):
    with pytest.raises((DefinitionError, DurationError), match=named) as raised:
        wrong()
    one_line(raised.value)


def test_wait_for_needs_a_run():
    with pytest.raises(OutsideRunError, match=r"wait_for\('go'\) needs a run to be signalled: .*Relight.start\(\)"):
        wait_for("go")


async def test_only_flows_are_spawned(world: World):
    @step
    async def one() -> None: ...

    @flow
    async def child() -> None: ...

    with pytest.raises(OutsideRunError, match=r"spawn\('child'\) needs a run around it: use Relight.start\(\)"):
        await spawn(child)

    @flow
    async def spawning(what: str) -> None:
        await spawn({"step": one, "function": lambda: None, "number": 7}[what])  # type: ignore[arg-type]

    rl = await world.open()
    for what in ("step", "function", "number"):
        with pytest.raises(RunFailedError, match=r"spawn\(\) takes a flow, not .*decorate the function with @flow"):
            await rl.run(spawning, what)
    assert world.rows_in("runs") == 3


async def test_parallel_is_for_sync_flows(world: World):
    @flow
    async def wrong() -> Any:
        return parallel(lambda: 1)

    rl = await world.open()
    with pytest.raises(RunFailedError, match=r"in an async flow use asyncio\.gather or asyncio\.TaskGroup"):
        await rl.run(wrong)


async def test_an_engine_that_is_not_open_says_so():
    rl = Relight("memory:")
    with pytest.raises(RelightError, match="is not open: use it inside"):
        await rl.start(waiting_flow())
    with pytest.raises(ConfigError, match=r"'mysql://db'.*expected memory:, the path of a SQLite file.*postgresql://"):
        await Relight("mysql://db").open()


async def test_wrong_filters_are_refused(world: World):
    rl = await world.open()
    with pytest.raises(ConfigError, match=r"list\(limit=0\)"):
        await rl.list(limit=0)
    with pytest.raises(ConfigError, match=r"list\(status='done'\).*completed"):
        await rl.list(status="done")


# ---- code that has outlived its run, and foreign threads


@step
async def late() -> str:
    return "recorded"


async def test_a_task_that_its_flow_leaves_behind_is_cancelled_and_may_clean_up(world: World):
    left: list[asyncio.Task[str]] = []

    async def later() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            await late()
        return "never"

    @flow
    async def hasty() -> str:
        left.append(asyncio.create_task(later()))
        await asyncio.sleep(0)
        return "done"

    rl = await world.open()
    run = await rl.start(hasty)
    assert await run.result() == "done"
    assert left[0].cancelled()
    assert [key for key in await world.recorded(run.id) if key] == ["~later/late"]


async def test_a_step_that_its_flow_leaves_behind_is_cancelled_before_the_run_ends(world: World):
    calls: list[str] = []
    left: list[asyncio.Task[str]] = []

    @step
    async def slow() -> str:
        calls.append("entered")
        try:
            await asyncio.Event().wait()
        finally:
            calls.append("left")
        return "too late"

    @flow
    async def hasty() -> str:
        left.append(asyncio.create_task(slow()))
        await late()
        return "done"

    rl = await world.open()
    run = await rl.start(hasty)
    assert await run.result() == "done"
    assert calls in (["entered", "left"], [])
    assert [type(event) for event in await world.events(run.id)][-2:] == [j.OperationCancelled, j.RunCompleted]


class Foreign(threading.Thread):
    """A thread that a user makes inside a flow, with the flow's context. It keeps the error that was raised in it."""

    def __init__(self, body: Callable[[], Any], gate: threading.Event | None = None) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._body = contextvars.copy_context().run
        self._fn = body
        self._gate = gate

    def run(self) -> None:
        if self._gate is not None:
            self._gate.wait()
        try:
            self._body(self._fn)
        except BaseException as error:
            self.error = error


@pytest.mark.parametrize("closed", [False, True])
async def test_a_step_in_a_thread_that_has_outlived_its_run(world: World, closed: bool):
    gate = threading.Event()
    left: list[Foreign] = []

    @step
    def record() -> str:
        return "recorded"

    @flow
    def hasty() -> str:
        left.append(Foreign(record, gate))
        left[0].start()
        return "done"

    rl = await world.open()
    run = await rl.start(hasty)
    assert await run.result() == "done"
    before = world.rows_in("journal")
    if closed:
        await world.close()
    gate.set()
    await until(lambda: not left[0].is_alive())
    assert isinstance(left[0].error, OutsideRunError)
    assert "use parallel() instead of threads" in one_line(left[0].error)
    assert world.rows_in("journal") == before


async def test_a_step_in_a_foreign_thread_of_a_living_sync_flow(world: World):
    @step
    def record() -> str:
        return "recorded"

    @flow
    def threading_flow() -> list[str]:
        thread = Foreign(record)
        thread.start()
        thread.join()
        assert isinstance(thread.error, OutsideRunError)
        return [str(thread.error), record()]

    rl = await world.open()
    run = await rl.start(threading_flow)
    refused, recorded = await run.result()
    assert "from a thread that is not its flow's; use parallel()" in refused
    assert recorded == "recorded"
    assert [key for key in await world.recorded(run.id) if key] == ["record"]


async def test_a_step_in_a_foreign_thread_of_a_living_async_flow(world: World):
    @flow
    async def threading_flow() -> list[str]:
        thread = Foreign(lambda: asyncio.run(late()))
        thread.start()
        thread.join()
        assert isinstance(thread.error, OutsideRunError)
        return [str(thread.error), await late()]

    rl = await world.open()
    run = await rl.start(threading_flow)
    refused, recorded = await run.result()
    assert "'late' was called from a thread that is not its flow's" in refused
    assert "asyncio.gather in an async one" in refused
    assert recorded == "recorded"
    assert [key for key in await world.recorded(run.id) if key] == ["late"]


async def test_a_step_awaited_outside_the_run_it_was_called_in(world: World):
    given: list[Any] = []

    @flow
    async def handing_out() -> None:
        given.append(late())

    rl = await world.open()
    with pytest.raises(RunFailedError, match=r"'late' was called at .* and never awaited"):
        await rl.run(handing_out)
    with pytest.raises(OutsideRunError, match="awaited outside that flow's run"):
        await given[0]


# ---- corrupt journals


class Damaged:
    """Two runs are in the middle of their third step when their process dies. Then the journal of one is damaged."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gate = asyncio.Event()
        self.calls: list[int] = []

        @step
        async def count(n: int) -> int:
            if n == 2 and not self.gate.is_set():
                self.calls.append(-1)
                await self.gate.wait()
            self.calls.append(n)
            return n

        @flow
        async def counting() -> int:
            return sum([await count(n) for n in range(5)])

        self.flow = counting

    async def crash(self, **config: Any) -> None:
        rl = await self.world.open(**config)
        for run_id in ("bad", "good"):
            await rl.start(self.flow.with_id(run_id))
        await until(lambda: self.calls.count(-1) == 2)
        if config:
            await until(self._checkpointed)
        await self.world.crash()
        self.gate.set()
        self.calls.clear()

    async def _checkpointed(self) -> bool:
        return bool(await self.world.rl.services.store.get_checkpoint("bad"))

    async def reopen(self, named: str, caplog: pytest.LogCaptureFixture) -> Handle[Any]:
        """Check that the good run completes, and that the bad run is held and says why."""
        rl = await self.world.open()
        assert await (await rl.get("good")).result(timeout="60s") == 10
        run = await rl.get("bad")
        row = await self.world.until_status("paused", run)
        assert (row.hold, row.owner) == (Hold.CORRUPT, None)
        assert re.search(named, row.reason), row.reason
        assert "restore the file from a backup and resume() the run, or cancel() it" in row.reason
        with pytest.raises(CorruptionError, match=f"run 'bad' is held: .*{named}"):
            await run.result(timeout="60s")
        assert re.search(rf"\[JOURNAL_CORRUPT\] run bad: .*{named}", caplog.text)
        assert sorted(self.calls) == [2, 3, 4]  # steps of the good run only
        return run


@pytest.mark.parametrize("data", [b'["step"', b"", b"\xff\xfe", b'["no-such-event","x"]', b"{}"])
async def test_a_corrupt_journal_row_holds_its_run_and_no_other(
    world: World, caplog: pytest.LogCaptureFixture, data: bytes
):
    damaged = Damaged(world)
    await damaged.crash()
    world.damage("bad", 2, data)
    run = await damaged.reopen(r"(sequence|entry) 2\b", caplog)
    await run.cancel("give up")
    with pytest.raises(RunCancelledError):
        await run.result(timeout="60s")
    assert "corrupt" in (await run.describe()).reason


async def test_a_repaired_journal_is_resumed(world: World, caplog: pytest.LogCaptureFixture):
    damaged = Damaged(world)
    await damaged.crash()
    rl = await world.open(recovery_enabled=False)
    entry = (await world.journal("bad")).entries[1].event
    await world.close(rl)
    world.damage("bad", 2)
    run = await damaged.reopen(r"(sequence|entry) 2\b", caplog)
    await run.resume()  # nothing was repaired: the run is read, and held again
    await until(lambda: caplog.text.count("[JOURNAL_CORRUPT]") == 2)
    await world.until_status("paused", run)
    world.damage("bad", 2, bytes(entry))
    await run.resume()
    assert await run.result(timeout="60s") == 10
    assert sorted(damaged.calls) == [2, 2, 3, 3, 4, 4]


async def test_a_missing_journal_row_holds_its_run(world: World, caplog: pytest.LogCaptureFixture):
    if world.kind == "memory":
        pytest.skip("a list has no gaps")
    damaged = Damaged(world)
    await damaged.crash()
    world.lose("bad", 2)
    run = await damaged.reopen(r"\b2\b", caplog)
    await run.cancel()
    await world.until_status("cancelled", run)


async def test_a_corrupt_checkpoint_holds_its_run_and_no_other(world: World, caplog: pytest.LogCaptureFixture):
    damaged = Damaged(world)
    await damaged.crash(checkpoint_every=2)
    world.damage_checkpoint("bad")
    run = await damaged.reopen(r"checkpoint.*\b\d\b", caplog)
    await run.cancel()
    with pytest.raises(RunCancelledError):
        await run.result(timeout="60s")
    with pytest.raises(RunStateError, match="there is nothing to resume"):
        await run.resume()


# ---- files that cannot be used


async def refused(path: str | Path) -> str:
    """The line with which opening this path fails. After that the engine can be closed, and opened again."""
    rl = Relight(path)
    with pytest.raises(StoreFormatError) as raised:
        await rl.open()
    await rl.close()
    with pytest.raises(StoreFormatError), Relight(path):
        pass
    message = one_line(raised.value)
    assert str(path) in message
    return message


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path):
    path = tmp_path / "notes.db"
    for content in (b"these are my notes\n" * 100, b"short"):
        path.write_bytes(content)
        assert "is not a Relight database" in await refused(path)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["notes.db"]  # noqa: PTH208 - and no journal beside it


async def test_a_database_of_another_program_is_refused(tmp_path: Path):
    path = tmp_path / "other.db"
    with contextlib.closing(apsw.Connection(str(path))) as db:
        db.execute("CREATE TABLE runs (id); INSERT INTO runs VALUES ('mine')")
    content = path.read_bytes()
    assert "is a database of another program: use another path" in await refused(path)
    assert path.read_bytes() == content


async def test_a_newer_database_is_refused(tmp_path: Path):
    path = tmp_path / "newer.db"
    async with Relight(path):
        pass
    with contextlib.closing(apsw.Connection(str(path))) as db:
        db.execute("PRAGMA user_version = 99")
    assert re.search("has schema version 99, this Relight knows [0-9]+: upgrade Relight", await refused(path))


OPEN = """
import asyncio, sys
from relight import Relight
from relight.errors import StoreFormatError
try:
    asyncio.run(Relight(sys.argv[1]).open())
except StoreFormatError as error:
    print(error)
"""


async def test_a_read_only_database_is_refused(tmp_path: Path):
    path = tmp_path / "kept.db"
    async with Relight(path):
        pass
    path.chmod(0o444)
    command = [sys.executable, "-c", OPEN, str(path)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root ignores permission bits, and there is no setpriv to take that power away")
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == f"{path} is read-only: give this user write permission, or use another path\n"


async def test_a_directory_is_refused(tmp_path: Path):
    assert f"is a directory: name a file in it, such as {tmp_path / 'relight.db'}" in await refused(tmp_path)
    assert "make the folder" in await refused(tmp_path / "no" / "such" / "folder.db")
