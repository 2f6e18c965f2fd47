"""A SQLite file of which a part is damaged: it is called that, and what stands still because of it says so."""

import asyncio
import logging
import random
import sqlite3
from pathlib import Path

import pytest

from relight import Relight, flow, wait_for
from relight.errors import StoreFormatError
from tests.flows.world import until


@flow
async def asking() -> int:
    return await wait_for("number", int)


async def made(path: Path) -> Path:
    """A database with a run that is due."""
    async with Relight(path, park_after=0, flows=[asking]) as rl:
        await rl.start(asking.with_id("r"))
        await rl.idle()
    async with Relight(path, drive=False) as client:
        await (await client.get("r")).signal("number", 7)
    return path


def damage(path: Path, index: str) -> None:
    """Overwrite the page with which this index begins."""
    with sqlite3.connect(path) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (index,)).fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    db.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(random.Random(7).randbytes(size))


async def test_a_due_run_says_that_the_part_that_takes_it_up_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = await made(tmp_path / "relight.db")
    await asyncio.to_thread(damage, path, "runs_due")
    caplog.set_level(logging.WARNING, "relight")
    recovery = {"lease_ttl": "3s"}  # a heartbeat each second carries what fails
    async with Relight(path, flows=[asking], recovery=recovery) as rl, Relight(path, drive=False) as client:
        run = await rl.get("r")
        await until(lambda: any(part.failing for part in rl.health().parts))
        assert not rl.health().ok

        async def said_by(engine: Relight) -> str:
            return (await engine.explain("r")).sentence

        assert "is in trouble (" in await said_by(rl)
        assert f"{path} is damaged: restore a backup" in await said_by(rl)

        async def has_heard() -> bool:
            return f"{path} is damaged: restore a backup" in await said_by(client)

        await until(has_heard)
        with pytest.raises(TimeoutError, match="is damaged: restore a backup"):
            await run.result(timeout=0)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert f"{path} is damaged: restore a backup of it (" in errors[0].getMessage()


@pytest.mark.parametrize("left", [600, 4096 + 10, 5 * 4096])
async def test_a_file_that_was_cut_off_is_called_damaged(tmp_path: Path, left: int):
    path = await made(tmp_path / "relight.db")
    with path.open("r+b") as file:
        file.truncate(left)
    with pytest.raises(
        StoreFormatError, match=r"is damaged: restore a backup of it \(.*SQLITE_CORRUPT.*or use another"
    ):
        await Relight(path).open()


async def test_one_that_was_cut_off_at_its_beginning(tmp_path: Path):
    path = await made(tmp_path / "relight.db")
    with path.open("r+b") as file:
        file.truncate(300)
    with pytest.raises(StoreFormatError, match=r"is not a Relight database .*if it was one, .* restore a backup"):
        await Relight(path).open()
