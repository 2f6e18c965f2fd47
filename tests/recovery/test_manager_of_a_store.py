"""The store remembers which lease manager it has: set by an orchestrator whose session has begun, and by no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from relight import ConfigError, Relight
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.backends.sqlite.store import SqliteStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import LeasesUnavailableError
from relight.process import mark_dead


class Manager(MemoryLeases):
    """A lease manager of another name, which may not answer."""

    def __init__(self, store: MemoryStore, name: str, *, answers: bool = True) -> None:
        super().__init__(store, clock=SYSTEM_CLOCK)
        self.name = name
        self.answers = answers

    async def heartbeat(self) -> bool:
        if not self.answers:
            raise LeasesUnavailableError("nothing there")
        return await super().heartbeat()


class Store(MemoryStore):
    """A store in which something may happen right before a manager is set."""

    def __init__(self) -> None:
        super().__init__(clock=SYSTEM_CLOCK)
        self.before_set: Callable[[], Awaitable[object]] | None = None

    async def set_lease_manager(self, name: str, before: str | None) -> bool:
        happens, self.before_set = self.before_set, None
        if happens is not None:
            await happens()
        return await super().set_lease_manager(name, before)


def engine(store: MemoryStore, name: str, *, answers: bool = True, drive: bool = True) -> Relight:
    return Relight(
        store=store, lease_manager=Manager(store, name, answers=answers), orchestrator_id=f"by-{name}", drive=drive
    )


async def test_a_manager_that_does_not_answer_is_not_remembered():
    store = Store()
    with pytest.raises(LeasesUnavailableError):
        await engine(store, "wrong", answers=False).open()
    assert await store.lease_manager() is None
    async with engine(store, "right", drive=False):
        pass  # a client is not refused
    async with engine(store, "right"):
        assert await store.lease_manager() == "right"
    with pytest.raises(LeasesUnavailableError):
        await engine(store, "wrong", answers=False).open()
    assert await store.lease_manager() == "right"


async def test_an_etcd_that_does_not_answer_is_not_remembered_in_a_file(tmp_path: Path):
    path = tmp_path / "relight.db"
    with pytest.raises(LeasesUnavailableError):
        await Relight(path, leases="etcd://127.0.0.1:1").open()
    async with Relight(path, drive=False) as client:
        assert (await client.list()).runs == []
    store = SqliteStore(path, clock=SYSTEM_CLOCK)
    await store.open()
    assert await store.lease_manager() is None
    await store.close()


async def test_a_client_hears_what_to_do_when_no_orchestrator_is_alive():
    store = Store()
    async with engine(store, "wrong"):
        with pytest.raises(ConfigError, match=r"stop every orchestrator first \(by-wrong#.* is alive\)"):
            await engine(store, "right", drive=False).open()
        with pytest.raises(ConfigError, match=r"stop every orchestrator first \(by-wrong#.* is alive\)"):
            await engine(store, "right").open()
    with pytest.raises(ConfigError, match="No orchestrator is alive: start an orchestrator with the right leases"):
        await engine(store, "right", drive=False).open()
    async with engine(store, "right"), engine(store, "right", drive=False):
        assert await store.lease_manager() == "right"


@pytest.mark.parametrize("old", [None, "old"])
async def test_of_two_managers_that_are_set_at_once_at_most_one_is(old: str | None):
    store = Store()
    if old is not None:
        async with engine(store, old):
            pass
    a, b = engine(store, "a"), engine(store, "b")
    outcomes = await asyncio.gather(a.open(), b.open(), return_exceptions=True)
    opened = [rl for rl, outcome in zip((a, b), outcomes, strict=True) if outcome is None]
    refused = [outcome for outcome in outcomes if outcome is not None]
    assert all(isinstance(outcome, ConfigError) for outcome in refused)
    assert len(opened) <= 1
    if old is None:
        assert len(opened) == 1
    for rl in opened:
        assert await store.lease_manager() == rl.services.heartbeats.leases.name
        await rl.close()


async def test_two_orchestrators_that_bring_in_the_same_manager_at_once_are_both_welcome():
    store = Store()
    async with engine(store, "old"):
        pass
    a, b = engine(store, "new"), engine(store, "new")
    await asyncio.gather(a.open(), b.open())
    assert await store.lease_manager() == "new"
    await a.close()
    await b.close()


async def test_one_with_the_old_manager_that_begins_in_between_wins():
    """The look at the sessions came before it began, and its own look before the new manager was set."""
    store = Store()
    async with engine(store, "old"):
        pass
    old = engine(store, "old")
    store.before_set = old.open
    with pytest.raises(ConfigError, match=r"by-old#.* is alive"):
        await engine(store, "new").open()
    assert await store.lease_manager() == "old"
    async with engine(store, "old", drive=False):
        pass
    await old.close()


async def test_a_session_that_says_no_manager_may_have_any():
    """Of an older version: it counts as alive by the old manager."""
    store = Store()
    async with engine(store, "old"):
        pass
    older = MemoryLeases(store, clock=SYSTEM_CLOCK)
    async with engine(store, "old") as rl:
        process = rl.services.heartbeats._process
    await older.open("older#1", process.__class__(machine="elsewhere", pid=1, session="older#1"), 60.0)
    await older.heartbeat()
    with pytest.raises(ConfigError, match="older#1 is alive"):
        await engine(store, "new").open()
    mark_dead("older#1")
    await older.close()
