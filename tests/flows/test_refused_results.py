"""A step whose result cannot be journaled has had its effect all the same: nothing executes it again."""

import asyncio
import contextlib
from typing import Any

import pytest

from relight import PayloadError, Retry, RunFailedError, StepResultError, flow, foreach, step
from tests.flows.world import World

TOO_LARGE = "x" * 2000
RESULTS = [{"lines": {1, 2}}, float("nan"), TOO_LARGE]
NAMES = ["set", "nan", "large"]


class Unequal:
    """Its comparison raises, and Relight compares a result with what it would read back."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = None  # type: ignore[assignment]  # as for any class with __eq__ alone


async def refused(world: World, *args: Any) -> StepResultError:
    with pytest.raises(RunFailedError) as failed:
        await world.rl.run(*args)
    cause = failed.value.__cause__
    assert isinstance(cause, StepResultError)
    assert isinstance(cause, PayloadError)
    return cause


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("result", RESULTS, ids=NAMES)
async def test_a_steps_own_retry_does_not_repeat_it(world: World, kind: str, result: Any):
    charged: list[str] = []

    @step(name="charge", retry=Retry(attempts=3, delay="1h"))
    async def charge_async(order: str) -> Any:
        charged.append(order)
        return result

    @step(name="charge", retry=Retry(attempts=3, delay="1h"))
    def charge_sync(order: str) -> Any:
        charged.append(order)
        return result

    charge: Any = charge_async if kind == "async" else charge_sync

    @flow
    async def shop(order: str) -> Any:
        return await charge(order)

    rl = await world.open(payload={"max_bytes": 1000})
    cause = await refused(world, shop.with_id("o"), "o")
    assert "'charge'" in str(cause)
    assert charged == ["o"]
    (one,) = (await (await rl.get("o")).steps()).steps
    assert (one.attempt, one.state) == (1, "failed")


async def test_a_result_whose_methods_raise_is_refused_as_well(world: World):
    charged: list[str] = []

    @step(retry=Retry(attempts=3))
    async def charge(order: str) -> Any:
        charged.append(order)
        return [Unequal()]

    @flow
    async def shop(order: str) -> Any:
        return await charge(order)

    await world.open()
    await refused(world, shop, "o")
    assert charged == ["o"]


async def test_a_refusal_in_the_body_is_an_error_like_any_other(world: World):
    """The body may have asked for something that raises PayloadError, without an effect."""
    tries: list[int] = []

    @step(retry=Retry(attempts=3))
    async def ask() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise PayloadError("somebody else's")
        return 7

    @flow
    async def asking() -> int:
        return await ask()

    rl = await world.open()
    assert await rl.run(asking) == 7
    assert len(tries) == 3


@pytest.mark.parametrize("crash", [False, True], ids=["live", "after a crash"])
@pytest.mark.parametrize("plain", [False, True], ids=["retried", "plain"])
async def test_the_retry_of_a_flow_does_not_repeat_it_either(world: World, plain: bool, crash: bool):
    charged: list[str] = []
    calls: list[int] = []
    retry = None if plain else Retry(attempts=2)

    @step(retry=retry)
    async def charge(order: str) -> Any:
        charged.append(order)
        return {1, float("nan")}

    @flow(retry=Retry(attempts=2, delay="1h"))
    async def shop(order: str) -> Any:
        calls.append(1)
        return await charge(order)

    rl = await world.open()
    handle = await rl.start(shop.with_id("o"), "o")
    await rl.idle()
    if crash:
        await world.crash()
        rl = await world.open()
        await rl.idle()
        handle = await rl.get("o")
    world.clock.advance(3600)
    with pytest.raises(RunFailedError) as failed:
        await handle.result()
    assert isinstance(failed.value.__cause__, StepResultError)
    assert charged == ["o"]
    assert len(calls) == 2


async def test_nor_when_the_flow_has_given_up_on_it(world: World):
    """Its end was recorded, and a timeout of the flow came first: the next attempt of the flow is told that end."""
    charged: list[str] = []
    begun, never = asyncio.Event(), asyncio.Event()

    @step(retry=Retry(attempts=2))
    async def charge(order: str) -> Any:
        charged.append(order)
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):  # it cannot be stopped any more
            await never.wait()
        return {1, float("nan")}

    @flow(retry=Retry(attempts=2))
    async def shop(order: str) -> Any:
        try:
            async with asyncio.timeout(10):
                return await charge(order)
        except TimeoutError:
            raise ValueError("late") from None

    rl = await world.open()
    handle = await rl.start(shop.with_id("o"), "o")
    await begun.wait()
    world.clock.advance(10)
    with pytest.raises(RunFailedError):
        await handle.result()
    assert charged == ["o"]


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("result", RESULTS, ids=NAMES)
async def test_an_item_is_not_repeated(world: World, concurrency: int, result: Any):
    charged: list[int] = []

    @step(retry=Retry(attempts=3))
    async def charge(n: int) -> Any:
        charged.append(n)
        return result if n == 1 else n

    @flow(retry=Retry(attempts=3))
    async def shop() -> Any:
        return await foreach(range(2), charge, concurrency=concurrency)

    await world.open(payload={"max_bytes": 1000})
    await refused(world, shop)
    assert sorted(charged) == [0, 1]


@pytest.mark.parametrize("child", [False, True], ids=["root", "child"])
@pytest.mark.parametrize("result", RESULTS, ids=NAMES)
async def test_a_flow_is_not_called_again_for_its_own_result(world: World, child: bool, result: Any):
    calls: list[int] = []

    @flow(retry=Retry(attempts=3))
    async def make() -> Any:
        calls.append(1)
        return result

    @flow
    async def outer() -> Any:
        return await make()

    rl = await world.open(payload={"max_bytes": 1000})
    with pytest.raises(RunFailedError) as failed:
        await rl.run(outer if child else make)
    assert isinstance(failed.value.__cause__, PayloadError)
    assert calls == [1]
