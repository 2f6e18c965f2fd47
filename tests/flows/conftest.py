from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from relight.flow.registry import REGISTRY, Registry
from tests.flows.world import World


@pytest.fixture(autouse=True)
def registry() -> Iterator[Registry]:
    """No flows but those of this test; `registry.remove(name)` makes way for another version of one."""
    flows, listeners = REGISTRY._flows, REGISTRY._listeners
    REGISTRY._flows, REGISTRY._listeners = {}, []
    yield REGISTRY
    REGISTRY._flows, REGISTRY._listeners = flows, listeners


@pytest.fixture(params=["memory", "sqlite"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    made = World(request.param, tmp_path)
    yield made
    await made.end()
