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


# PostgreSQL behaves as the conformance suites say; that the whole engine does on it is looked at in `make soak`.
WORLDS = ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.soak)]


@pytest.fixture(params=WORLDS)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    server = request.getfixturevalue("postgres_server") if request.param == "postgres" else None
    made = World(request.param, tmp_path, server)
    yield made
    await made.end()
