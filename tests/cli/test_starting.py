"""The command in an interpreter of its own, as a shell starts it. Other tests fork it, to save time (see `command.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import relight

COMMANDS = (
    ["recovery", "plan", "--check"],
    ["show", "nobody"],
)
MORE = (["--help"], ["--version"], ["runs", "--json"], ["nonsense"])


@pytest.mark.parametrize(
    "arguments",
    [*COMMANDS, *(pytest.param(arguments, marks=pytest.mark.soak_ci) for arguments in MORE)],
    ids=" ".join,
)
def test_it_says_the_same_as_one_that_is_forked(arguments: list[str], tmp_path: Path) -> None:
    assert relight("migrate", cwd=tmp_path).returncode == 0
    program = Path(sys.executable).with_name("relight")
    done = subprocess.run(
        [program, *arguments],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    forked = relight(*arguments, cwd=tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (done.returncode, done.stdout, done.stderr)
