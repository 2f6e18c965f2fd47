"""State that branches share. The order in which they use it decides what the flow asks for next, live and on replay."""

import asyncio
from typing import Any

import pytest

from relight import flow, parallel, step, wait_for
from tests.flows.ways import Gate, Ways, replay_to_the_end, two_signals
from tests.flows.world import World, until

CRASH = pytest.mark.parametrize("crash", [True, False], ids=["killed", "parked"])
ORDERS = pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)], ids=str)


class Shop:
    """Steps whose bodies end when the test lets them, and a step whose argument is the order in which the flow saw them."""

    def __init__(self, count: int = 4) -> None:
        self.gates = [Gate() for _ in range(count)]
        self.ways = Ways()
        self.told: list[str] = []

        @step(name="work")
        async def work(n: int) -> int:
            await self.gates[n].pass_by()
            return n

        @step(name="tell")
        async def tell(what: str) -> str:
            self.told.append(what)
            return what

        self.work, self.tell = work, tell

    async def open(self, order: tuple[int, ...]) -> None:
        """Let the steps end one after the other, each when the flow has seen the one before."""
        for count, n in enumerate(order, start=1):
            await self.gates[n].open()
            await until(lambda count=count: len(self.ways[0]) >= count)

    async def open_at_once(self) -> None:
        await until(lambda: all(gate.entered for gate in self.gates))
        for gate in self.gates:
            await gate.open()


@CRASH
@ORDERS
async def test_a_list_that_branches_append_to(world: World, crash: bool, order: tuple[int, ...]):
    shop = Shop()

    @flow
    async def listing() -> str:
        way, seen = shop.ways.begin(), list[int]()

        async def branch(n: int) -> None:
            seen.append(await shop.work(n))
            way.append(str(seen))
            await shop.tell(f"{n} after {seen[:-1]}")

        await asyncio.gather(*(branch(n) for n in range(4)))
        await two_signals()
        return str(seen)

    rl = await world.open()
    run = await rl.start(listing)
    await shop.open(order)
    assert await replay_to_the_end(world, run, crash) == str(list(order))
    shop.ways.check()
    assert len(shop.told) == 4


@CRASH
async def test_a_list_that_branches_append_to_in_one_commit(world: World, crash: bool):
    shop = Shop(8)

    @flow
    async def listing() -> str:
        way, seen = shop.ways.begin(), list[int]()

        async def branch(n: int) -> None:
            seen.append(await shop.work(n))
            way.append(str(n))
            await shop.tell(f"{n} after {seen}")

        await asyncio.gather(*(branch(n) for n in range(8)))
        await two_signals()
        return str(seen)

    rl = await world.open()
    run = await rl.start(listing)
    await shop.open_at_once()
    found = await replay_to_the_end(world, run, crash)
    assert shop.ways.check() == found[1:-1].split(", ")
    assert len(shop.told) == 8


@CRASH
@ORDERS
async def test_a_queue_between_branches(world: World, crash: bool, order: tuple[int, ...]):
    shop = Shop()

    @flow
    async def queueing() -> list[str]:
        way = shop.ways.begin()
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

        async def produce(n: int) -> None:
            await queue.put(await shop.work(n))
            way.append(f"put {n}")

        async def consume() -> list[str]:
            return [await shop.tell(f"got {await queue.get()}") for _ in range(4)]

        async with asyncio.TaskGroup() as group:
            consumer = group.create_task(consume())
            for n in range(4):
                group.create_task(produce(n))
        await two_signals()
        return consumer.result()

    rl = await world.open()
    run = await rl.start(queueing)
    await shop.open(order)
    assert await replay_to_the_end(world, run, crash) == [f"got {n}" for n in order]
    shop.ways.check()
    assert shop.told == [f"got {n}" for n in order]


@CRASH
@pytest.mark.parametrize("kind", ["lock", "semaphore", "bounded", "condition"])
@ORDERS
async def test_what_admits_one_branch_at_a_time(world: World, crash: bool, kind: str, order: tuple[int, ...]):
    """Branches come to the lock in the order in which their first steps end, and enter in that order."""
    shop, inside = Shop(), Gate()

    @step
    async def enter(n: int, number: int) -> int:
        await inside.pass_by()
        return n

    @flow
    async def guarded() -> list[int]:
        way, entered = shop.ways.begin(), list[int]()
        makers: dict[str, Any] = {
            "lock": asyncio.Lock,
            "semaphore": asyncio.Semaphore,
            "bounded": asyncio.BoundedSemaphore,
            "condition": asyncio.Condition,
        }
        guard = makers[kind]()

        async def branch(n: int) -> None:
            await shop.work(n)
            way.append(f"came {n}")
            async with guard:
                entered.append(await enter(n, len(entered)))
                way.append(f"entered {n}")

        await asyncio.gather(*(branch(n) for n in range(4)))
        await two_signals()
        return entered

    rl = await world.open()
    run = await rl.start(guarded)
    await shop.open(order)
    await inside.open()
    assert await replay_to_the_end(world, run, crash) == list(order)
    assert shop.ways.check()[:4] == [f"came {n}" for n in order]


@CRASH
async def test_a_counter_and_its_numbers_in_arguments(world: World, crash: bool):
    shop = Shop(6)

    @flow
    async def counting() -> list[int]:
        way, count, given = shop.ways.begin(), 0, dict[int, int]()

        async def branch(n: int) -> None:
            nonlocal count
            await shop.work(n)
            count += 1
            given[n] = count
            way.append(f"{n} is {count}")
            await shop.tell(f"{n} is {count}")

        async with asyncio.TaskGroup() as group:
            for n in range(6):
                group.create_task(branch(n))
        await two_signals()
        return [given[n] for n in range(6)]

    rl = await world.open()
    run = await rl.start(counting)
    await shop.open((4, 0))
    await shop.open_at_once()
    found = await replay_to_the_end(world, run, crash)
    assert (found[4], found[0]) == (1, 2)
    assert sorted(shop.told) == sorted(f"{n} is {number}" for n, number in enumerate(found))
    shop.ways.check()


async def test_killed_in_the_middle_branches_go_on_with_what_they_shared(world: World):
    """Two of four branches have used the list when the process dies. The others find it as it was."""
    shop = Shop()

    @flow
    async def listing() -> str:
        way, seen = shop.ways.begin(), list[int]()

        async def branch(n: int) -> None:
            seen.append(await shop.work(n))
            way.append(await shop.tell(f"{n} after {seen[:-1]}"))

        await asyncio.gather(*(branch(n) for n in range(4)))
        await two_signals()
        return str(seen)

    rl = await world.open()
    run = await rl.start(listing)
    await shop.open((3, 1))
    await until(lambda: len(shop.told) == 2)
    rl = await world.crash_and_reopen()
    for n in (2, 0):
        await shop.gates[n].open(after=2)
        await until(lambda n=n: any(what.startswith(str(n)) for what in shop.told))
    assert await replay_to_the_end(world, await rl.get(run.id)) == "[3, 1, 2, 0]"
    assert shop.told == ["3 after []", "1 after [3]", "2 after [3, 1]", "0 after [3, 1, 2]"]
    assert shop.ways.check() == shop.told


async def test_branches_of_parallel_share_a_list_in_the_same_order_on_replay(world: World):
    ways, told = Ways(), list[str]()

    @step
    def work(n: int) -> int:
        return n

    @step
    def tell(what: str) -> None:
        told.append(what)

    @flow
    def listing() -> list[int]:
        way, seen = ways.begin(), list[int]()

        def branch(n: int) -> None:
            seen.append(work(n))
            way.append(str(n))
            tell(f"{n} after {seen[:-1]}")

        parallel(*(lambda n=n: branch(n) for n in range(6)))  # type: ignore[misc]
        wait_for("go")
        wait_for("go")
        return seen

    rl = await world.open()
    run = await rl.start(listing)
    found = await replay_to_the_end(world, run)
    assert ways.check(at_least=3) == [str(n) for n in found]
    assert len(told) == 6
