"""Exceptions whose `__repr__` or `__str__` is broken: what fails is what the user's code raised, and not the text about it."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any, NoReturn

import pytest

from relight import Relight, Retry, RunFailedError, StepError, flow, foreach, spawn, step
from relight.execution.body_tasks import Body
from relight.execution.refused_calls import explain
from relight.model.text import error_message, shown
from tests.flows.world import World, until


class OddError(Exception):
    """Its author has tried neither."""

    __notes__ = ()  # type: ignore[assignment]  # a note cannot be added to it either

    def __repr__(self) -> str:
        raise AttributeError("code")

    def __str__(self) -> str:
        raise SystemExit("no text")


class Quiet:
    """An argument of an exception."""

    def __repr__(self) -> str:
        raise KeyError("quiet")

    __str__ = __repr__


class StrangeEndError(BaseException):
    """No Exception, and what it was given cannot be shown."""


tries: list[int] = []


def twice_odd() -> int:
    tries.append(1)
    if len(tries) < 3:
        raise OddError
    return len(tries)


@step(retry=Retry(3, delay="1s"))
async def retried() -> int:
    return twice_odd()


@step(retry=Retry(3, delay="1s"))
def retried_in_thread() -> int:
    return twice_odd()


@step
async def once() -> int:
    raise OddError


@step
async def ends() -> NoReturn:
    raise StrangeEndError(Quiet(), 5)


def shapes() -> dict[str, Any]:
    retry = Retry(3, delay="1s")

    @flow
    async def in_step() -> int:
        return await retried()

    @flow
    async def in_sync_step() -> int:
        return await retried_in_thread()  # type: ignore[misc]

    @flow
    def in_sync_flow() -> int:
        return retried_in_thread()

    @flow(retry=retry)
    async def in_flow() -> int:
        return twice_odd()

    @flow(retry=retry)
    async def in_forgotten() -> int:
        if len(tries) < 2:
            once()  # type: ignore[unused-coroutine]
        return twice_odd()

    @flow
    async def in_child() -> int:
        return await in_flow()

    @flow
    async def in_spawned() -> int:
        return await (await spawn(in_flow))

    @flow
    async def in_foreach() -> int:
        return (await foreach([1], lambda _: retried()))[0]

    return {name: one for name, one in locals().items() if name.startswith("in_")}


NAMES = ["in_step", "in_sync_step", "in_sync_flow", "in_flow", "in_forgotten", "in_child", "in_spawned", "in_foreach"]


@pytest.mark.parametrize("shape", NAMES)
async def test_it_is_tried_again(world: World, shape: str):
    flows = shapes()
    assert sorted(flows) == sorted(NAMES)
    tries.clear()
    rl = await world.open()
    async with world.clock.advancing(rl):
        assert await rl.run(flows[shape]) == 3


async def test_it_fails_the_run_and_is_told_again_on_replay(world: World):
    caught: list[str] = []

    @flow
    async def careful() -> str:
        try:
            await once()
        except OddError as error:
            caught.append(type(error).__name__)
        return await hears()

    go = asyncio.Event()

    @step
    async def hears() -> str:
        await go.wait()
        return "fine"

    rl = await world.open()
    run = await rl.start(careful)
    await until(lambda: caught)
    rl = await world.crash_and_reopen()
    go.set()
    assert await (await rl.get(run.id)).result("60s") == "fine"
    assert caught == ["OddError"] * 2


async def test_what_is_no_exception_and_has_no_text_fails_its_run(world: World):
    @flow
    async def work() -> None:
        await ends()

    rl = await world.open()
    with pytest.raises(RunFailedError, match=r"raised StrangeEndError\(<KeyError in Quiet.__repr__>, 5\)") as failed:
        await rl.run(work)
    assert isinstance(failed.value.__cause__, StepError)


async def test_what_breaks_in_the_engine_is_reported_all_the_same(caplog: pytest.LogCaptureFixture):
    """A bug of ours that lets such an error through is in the log under its name."""

    async def breaks() -> None:
        raise OddError

    async with Relight("memory:") as rl:
        broke: list[BaseException] = []
        rl.services.background.start(breaks(), "work", broke.append)
        await until(lambda: broke)
        body = Body(breaks(), contextvars.Context())
        body.first_stretch()
    lines = [record.getMessage() for record in caplog.records if "broke" in record.getMessage()]
    assert len(lines) == 2
    assert all("<AttributeError in OddError.__repr__>" in line for line in lines)


def test_texts():
    assert shown(ValueError("x")) == "ValueError('x')"
    assert shown(OddError()) == "<AttributeError in OddError.__repr__>"
    assert error_message(ValueError("x")) == "x"
    assert error_message(OddError()) == "<SystemExit in OddError.__str__>"
    error = RuntimeError(Quiet())
    assert explain(error) is error
