"""Building blocks of the suites: runs, commits and a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from relight.clock import Timer
from relight.model.journal import Journal
from relight.model.run import Run, RunChange, Status
from relight.ports.store import NO_EXTRAS, Commit, CommitResult, Committed, Extras, Store

START = 1_700_000_000.0


class FixedClock:
    """Stands still until a test sets `time`."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        raise NotImplementedError("a store does not wait")


class Suite:
    """Base of all suites."""

    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    def clock(self) -> FixedClock:
        return FixedClock()


def new_run(run_id: str = "run", **fields: Any) -> Run:
    """A running root of owner "me" at epoch 1, unless `fields` say otherwise."""
    values: dict[str, Any] = {
        "root_id": run_id,
        "flow": "checkout",
        "status": Status.RUNNING,
        "created_at": START,
        "updated_at": START,
        "owner": "me",
        "epoch": 1,
    }
    return Run(id=run_id, **(values | fields))


def child_of(root: Run, key: str, **fields: Any) -> Run:
    """A child run in the tree of `root`: no owner, no epoch of its own."""
    run_id = f"{root.id}/{key}"
    values = {"root_id": root.id, "parent_id": root.id, "owner": None, "epoch": 0}
    return new_run(run_id, **(values | fields))


def spawned_by(parent: Run, run_id: str, **fields: Any) -> Run:
    """A root that `parent` has spawned."""
    values = {"parent_id": parent.id, "owner": None, "epoch": 0, "status": Status.PENDING}
    return new_run(run_id, **(values | fields))


def creation(run: Run, *entries: bytes, **parts: Any) -> Commit:
    """The commit that creates a root."""
    return _commit(run, {"create": run, "entries": list(entries or (b"created",)), **parts})


def appending(run: Run, after: int, *entries: bytes, **parts: Any) -> Commit:
    """A commit of the run's owner."""
    return _commit(run, {"after": after, "entries": list(entries), **parts})


def _commit(run: Run, parts: dict[str, Any]) -> Commit:
    """A commit of these parts; those that are fields of `Extras` go there."""
    extras = {name: parts.pop(name) for name in Extras.__struct_fields__ if name in parts}
    return Commit(root_id=run.id, epoch=run.epoch, extras=Extras(**extras) if extras else NO_EXTRAS, **parts)


def changing(run: Run, status: Status, **fields: Any) -> RunChange:
    """A change of the run's row."""
    return RunChange(run_id=run.id, status=status, **fields)


async def created(store: Store, *runs: Run) -> None:
    """Create these roots, each with one entry."""
    results = await store.commit([creation(run) for run in runs])
    assert results == [Committed(1)] * len(runs)


async def commit_one(store: Store, commit: Commit) -> CommitResult:
    """The result of a batch of one."""
    (result,) = await store.commit([commit])
    return result


async def ended(store: Store, run: Run, after: int = 1, status: Status = Status.COMPLETED) -> None:
    """End a root by its owner's commit."""
    result = await commit_one(store, appending(run, after, b"end", changes=[changing(run, status)]))
    assert result == Committed(after + 1)


async def journal_of(store: Store, root_id: str) -> Journal:
    """One journal that must be readable."""
    (journal,) = await store.read([root_id])
    assert isinstance(journal, Journal), journal
    return journal


async def entries_of(store: Store, root_id: str) -> list[bytes]:
    """The events of a journal, checked to be numbered from 1 without gaps."""
    journal = await journal_of(store, root_id)
    assert journal.checkpoint is None
    assert [entry.sequence for entry in journal.entries] == list(range(1, len(journal.entries) + 1))
    return [entry.event for entry in journal.entries]


def ids(runs: list[Run]) -> list[str]:
    """The ids of these runs, in order."""
    return [run.id for run in runs]


async def run_of(store: Store, run_id: str) -> Run:
    """A run that must exist."""
    run = await store.get_run(run_id)
    assert run is not None, f"there is no run {run_id!r}"
    return run


def but(run: Run, **fields: Any) -> Run:
    """The same run with other values."""
    return msgspec.structs.replace(run, **fields)
