"""Explorations: their reports are printed, counted for the summary, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from relight.testing.crashpoints import Explorer, Report
from relight.testing.forkserver import ForkServer

Verify = Callable[[Report], None]
Explorers = Callable[..., Explorer]


@pytest.fixture
def verify(record_property: Callable[[str, Any], None]) -> Verify:
    def check(report: Report) -> None:
        print(report)
        found = {"points": report.points, "kills": report.kills, "processes": report.lives, "steps lost": report.lost}
        found |= {"committed steps repeated": report.duplicated, "steps in flight repeated": report.repeated}
        for name, value in found.items():
            record_property(f"crash {name}", value)
        report.check()

    return check


ForkServers = Callable[[str], list[ForkServer]]


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[ForkServers]:
    """Fork servers that have loaded a module, for all explorers of its scenarios. The processes that they fork share nothing."""
    made: dict[str, list[ForkServer]] = {}
    yield lambda module: made.setdefault(module, [])
    for servers in made.values():
        for server in servers:
            server.close()


@pytest.fixture
def explorers(fork_servers: ForkServers) -> Iterator[Explorers]:
    """Explorers of the shapes in shapes.py, by name. The files of a failed trial stay: the failure's message says where."""
    made: list[Explorer] = []

    def make(scenario: str, **options: Any) -> Explorer:
        made.append(Explorer(f"tests.crash.shapes:{scenario}", servers=fork_servers("tests.crash.shapes"), **options))
        return made[-1]

    yield make
    for explorer in made:
        explorer.close()
