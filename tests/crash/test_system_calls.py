"""Faults and kills at system calls. strace injects them into a real process from outside: inside a transaction, between
its writes and its sync. Crash points of the store do not reach these places."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from relight.backends.sqlite import SqliteStore
from relight.clock import SYSTEM_CLOCK
from relight.testing.ledger import read_ledger

STEPS = 10


@pytest.fixture(scope="session")
def strace() -> list[str]:
    """The start of a command line. Without strace the test is skipped, and in CI it fails."""
    found = shutil.which("strace")
    works = found and subprocess.run([found, "-qq", "-o", os.devnull, "true"], check=False).returncode == 0
    if not works:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("strace is not here, or may not trace")
    return [str(found), "-f", "-qq", "-o", os.devnull]


@pytest.fixture(scope="session")
def calls(strace: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How many writes and syncs the writer makes in an undisturbed run on a file that exists already."""
    directory = tmp_path_factory.mktemp("undisturbed")
    prepare(directory)
    trace = directory / "trace"
    command = [*strace[:-1], str(trace), "-e", "trace=pwrite64,fdatasync"]
    assert Child(directory, command).everything()["result"] == list(range(STEPS))
    made = [call for line in trace.read_text().splitlines() for call in ("pwrite64", "fdatasync") if f"{call}(" in line]
    return {call: made.count(call) for call in set(made)} | {"middle": _middle_write(made)}


def _middle_write(made: list[str]) -> int:
    """The write before the middle sync: commits come before and after it, however many writes opening and closing make."""
    syncs = [place for place, call in enumerate(made) if call == "fdatasync"]
    return made[: syncs[len(syncs) // 2]].count("pwrite64")


def prepare(directory: Path) -> None:
    """Make the file. That takes more writes than the run itself, and is not tested here."""

    async def make() -> None:
        store = SqliteStore(directory / "app.db", clock=SYSTEM_CLOCK)
        await store.open()
        await store.close()

    asyncio.run(make())


class Child:
    """One life of tests.crash.faulty_child, and the lines that it prints."""

    def __init__(self, directory: Path, command: Sequence[str] = ()) -> None:
        with (directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *command,
                    sys.executable,
                    "-m",
                    "tests.crash.faulty_child",
                    directory / "app.db",
                    directory / "ledger",
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
                text=True,
            )

    def says(self) -> dict[str, Any]:
        """The next line that it prints. {}: it prints nothing any more."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else {}

    def everything(self) -> dict[str, Any]:
        said: dict[str, Any] = {}
        while news := self.says():
            said |= news
        self.end()
        return said

    def end(self) -> int:
        """Wait until it has ended, by itself or by a kill."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._process.wait()

    def kill(self) -> None:
        # strace does not pass SIGKILL on: it detaches from its child. So the child is killed by its own id.
        for child in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        self._process.kill()


def repeated(directory: Path) -> int:
    """How many steps were executed more than once. No step may be missing, and none may be executed more than twice."""
    lines = read_ledger(directory / "ledger")
    starts = [line.effect for line in lines if line.what == "start"]
    assert len(set(starts)) == STEPS
    assert max(starts.count(effect) for effect in starts) <= 2
    return len(starts) - STEPS


FAULTS = {
    "fsync fails": ("fdatasync", "error=EIO", "SQLITE_IOERR_FSYNC"),
    "disk full": ("pwrite64", "error=ENOSPC", "SQLITE_FULL"),
    "write fails": ("pwrite64", "error=EIO", "SQLITE_IOERR_WRITE"),
}


def injected(strace: list[str], call: str, fault: str, when: str) -> list[str]:
    return [*strace, "-e", f"trace={call}", "-e", f"inject={call}:{fault}:when={when}"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_passes_in_the_same_process(
    name: str, strace: list[str], calls: dict[str, int], tmp_path: Path
) -> None:
    call, fault, code = FAULTS[name]
    prepare(tmp_path)
    middle = calls["middle"] if call == "pwrite64" else calls[call] // 2
    said = Child(tmp_path, injected(strace, call, fault, f"{middle}..{middle + 3}")).everything()
    log = (tmp_path / "log").read_text()
    assert said["accepted"] == "run"
    assert code in said["refused"], said
    assert "nothing is being committed" in said["late"]
    assert said["result"] == list(range(STEPS)), log
    assert said["fault"] is None
    assert log.count("ERROR:relight:[COMMIT_FAILED]") == 1
    assert "[COMMIT_RECOVERED]" in log
    assert repeated(tmp_path) == 0, "a step was executed again because its commit failed"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_stays_until_a_restart(
    name: str, strace: list[str], calls: dict[str, int], tmp_path: Path
) -> None:
    call, fault, code = FAULTS[name]
    prepare(tmp_path)
    middle = calls["middle"] if call == "pwrite64" else calls[call] // 2
    child = Child(tmp_path, injected(strace, call, fault, f"{middle}+"))
    assert child.says() == {"accepted": "run"}
    assert code in child.says()["fault"]
    assert code in child.says()["refused"]
    assert "nothing is being committed" in child.says()["late"]
    child.kill()
    child.end()
    before = read_ledger(tmp_path / "ledger")
    assert len({line.effect for line in before}) < STEPS, "it went on although nothing could be committed"

    said = Child(tmp_path).everything()
    assert said["result"] == list(range(STEPS))
    assert repeated(tmp_path) <= 1


def _killed_at(call: str, number: int, strace: list[str], directory: Path) -> bool:
    """Kill a process at its n-th such call, resume it, and check the end. Returns whether it made so many calls."""
    directory.mkdir()
    first = Child(directory, injected(strace, call, "signal=KILL", str(number))).everything()
    said = Child(directory).everything()
    assert said.get("result") == list(range(STEPS)), (directory / "log").read_text()
    assert repeated(directory) <= 1
    assert not first.get("result") or repeated(directory) == 0
    shutil.rmtree(directory)
    return "result" not in first


Record = Callable[[str, Any], None]


@pytest.mark.parametrize(
    "step", [97, pytest.param(17, marks=pytest.mark.soak_ci), pytest.param(1, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("call", ["pwrite64", "fdatasync"])
def test_killed_inside_transactions(
    call: str, step: int, strace: list[str], calls: dict[str, int], tmp_path: Path, record_property: Record
) -> None:
    """On a new file, so that making the file is tried as well: every write and sync of it (in `make test` a part of them)."""
    numbers = range(1, 2 * calls[call], step if call == "pwrite64" else (step + 1) // 2)
    kills = sum(_killed_at(call, number, strace, tmp_path / str(number)) for number in numbers)
    assert kills >= len(numbers) // 3
    record_property("crash points", kills)
    record_property("crash kills", kills)
