"""What ran in a test, and how it ended."""

from typing import Any

from relight import (
    step,
)
from tests.flows.world import World


class Calls(list[str]):
    """What ran, in order. `fails` says how often each name fails before it succeeds."""

    def __init__(self, **fails: int) -> None:
        super().__init__()
        self.fails = fails

    def __call__(self, name: str) -> str:
        self.append(name)
        if self.fails.get(name, 0) > 0:
            self.fails[name] -= 1
            raise ValueError(f"{name} fails")
        return name


def marking(calls: Calls) -> Any:
    """A step that records its call."""

    @step
    async def mark(name: str) -> str:
        return calls(name)

    return mark


async def finish(world: World, run_id: str) -> Any:
    return await (await world.rl.get(run_id)).result(timeout="60s")


class NoStockError(Exception):
    def __init__(self, sku: str) -> None:
        super().__init__(f"no {sku} in stock")
        self.sku = sku
