"""Disk full, and syncs that fail: progress stops with a clear error, and nothing is reported as done that is not. When
the fault is gone, the run goes on, in the same process or in the next."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import apsw
import pytest

from relight import Relight, RunNotFoundError, StoreUnavailableError, flow, step
from relight.backends.sqlite import SqliteStore
from relight.clock import SYSTEM_CLOCK
from tests.crash.faulty_disk import FULL, NO_SYNC, NO_WRITE, FaultyDisk

FAULTS = {"disk full": FULL, "fsync fails": NO_SYNC, "write fails": NO_WRITE}

_break: list[Callable[[], None]] = []  # what the step in the middle does to the disk
_done: list[str] = []  # the steps' effects, in this process's memory: outside the engine's database


@step
async def fault_step(label: str) -> str:
    _done.append(label)
    if label == "break":
        for broken in _break:
            broken()
    return label


@flow
async def faulty_flow() -> list[str]:
    return [await fault_step(label) for label in ("first", "break", "last")]


@flow
async def other_flow() -> str:
    return await fault_step("other")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _break.clear()
    _done.clear()


@pytest.fixture
def disk(request: pytest.FixtureRequest) -> Iterator[FaultyDisk]:
    disk = FaultyDisk(f"faulty-{id(request)}")
    yield disk
    disk.unregister()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


def engine(path: Path, disk: FaultyDisk) -> Relight:
    return Relight(store=SqliteStore(path, clock=SYSTEM_CLOCK, vfs=disk.name), shutdown_grace="200ms")


@pytest.fixture
async def relight(path: Path, disk: FaultyDisk) -> AsyncIterator[Relight]:
    async with engine(path, disk) as rl:
        yield rl
        disk.faults.clear()


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.002)


def journaled(path: Path) -> list[str]:
    """The events in the file, read through another connection."""
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        rows = db.execute("SELECT event FROM journal ORDER BY run, sequence").fetchall()
    finally:
        db.close()
    return [bytes(event).decode() for (event,) in rows]  # type: ignore[arg-type]  # a BLOB column


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_stops_progress_and_passes(
    fault: str, relight: Relight, disk: FaultyDisk, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relight")
    _break.append(lambda: disk.faults.update(FAULTS[fault]))
    run = await relight.start(faulty_flow.with_id("hit"))
    await until(lambda: relight.fault is not None)

    # The fault is clear, in all places where a person would look for it
    assert relight.fault is not None
    assert str(path) in relight.fault
    errors = [record for record in caplog.records if "[COMMIT_FAILED]" in record.message]
    assert [record.levelname for record in errors if record.levelno >= logging.WARNING] == ["ERROR"], "said once"
    with pytest.raises(TimeoutError, match="nothing is being committed"):
        await run.result(timeout="100ms")
    # Nothing is accepted, nothing goes on, and nothing is said to be done
    with pytest.raises(StoreUnavailableError, match="not accepted"):
        await asyncio.wait_for(relight.start(other_flow.with_id("refused")), 60)
    with pytest.raises(StoreUnavailableError):
        await run.signal("anything")
    assert (await run.status()).value == "running"
    assert _done == ["first", "break"]
    assert [event for event in journaled(path) if '"break"' in event] == []

    disk.faults.clear()
    assert await run.result(timeout="60s") == ["first", "break", "last"]
    assert _done == ["first", "break", "last"], "the step whose commit failed was executed again"
    assert relight.fault is None
    assert any("[COMMIT_RECOVERED]" in record.message for record in caplog.records)
    with pytest.raises(RunNotFoundError):
        await relight.get("refused")
    assert await relight.run(other_flow.with_id("refused")) == "other"


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_start_that_fails_is_refused_and_may_be_repeated(
    fault: str, relight: Relight, disk: FaultyDisk
) -> None:
    disk.faults.update(FAULTS[fault])
    for _ in range(3):
        with pytest.raises(StoreUnavailableError, match="not accepted"):
            await asyncio.wait_for(relight.start(other_flow.with_id("again")), 60)
    assert _done == []
    disk.faults.clear()
    assert await relight.run(other_flow.with_id("again")) == "other"
    assert _done == ["other"]
    assert relight.fault is None


@pytest.mark.parametrize("fault", FAULTS)
async def test_closing_during_a_fault_ends_and_the_next_process_goes_on(
    fault: str, path: Path, disk: FaultyDisk
) -> None:
    _break.append(lambda: disk.faults.update(FAULTS[fault]))
    rl = engine(path, disk)
    await rl.open()
    await rl.start(faulty_flow.with_id("hit"))
    await until(lambda: rl.fault is not None)
    async with asyncio.timeout(60):
        await rl.close()
    disk.faults.clear()
    _break.clear()

    async with engine(path, disk) as rl:
        run = await rl.get("hit")
        assert await run.result(timeout="60s") == ["first", "break", "last"]
    # A commit whose sync failed may be there after all; one whose write failed is not, and its step was in flight.
    repeated = ["first", "break", "break", "last"]
    assert _done == repeated or (fault == "fsync fails" and _done == ["first", "break", "last"])
