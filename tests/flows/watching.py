"""Functions that look at runs that wait."""

import asyncio
from collections.abc import Sequence
from typing import Any

from relight import Handle, Status
from relight.model import journal as j
from relight.ports.store import Commit
from tests.flows.world import World


async def waits_for(world: World, run: Handle[Any], name: str) -> bool:
    """Whether the run has begun to wait for this signal."""
    events = await world.events(run.id)
    return any(isinstance(event, j.WaitStarted) and event.name == name for event in events)


async def turns(count: int = 50) -> None:
    """Let everything that is ready to happen happen."""
    for _ in range(count):
        await asyncio.sleep(0)


async def is_parked(world: World, run: Handle[Any]) -> bool:
    """Whether the run waits and has no owner."""
    row = await world.row(run.id)
    return row.status is Status.WAITING and row.owner is None


async def parks(world: World, run: Handle[Any]) -> bool:
    """Whether the run waits and has no owner. If not, let a second pass."""
    if await is_parked(world, run):
        return True
    world.clock.advance("1s")
    return False


def begins_a_generation(commits: Sequence[Commit]) -> bool:
    """Whether one of these commits begins a generation."""
    return any(one.next is not None for one in commits)


def gives_up(commits: Sequence[Commit]) -> bool:
    """Whether one of these commits says that a flow gave up on something, or has ended its generation after that."""
    events = [j.decode_event(entry) for one in commits for entry in one.entries]
    return any(isinstance(event, j.OperationCancelled | j.RunContinued) for event in events)


async def is_in_generation(world: World, run_id: str, number: int) -> bool:
    """Whether the run is in this generation."""
    return (await world.state(run_id)).generation == number


async def is_beyond(world: World, run_id: str, generation: int) -> bool:
    """Whether the run is in a later generation."""
    return (await world.state(run_id)).generation > generation
