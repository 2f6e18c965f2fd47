"""Types of users that raise what ends programs when a value is written or read, long after the code was tested: the run is
held, or its step fails, and the engine and the other runs go on."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Self

import pydantic
import pytest

from relight import Relight, flow, step, wait_for
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import PayloadError
from relight.flow.error_records import rebuild_error, record_error
from relight.flow.payloads import ArgumentsCodec, ValueCodec
from tests.flows.world import World, until

WHAT = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, KeyError]


class _Now:
    raises: type[BaseException] | None = None


def misbehave() -> None:
    if _Now.raises is not None:
        raise _Now.raises("no configuration")


@pytest.fixture(autouse=True)
def quiet_at_first() -> Iterator[None]:
    _Now.raises = None
    yield
    _Now.raises = None


@dataclasses.dataclass
class Order:
    n: int

    def __post_init__(self) -> None:
        misbehave()


class Model(pydantic.BaseModel):
    n: int

    @pydantic.field_validator("n")
    @classmethod
    def checked(cls, n: int) -> int:
        misbehave()
        return n


class Text(str):
    """Made by its constructor when it is read."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        misbehave()
        return super().__new__(cls, text)


class Compared:
    """A model, as far as Relight is concerned, whose comparison does it."""

    def __eq__(self, other: object) -> bool:
        misbehave()
        return True

    __hash__ = None  # type: ignore[assignment]  # as of every class with an `__eq__`

    @classmethod
    def model_validate(cls, _: Any) -> "Compared":
        return cls()

    @classmethod
    def model_validate_json(cls, _: bytes) -> "Compared":
        return cls()

    def model_dump(self, **_: Any) -> dict[str, int]:
        return {}


class DeclinedError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        misbehave()

    def __str__(self) -> str:
        misbehave()
        return "declined"

    @property
    def code(self) -> int:
        misbehave()
        return 5


KINDS: dict[type, Callable[[], Any]] = {
    Order: lambda: Order(1),
    Model: lambda: Model(n=1),
    Text: lambda: Text("x"),
}


def as_argument(kind: type) -> tuple[Any, list[Any]]:
    @flow(name="work")
    async def work(value: kind) -> str:  # type: ignore[valid-type]  # chosen by the test
        return await wait_for("go", str)

    return work, [KINDS[kind]()]


def as_result(kind: type) -> tuple[Any, list[Any]]:
    @step(name="make")
    async def make() -> kind:  # type: ignore[valid-type]  # as above
        return KINDS[kind]()

    @flow(name="work")
    async def work() -> str:
        await make()
        return await wait_for("go", str)

    return work, []


@pytest.mark.parametrize("raises", [SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("place", [as_argument, as_result])
@pytest.mark.parametrize("kind", [Order, Model, Text])
async def test_a_run_whose_value_does_not_read_is_held_and_the_others_go_on(
    world: World, kind: type, place: Any, raises: type[BaseException]
):
    work, args = place(kind)

    @flow
    async def innocent() -> str:
        return await wait_for("go", str)

    rl = await world.open()
    bad, good = await rl.start(work, *args), await rl.start(innocent)
    await world.park(good)
    await world.park(bad)
    _Now.raises = raises
    await bad.signal("go", "x")
    row = await world.until_status("paused", bad)
    assert row.hold == "version"
    assert "does not read back" in row.reason
    assert raises.__name__ in row.reason or "no configuration" in row.reason
    await good.signal("go", "y")
    assert await good.result("60s") == "y"
    assert rl.health().ok
    assert await rl.explain(bad.id)
    await bad.describe()
    _Now.raises = None
    await bad.resume()
    assert await bad.result("60s") == "x"


@pytest.mark.parametrize("raises", [KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("kind", list(KINDS))
async def test_a_result_whose_type_misbehaves_fails_its_step(world: World, kind: type, raises: type[BaseException]):
    made = KINDS[kind]()

    @step
    async def make() -> kind:  # type: ignore[valid-type]  # chosen by the test
        _Now.raises = raises
        return made

    @flow
    async def work() -> str:
        try:
            await make()
        except PayloadError:
            return "refused"
        return "accepted"

    rl = await world.open()
    assert await asyncio.wait_for(rl.run(work), 60) == "refused"
    assert rl.health().ok


@pytest.mark.parametrize("raises", WHAT)
@pytest.mark.parametrize("kind", list(KINDS))
def test_codecs_raise_payload_errors_only(kind: type, raises: type[BaseException]):
    def fn(value: Any, other: Any = 1) -> None: ...

    fn.__annotations__["value"] = kind
    value, codec, arguments = KINDS[kind](), ValueCodec(kind, "result"), ArgumentsCodec(fn, "flow 'f'")
    data, sealed = codec.seal(value)[0], arguments.seal((value,), {})
    digest = arguments.digest((value,), {})
    _Now.raises = raises
    calls: list[Callable[[], object]] = [
        lambda: codec.seal(value),
        lambda: codec.seal_canonically(value),
        lambda: arguments.seal((value,), {}),
        lambda: codec.open(data),
        lambda: arguments.open(sealed),
    ]
    for call in calls:
        with pytest.raises(PayloadError):
            call()
    assert arguments.digest((value,), {}) == arguments.digest((value,), {}, digest) == digest  # never read: accepted


@pytest.mark.parametrize("raises", WHAT[:4])
def test_a_comparison_that_exits_refuses_the_value(raises: type[BaseException]):
    codec = ValueCodec(Compared, "result")
    _Now.raises = raises
    with pytest.raises(PayloadError, match=raises.__name__):
        codec.seal(Compared())


@pytest.mark.parametrize("raises", WHAT)
def test_exceptions_are_recorded_and_rebuilt_all_the_same(raises: type[BaseException]):
    error = DeclinedError(7)
    record = record_error(error)
    _Now.raises = raises
    assert f"<{raises.__name__} in DeclinedError.__str__>" in record_error(error).message
    rebuilt = rebuild_error(record)
    assert isinstance(rebuilt, DeclinedError)
    assert rebuilt.args == (7,)


@pytest.mark.parametrize("raises", WHAT)
async def test_an_exception_that_exits_when_it_is_rebuilt_is_told_on_replay(world: World, raises: type[BaseException]):
    caught: list[str] = []

    @step
    async def pay() -> None:
        raise DeclinedError(7)

    @flow
    async def work() -> str:
        try:
            await pay()
        except DeclinedError as error:
            caught.append(str(error.args))
        return await wait_for("go", str)

    rl = await world.open()
    run = await rl.start(work)
    await world.park(run)
    _Now.raises = raises
    await run.signal("go", "x")
    assert await run.result("60s") == "x"
    assert caught == ["(7,)"] * 2


async def test_an_engine_whose_tasks_the_program_has_cancelled_can_be_closed():
    """asyncio.run() does so when a task of the program has raised SystemExit, before `async with` closes the engine."""
    store = MemoryStore(clock=SYSTEM_CLOCK)
    rl = Relight(store=store, lease_manager=MemoryLeases(store, clock=SYSTEM_CLOCK))
    await rl.open()
    lanes = rl.services.recorder._parts
    await until(lambda: len(rl.services.recorder.free) == len(lanes))
    for lane in lanes:
        assert lane.task is not None
        lane.task.cancel()
    await until(lambda: all(lane.task is not None and lane.task.done() for lane in lanes))
    await asyncio.wait_for(rl.close(), 60)
