"""Steps: what they return and raise, live and on replay. Retries, timeouts, on_crash. How a step is identified."""

import asyncio
import dataclasses
import datetime as dt
import decimal
import enum
import threading
import uuid as uuid_module
from collections.abc import Callable
from typing import Any

import msgspec
import pydantic
import pytest

import relight
from relight import (
    OutsideRunError,
    Retry,
    RunFailedError,
    StepError,
    StepInterruptedError,
    StepTimeoutError,
    current_step,
    flow,
    foreach,
    parallel,
    sleep,
    spawn,
    step,
    wait_for,
)
from relight.errors import DefinitionError
from relight.model import journal as j
from relight.model.replay import Open
from tests.flows.world import World, until

# ---- sync and async, in sync and async flows


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_sync_and_async_steps_in_an_async_flow(world: World, kind: str):
    calls: list[int] = []

    @step(name="double")
    async def double_async(x: int) -> int:
        calls.append(x)
        return 2 * x

    @step(name="double")
    def double_sync(x: int) -> int:
        calls.append(x)
        return 2 * x

    double: Any = double_async if kind == "async" else double_sync

    @flow
    async def calculate(x: int) -> int:
        return await double(await double(x))

    rl = await world.open()
    assert await rl.run(calculate, 5) == 20
    assert calls == [5, 10]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_sync_and_async_steps_in_a_sync_flow(world: World, kind: str):
    calls: list[int] = []

    @step(name="double")
    async def double_async(x: int) -> int:
        calls.append(x)
        return 2 * x

    @step(name="double")
    def double_sync(x: int) -> int:
        calls.append(x)
        return 2 * x

    double: Any = double_async if kind == "async" else double_sync

    @flow
    def calculate(x: int) -> int:
        return double(double(x))  # type: ignore[no-any-return]

    rl = await world.open()
    assert await rl.run(calculate, 5) == 20
    assert calls == [5, 10]


async def test_sync_steps_do_not_run_on_the_event_loop(world: World):
    @step
    def where() -> int:
        return threading.get_ident()

    @flow
    async def from_async() -> int:
        return await where()

    @flow
    def from_sync() -> list[int]:
        return [threading.get_ident(), where()]

    rl = await world.open()
    assert await rl.run(from_async) != threading.get_ident()
    of_flow, of_step = await rl.run(from_sync)
    assert of_flow == of_step != threading.get_ident()  # a sync flow and its steps share one thread


async def test_a_finished_step_is_not_run_again_after_a_crash(world: World):
    calls: list[str] = []

    @step
    async def first() -> str:
        calls.append("first")
        return "1"

    @step
    def second(value: str) -> str:
        calls.append("second")
        return value + "2"

    @flow
    async def both() -> str:
        value = await second(await first())
        return str(value) + await wait_for("go", str)

    rl = await world.open()
    run = await rl.start(both)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    await (await rl.get(run.id)).signal("go", "3")
    assert await (await rl.get(run.id)).result() == "123"
    assert calls == ["first", "second"]


# ---- typed payloads, live and replayed alike


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Line:
    sku: str
    price: decimal.Decimal
    colour: Colour = Colour.RED


class Order(msgspec.Struct):
    id: uuid_module.UUID
    lines: list[Line]
    placed: dt.datetime
    tags: dict[str, set[int]] = {}


class Customer(pydantic.BaseModel):
    name: str
    born: dt.date
    levels: list[Level] = []


LINE = Line("a-1", decimal.Decimal("10.10"), Colour.BLUE)
ORDER = Order(uuid_module.UUID(int=7), [LINE, LINE], dt.datetime(2024, 2, 29, 12, 30, tzinfo=dt.UTC), {"x": {1, 2}})
CUSTOMER = Customer(name="Ada", born=dt.date(1815, 12, 10), levels=[Level.HIGH])

PAYLOADS: list[tuple[Any, Any]] = [
    (None, None),
    (bool, True),
    (int, 2**80),
    (float, 0.1),
    (str, "snow ☃ \0 and \U0001f600"),
    (bytes, b"\x00\xff"),
    (dt.datetime, dt.datetime(2024, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)),
    (dt.datetime, dt.datetime(2024, 1, 2, 3, 4, 5)),  # noqa: DTZ001 - naive on purpose: it must come back naive
    (dt.date, dt.date(2024, 2, 29)),
    (dt.timedelta, dt.timedelta(days=1, microseconds=5)),
    (uuid_module.UUID, uuid_module.UUID(int=2**127 + 1)),
    (decimal.Decimal, decimal.Decimal("0.10")),
    (Colour, Colour.BLUE),
    (Level, Level.HIGH),
    (Line, LINE),
    (Order, ORDER),
    (Customer, CUSTOMER),
    (list[Customer], [CUSTOMER, CUSTOMER]),
    (dict[str, tuple[Line, ...]], {"lines": (LINE, LINE), "none": ()}),
    (dict[int, str], {1: "one", 2: "two"}),
    (set[str], {"b", "a"}),
    (tuple[int, str, bytes], (1, "a", b"b")),
    (Order | None, ORDER),
    (Any, {"nested": [1, 2.5, None, {"deep": True}]}),
]


@pytest.mark.parametrize(("annotation", "value"), PAYLOADS, ids=[f"{a}-{n}" for n, (a, _) in enumerate(PAYLOADS)])
async def test_results_come_back_as_the_annotated_type(world: World, annotation: Any, value: Any):
    seen: list[Any] = []

    def produce() -> Any:
        return value

    produce.__annotations__["return"] = annotation
    make = step(produce)

    def passing(given: Any) -> Any: ...

    async def body(given: Any) -> Any:
        seen.append(given)
        made = await make()
        seen.append(made)
        await wait_for("go")
        return made

    body.__annotations__ = {"given": annotation, "return": annotation}
    carry = flow(name="carry")(body)

    rl = await world.open()
    run = await rl.start(carry, value)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    await run.signal("go")
    seen.append(await run.result())
    assert len(seen) == 5  # argument and result live, both again replayed, and the run's own result
    for one in seen:
        assert one == value
        assert type(one) is type(value)
    if isinstance(value, Order):
        assert type(seen[3].lines[0].price) is decimal.Decimal


async def test_a_flow_goes_on_with_the_value_as_it_will_come_back(world: World):
    """An annotation may read a value back as another value that is equal. Then the flow must get the same value live
    and on replay."""
    seen: list[Any] = []

    @step
    async def level() -> int:
        return Level.HIGH

    @flow
    async def look() -> None:
        seen.append(await level())
        await wait_for("go")

    rl = await world.open()
    run = await rl.start(look)
    await world.until_status("waiting", run)
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 2)
    assert [type(one) for one in seen] == [int, int]


async def test_changing_a_result_in_place_does_not_change_the_recorded_one(world: World):
    seen: list[list[int]] = []

    @step
    async def numbers() -> list[int]:
        return [1, 2]

    @flow
    async def spoil() -> None:
        found = await numbers()
        seen.append(list(found))
        found.append(3)
        await wait_for("go")

    rl = await world.open()
    run = await rl.start(spoil)
    await world.until_status("waiting", run)
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 2)
    assert seen == [[1, 2], [1, 2]]


# ---- exceptions, live and replayed alike


class OddError(Exception):
    """Its constructor takes other arguments than those that Exception keeps."""

    def __init__(self, order: str, *, code: int) -> None:
        super().__init__(f"order {order} was declined")
        self.order = order
        self.code = code


class SilentError(ValueError):
    def __init__(self) -> None:
        super().__init__()


class ClosingError(OddError):
    def __str__(self) -> str:
        return f"closing {self.order} ({self.code})"


ERRORS: list[Callable[[], Exception]] = [
    lambda: ValueError("bad"),
    lambda: KeyError("missing"),
    lambda: OSError(2, "no such file", "x.txt"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    lambda: OddError("o-1", code=51),
    lambda: ClosingError("o-2", code=7),
    lambda: SilentError(),
    lambda: ZeroDivisionError(),
    lambda: ExceptionGroup("several", [ValueError("one"), OddError("o-3", code=1)]),
    lambda: StopAsyncIteration("odd, but an Exception"),
]


@pytest.mark.parametrize("make", ERRORS, ids=[repr(make()) for make in ERRORS])
async def test_exceptions_are_raised_again_as_what_they_were(world: World, make: Callable[[], Exception]):
    caught: list[BaseException] = []
    calls: list[int] = []

    @step
    async def fail() -> None:
        calls.append(1)
        raise make()

    @flow
    async def catch() -> str:
        try:
            await fail()
        except Exception as error:
            caught.append(error)
        return await wait_for("go", str)

    rl = await world.open()
    run = await rl.start(catch)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    await run.signal("go", "on")
    assert await run.result() == "on"
    assert calls == [1]
    live, replayed = caught
    expected = make()
    assert type(live) is type(expected)
    assert isinstance(replayed, type(expected))
    assert type(replayed).__name__ == type(expected).__name__  # a stand-in, if its arguments are not data
    assert str(live) == str(replayed) == str(expected)
    for name in ("order", "code", "errno", "filename"):
        assert getattr(replayed, name, None) == getattr(expected, name, None)
    if isinstance(replayed, ExceptionGroup):
        assert [type(e) for e in replayed.exceptions] == [ValueError, OddError]


async def test_the_same_except_clause_is_taken_after_replay(world: World):
    taken: list[str] = []

    @step
    def decline() -> None:
        raise OddError("o-9", code=51)

    @flow
    def pay() -> str:
        try:
            decline()
        except ValueError:
            taken.append("wrong")
        except OddError as error:
            taken.append(f"declined {error.code}")
        wait_for("go")
        return taken[-1]

    rl = await world.open()
    run = await rl.start(pay)
    await world.park(run)
    await run.signal("go")
    assert await run.result() == "declined 51"
    assert taken == ["declined 51", "declined 51"]


async def test_an_exception_of_a_class_that_is_gone_is_still_caught_by_its_base(world: World):
    class LocalError(ValueError):
        pass

    caught: list[BaseException] = []

    @step
    async def fail() -> None:
        raise LocalError("local")

    @flow
    async def catch() -> None:
        try:
            await fail()
        except ValueError as error:
            caught.append(error)
        await wait_for("go")

    rl = await world.open()
    await world.until_status("waiting", await rl.start(catch))
    await world.crash_and_reopen()
    await until(lambda: len(caught) == 2)
    replayed = caught[1]
    assert isinstance(replayed, StepError)
    assert str(replayed) == "local"
    assert replayed.type_name.endswith("LocalError")


async def test_a_run_that_fails_says_why_and_has_the_exception_as_its_cause(world: World):
    @step
    async def fail() -> None:
        raise OddError("o-1", code=51)

    @flow
    async def failing() -> None:
        await fail()

    rl = await world.open()
    run = await rl.start(failing.with_id("bad"))
    with pytest.raises(RunFailedError, match="run 'bad' failed: OddError: order o-1 was declined") as raised:
        await run.result()
    assert isinstance(raised.value.__cause__, OddError)
    assert raised.value.__cause__.code == 51
    assert any("fail()" in note for note in raised.value.__cause__.__notes__)  # the traceback, as text
    assert await run.status() == "failed"
    rl = await world.close_and_reopen()
    with pytest.raises(RunFailedError) as raised:
        await (await rl.get("bad")).result()
    assert isinstance(raised.value.__cause__, OddError)


# ---- retries


class Flaky:
    """Fails so often, then succeeds. Records the attempt numbers that it got."""

    def __init__(self, failures: int, error: Callable[[], Exception] = lambda: ValueError("flaky")) -> None:
        self.failures = failures
        self.error = error
        self.attempts: list[int] = []

    def __call__(self) -> str:
        self.attempts.append(current_step().attempt)
        if len(self.attempts) <= self.failures:
            raise self.error()
        return "ok"


async def backoffs(world: World, retry: Retry, failures: int) -> list[float]:
    """The pauses between the attempts, as the store shows them."""
    flaky = Flaky(failures)

    @step(retry=retry)
    async def unsteady() -> str:
        return flaky()

    @flow
    async def trying() -> str:
        return await unsteady()

    rl = await world.open()
    run = await rl.start(trying)
    pauses = []
    for count in range(1, failures + 1):
        await until(lambda count=count: len(flaky.attempts) == count)
        row = await until(lambda: world.asleep(run))
        assert row.wake_at is not None
        pauses.append(row.wake_at - world.clock.now())
        world.clock.advance(pauses[-1])
    assert await run.result() == "ok"
    assert flaky.attempts == list(range(1, failures + 2))
    return pauses


@pytest.mark.parametrize(
    ("retry", "expected"),
    [
        (Retry(5, delay="2s"), [2, 2, 2, 2]),
        (Retry(6, delay="1s", backoff="exponential"), [1, 2, 4, 8, 16]),
        (Retry(6, delay="1s", backoff="exponential", max_delay="5s"), [1, 2, 4, 5, 5]),
        (Retry(7, delay="10s", backoff="fibonacci"), [10, 10, 20, 30, 50, 80]),
        (Retry(3, delay="3d", backoff="exponential"), [259_200, 518_400]),
    ],
    ids=["fixed", "exponential", "exponential-capped", "fibonacci", "days"],
)
async def test_back_off(world: World, retry: Retry, expected: list[float]):
    assert await backoffs(world, retry, len(expected)) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("drawn", "factor"), [(0.0, 0.8), (0.5, 1.0), (0.9999999, 1.2)])
async def test_jitter_spreads_a_delay_in_both_directions(world: World, drawn: float, factor: float):
    world.entropy.number = drawn
    assert await backoffs(world, Retry(3, delay="10s", jitter=0.2), 2) == pytest.approx([10 * factor] * 2, abs=1e-3)


async def test_without_a_delay_the_next_attempt_follows_at_once(world: World):
    flaky = Flaky(2)

    @step(retry=Retry(3))
    def unsteady() -> str:
        return flaky()

    @flow
    def trying() -> str:
        return unsteady()  # type: ignore[no-any-return]

    rl = await world.open()
    assert await rl.run(trying) == "ok"
    assert flaky.attempts == [1, 2, 3]


async def test_the_last_error_is_raised_when_the_attempts_are_used_up(world: World):
    count = 0

    @step(retry=Retry(3))
    async def unsteady() -> None:
        nonlocal count
        count += 1
        raise ValueError(f"attempt {count}")

    @flow
    async def trying() -> str:
        try:
            await unsteady()
        except ValueError as error:
            return str(error)
        return "no error"

    rl = await world.open()
    assert await rl.run(trying) == "attempt 3"
    assert count == 3


@pytest.mark.parametrize(
    ("retry", "error", "tries"),
    [
        (Retry(3, on=ValueError), ValueError, 3),
        (Retry(3, on=ValueError), KeyError, 1),
        (Retry(3, on=LookupError), KeyError, 3),
        (Retry(3, on=(KeyError, ValueError)), ValueError, 3),
        (Retry(3, not_on=ValueError), ValueError, 1),
        (Retry(3, not_on=(OSError, KeyError)), ValueError, 3),
        (Retry(3, on=LookupError, not_on=KeyError), KeyError, 1),
        (Retry(3, on=LookupError, not_on=KeyError), IndexError, 3),
        (Retry(1), ValueError, 1),
    ],
)
async def test_only_the_named_exceptions_are_retried(world: World, retry: Retry, error: type[Exception], tries: int):
    flaky = Flaky(99, error)

    @step(retry=retry)
    async def unsteady() -> str:
        return flaky()

    @flow
    async def trying() -> str:
        return await unsteady()

    rl = await world.open()
    with pytest.raises(RunFailedError) as raised:
        await rl.run(trying)
    assert type(raised.value.__cause__) is error
    assert len(flaky.attempts) == tries


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: Retry(attempts=0), "attempts=0"),
        (lambda: Retry(attempts=True), "attempts=True"),
        (lambda: Retry(backoff="quadratic"), "quadratic"),  # type: ignore[arg-type]
        (lambda: Retry(jitter=2), "jitter=2"),
        (lambda: Retry(on=3), "on=3"),  # type: ignore[arg-type]
    ],
)
def test_wrong_retry_options_are_refused(wrong: Callable[[], Retry], named: str):
    with pytest.raises(DefinitionError, match=named):
        wrong()


async def test_the_attempt_count_and_the_back_off_survive_a_crash(world: World):
    flaky = Flaky(99)

    @step(retry=Retry(3, delay="1h"))
    async def unsteady() -> str:
        return flaky()

    @flow
    async def trying() -> str:
        return await unsteady()

    rl = await world.open()
    run = await rl.start(trying)
    for attempts in (1, 2):
        await until(lambda attempts=attempts: len(flaky.attempts) == attempts)
        due = (await until(lambda: world.asleep(run))).wake_at
        rl = await world.crash_and_reopen()
        run = await rl.get(run.id)
        again = await until(lambda: world.asleep(run))
        assert again.wake_at == due  # not renewed by the restart
        world.clock.advance("1h")
    with pytest.raises(RunFailedError):
        await run.result()
    assert flaky.attempts == [1, 2, 3]


async def test_a_long_back_off_leaves_memory(world: World):
    flaky = Flaky(1)

    @step(retry=Retry(3, delay="1d"))
    def unsteady() -> str:
        return flaky()

    @flow
    def trying() -> str:
        return unsteady()  # type: ignore[no-any-return]

    rl = await world.open()
    run = await rl.start(trying)
    await world.park(run)
    world.clock.advance("1d")
    assert await run.result() == "ok"
    assert flaky.attempts == [1, 2]


async def test_an_attempt_in_flight_at_a_crash_keeps_its_number(world: World):
    gate = asyncio.Event()
    seen: list[int] = []

    @step(retry=Retry(3))
    async def unsteady() -> str:
        seen.append(current_step().attempt)
        if len(seen) == 1:
            raise ValueError("first")
        if len(seen) == 2:
            await gate.wait()
        return "ok"

    @flow
    async def trying() -> str:
        return await unsteady()

    rl = await world.open()
    run = await rl.start(trying)
    await until(lambda: len(seen) == 2)
    rl = await world.crash_and_reopen()
    assert await (await rl.get(run.id)).result() == "ok"
    assert seen == [1, 2, 2]


# ---- timeouts


async def test_an_async_step_past_its_timeout_is_cancelled(world: World):
    begun = asyncio.Event()
    ended: list[str] = []

    @step(timeout="1h")
    async def slow() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    @flow
    async def waiting() -> str:
        try:
            await slow()
        except TimeoutError as error:
            return str(error)
        return "no timeout"

    rl = await world.open()
    run = await rl.start(waiting)
    await begun.wait()
    world.clock.advance("59m")
    assert ended == []
    world.clock.advance("1m")
    assert await run.result() == "step 'slow' did not finish within its timeout of 3600.0s"
    assert ended == ["cancelled"]


async def test_a_sync_step_past_its_timeout_is_left_behind(world: World):
    begun, gate = threading.Event(), threading.Event()

    @step(timeout="1h")
    def slow() -> None:
        begun.set()
        gate.wait()

    @flow
    def waiting() -> str:
        try:
            slow()
        except StepTimeoutError as error:
            return str(error)
        return "no timeout"

    rl = await world.open()
    try:
        run = await rl.start(waiting)
        await until(begun.is_set)
        world.clock.advance("1h")
        assert "did not finish within its timeout" in await run.result()
    finally:
        gate.set()


async def test_a_timeout_counts_for_each_attempt_and_is_retried(world: World):
    seen: list[int] = []

    @step(timeout="1h", retry=Retry(3))
    async def slow() -> str:
        seen.append(current_step().attempt)
        if len(seen) < 3:
            await asyncio.Event().wait()
        return "at last"

    @flow
    async def waiting() -> str:
        return await slow()

    rl = await world.open()
    run = await rl.start(waiting)
    for attempt in (1, 2):
        await until(lambda attempt=attempt: len(seen) == attempt)
        world.clock.advance("1h")
    assert await run.result() == "at last"
    assert seen == [1, 2, 3]


async def test_a_timeout_error_of_the_body_is_not_the_steps_timeout(world: World):
    @step(timeout="1h")
    async def own() -> None:
        raise TimeoutError("the service was slow")

    @flow
    async def waiting() -> list[str]:
        try:
            await own()
        except TimeoutError as error:
            return [type(error).__name__, str(error)]
        return []

    rl = await world.open()
    assert await rl.run(waiting) == ["TimeoutError", "the service was slow"]


async def test_a_deadline_survives_a_crash(world: World):
    started: list[int] = []
    gate = asyncio.Event()

    @step(timeout="1h")
    async def slow() -> str:
        started.append(1)
        await gate.wait()
        return "done"

    @flow
    async def waiting() -> str:
        try:
            return await slow()
        except TimeoutError as error:
            return str(error)

    rl = await world.open()
    in_time = await rl.start(waiting.with_id("in-time"))
    await until(lambda: len(started) == 1)
    begun = await until(lambda: _open_step(world, "in-time"))
    world.clock.advance("30m")
    rl = await world.crash_and_reopen()
    await until(lambda: len(started) == 2)
    again = await _open_step(world, "in-time")
    assert again is not None
    assert again.deadline == begun.deadline == begun.at + 3600
    gate.set()
    assert await (await rl.get(in_time.id)).result() == "done"

    gate.clear()
    await rl.start(waiting.with_id("too-late"))
    await until(lambda: _open_step(world, "too-late"))
    await world.crash()
    world.clock.advance("2h")
    rl = await world.open()
    assert "passed its deadline while no process was running it" in await (await rl.get("too-late")).result()
    assert len(started) == 3


async def _open_step(world: World, run_id: str) -> Open | None:
    return (await world.state(run_id)).open.get("slow")


# ---- on_crash


async def test_on_crash_fail_forbids_repeating_a_step_in_flight(world: World):
    gate = asyncio.Event()
    calls: list[str] = []

    @step(on_crash="fail")
    async def charge() -> str:
        calls.append("charge")
        await gate.wait()
        return "charged"

    @step
    async def ask_somebody() -> str:
        calls.append("ask")
        return "asked"

    @flow
    async def pay() -> str:
        try:
            return await charge()
        except StepInterruptedError as error:
            assert "'charge'" in str(error)
            assert "whether it took effect is unknown" in str(error)
            return await ask_somebody()

    rl = await world.open()
    run = await rl.start(pay)
    await until(lambda: calls)
    gate.set()
    rl = await world.crash_and_reopen()
    assert await (await rl.get(run.id)).result() == "asked"
    assert calls == ["charge", "ask"]


async def test_on_crash_fail_is_not_retried_either(world: World):
    calls: list[int] = []

    @step(on_crash="fail", retry=Retry(5))
    def charge() -> str:
        calls.append(1)
        gate.wait()
        return "charged"

    @flow
    def pay() -> str:
        try:
            return charge()  # type: ignore[no-any-return]
        except StepInterruptedError:
            return "interrupted"

    gate = threading.Event()
    rl = await world.open()
    run = await rl.start(pay)
    await until(lambda: calls)
    await world.crash()
    gate.set()
    rl = await world.open()
    assert await (await rl.get(run.id)).result() == "interrupted"
    assert calls == [1]


async def test_on_crash_fail_between_two_attempts_goes_on(world: World):
    flaky = Flaky(1)

    @step(on_crash="fail", retry=Retry(3, delay="1h"))
    async def charge() -> str:
        return flaky()

    @flow
    async def pay() -> str:
        return await charge()

    rl = await world.open()
    run = await rl.start(pay)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    world.clock.advance("1h")
    assert await (await rl.get(run.id)).result() == "ok"
    assert flaky.attempts == [1, 2]


async def test_on_crash_fail_that_finished_is_replayed(world: World):
    calls: list[int] = []

    @step(on_crash="fail")
    async def charge() -> str:
        calls.append(1)
        return "charged"

    @flow
    async def pay() -> str:
        paid = await charge()
        await wait_for("go")
        return paid

    rl = await world.open()
    run = await rl.start(pay)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    await (await rl.get(run.id)).signal("go")
    assert await (await rl.get(run.id)).result() == "charged"
    assert calls == [1]


# ---- how a step is identified


async def test_a_spawned_run_has_idempotency_keys_of_its_own(world: World):
    @step
    async def charge() -> str:
        return current_step().idempotency_key

    @flow
    async def order() -> str:
        return await charge()

    @flow
    async def several() -> list[str]:
        first, second = await spawn(order), await spawn(order)
        return [await charge(), await order(), await first, await second]

    rl = await world.open()
    keys = await (await rl.start(several.with_id("s"))).result("60s")
    assert len(set(keys)) == 4


async def test_current_step_and_its_idempotency_key_are_stable(world: World):
    seen: list[relight.flow.scope.StepInfo] = []  # type: ignore[name-defined]
    gate = asyncio.Event()

    @step(retry=Retry(3))
    async def charge(amount: int) -> str:
        seen.append(current_step())
        if len(seen) == 1:
            raise ValueError("first")
        if len(seen) == 2:
            await gate.wait()
        return current_step().idempotency_key

    @flow
    async def pay() -> list[str]:
        return [await charge(1), await charge(2)]

    rl = await world.open()
    run = await rl.start(pay.with_id("order-1"))
    await until(lambda: len(seen) == 2)
    rl = await world.crash_and_reopen()
    keys = await (await rl.get(run.id)).result()
    assert [info.attempt for info in seen] == [1, 2, 2, 1]
    assert {info.run_id for info in seen} == {"order-1"}
    assert [info.step for info in seen] == ["charge", "charge", "charge", "charge:1"]
    assert len({info.idempotency_key for info in seen[:3]}) == 1
    assert keys == [seen[0].idempotency_key, seen[3].idempotency_key]
    assert keys[0] != keys[1]


async def test_current_step_in_a_child_run_and_in_sync_code(world: World):
    @step
    def who() -> list[str]:
        info = current_step()
        return [info.run_id, info.step, info.idempotency_key]

    @flow
    def inner() -> list[str]:
        return who()  # type: ignore[no-any-return]

    @flow
    async def outer() -> list[str]:
        return await inner()  # type: ignore[no-any-return,misc]

    rl = await world.open()
    assert await rl.run(outer.with_id("o")) == ["o/inner", "inner/who", "o/inner/who"]


def test_current_step_outside_a_step_is_an_error():
    with pytest.raises(OutsideRunError, match="current_step"):
        current_step()


async def test_current_step_in_a_flow_is_an_error(world: World):
    @flow
    async def asking() -> str:
        with pytest.raises(OutsideRunError, match="inside the body of a step"):
            current_step()
        return "refused"

    rl = await world.open()
    assert await rl.run(asking) == "refused"


# ---- plain functions


async def test_outside_a_run_steps_and_flows_are_plain_functions():
    @step(retry=Retry(3), timeout="1s")
    def add(a: int, b: int = 1) -> int:
        """Adds."""
        return a + b

    @step
    async def add_async(a: int, b: int = 1) -> int:
        return a + b

    @flow
    async def summing(n: int) -> list[Any]:
        each = [await foreach([1, 2], add_async), foreach([1, 2], add)]
        await sleep(0)
        return [add(n), await add_async(n, b=2), *each]

    assert add(1) == 2
    assert getattr(add, "__name__", None) == "add"
    assert add.__doc__ == "Adds."
    assert await add_async(1) == 2
    assert await summing(5) == [6, 7, [2, 3], [2, 3]]


def test_outside_a_run_sync_flows_are_plain_functions_too():
    @step
    def fail(x: int) -> int:
        raise ValueError(f"no {x}")

    @flow
    def trying(x: int) -> list[Any]:
        try:
            fail(x)
        except ValueError as error:
            found = str(error)
        sleep("1ms")
        return [found, parallel(lambda: 1, lambda: 2), foreach([1], lambda i: i + 1)]

    assert trying(7) == ["no 7", [1, 2], [2]]
    before = dt.datetime.now(dt.UTC)
    assert before <= relight.now() <= dt.datetime.now(dt.UTC)
    assert 0 <= relight.random() < 1
    assert isinstance(relight.uuid(), uuid_module.UUID)


async def test_a_step_inside_a_step_is_a_plain_call(world: World):
    calls: list[str] = []

    @step
    def inner(x: int) -> int:
        calls.append(current_step().step)
        return x + 1

    @step
    async def inner_async(x: int) -> int:
        calls.append(current_step().step)
        return x + 1

    @step
    async def outer(x: int) -> int:
        return inner(x) + await inner_async(x)  # type: ignore[no-any-return]

    @flow
    async def nesting() -> int:
        return await outer(1)

    rl = await world.open()
    run = await rl.start(nesting)
    assert await run.result() == 4
    assert calls == ["outer", "outer"]
    assert [key for key in await world.recorded(run.id) if key] == ["outer"]


@pytest.mark.parametrize("what", ["sleep", "wait_for", "foreach", "spawn"])
async def test_durable_operations_inside_a_step_are_refused(world: World, what: str):
    @flow
    async def other() -> None: ...

    @step
    async def wrong() -> None:
        operations: dict[str, Callable[[], Any]] = {
            "sleep": lambda: sleep(1),
            "wait_for": lambda: wait_for("x"),
            "foreach": lambda: foreach([1], lambda i: i),
            "spawn": lambda: relight.spawn(other),
        }
        await operations[what]()

    @flow
    async def nesting() -> None:
        await wrong()

    rl = await world.open()
    with pytest.raises(RunFailedError, match=r"was called inside step 'wrong'") as raised:
        await rl.run(nesting)
    assert isinstance(raised.value.__cause__, OutsideRunError)


# ---- large payloads


async def test_payloads_over_the_threshold_are_stored_once(world: World):
    large = "x" * 5000
    seen: list[str] = []

    @step
    async def make(n: int) -> str:
        return large

    @flow
    async def carry(given: str) -> str:
        seen.append(given)
        for n in range(3):
            seen.append(await make(n))
        await wait_for("go")
        return seen[-1]

    rl = await world.open(payload_blob_threshold=1000)
    run = await rl.start(carry, large)
    await world.until_status("waiting", run)
    assert world.rows_in("blobs") == 2  # the step's result, and the input as a JSON object
    assert all(len(entry.event) < 1000 for entry in (await world.journal(run.id)).entries)
    rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    await run.signal("go", "y" * 5000)
    assert await run.result() == large
    assert seen == [large] * 8
    assert world.rows_in("blobs") == 3
    assert [type(event) for event in await world.events(run.id)].count(j.StepCompleted) == 3


async def test_a_payload_at_the_threshold_stays_in_the_journal(world: World):
    @step
    async def make(size: int) -> str:
        return "x" * size

    @flow
    async def carry(size: int) -> int:
        return len(await make(size))

    rl = await world.open(payload_blob_threshold=1000)
    assert await rl.run(carry, 998) == 998  # and two quotes
    assert world.rows_in("blobs") == 0
    assert await rl.run(carry, 999) == 999
    assert world.rows_in("blobs") == 1
