"""The flows that the tests of the command line drive in real processes, and how these processes are started.

Steps write marks into a file that RELIGHT_TEST_MARKS names, so that a test knows which steps have begun, and how often. A gate is
shut until a file with the name of that file and `.open` exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from relight import Relight, flow, step, wait_for
from tests import shown_passwords
from tests.cli import command

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.cli.shop"
DEADLINE_SECONDS = 60.0  # a test waits for so long only if it fails; machines may be busy


# ---- in the driven process


def _marks() -> Path:
    return Path(os.environ["RELIGHT_TEST_MARKS"])


def _mark(what: str) -> None:
    with _marks().open("a") as file:
        file.write(what + "\n")


@step
async def shop_price(cents: int) -> int:
    _mark("price")
    return cents


@step
async def shop_gate() -> str:
    _mark("gate")
    while not _marks().with_suffix(".open").exists():  # noqa: ASYNC110 - another process opens it
        await asyncio.sleep(0.01)
    return "open"


@step
def shop_thread(seconds: float) -> None:
    _mark("thread")
    time.sleep(seconds)


@step
async def shop_block(seconds: float) -> None:
    """A step that blocks the process's event loop, as no step should."""
    _mark("block")
    time.sleep(seconds)  # noqa: ASYNC251 - that is the point


@step
async def shop_deaf() -> None:
    """A step that goes on when it is cancelled, as no step should."""
    _mark("deaf")
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


@step(on_crash="fail")
async def shop_coins() -> str:
    _mark("coins")
    return await shop_gate()


@flow
async def shop_order(cents: int) -> str:
    return f"{await shop_price(cents)} {await shop_gate()}"


@flow
async def shop_vend() -> str:
    await shop_price(1)
    return await shop_coins()


@flow(resumable=False)
async def shop_fragile() -> str:
    return await shop_gate()


@flow
async def shop_wait() -> str:
    return str(await wait_for("go", timeout="1h"))


@flow
async def shop_busy(how: str) -> None:
    await (shop_thread(60.0) if how == "thread" else shop_block(60.0))


@flow
async def shop_stuck() -> None:
    await shop_deaf()


# ---- in the test


def environ(folder: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "RELIGHT_TEST_MARKS": str(folder / "marks"), **more}


def relight(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    done = command.relight(*arguments, cwd=cwd, **environ(cwd, **more))
    assert not shown_passwords.shown(done.stdout + done.stderr, f"relight {arguments[0]}")
    return done


def orchestrator(folder: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Start `relight orchestrator` on the folder's database. Returns when it drives runs. Its log goes to `log`."""
    begun = count_lines(folder / "log", " drives runs of ")
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "relight.cli.main", "orchestrator", "--module", MODULE, *arguments],
            cwd=folder,
            env=environ(folder, **more),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )
    until(lambda: count_lines(folder / "log", " drives runs of ") > begun or process.poll() is not None)
    assert process.poll() is None, (folder / "log").read_text()
    return process


def count_lines(file: Path, text: str) -> int:
    return sum(text in line for line in file.read_text().splitlines()) if file.exists() else 0


def marks(folder: Path, what: str) -> int:
    """How often a step of this mark has begun."""
    file = folder / "marks"
    return file.read_text().splitlines().count(what) if file.exists() else 0


def open_gate(folder: Path) -> None:
    (folder / "marks.open").touch()


async def _statuses(folder: Path) -> dict[str, tuple[str, str | None]]:
    async with Relight(folder / "relight.db", drive=False) as rl:
        return {run.id: (run.status, run.hold) for run in (await rl.list()).runs}


def statuses(folder: Path) -> dict[str, tuple[str, str | None]]:
    """Status and hold of every run. This does not use the command, because a test that waits asks again and again."""
    return asyncio.run(_statuses(folder))


def until(condition: Callable[[], bool]) -> None:
    latest = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < latest, "it did not come to pass in time"
        time.sleep(0.03)  # some conditions open an engine to look
