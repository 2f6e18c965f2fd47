"""Looking at runs that wait."""

import asyncio

from relight import Handle, Status
from relight.model import journal as j
from tests.flows.world import World


async def waits_for(world: World, run: Handle, name: str) -> bool:
    """Whether the run has begun to wait for this signal."""
    events = await world.events(run.id)
    return any(isinstance(event, j.WaitStarted) and event.name == name for event in events)


async def turns(count: int = 50) -> None:
    """Let everything that is ready to happen happen."""
    for _ in range(count):
        await asyncio.sleep(0)


async def is_parked(world: World, run: Handle) -> bool:
    """Whether it waits, and is nobody's."""
    row = await world.row(run.id)
    return row.status is Status.WAITING and row.owner is None


async def parks(world: World, run: Handle) -> bool:
    """The same; if not, a second passes."""
    if await is_parked(world, run):
        return True
    world.clock.advance("1s")
    return False
