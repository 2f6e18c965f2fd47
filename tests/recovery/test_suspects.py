"""Runs that share deaths without progress are tried apart from each other, and only the guilty run is held."""

from __future__ import annotations

import asyncio
from typing import Any

from relight import Handle, Relight, flow, step
from relight.flow.registry import REGISTRY
from relight.model.decisions import Action
from relight.model.journal import RunRecovered
from relight.model.run import Status
from relight.run import long_steps
from tests.flows.world import World, until


class Stuck:
    """Runs whose only step waits until its gate is opened. At a crash all of them are in flight."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.begun: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

        @step
        async def stand_still(name: str) -> str:
            self.begun.append(name)
            await self.gates[name].wait()
            return name

        @flow
        async def stuck(name: str) -> str:
            return await stand_still(name)

        self.flow = stuck

    async def start(self, rl: Relight, *names: str) -> None:
        for name in names:
            self.gates[name] = asyncio.Event()
            await rl.start(self.flow.with_id(name), name)
        await until(lambda: set(names) <= set(self.begun))

    async def crash(self, times: int, config: dict[str, int] | None = None) -> Relight:
        """Crash so often, each time with every run in flight that was taken up again."""
        for left in range(times, 0, -1):
            self.begun.clear()
            rl = await self.world.crash_and_reopen(recovery=config or {})
            if left > 1:
                await until(lambda: len(self.begun) == len(self.gates))
        return rl

    async def waiting(self) -> list[str]:
        rows = [await self.world.row(name) for name in self.gates]
        return [row.id for row in rows if row.status is Status.PENDING and row.owner is None]


async def test_half_of_the_suspects_wait_and_say_so(world: World):
    stuck = Stuck(world)
    await stuck.start(await world.open(), "a", "b", "c", "d")
    rl = await stuck.crash(3)
    await until(lambda: len(stuck.begun) == 2)
    waiting = await until(stuck.waiting)
    assert len(waiting) == 2
    assert set(waiting) | set(stuck.begun) == {"a", "b", "c", "d"}
    explained = await rl.explain(waiting[0])
    assert "suspected, tried alone next" in explained.sentence
    plan = {one.run_id: one for one in await rl.plan()}
    assert plan[waiting[0]].action is Action.LEAVE
    assert "suspected, tried alone next" in plan[waiting[0]].reason
    for name in stuck.begun:  # these make progress: so the others are tried now, long before they are due
        stuck.gates[name].set()
    await until(lambda: len(stuck.begun) == 3)
    assert await stuck.waiting() == [name for name in waiting if name not in stuck.begun]
    for gate in stuck.gates.values():
        gate.set()
    for name in stuck.gates:
        assert await (await rl.get(name)).result(timeout="60s") == name


async def test_a_suspect_that_is_long_and_innocent_passes_and_the_next_is_tried_beside_it(world: World):
    stuck = Stuck(world)
    await stuck.start(await world.open(), "a", "b")
    rl = await stuck.crash(3)
    await until(lambda: len(stuck.begun) == 1)
    (waiting,) = await until(stuck.waiting)
    (first,) = stuck.begun
    world.clock.advance(300)  # this process has lived longer than the last one
    await until(lambda: len(stuck.begun) == 2)
    assert first in rl.orchestrator.live
    passed = (await world.state(first)).crashes
    assert (passed.count, passed.alone, passed.tried_with) == (3, 0, 0)
    tried = (await world.state(waiting)).crashes
    assert (tried.count, tried.tried_with) == (3, 1)
    # A death of the process counts against the run that is tried alone now.
    stuck.begun.clear()
    rl = await world.crash_and_reopen()
    await until(lambda: len(stuck.begun) == 1)
    await until(stuck.waiting)
    assert (await world.state(first)).crashes.alone == 0
    assert (await world.state(waiting)).crashes.alone == 1
    for gate in stuck.gates.values():
        gate.set()
    world.clock.advance(300)
    for name in stuck.gates:
        assert await (await rl.get(name)).result(timeout="60s") == name


async def test_a_long_step_of_a_suspect_is_no_progress(world: World):
    """Once, its announcement after a second counted as progress. The next suspect was tried beside it, and one death counted as a
    death alone for both."""
    stuck = Stuck(world)
    await stuck.start(await world.open(), "a", "b")
    rl = await stuck.crash(3)
    await until(lambda: len(stuck.begun) == 1)
    (waiting,) = await until(stuck.waiting)
    (first,) = stuck.begun
    run = rl.orchestrator.live[first]
    before = run.writer.sequence
    world.clock.advance(long_steps.LONG_SECONDS + 0.1)
    await until(lambda: run.writer.sequence > before)
    assert rl.orchestrator.trials.count() == 1
    world.clock.advance(300)
    await until(lambda: len(stuck.begun) == 2)
    await run.writer.committed()
    passed, tried = (await world.state(first)).crashes, (await world.state(waiting)).crashes
    assert (passed.tried_with, tried.tried_with) == (0, 1)
    stuck.begun.clear()
    await world.crash_and_reopen()
    await until(lambda: stuck.begun)
    assert [(await world.state(name)).crashes.alone for name in (first, waiting)] == [0, 1]


async def test_innocent_runs_go_on_beside_a_trial_and_a_process_that_dies_in_it_costs_the_waiting_ones_nothing(
    world: World,
):
    stuck = Stuck(world)
    await stuck.start(await world.open(), "a", "b")
    rl = await stuck.crash(3)
    (waiting,) = await until(stuck.waiting)
    await stuck.start(rl, "fresh")
    before = (await world.state(waiting)).crashes
    for _ in range(2):
        stuck.begun.clear()
        await world.crash_and_reopen()
        await until(lambda: "fresh" in stuck.begun)
    assert (await world.state(waiting)).crashes == before
    assert (await world.state("fresh")).crashes.count == 2


async def test_a_run_is_held_for_deaths_in_which_it_was_the_only_suspect(world: World):
    """Two runs share three deaths. Then each is tried alone, and the run that dies alone three times is held."""
    stuck = Stuck(world)
    await stuck.start(await world.open(), "a", "b")
    await stuck.crash(3, {"max_attempts": 3})
    (waiting,) = await until(stuck.waiting)
    (guilty,) = set(stuck.gates) - {waiting}
    for _ in range(3):
        await until(lambda: guilty in stuck.begun)
        stuck.begun.clear()
        rl = await world.crash_and_reopen(recovery={"max_attempts": 3})
    row = await world.until_status("paused", await rl.get(guilty))
    assert row.reason.startswith(
        "its process died 6 times in a row without progress of this run, 3 of them while it was the only"
    )
    stuck.gates[waiting].set()
    world.clock.advance(300)
    assert await (await rl.get(waiting)).result(timeout="60s") == waiting


async def test_a_run_that_a_person_resumes_begins_to_count_anew(world: World):
    stuck = Stuck(world)
    await stuck.start(await world.open(recovery={"max_attempts": 2}), "a")
    rl = await stuck.crash(2, {"max_attempts": 2})
    run: Handle[Any] = await rl.get("a")
    await world.until_status("paused", run)
    await run.resume()
    await until(lambda: len(stuck.begun) == 1)
    await until(lambda: _counts(world, "a", 0))
    stuck.begun.clear()
    rl = await world.crash_and_reopen(recovery={"max_attempts": 2})
    await until(lambda: len(stuck.begun) == 1)
    (recovered,) = [event for event in (await world.events("a"))[-1:] if isinstance(event, RunRecovered)]
    assert recovered.alone
    stuck.gates["a"].set()
    assert await (await rl.get("a")).result(timeout="60s") == "a"
    assert REGISTRY.find("stuck") is not None


async def _counts(world: World, run_id: str, crashes: int) -> bool:
    return (await world.state(run_id)).crashes.count == crashes


async def test_a_death_is_no_run_s_alone_while_others_of_that_owner_are_still_to_be_looked_at(world: World):
    """Recovery takes runs up in several passes. The first pass does not have all of them."""
    stuck = Stuck(world)
    await stuck.start(await world.open(), "a", "b")
    await stuck.crash(1, {"max_startup_recovery": 1})
    await until(lambda: len(stuck.begun) == 2)
    for name in ("a", "b"):
        crashes = (await world.state(name)).crashes
        assert (crashes.count, crashes.alone) == (1, 0)
