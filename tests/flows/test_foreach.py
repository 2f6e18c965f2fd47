"""foreach: per-item progress, kept while the items still match."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from relight import (
    Handle,
    PayloadError,
    Retry,
    RunFailedError,
    flow,
    foreach,
    now,
    parallel,
    sleep,
    step,
    wait_for,
)
from relight.errors import DefinitionError
from relight.model import journal as j
from tests.flows.world import World, until

# ---- results


def each_kinds(calls: list[Any]) -> dict[str, Any]:
    """The same work as each kind of function that foreach accepts."""

    @step
    async def a_step(n: int) -> int:
        calls.append(n)
        return n * 10

    @step
    def a_sync_step(n: int) -> int:
        calls.append(n)
        return n * 10

    @flow
    async def a_flow(n: int) -> int:
        return await a_step(n)

    @flow
    def a_sync_flow(n: int) -> int:
        return a_sync_step(n)  # type: ignore[no-any-return]

    async def an_async_function(n: int) -> int:
        return await a_step(n) + await a_step(0)

    def a_function(n: int) -> int:
        calls.append(n)
        return n * 10

    return {
        "step": a_step,
        "sync step": a_sync_step,
        "flow": a_flow,
        "sync flow": a_sync_flow,
        "async function": an_async_function,
        "function": a_function,
        "lambda": lambda n: a_step(n),
    }


EACH = ["step", "sync step", "flow", "sync flow", "async function", "function", "lambda"]


@pytest.mark.parametrize("concurrency", [1, 2, 10])
@pytest.mark.parametrize("kind", EACH)
async def test_results_are_in_the_order_of_the_items(world: World, kind: str, concurrency: int):
    each = each_kinds([])[kind]

    @flow
    async def all_of_them() -> list[int]:
        return await foreach([3, 1, 2], each, concurrency=concurrency)  # type: ignore[no-any-return]

    rl = await world.open()
    assert await rl.run(all_of_them) == [30, 10, 20]


@pytest.mark.parametrize("concurrency", [1, 2, 10])
@pytest.mark.parametrize("kind", EACH)
async def test_in_a_sync_flow(world: World, kind: str, concurrency: int):
    each = each_kinds([])[kind]

    @flow
    def all_of_them() -> list[int]:
        return foreach([3, 1, 2], each, concurrency=concurrency)  # type: ignore[no-any-return]

    rl = await world.open()
    assert await rl.run(all_of_them) == [30, 10, 20]


async def test_one_after_the_other_or_so_many_at_once(world: World):
    active: list[int] = []
    most: list[int] = []

    @step
    async def work(n: int) -> int:
        active.append(n)
        most.append(len(active))
        for _ in range(50):  # turns of the loop in which the others begin
            await asyncio.sleep(0)
        active.remove(n)
        return n

    @flow
    async def some(concurrency: int) -> list[int]:
        return await foreach(range(12), work, concurrency=concurrency)  # type: ignore[no-any-return]

    rl = await world.open()
    for concurrency in (1, 3, 100):
        most.clear()
        assert await rl.run(some, concurrency) == list(range(12))
        assert max(most) == min(concurrency, 12)


async def test_sync_steps_of_a_sync_flow_run_at_once(world: World):
    barrier = threading.Barrier(3, timeout=60)

    @step
    def meet(n: int) -> int:
        barrier.wait()
        return n

    @flow
    def meeting() -> list[int]:
        return foreach([1, 2, 3], meet, concurrency=3)  # type: ignore[no-any-return]

    rl = await world.open()
    assert await rl.run(meeting) == [1, 2, 3]


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_nothing_to_do(world: World, concurrency: int):
    @flow
    async def nothing() -> list[Any]:
        return await foreach([], lambda item: item, concurrency=concurrency)  # type: ignore[no-any-return]

    rl = await world.open()
    run = await rl.start(nothing)
    assert await run.result() == []
    assert await rl.items(run.id) == []


async def test_any_iterable_and_equal_items(world: World):
    calls: list[str] = []

    @step
    async def work(name: str) -> str:
        calls.append(name)
        return f"{name}{len(calls)}"

    @flow
    async def several() -> list[Any]:
        return [
            await foreach((name for name in "aab"), work),
            await foreach({"x": 1, "y": 2}, work),
            await foreach(("a", "a"), work, concurrency=2),
        ]

    rl = await world.open()
    first, second, third = await rl.run(several)
    assert first == ["a1", "a2", "b3"]
    assert second == ["x4", "y5"]
    assert sorted(third) == ["a6", "a7"]


@dataclasses.dataclass
class Parcel:
    id: int
    weight: float


class Label(msgspec.Struct):
    parcel: Parcel
    text: str


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_typed_items_and_results_live_and_replayed(world: World, concurrency: int):
    seen: list[list[Label]] = []

    @step
    async def label(parcel: Parcel) -> Label:
        return Label(parcel, f"#{parcel.id}")

    @flow
    async def labelling() -> None:
        parcels = [Parcel(1, 0.5), Parcel(2, 1.5)]
        seen.append(await foreach(parcels, label, concurrency=concurrency))
        await wait_for("go")

    rl = await world.open()
    await world.until_status("waiting", await rl.start(labelling))
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 2)
    assert seen[0] == seen[1] == [Label(Parcel(1, 0.5), "#1"), Label(Parcel(2, 1.5), "#2")]
    assert type(seen[1][0].parcel) is Parcel


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_a_thousand_items(world: World, concurrency: int):
    calls: list[int] = []

    @step
    async def work(n: int) -> int:
        calls.append(n)
        return n + 1

    @flow
    async def thousand() -> int:
        found = await foreach(range(1000), work, concurrency=concurrency)
        await wait_for("go")
        return sum(found)

    rl = await world.open(checkpoint_every=500)
    run = await rl.start(thousand.with_id("r"))
    await until(lambda: len(calls) >= 600)
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    await run.signal("go")
    assert await run.result() == sum(range(1, 1001))
    assert set(calls) == set(range(1000))
    assert len(calls) <= 1000 + concurrency  # only what was in flight
    assert len(await rl.items("r")) == 1000


async def test_restoring_costs_in_proportion_to_the_items(world: World):
    """Many finished items are restored at once. The engine does not search through all of them for each one."""

    @step
    async def work(n: int) -> int:
        return n

    @flow
    async def many() -> int:
        found = await foreach(range(6000), work, concurrency=500)
        await wait_for("go")
        return len(found)

    rl = await world.open()
    run = await rl.start(many.with_id("r"))
    await world.until_status("waiting", run)
    await world.crash()
    before = time.process_time()
    rl = await world.open()
    run = await rl.get("r")
    await run.signal("go")
    assert await run.result() == 6000
    assert time.process_time() - before < 8  # of processor time: 0.2 s; with a search through all of them 20 s and more


# ---- items that change between a crash and the resumption


class Shipping:
    """A flow that ships the `items` that there are when it runs. It hangs at one item until the test lets it go on."""

    def __init__(self, items: list[str], hang_at: str | None, concurrency: int) -> None:
        self.items = items
        self.hang_at = hang_at
        self.shipped: list[str] = []
        self.finished: list[str] = []

        @step
        async def ship(item: str) -> str:
            self.shipped.append(item)
            if item == self.hang_at:
                await asyncio.Event().wait()
            self.finished.append(item)
            return item.upper()

        @flow
        async def shipping() -> list[str]:
            return await foreach(self.items, ship, concurrency=concurrency)  # type: ignore[no-any-return]

        self.flow = shipping

    async def crash_at(self, world: World, done: int) -> None:
        """Start the run, and crash when so many items are recorded and the next one hangs."""
        rl = await world.open()
        await rl.start(self.flow.with_id("r"))
        await until(lambda: self.hang_at in self.shipped)
        await until(lambda: _items(world, done))
        await world.crash()
        self.hang_at = None
        self.shipped.clear()

    async def resume(self, world: World) -> Any:
        rl = await world.open()
        return await (await rl.get("r")).result()


async def _items(world: World, count: int) -> bool:
    return len(await world.rl.items("r")) == count


ABCDE = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("done", [0, 2, 4])
async def test_sequentially_it_goes_on_with_the_first_missing_item(world: World, done: int):
    shipping = Shipping(ABCDE, ABCDE[done], 1)
    await shipping.crash_at(world, done)
    assert await shipping.resume(world) == ["A", "B", "C", "D", "E"]
    assert shipping.shipped == ABCDE[done:]


@pytest.mark.parametrize("changed", [0, 1, 2, 3, 4])
async def test_sequentially_the_longest_prefix_that_still_matches_is_kept(
    world: World, changed: int, caplog: pytest.LogCaptureFixture
):
    shipping = Shipping(ABCDE, "d", 1)
    await shipping.crash_at(world, 3)
    shipping.items = [*ABCDE[:changed], "x", *ABCDE[changed + 1 :]]
    assert await shipping.resume(world) == [item.upper() for item in shipping.items]
    assert shipping.shipped == shipping.items[min(changed, 3) :]
    assert ("[FOREACH_CUT]" in caplog.text) == (changed < 3)
    listed = await world.rl.items("r")
    assert [(item.index, item.output) for item in listed] == [
        (n, msgspec.json.encode(item.upper())) for n, item in enumerate(shipping.items)
    ]


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_items_that_are_gone_are_no_longer_listed(world: World, concurrency: int):
    shipping = Shipping(ABCDE, "d", concurrency)
    await shipping.crash_at(world, 3 if concurrency == 1 else 4)
    shipping.items = ["a", "b"]
    assert await shipping.resume(world) == ["A", "B"]
    assert [item.index for item in await world.rl.items("r")] == [0, 1]


async def test_a_cut_is_durable_across_a_second_restart(world: World):
    """Items that were cut off do not come back when the changed item is changed back."""
    shipping = Shipping(ABCDE, "e", 1)
    await shipping.crash_at(world, 4)
    shipping.items = ["a", "x", "c", "d", "e"]
    shipping.hang_at = "c"
    rl = await world.open()
    await until(lambda: "c" in shipping.shipped)
    assert shipping.shipped == ["x", "c"]
    await world.crash()
    shipping.hang_at = None
    shipping.shipped.clear()
    shipping.items = ABCDE
    rl = await world.open()
    assert await (await rl.get("r")).result() == ["A", "B", "C", "D", "E"]
    assert shipping.shipped == ["b", "c", "d", "e"]


async def test_items_that_changed_places_have_changed(world: World):
    shipping = Shipping(ABCDE, "e", 1)
    await shipping.crash_at(world, 4)
    shipping.items = ["a", "c", "b", "d", "e"]
    assert await shipping.resume(world) == ["A", "C", "B", "D", "E"]
    assert shipping.shipped == ["c", "b", "d", "e"]


async def test_sequentially_a_list_that_grew_keeps_all_and_goes_on(world: World):
    shipping = Shipping(ABCDE, "e", 1)
    await shipping.crash_at(world, 4)
    shipping.items = [*ABCDE, "f", "g"]
    assert await shipping.resume(world) == ["A", "B", "C", "D", "E", "F", "G"]
    assert shipping.shipped == ["e", "f", "g"]


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("left", [0, 2, 4])
async def test_a_list_that_shrank(world: World, left: int, concurrency: int):
    shipping = Shipping(ABCDE, "e", concurrency)
    await shipping.crash_at(world, 4)
    shipping.items = ABCDE[:left]
    assert await shipping.resume(world) == ["A", "B", "C", "D", "E"][:left]
    assert shipping.shipped == []


@pytest.mark.parametrize("concurrency", [2, 3, 10])
async def test_concurrently_every_finished_item_is_kept_on_its_own(world: World, concurrency: int):
    shipping = Shipping(ABCDE, "b", concurrency)
    await shipping.crash_at(world, 4)
    shipping.items = ["a", "b", "x", "d", "e"]
    assert await shipping.resume(world) == ["A", "B", "X", "D", "E"]
    assert sorted(shipping.shipped) == ["b", "x"]


async def test_from_sequential_to_concurrent_and_back(world: World):
    """The journal does not have the concurrency. Changing it between two starts loses no result that is still right."""
    shipped: list[str] = []
    concurrency = 3
    hang = True

    @step
    async def ship(item: str) -> str:
        shipped.append(item)
        if hang and item == "b":
            await asyncio.Event().wait()
        return item.upper()

    @flow
    async def shipping() -> list[str]:
        return await foreach(ABCDE, ship, concurrency=concurrency)  # type: ignore[no-any-return]

    rl = await world.open()
    await rl.start(shipping.with_id("r"))
    await until(lambda: _items(world, 4))
    await world.crash()
    concurrency, hang = 1, False
    shipped.clear()
    rl = await world.open()
    assert await (await rl.get("r")).result() == ["A", "B", "C", "D", "E"]
    assert shipped == ["b", "c", "d", "e"]  # one after the other: the items after a missing one are done again


async def test_an_item_is_what_its_step_is_given(world: World):
    """A dataclass that gets a new field with a default is still the same item. Other content is another item."""
    seen: list[Any] = []
    items: list[Any] = [{"id": 1, "weight": 2}]

    @step
    async def weigh(parcel: dict[str, float]) -> float:
        seen.append(parcel)
        return parcel["weight"]

    @flow
    async def weighing() -> list[float]:
        found = await foreach(items, weigh)
        await wait_for("go")
        return found  # type: ignore[no-any-return]

    rl = await world.open()
    run = await rl.start(weighing.with_id("r"))
    await world.until_status("waiting", run)
    items[0] = {"weight": 2, "id": 1}  # the same arguments in another order
    await world.crash_and_reopen()
    await until(lambda: "r" in world.rl.orchestrator.live)
    await world.until_status("waiting", await world.rl.get("r"))
    assert len(seen) == 1
    items[0] = {"weight": 3, "id": 1}
    rl = await world.crash_and_reopen()
    await (await rl.get("r")).signal("go")
    assert await (await rl.get("r")).result() == [3]
    assert len(seen) == 2


# ---- inside an item


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_progress_inside_an_item_is_kept(world: World, concurrency: int):
    calls: list[str] = []
    gate = asyncio.Event()

    @step
    async def pack(n: int) -> str:
        calls.append(f"pack {n}")
        return f"packed {n}"

    @step
    async def ship(n: int) -> str:
        calls.append(f"ship {n}")
        if n == 1:
            await gate.wait()
        return f"shipped {n}"

    async def both(n: int) -> list[str]:
        return [await pack(n), await ship(n)]

    @flow
    async def shipping() -> list[list[str]]:
        return await foreach([0, 1, 2], both, concurrency=concurrency)  # type: ignore[no-any-return]

    rl = await world.open()
    await rl.start(shipping.with_id("r"))
    await until(lambda: "ship 1" in calls)
    await until(lambda: _items(world, 1 if concurrency == 1 else 2))
    before = list(calls)
    await world.crash()
    gate.set()
    rl = await world.open()
    assert await (await rl.get("r")).result() == [[f"packed {n}", f"shipped {n}"] for n in range(3)]
    assert calls[len(before) :] == ["ship 1"] + ([] if concurrency > 1 else ["pack 2", "ship 2"])


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_items_may_sleep_and_wait_and_the_run_is_parked(world: World, concurrency: int):
    async def slow(n: int) -> str:
        await sleep(60 * (n + 1))
        return f"{n} {await wait_for(f'signal-{n}', str)}"

    @flow
    async def slowly() -> list[str]:
        return await foreach(range(3), slow, concurrency=concurrency)  # type: ignore[no-any-return]

    rl = await world.open()
    run = await rl.start(slowly)
    for n in range(3):
        await run.signal(f"signal-{n}", f"s{n}")
    await until(lambda: _done_or_park(world, run))
    assert await run.result() == ["0 s0", "1 s1", "2 s2"]


async def _done_or_park(world: World, run: Handle[Any]) -> bool:
    """Let minutes pass, one by one. Between them every run leaves memory."""
    row = await world.row(run.id)
    if row.status == "waiting" and run.id not in world.rl.orchestrator.live:
        world.clock.advance("1m")
    elif run.id in world.rl.orchestrator.live:
        world.clock.advance("1s")
    return row.status == "completed"


async def test_nested_and_repeated(world: World):
    calls: list[str] = []
    gate = asyncio.Event()

    @step
    async def cell(place: str) -> str:
        calls.append(place)
        if place == "1.2.1":
            await gate.wait()
        return place

    async def row(name: str) -> list[str]:
        return await foreach([f"{name}.{n}" for n in range(2)], cell, concurrency=2)  # type: ignore[no-any-return]

    @flow
    async def table(name: str) -> list[list[str]]:
        return await foreach([f"{name}.{n}" for n in range(3)], row)  # type: ignore[no-any-return]

    @flow
    async def tables() -> list[Any]:
        return await foreach(["0", "1"], table)  # type: ignore[no-any-return]

    rl = await world.open()
    await rl.start(tables.with_id("r"))
    await until(lambda: "1.2.1" in calls)
    await until(lambda: _keys(world, "1.2.0"))
    await world.crash()
    before = len(calls)
    gate.set()
    rl = await world.open()
    found = await (await rl.get("r")).result()
    assert found == [[[f"{t}.{r}.{c}" for c in range(2)] for r in range(3)] for t in range(2)]
    assert calls[before:] == ["1.2.1"]


async def _keys(world: World, result: str) -> bool:
    outcomes = (await world.state("r")).outcomes.values()
    return any(outcome.kind == "item" and bytes(outcome.output) == f'"{result}"'.encode() for outcome in outcomes)


async def test_several_foreach_in_one_flow_keep_apart(world: World):
    calls: list[str] = []

    @step
    async def work(name: str) -> str:
        calls.append(name)
        return name

    @flow
    async def twice() -> list[Any]:
        first = await foreach(["a", "b"], work)
        second = await foreach(["a", "b"], work, concurrency=2)
        await wait_for("go")
        return [first, second]

    rl = await world.open()
    run = await rl.start(twice.with_id("r"))
    await world.until_status("waiting", run)
    assert {item.key for item in await rl.items("r")} == {"$foreach", "$foreach:1"}
    rl = await world.crash_and_reopen()
    await (await rl.get("r")).signal("go")
    assert await (await rl.get("r")).result() == [["a", "b"], ["a", "b"]]
    assert sorted(calls) == ["a", "a", "b", "b"]


async def test_foreach_inside_parallel_branches(world: World):
    @step
    def work(name: str) -> str:
        return name.upper()

    @flow
    def fan() -> list[Any]:
        return parallel(lambda: foreach("ab", work), lambda: foreach("cd", work, concurrency=2))

    rl = await world.open()
    assert await rl.run(fan) == [["A", "B"], ["C", "D"]]


# ---- errors


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_the_first_error_stops_the_rest(world: World, concurrency: int):
    calls: list[int] = []

    @step
    async def work(n: int) -> int:
        calls.append(n)
        if n == 2:
            raise ValueError(f"item {n}")
        return n

    @flow
    async def failing() -> str:
        try:
            await foreach(range(100), work, concurrency=concurrency)
        except ValueError as error:
            return str(error)
        return "no error"

    rl = await world.open()
    run = await rl.start(failing)
    assert await run.result() == "item 2"
    assert len(calls) <= 3 + concurrency
    assert {item.index for item in await rl.items(run.id)} >= {0, 1}


async def test_items_under_way_when_one_fails_are_finished_and_kept(world: World):
    gate = asyncio.Event()
    calls: list[int] = []

    @step
    async def work(n: int) -> int:
        calls.append(n)
        if n == 0:
            await gate.wait()
        if n == 1:
            gate.set()
            raise ValueError("one")
        return n

    @flow
    async def failing() -> None:
        await foreach(range(4), work, concurrency=2)

    rl = await world.open()
    run = await rl.start(failing)
    with pytest.raises(RunFailedError, match="one"):
        await run.result()
    assert calls == [0, 1]
    assert [item.index for item in await rl.items(run.id)] == [0]


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_retried_flow_repeats_only_the_items_that_failed(world: World, concurrency: int):
    calls: list[int] = []

    @step
    async def work(n: int) -> int:
        calls.append(n)
        if n == 1 and calls.count(1) < 3:
            raise ValueError("flaky item")
        return n

    @flow(retry=Retry(5))
    async def stubborn() -> list[int]:
        return await foreach(range(3), work, concurrency=concurrency)  # type: ignore[no-any-return]

    rl = await world.open()
    assert await rl.run(stubborn) == [0, 1, 2]
    assert calls.count(0) == 1
    assert calls.count(1) == 3
    assert calls.count(2) == 1


async def test_an_error_in_an_item_replays_as_an_error(world: World):
    seen: list[str] = []
    calls: list[int] = []

    @step
    async def work(n: int) -> int:
        calls.append(n)
        if n == 1:
            raise KeyError("one")
        return n

    @flow
    async def failing() -> None:
        try:
            await foreach(range(3), work)
        except KeyError as error:
            seen.append(repr(error))
        await wait_for("go")

    rl = await world.open()
    await world.until_status("waiting", await rl.start(failing))
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 2)
    assert seen == ["KeyError('one')"] * 2
    assert calls == [0, 1]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: foreach([1], lambda n: n, concurrency=0), r"concurrency=0"),
        (lambda: foreach([1], lambda n: n, concurrency=True), r"concurrency=True"),
        (lambda: foreach([1], lambda n: n, concurrency=1.5), r"concurrency=1.5"),  # type: ignore[call-overload]
        (lambda: foreach([1], "work"), r"each='work'"),  # type: ignore[call-overload]
    ],
)
def test_wrong_arguments_are_refused(wrong: Callable[[], Any], named: str):
    with pytest.raises(DefinitionError, match=named):
        wrong()


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_an_item_that_is_no_data_is_refused_before_anything_runs(world: World, concurrency: int):
    calls: list[Any] = []

    @step
    async def work(item: Any) -> None:
        calls.append(item)

    @flow
    async def wrong() -> None:
        await foreach([1, object()], work, concurrency=concurrency)

    rl = await world.open()
    with pytest.raises(RunFailedError) as raised:
        await rl.run(wrong)
    assert isinstance(raised.value.__cause__, PayloadError)
    assert calls == []


async def test_a_result_that_is_no_data_names_the_foreach(world: World):
    @flow
    async def wrong() -> None:
        await foreach([1, 2], lambda n: {n})

    rl = await world.open()
    run = await rl.start(wrong)
    with pytest.raises(RunFailedError, match=r"result of \$foreach"):
        await run.result()
    assert await rl.items(run.id) == []


# ---- listing


async def test_finished_items_are_listed_while_it_runs(world: World):
    gate = asyncio.Event()

    @step
    async def work(name: str) -> dict[str, str]:
        if name == "c":
            await gate.wait()
        return {"name": name}

    @flow
    async def listing() -> None:
        await foreach("abc", work, concurrency=3)

    rl = await world.open(payload_blob_threshold=11)
    run = await rl.start(listing.with_id("r"))
    await until(lambda: _items(world, 2))
    items = await rl.items("r")
    assert [(item.key, item.index, item.run_id) for item in items] == [("$foreach", 0, "r"), ("$foreach", 1, "r")]
    assert all(item.output == b"" and item.output_blob for item in items)  # over the threshold
    assert await rl.services.store.get_blob(items[1].output_blob) == b'{"name":"b"}'
    gate.set()
    await run.result()
    assert [item.index for item in await rl.items("r")] == [0, 1, 2]


async def test_items_of_a_child_run_are_listed_under_it(world: World):
    @step
    async def work(n: int) -> int:
        return n

    @flow
    async def child() -> None:
        await foreach([1, 2], work)

    @flow
    async def parent() -> None:
        await child()

    rl = await world.open()
    run = await rl.start(parent.with_id("p"))
    await run.result()
    assert await rl.items("p") == []
    assert len(await rl.items("p/child")) == 2


async def test_an_item_costs_one_commit(world: World):
    @step
    async def work(n: int) -> int:
        return n

    @flow
    async def ten() -> None:
        await foreach(range(10), work)

    rl = await world.open()
    run = await rl.start(ten)
    before = rl.services.recorder.commits
    await run.result()
    assert rl.services.recorder.commits - before <= 12
    kinds = [type(event) for event in await world.events(run.id)]
    assert kinds.count(j.ItemCompleted) == kinds.count(j.StepCompleted) == 10


async def test_values_between_items_replay(world: World):
    seen: list[list[Any]] = []

    @step
    async def work(n: int) -> int:
        return n

    @flow
    async def timed() -> None:
        async def one(n: int) -> list[Any]:
            return [await work(n), now().timestamp()]

        seen.append(await foreach(range(3), one))
        await wait_for("go")

    rl = await world.open()
    await world.until_status("waiting", await rl.start(timed))
    world.clock.advance("1h")
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 2)
    assert seen[0] == seen[1]
