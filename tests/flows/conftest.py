from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest

from relight.flow.registry import REGISTRY, Registry
from tests.flows.world import World


@pytest.fixture(autouse=True)
def registry() -> Iterator[Registry]:
    """The registry has only the flows of this test. After `registry.remove(name)` a test may register another version
    of a flow."""
    flows, listeners = REGISTRY._flows, REGISTRY._listeners
    REGISTRY._flows, REGISTRY._listeners = {}, []
    yield REGISTRY
    REGISTRY._flows, REGISTRY._listeners = flows, listeners


# PostgreSQL behaves as the conformance suites check. `make soak` checks the whole engine on it.
WORLDS = ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.soak)]


NO_PARAMETERS = SimpleNamespace(params={})


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test without other parameters runs on both kinds of stores in `make test`. If it has some, each case runs there on one of
    the two, about half of them on each, and on the other in `make soak-ci`."""
    parameters = getattr(item, "callspec", NO_PARAMETERS).params
    kind = parameters.get("world")
    if kind in ("memory", "sqlite") and len(parameters) > 1:
        case = item.name.replace(kind, "*", 1)
        if kind != ("memory", "sqlite")[crc32(case.encode()) % 2]:
            item.add_marker(pytest.mark.soak_ci)


@pytest.fixture(params=WORLDS)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    server = request.getfixturevalue("postgres_server") if request.param == "postgres" else None
    made = World(request.param, tmp_path, server)
    yield made
    await made.end()
