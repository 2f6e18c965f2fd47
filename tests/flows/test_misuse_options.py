"""Wrong options of flows, steps, operations and the engine: refused where they are written, in one sentence."""

import collections.abc
import dataclasses
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NewType, Optional, TypeVar

import pytest

import relight
from relight import ConfigError, DefinitionError, Relight, RunFailedError, flow, step, wait_for
from relight.backends.memory import MemoryStore
from relight.clock import SYSTEM_CLOCK
from tests.flows.world import World


def plain() -> int:
    return 1


async def plain_async() -> int:
    return 1


@pytest.mark.parametrize("zero", [0, "0s", 0.0, "0ms"])
@pytest.mark.parametrize("decorate", [step, flow])
def test_a_timeout_of_nothing(decorate: Any, zero: Any):
    with pytest.raises(DefinitionError, match="leaves no time at all; give more than 0, or leave it out"):
        decorate(timeout=zero)(plain_async)


@pytest.mark.parametrize("wrong", ["no", 0, None, 1])
def test_resumable(wrong: Any):
    with pytest.raises(DefinitionError, match=f"resumable takes True or False, not {wrong!r}"):
        flow(resumable=wrong)(plain)


def test_an_option_that_does_not_exist_is_a_type_error():
    with pytest.raises(TypeError, match="timeouts"):
        step(timeouts="3s")  # type: ignore[call-overload]  # that is the test


STORE = MemoryStore(clock=SYSTEM_CLOCK)
Engine: Any = Relight  # the wrong types are the test


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Engine("memory:", flows=[plain]), "give a list of flows, which are functions decorated with @flow"),
        (lambda: Engine("memory:", flows=plain), "give a list of flows"),
        (lambda: Engine("memory:", flows="plain"), "give a list of flows"),
        (lambda: Engine("memory:", flows=[step(plain_async)]), "give a list of flows"),
        (lambda: Engine("memory:", flows=flow(plain_async)), "give a list of flows"),
        (lambda: Engine(3), "store: 3 is not accepted; expected a path"),
        (lambda: Engine(STORE), "store: .* is not accepted; expected a path"),
        (lambda: Engine(b"app.db"), "store: b'app.db' is not accepted"),
        (lambda: Engine(store="x"), "expected a store as an object; a path or URL is the first argument"),
        (lambda: Engine(store=STORE, lease_manager="etcd://h"), "expected a lease manager as an object"),
        (lambda: Engine("memory:", store=STORE), "was given a URL and store=, which are two stores"),
        (lambda: Engine("memory:", orchestrator_id="a#b"), "orchestrator_id: 'a#b' is not accepted; .* and no #"),
    ],
)
def test_the_engine(make: Callable[[], Any], says: str):
    with pytest.raises(ConfigError, match=says):
        make()


def test_flows_may_come_in_any_iterable():
    one: Any = flow(plain)
    assert Relight("memory:", flows=iter([one])).registry.find("plain") is one
    assert Relight("memory:", flows=[]).registry.names() == []


T = TypeVar("T")


@dataclasses.dataclass
class Order:
    n: int


RIGHT = [
    int,
    Order,
    int | None,
    Optional[int],  # noqa: UP045 - another object than int | None
    list[int],
    typing.List[int],  # noqa: UP006 - as above
    dict[str, Order],
    Literal["a", "b"],
    Annotated[int, "n"],
    NewType("Id", int),
    None,
    Any,
    object,
    T,
    collections.abc.Sequence[int],
]


@pytest.mark.parametrize("right", RIGHT, ids=str)
def test_types_that_wait_for_takes(right: Any):
    with pytest.raises(relight.OutsideRunError):
        wait_for("x", right)


@pytest.mark.parametrize(
    "wrong",
    ["Order", 3, typing.ForwardRef("Order"), [int], plain, {"n": int}],
    ids=["name", "number", "forward", "list", "function", "dict"],
)
async def test_types_that_wait_for_refuses(world: World, wrong: Any):
    @flow
    async def waiting() -> Any:
        return await wait_for("x", wrong)

    rl = await world.open()
    with pytest.raises(RunFailedError, match="give the type of the payload itself") as failed:
        await rl.run(waiting)
    assert isinstance(failed.value.__cause__, DefinitionError)
    assert re.match(r"wait_for\('x', ", str(failed.value.__cause__))
