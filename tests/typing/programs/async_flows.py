# pyright: strict
"""User code with async flows: everything has its real type, for both checkers, and when it runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, assert_type

from relight import (
    Flow,
    Handle,
    Relight,
    Retry,
    SpawnedRun,
    Status,
    Step,
    continue_as,
    flow,
    foreach,
    sleep,
    spawn,
    step,
    wait_for,
)


@dataclass
class Order:
    name: str
    cents: int


@dataclass
class Receipt:
    order: str


@step
def price(order: Order, discount: int = 0) -> int:
    return order.cents - discount


@step
async def charge(order: Order, *, cents: int) -> Receipt:
    return Receipt(f"{order.name}: {cents}")


@step(retry=Retry(attempts=2), timeout="10s")
def pack(name: str) -> bytes:
    return name.encode()


@step(name="send", on_crash="fail")
async def ship(parcel: bytes) -> str:
    return parcel.decode()


async def not_a_step(name: str) -> int:
    return len(await pack(name))


@flow
async def checkout(order: Order, coupon: str | None = None) -> Receipt:
    cents = await price(order, discount=5 if coupon else 0)
    assert_type(cents, int)
    receipt = await charge(order, cents=cents)
    assert_type(receipt, Receipt)
    return receipt


@flow(name="counting", timeout="1h")
def count(words: list[str]) -> int:
    return len(words)


@flow
async def everything(order: Order) -> str:
    assert_type(await sleep("1ms"), None)

    decision = await wait_for("decision", bool)
    assert_type(decision, bool)
    parts = await wait_for("parts", list[str], timeout="1d")
    assert_type(parts, list[str])
    comment = await wait_for("comment", str, timeout="1ms", default=None)
    assert_type(comment, str | None)
    anything = await wait_for("anything")
    assert_type(anything, Any)

    assert_type(await foreach(parts, pack), list[bytes])
    assert_type(await foreach([b"a", b"b"], ship, concurrency=2), list[str])
    assert_type(await foreach([order], checkout), list[Receipt])
    assert_type(await foreach(parts, not_a_step), list[int])
    assert_type(await foreach(parts, len), list[int])

    child = await checkout(order, "spring")
    assert_type(child, Receipt)
    words = await count(parts)
    assert_type(words, int)

    spawned = await spawn(checkout, order, coupon="spring")
    assert_type(spawned, SpawnedRun[Receipt])
    assert_type(await spawned, Receipt)
    named = await spawn(count.with_id("counted"), words=parts)
    assert_type(named, SpawnedRun[int])
    assert_type(await named, int)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(charge(order, cents=1))
    assert_type(task.result(), Receipt)
    again, shipped, packed = await asyncio.gather(charge(order, cents=2), ship(b"x"), pack("x"))
    assert_type(again, Receipt)
    assert_type(shipped, str)
    assert isinstance(packed, bytes)  # mypy says `bytes | Any`
    return f"{decision} {comment} {anything} {words} {child.order}"


@flow
async def count_down(n: int) -> None:
    if n > 0:
        continue_as(n - 1)  # without `return`: mypy accepts no returned value in a `-> None` flow


@flow
async def count_up(n: int) -> int:
    if n < 3:
        return continue_as(n + 1)
    return n


def takes_definitions(one: Flow[[Order], Any], other: Step[[str], bytes]) -> str:
    return f"{one.name} {other.name}"


async def main() -> None:
    order = Order("tea", 300)
    async with Relight("memory:") as rl:
        run = await rl.start(everything.with_id("order-1"), order)
        assert_type(run, Handle[str])
        await run.signal("decision", True)
        await run.signal("parts", ["lid", "pot"])
        await run.signal("anything", 7)
        result = await run.result(timeout="1m")
        assert_type(result, str)
        print(result)

        receipt = await rl.run(checkout, order, coupon=None)
        assert_type(receipt, Receipt)
        assert_type(await rl.run(count, ["a", "b"]), int)
        assert_type(await (await rl.start(count.with_id(None), words=["a"])).result(), int)

        await rl.run(count_down, 2)
        assert_type(await rl.start(count_down, 2), Handle[None])
        assert_type(await rl.run(count_up, 1), int)

        by_name = await rl.start("checkout", order, id="by-name")
        assert_type(by_name, Handle[Any])
        assert_type(await rl.get("by-name"), Handle[Any])
        assert_type(await by_name.status(), Status)
        await by_name.result()
    print(takes_definitions(everything, pack))
    print(await charge(order, cents=1))  # outside a run: a plain function


if __name__ == "__main__":
    asyncio.run(main())
