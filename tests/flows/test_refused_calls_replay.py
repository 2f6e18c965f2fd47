"""A flow may catch the error of a call that Relight refuses. If the run goes on after that, it must replay the same way."""

from __future__ import annotations

import pytest

from relight import ConflictError, PayloadError, Relight, flow, spawn, step, wait_for
from relight.backends.memory import MemoryStore
from relight.clock import SYSTEM_CLOCK
from tests.flows.world import until


@pytest.mark.parametrize("how", ["child", "spawn", "conflict", "step"])
async def test_a_refusal_that_was_caught_is_refused_again(how):
    store = MemoryStore(clock=SYSTEM_CLOCK)

    @step
    async def before_and_after(number: int) -> int:
        return number

    @flow
    async def numbered(number: int) -> int:
        return number

    @flow
    async def careless(how: str) -> str:
        await before_and_after(1)
        seen = "nothing"
        try:
            if how == "child":
                await numbered("one")  # type: ignore[arg-type] # that is the point
            elif how == "spawn":
                await spawn(numbered, "one")  # type: ignore[arg-type] # that is the point
            elif how == "conflict":
                await spawn(numbered.with_id("taken"), 5)
            else:
                await before_and_after(float("nan"))  # type: ignore[arg-type] # the same
        except (PayloadError, ConflictError) as error:
            seen = type(error).__name__
        await before_and_after(2)
        await wait_for("end")
        return seen

    async with Relight(store=store) as rl:
        await rl.run(numbered.with_id("taken"), 4)
        run = await rl.start(careless.with_id("r"), how)

        async def waiting() -> bool:
            return await run.status() == "waiting"

        await until(waiting)
    async with Relight(store=store) as rl:
        run = await rl.get("r")
        await run.signal("end")
        expected = "ConflictError" if how == "conflict" else "PayloadError"
        assert await run.result(timeout="60s") == expected
