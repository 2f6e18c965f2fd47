"""Which functions can be a step or a flow, and which error all others get where they are decorated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from relight import DefinitionError, RunFailedError, flow, spawn, step
from tests.flows.world import World


def values() -> Any:
    yield 1


async def async_values() -> Any:
    yield 1


def add(a: int, b: int) -> int:
    return a + b


class Shop:
    def sell(self, count: int) -> int:
        return count

    @classmethod
    def build(cls) -> int:
        return 1

    def __call__(self) -> int:
        return 1


def in_a_class(decorate: Any) -> Any:
    class Service:
        @decorate  # type: ignore[untyped-decorator]  # either of the two
        async def charge(self, cents: int) -> int:
            return cents

    return Service


def under_a_static_method(decorate: Any) -> Any:
    class Service:
        @decorate  # type: ignore[untyped-decorator]  # either of the two
        @staticmethod
        def charge(cents: int) -> int:
            return cents

    return Service


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        pytest.param(
            lambda of: of(values), "@kind values: a generator has no single result; return a list", id="generator"
        ),
        pytest.param(
            lambda of: of(async_values),
            "@kind async_values: an async generator has no single result; return a list, or call a step for every value",
            id="async generator",
        ),
        pytest.param(
            lambda of: of(lambda: 1), r"<lambda>: a lambda has no name .*; write a def, or give it a name", id="lambda"
        ),
        pytest.param(
            in_a_class, "charge: a method needs its object, .*; write a function outside the class", id="method"
        ),
        pytest.param(
            lambda of: of(Shop().sell), "Shop.sell: a bound method needs its object, .*; write a function", id="bound"
        ),
        pytest.param(lambda of: of(Shop.build), "Shop.build: a bound method needs its object", id="bound to a class"),
        pytest.param(lambda of: of(Shop.sell), "Shop.sell: a method needs its object", id="unbound"),
        pytest.param(under_a_static_method, "put @staticmethod above @kind", id="staticmethod"),
        pytest.param(
            lambda of: of(functools.partial(add, 1)), "a partial has no code of its own; write a function", id="partial"
        ),
        pytest.param(lambda of: of(Shop), "@kind Shop: a class is no function, .*; write a function", id="class"),
        pytest.param(lambda of: of(Shop()), "an object with __call__ does not exist .*; write a function", id="object"),
        pytest.param(
            lambda of: of(len),
            "@kind len: a builtin has no code that could be compared .*; write a function",
            id="builtin",
        ),
        pytest.param(lambda of: of("".join), "join: a builtin has no code", id="builtin method"),
        pytest.param(lambda of: of(step(add)), "it is a step already; decorate the function once", id="twice"),
        pytest.param(
            lambda of: of("checkout"), r"str 'checkout': it takes a function; write @kind or @kind\(name=", id="name"
        ),
        pytest.param(lambda of: of(7), "int 7: it takes a function", id="number"),
    ],
)
@pytest.mark.parametrize("decorate", [flow, step])
def test_what_cannot_be_found_again_is_refused_with_what_to_do_instead(
    decorate: Any, what: Callable[[Any], Any], instead: str
):
    with pytest.raises(DefinitionError, match=instead.replace("kind", decorate.__name__)) as raised:
        what(decorate)
    assert "\n" not in str(raised.value)


async def test_a_parameter_of_a_flow_is_not_called_id(world: World):
    """`start(refund, id="7")` gives the run an id, and the flow gets no such argument."""

    async def by_name(id: str) -> str:  # noqa: A002 - what this is about
        return id

    async def only_by_name(*, id: str = "") -> str:  # noqa: A002
        return id

    for fn in (by_name, only_by_name):
        with pytest.raises(
            DefinitionError, match=r"parameter 'id' could not be given by name, .* id= as the run's id; give it"
        ):
            flow(fn)
        step(fn)  # only a flow calls a step

    @flow
    async def by_position(id: str, /) -> str:  # noqa: A002
        return id

    @flow
    async def anything(**options: str) -> list[str]:
        return sorted(options)

    rl = await world.open()
    assert await rl.run(by_position.with_id("run-7"), "7") == "7"
    assert await rl.run(anything.with_id("run-8"), note="x") == ["note"]
    assert (await rl.row("run-7")).flow == "by_position"


async def test_what_works_stays_allowed(world: World):
    """A closure, a function in a class that needs no object, a lambda with a name, a function behind a decorator."""

    def logged(fn: Any) -> Any:
        @functools.wraps(fn)
        async def around(*args: Any) -> Any:
            return await fn(*args)

        return around

    captured = 10

    @step
    @logged
    async def closure(n: int) -> int:
        return n + captured

    class Steps:
        @staticmethod
        @step
        async def static(n: int) -> int:
            return n + 1

    named = step(name="twice")(lambda n: 2 * n)

    @flow
    async def nested() -> list[int]:
        return [await closure(1), await Steps.static(1), await named(1)]

    rl = await world.open()
    assert await rl.run(nested) == [11, 2, 2]


async def test_a_flow_that_was_made_again_is_not_spawned(world: World):
    """By its name, recovery would find the new flow."""

    def make(n: int) -> Any:
        @flow(name="made")
        async def made() -> int:
            return n

        return made

    old, _ = make(1), make(2)

    @flow
    async def spawning() -> None:
        await spawn(old)

    rl = await world.open()
    with pytest.raises(RunFailedError, match=r"is not the flow registered as 'made': .* pass what differs .* argument"):
        await rl.run(spawning)
