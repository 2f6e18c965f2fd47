"""Spawned runs, which are independent: not awaited, awaited, cancelled, brought back."""

import asyncio
from typing import Any

import pytest

from relight import (
    ConflictError,
    Flow,
    RunCancelledError,
    SpawnedRun,
    flow,
    spawn,
    step,
    wait_for,
)
from relight.model import journal as j
from relight.model.run import Hold, Message, MessageKind, RunChange, Status
from relight.ports.store import Commit, Committed, Extras
from tests.flows.calls import Calls, NoStockError, finish, marking
from tests.flows.world import World, until


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_spawned_run_is_a_root_that_can_be_awaited(world: World, kind: str):
    @flow
    async def ship(sku: str) -> str:
        return f"shipped {sku}"

    @flow
    async def order_async() -> list[str]:
        spawned: SpawnedRun[str] = await spawn(ship, "a-1")
        return [spawned.id, await spawned]

    @flow
    def order_sync() -> list[str]:
        spawned: SpawnedRun[str] = spawn(ship, "a-1")
        return [spawned.id, spawned.result()]

    rl = await world.open()
    order: Flow[..., Any] = order_async if kind == "async" else order_sync
    spawned_id, found = await rl.run(order.with_id("o"))
    assert (spawned_id, found) == ("o/$spawn.ship", "shipped a-1")
    row = await world.row(spawned_id)
    assert (row.root_id, row.parent_id, row.status) == (row.id, "o", "completed")
    assert {row.id for row in (await rl.list()).runs} == {"o", spawned_id}


async def test_a_spawned_run_that_is_let_go_outlives_its_parent(world: World):
    @flow
    async def ship() -> str:
        return str(await wait_for("go"))

    @flow
    async def order() -> str:
        return str((await spawn(ship)).id)

    rl = await world.open()
    spawned_id = await rl.run(order)
    spawned = await rl.get(spawned_id)
    await world.until_status("waiting", spawned)
    rl = await world.crash_and_reopen()
    await (await rl.get(spawned_id)).signal("go", "gone")
    assert await finish(world, spawned_id) == "gone"


@pytest.mark.parametrize("how", ["live", "crash", "close", "both parked"])
async def test_a_parent_is_woken_by_the_end_of_what_it_spawned(world: World, how: str):
    calls = Calls()
    mark = marking(calls)

    @flow
    async def ship() -> str:
        return str(await wait_for("go"))

    @flow
    async def order() -> str:
        spawned = await spawn(ship.with_id("ship-1"))
        await mark("spawned")
        return str(await spawned) + str(await mark("end"))

    rl = await world.open()
    run = await rl.start(order.with_id("o"))
    await world.park(run)
    await world.park(await rl.get("ship-1"))
    if how == "crash":
        rl = await world.crash_and_reopen()
    elif how == "close":
        rl = await world.close_and_reopen()
    await (await rl.get("ship-1")).signal("go", "shipped-")
    assert await finish(world, "o") == "shipped-end"
    assert calls == ["spawned", "end"]


async def test_a_crash_between_the_spawn_and_its_take_up_loses_and_doubles_nothing(world: World):
    calls = Calls()
    gate = asyncio.Event()

    @step
    async def mark(name: str) -> str:
        if name == "spawned":
            calls("about to")
            await gate.wait()
        return calls(name)

    @flow
    async def ship() -> str:
        return str(await mark("ship"))

    @flow
    async def order() -> str:
        spawned = await spawn(ship)
        await mark("spawned")
        return str(await spawned)

    rl = await world.open(max_concurrent_runs=1)  # so that the spawned run has to wait in the store
    await rl.start(order.with_id("o"))
    await until(lambda: calls)
    assert (await world.row("o/$spawn.ship")).status == "pending"
    gate.set()
    rl = await world.crash_and_reopen(max_concurrent_runs=10)
    assert await finish(world, "o") == "ship"
    assert sorted(calls) == ["about to", "about to", "ship", "spawned"]
    assert len((await rl.list()).runs) == 2


async def test_a_spawned_run_that_fails_raises_in_its_parent_live_and_replayed(world: World):
    seen: list[str] = []

    @flow
    async def ship() -> None:
        raise NoStockError("a-1")

    @flow
    async def order() -> str:
        try:
            await (await spawn(ship))
        except NoStockError as error:
            seen.append(error.sku)
        await wait_for("go")
        return seen[-1]

    rl = await world.open()
    run = await rl.start(order.with_id("o"))
    await until(lambda: seen)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    await (await rl.get("o")).signal("go")
    assert await finish(world, "o") == "a-1"
    assert seen == ["a-1", "a-1"]


async def test_a_spawned_run_that_is_cancelled_raises_in_its_parent_live_and_replayed(world: World):
    seen: list[str] = []

    @flow
    async def ship() -> None:
        await wait_for("never")

    @flow
    async def order() -> str:
        try:
            await (await spawn(ship.with_id("s")))
        except RunCancelledError as error:
            seen.append(f"{error.run_id}: {error.reason}")
        await wait_for("go")
        return seen[-1]

    rl = await world.open()
    run = await rl.start(order.with_id("o"))
    await world.until_status("waiting", run)
    spawned = await rl.get("s")
    await world.until_status("waiting", spawned)
    await spawned.cancel("no need")
    await until(lambda: seen)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    await (await rl.get("o")).signal("go")
    assert await finish(world, "o") == "s: no need"
    assert seen == ["s: no need"] * 2


async def test_spawning_under_a_taken_id(world: World):
    seen: list[str] = []

    @flow
    async def ship(sku: str) -> str:
        return f"shipped {sku}"

    @flow
    async def order(sku: str) -> str:
        try:
            found = str(await (await spawn(ship.with_id("s"), sku)))
        except ConflictError as error:
            found = str(error)
        seen.append(found)
        await wait_for("go")
        return found

    rl = await world.open()
    assert await rl.run(ship.with_id("s"), "a-1") == "shipped a-1"
    same = await rl.start(order.with_id("same"), "a-1")
    other = await rl.start(order.with_id("other"), "b-2")
    await world.until_status("waiting", same)
    await world.until_status("waiting", other)
    rl = await world.crash_and_reopen()
    for run_id in ("same", "other"):
        await (await rl.get(run_id)).signal("go")
    assert await finish(world, "same") == "shipped a-1"
    assert "run id 's' is taken by flow 'ship'" in await finish(world, "other")
    assert len(seen) == 4


@pytest.mark.parametrize("where", ["in memory", "parked", "crashed"])
async def test_spawning_under_the_id_of_a_run_that_another_caller_started_and_is_under_way(world: World, where: str):
    ship, order = shipping()
    rl = await world.open()
    shared = await rl.start(ship.with_id("s"))
    await world.until_status("waiting", shared)
    for run_id in ("one", "two"):
        run = await rl.start(order.with_id(run_id))
        await (world.park(run) if where == "parked" else world.until_status("waiting", run))
    if where == "crashed":
        rl = await world.crash_and_reopen()
    await (await rl.get("s")).signal("go", "shipped")
    for run_id in ("one", "two"):  # at once: no time passes here
        assert await (await rl.get(run_id)).result(timeout="60s") == "shipped"


@pytest.mark.parametrize("whose", ["spawned", "somebody else's"])
@pytest.mark.parametrize("where", ["in memory", "parked", "crashed"])
async def test_a_run_that_recovery_gave_up_on_and_a_person_brought_back_is_awaited_again(
    world: World, where: str, whose: str
):
    ship, _ = shipping()
    calls = Calls()
    mark = marking(calls)

    @flow
    async def patient() -> str:
        spawned: SpawnedRun[str] = await spawn(ship.with_id("s"))
        try:
            return await spawned
        except RunCancelledError:
            await mark("cancelled")
            await wait_for("again")
            return await spawned + " after all"

    rl = await world.open()
    if whose != "spawned":
        await world.park(await rl.start(ship.with_id("s")))
    run = await rl.start(patient.with_id("o"))
    await until(lambda: exists(world, "s"))
    await world.park(await rl.get("s"))
    await give_up(world, "s")
    await until(lambda: calls)
    await rl.resume("s")
    await world.park(await rl.get("s"))
    await run.signal("again")
    await until(lambda: told_waits(world, "o", "s"))
    if where == "parked":
        await world.park(run)
    elif where == "crashed":
        rl = await world.crash_and_reopen()
    await (await rl.get("s")).signal("go", "shipped")
    assert await finish(world, "o") == "shipped after all"


async def test_a_run_is_brought_back_before_the_run_that_awaits_it_has_heard_that_it_ended(world: World):
    _, order = shipping()
    rl = await world.open()
    await world.park(await rl.start(order.with_id("o")))
    await world.park(await rl.get("s"))
    await world.close()
    rl = await world.open(drive=False)
    await give_up(world, "s")
    await rl.resume("s")
    assert not (await world.row("s")).status.terminal
    rl = await world.close_and_reopen(drive=True)
    await until(lambda: told_waits(world, "o", "s"))
    await (await rl.get("s")).signal("go", "shipped")
    assert await finish(world, "o") == "shipped"


def shipping() -> tuple[Flow[[], Any], Flow[[], Any]]:
    """A run that waits for a signal, and a run that spawns it (or finds it) under an id and waits for it."""

    @flow
    async def ship() -> str:
        return str(await wait_for("go"))

    @flow
    async def order() -> str:
        return str(await (await spawn(ship.with_id("s"))))

    return ship, order


async def give_up(world: World, run_id: str) -> None:
    """Cancel the run as recovery does if it may not resume it."""
    row = await world.row(run_id)
    change = RunChange(run_id=run_id, status=Status.CANCELLED, hold=Hold.RECOVERY, reason="too old")
    end = Message.end_of(run_id, row.epoch, row.updated_at, to=row.parent_id or "nobody")
    commit = Commit(
        root_id=run_id,
        epoch=row.epoch,
        after=await world.rl.services.store.latest_sequence(run_id),
        entries=[j.encode_event(j.RunCancelled("", "too old", row.updated_at))],
        extras=Extras(changes=[change], messages=[end]),
    )
    assert isinstance((await world.rl.services.store.commit([commit]))[0], Committed)
    world.rl.orchestrator.look_for_messages()


async def told_waits(world: World, run_id: str, awaited: str) -> bool:
    """Whether the run waits for the end of the awaited run, and has no message in its inbox about an end."""
    open_ = (await world.state(run_id)).open.values()
    told = await world.rl.services.store.inbox([run_id])
    return any((found.what, found.name) == ("run", awaited) for found in open_) and not told


async def test_joining_a_parked_run_does_not_wake_it(world: World):
    ship, order = shipping()
    rl = await world.open()
    shared = await rl.start(ship.with_id("s"))
    await world.until_status("waiting", shared)
    await world.park(shared)
    epoch = (await world.row("s")).epoch
    run = await rl.start(order)
    await world.park(run)
    assert (await world.row("s")).epoch == epoch
    await shared.signal("go", "shipped")
    assert await run.result(timeout="60s") == "shipped"


async def test_a_spawned_run_awaited_twice_and_by_two_branches(world: World):
    @flow
    async def ship() -> str:
        return str(await wait_for("go"))

    @flow
    async def order() -> list[str]:
        spawned: SpawnedRun[str] = await spawn(ship.with_id("s"))

        async def joined() -> str:
            return await spawned

        return [*await asyncio.gather(joined(), joined()), await spawned]

    rl = await world.open()
    run = await rl.start(order)
    await until(lambda: exists(world, "s"))
    await world.until_status("waiting", await rl.get("s"))
    await until(lambda: sum(one.waiting for one in rl.orchestrator.live[run.id].pending.values()) == 2)
    await (await rl.get("s")).signal("go", "x")
    assert await run.result(timeout="60s") == ["x", "x", "x"]


async def exists(world: World, run_id: str) -> bool:
    return bool(await world.rl.services.store.get_runs([run_id]))


async def test_joining_a_run_that_ends_in_that_moment(world: World, monkeypatch: pytest.MonkeyPatch):
    """The run is under way when the store is asked, and has ended when the join is posted. So it will not report its end."""
    ship, order = shipping()
    rl = await world.open()
    shared = await rl.start(ship.with_id("s"))
    await world.until_status("waiting", shared)
    store = rl.services.store
    post = store.post

    async def too_late(messages: list[Message]) -> Any:
        if messages[0].kind is MessageKind.JOIN:
            monkeypatch.undo()
            await shared.signal("go", "shipped")
            await shared.result(timeout="60s")
        return await post(messages)

    monkeypatch.setattr(store, "post", too_late, raising=False)
    assert await (await rl.start(order.with_id("o"))).result(timeout="60s") == "shipped"
