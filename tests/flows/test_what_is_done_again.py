"""What docs/how-to/changing-code.md says of committed steps when the code changes: which are done again, and which not."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from relight import Flow, NonDeterminismError, Relight, Retry, Step, flow, foreach, step, wait_for
from relight.backends.memory import MemoryStore
from relight.clock import SYSTEM_CLOCK
from tests.flows.world import until

ran: list[int] = []


@pytest.fixture(autouse=True)
def nothing_has_run():
    ran.clear()


def work(plus: int) -> Step[[int], int]:
    """A step of one name; its code is another for each `plus`."""
    if plus:

        @step(name="work")
        async def changed(n: int) -> int:
            ran.append(n)
            return n + 100

        return changed

    @step(name="work")
    async def unchanged(n: int) -> int:
        ran.append(n)
        return n

    return unchanged


async def before_and_after(
    before: Flow[[], Any], after: Flow[[], Any], policy: Literal["warn", "rerun", "fail"] = "warn"
) -> Any:
    """What a run gives that waits for "go" while its flow's code is replaced. `ran` has what was executed after that."""
    store = MemoryStore(clock=SYSTEM_CLOCK)
    async with Relight(store=store, flows=[before]) as rl:
        run = await rl.start(before.with_id("r"))

        async def is_waiting() -> bool:
            return await run.status() == "waiting"

        await until(is_waiting)
    ran.clear()
    async with Relight(store=store, flows=[after], recovery={"version_mismatch": policy}) as rl:
        again = await rl.get("r")
        await again.signal("go")
        return await again.result(timeout="60s")


def over(items: list[int], concurrency: int) -> Flow[[], list[int]]:
    each = work(0)

    @flow(name="items")
    async def over_items() -> list[int]:
        found = await foreach(items, each, concurrency=concurrency)
        await wait_for("go")
        return found

    return over_items


@pytest.mark.parametrize("policy", ["warn", "fail", "rerun"])
@pytest.mark.parametrize(
    ("concurrency", "items", "again"),
    [
        (1, [1, 9, 3], [9, 3]),  # 3 is unchanged, and came after the changed one
        (1, [1, 3], [3]),
        (3, [1, 9, 3], [9]),
        (3, [0, 1, 2, 3], [0, 1, 2, 3]),  # all have moved
    ],
)
async def test_items_of_a_changed_foreach(
    concurrency: int, items: list[int], again: list[int], policy: Literal["warn", "rerun", "fail"]
):
    assert await before_and_after(over([1, 2, 3], concurrency), over(items, concurrency), policy) == items
    assert sorted(ran) == sorted(again)


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_items_appended_behind_what_the_run_has_recorded_since(concurrency: int):
    with pytest.raises(NonDeterminismError, match=r"foreach\[3@"):
        await before_and_after(over([1, 2, 3], concurrency), over([1, 2, 3, 4], concurrency))
    assert ran == []


def calling(plus: int, argument: int) -> Flow[[], int]:
    called = work(plus)

    @flow(name="calling")
    async def calls() -> int:
        found = await called(argument)
        await wait_for("go")
        return found

    return calls


async def test_changed_code_and_arguments_together():
    assert await before_and_after(calling(0, 1), calling(1, 2), "warn") == 1  # what was recorded
    assert ran == []
    assert await before_and_after(calling(0, 1), calling(1, 2), "rerun") == 102
    assert ran == [2]


async def test_changed_arguments_alone():
    for policy in ("warn", "fail"):
        with pytest.raises(NonDeterminismError, match="argument 'n' changed"):
            await before_and_after(calling(0, 1), calling(0, 2), policy)
    assert ran == []


async def test_another_attempt_of_a_flow_with_other_arguments():
    attempts: list[int] = []
    called = work(0)

    @flow(retry=Retry(attempts=2, delay="1ms"))
    async def retried() -> int:
        attempts.append(1)
        found = await called(len(attempts))
        if len(attempts) == 1:
            raise OSError("once more")
        return found

    async with Relight("memory:", flows=[retried]) as rl:
        assert await asyncio.wait_for(rl.run(retried), 60) == 2
    assert ran == [1, 2]
