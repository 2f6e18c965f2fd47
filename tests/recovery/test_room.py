"""Recovery and the waker fill the same room in memory: neither starves, neither waits for room inside a round, and both together
fill no more than there is."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from relight import Relight, continue_as, flow, sleep, step
from relight.execution import idle
from relight.orchestrator import waking
from tests.flows.world import World, until


@pytest.fixture(autouse=True)
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is passed over is found in the end, by a poll: here it comes too late."""
    monkeypatch.setattr(waking, "CHECK_SECONDS", 3600.0)
    monkeypatch.setattr(idle, "CHECK_SECONDS", 3600.0)


async def sleepers(world: World, count: int) -> None:
    """Runs that are asleep, and whose process has died."""

    @flow
    async def soon() -> str:
        await sleep("500ms")  # for less than park_after: such a run stays in memory
        return "woken"

    rl = await world.open()
    for n in range(count):
        await rl.start(soon.with_id(f"r{n}"))
    await rl.idle()
    await world.crash()


def recovery_of(rl: Relight) -> Any:
    assert rl._recovery is not None
    return rl._recovery


# ---- no round waits for room


@pytest.mark.parametrize("rooms", [1, 2, 3])
async def test_an_engine_whose_room_recovery_has_filled_is_idle(world: World, rooms: int):
    await sleepers(world, 2)
    rl = await world.open(max_concurrent_runs=rooms)
    async with asyncio.timeout(60):
        await rl.idle()
    assert len(rl.orchestrator.live) == min(rooms, 2)
    assert recovery_of(rl).wants_room == (rooms < 2)
    assert recovery_of(rl).caught_up.is_set() == (rooms >= 2)
    for _ in range(2):
        world.clock.advance("500ms")
        async with asyncio.timeout(60):
            await rl.idle()
    for n in range(2):
        assert await (await rl.get(f"r{n}")).status() == "completed"
    assert recovery_of(rl).caught_up.is_set()


@pytest.mark.parametrize("rooms", [1, 2])
async def test_time_passes_although_orphans_wait_for_room(world: World, rooms: int):
    await sleepers(world, 3)
    rl = await world.open(max_concurrent_runs=rooms)
    async with world.clock.advancing(rl):
        for n in range(3):
            assert await (await rl.get(f"r{n}")).result(timeout="60s") == "woken"


async def test_a_round_that_breaks_while_orphans_wait_for_room_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    await sleepers(world, 3)
    rl = await world.open(max_concurrent_runs=1)
    await rl.idle()
    recovery = recovery_of(rl)
    assert recovery.wants_room
    recover = recovery._recover

    async def breaks(*args: Any) -> Any:
        monkeypatch.setattr(recovery, "_recover", recover)
        raise RuntimeError("a bug")

    monkeypatch.setattr(recovery, "_recover", breaks)
    async with world.clock.advancing(rl):
        for n in range(3):
            assert await (await rl.get(f"r{n}")).result(timeout="60s") == "woken"


async def test_room_that_becomes_free_while_a_round_comes_to_its_end_is_not_overlooked(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    turns = Turns()
    rl = await world.open()
    for n in range(3):
        await rl.start(turns.flow.with_id(f"r{n}"), f"r{n}")
    await until(lambda: len(turns.came) == 3)
    await world.crash()
    turns.came.clear()
    rl = await world.open(max_concurrent_runs=1)
    recovery = recovery_of(rl)
    await until(lambda: turns.came and recovery.wants_room)
    recover = recovery._recover
    monkeypatch.setattr(rl.orchestrator, "look_for_held", lambda: None)  # or the waker looks, and offers the room
    late_once: list[bool] = []

    async def late(*args: Any) -> Any:
        """The run that it has taken up is over before the round is."""
        found = await recover(*args)
        if recovery.wants_room and not late_once:
            late_once.append(True)
            recovery.wants_room = False  # as in the first round
            await turns.go(2)
            await until(lambda: not rl.orchestrator.live)
        return found

    monkeypatch.setattr(recovery, "_recover", late)
    turns.gates[turns.came[0]].set()
    await until(lambda: late_once)
    await turns.go(3)
    for n in range(3):
        await (await rl.get(f"r{n}")).result(timeout="60s")


# ---- who comes first


class Turns:
    """Runs whose step waits until the test lets it go, one by one; in which order they came into memory."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

        @step
        async def stay(name: str) -> None:
            self.came.append(name)
            gate = self.gates[name] = asyncio.Event()
            await gate.wait()

        @flow
        async def turn(name: str) -> None:
            await stay(name)

        self.flow = turn

    async def go(self, count: int) -> None:
        """Let the next ones come and go, one after the other."""
        for n in range(count):
            await until(lambda n=n: len(self.came) > n)
            self.gates[self.came[n]].set()


@pytest.mark.parametrize("slow", ["orphans", "due"])
async def test_orphans_and_due_runs_take_turns(world: World, slow: str):
    """Whichever of the two is faster to find its runs."""
    turns = Turns()
    rl = await world.open()
    for n in range(6):
        await rl.start(turns.flow.with_id(f"orphan-{n}"), f"orphan-{n}")
    await until(lambda: len(turns.came) == 6)
    await world.crash()
    turns.came.clear()
    client = await world.open(drive=False)
    for n in range(6):
        await client.start(turns.flow.with_id(f"due-{n}"), f"due-{n}")
    world.slow["owners" if slow == "orphans" else "next_due"] = 300
    rl = await world.open(max_concurrent_runs=1)
    await turns.go(12)
    kinds = [name.split("-")[0] for name in turns.came]
    # Which is found first depends on who began, and how many are left at the end. As long as there are both, neither waits
    # until the other has none left: they alternate, but for a look that comes late on a busy machine.
    both = kinds[max(kinds.index("orphan"), kinds.index("due")) :]
    both = both[: 2 * min(both.count("orphan"), both.count("due"))]
    assert all(len(list(row)) <= 3 for _, row in itertools.groupby(both)), kinds
    for n in range(6):
        for kind in ("orphan", "due"):
            await (await rl.get(f"{kind}-{n}")).result(timeout="60s")


async def test_a_run_of_many_generations_makes_room_for_an_orphan(world: World):
    recovered = asyncio.Event()

    @step
    async def beat() -> bool:
        await asyncio.sleep(0)
        return recovered.is_set()

    @flow
    async def endless(n: int) -> int:
        if await beat():
            return n
        return continue_as(n + 1)  # type: ignore[no-any-return]

    @flow
    async def orphan() -> str:
        await sleep("1h")
        recovered.set()
        return "recovered"

    rl = await world.open()
    await rl.start(orphan.with_id("orphan"))
    await rl.idle()
    await world.crash()
    world.clock.advance("1h")
    world.slow["owners"] = 300  # so that the other one is in memory first
    rl = await world.open(max_concurrent_runs=1)
    run = await rl.start(endless.with_id("endless"), 0)
    assert await (await rl.get("orphan")).result(timeout="60s") == "recovered"
    await run.result(timeout="60s")


async def test_a_death_is_no_run_s_alone_if_others_of_that_owner_had_room_before_it(world: World):
    turns = Turns()
    rl = await world.open()
    for n in range(2):
        await rl.start(turns.flow.with_id(f"r{n}"), f"r{n}")
    await until(lambda: len(turns.came) == 2)
    await world.crash()
    turns.came.clear()
    rl = await world.open(max_concurrent_runs=1)
    await turns.go(2)
    for n in range(2):
        await (await rl.get(f"r{n}")).result(timeout="60s")
        (recovered,) = [event for event in await world.events(f"r{n}") if type(event).__name__ == "RunRecovered"]
        assert not recovered.alone  # type: ignore[union-attr]


# ---- how many there are


@pytest.mark.parametrize("kind", ["orphan", "due", "held"])
async def test_room_that_is_filled_while_others_are_looked_for_is_filled_once(tmp_path: Path, kind: str):
    """A run is started here after the others were counted, and before they are in memory."""
    world, turns = World("memory", tmp_path), Turns()
    store, opened, begun = world._memory, asyncio.Event(), list[Any]()
    if kind == "orphan":
        rl = await world.open()
        await rl.start(turns.flow.with_id("found"), "found")
        await until(lambda: turns.came)
        await world.crash()
        turns.came.clear()
    else:
        client = await world.open(drive=False)
        await client.start(turns.flow.with_id("found"), "found")
        if kind == "held":
            stranger = await world.open(flows=[])
            await world.until_status("paused", await client.get("found"))
            await world.close(stranger)
    name = {"orphan": "list_active_roots", "due": "claim_due", "held": "list_held"}[kind]
    real = getattr(store, name)

    async def meanwhile(*args: Any) -> Any:
        await opened.wait()
        rows = await real(*args)
        if [row for row in rows if row.id == "found"] and not begun:
            begun.append("begun")
            await world.rl.start(turns.flow.with_id("started"), "started")
        return rows

    setattr(store, name, meanwhile)
    rl = await world.open(max_concurrent_runs=1)
    memory = rl.orchestrator.memory
    most, enter = 0, memory.enter

    def entered(run: Any) -> None:
        nonlocal most
        enter(run)
        most = max(most, len(memory.live))

    memory.enter = entered  # type: ignore[method-assign]
    opened.set()
    await turns.go(2)
    for run_id in ("found", "started"):
        await (await rl.get(run_id)).result(timeout="60s")
    assert begun
    assert most == 1
    await world.end()
