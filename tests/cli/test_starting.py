"""The command in an interpreter of its own, as a shell starts it. Other tests fork it, to save time (see `command.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relight import Relight
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


@pytest.mark.parametrize("package", ["typer", "rich", "shellingham"])
def test_without_its_extra_the_command_says_what_to_install(package: str, tmp_path: Path) -> None:
    missing = f"import sys; sys.modules[{package!r}] = None; "  # as if it were not installed
    done = subprocess.run(
        [sys.executable, "-c", missing + "from relight.cli.entry_point import main; main()", "runs"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    said = f"relight: the command needs the package {package}, which is not installed: pip install 'relight[cli]'\n"
    assert done.stderr == said


def test_the_library_needs_none_of_what_the_command_does(tmp_path: Path) -> None:
    code = """
import sys
for name in ("typer", "rich", "click", "pydantic"):
    sys.modules[name] = None
import relight

@relight.flow
def answer() -> int:
    return 42

with relight.Relight("app.db") as rl:
    print(rl.run(answer))
"""
    (tmp_path / "app.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("42\n", "")


FLOWS = """
from relight import flow

@flow
async def found_here() -> int:
    return 42
"""


@pytest.mark.parametrize("by", ["--module", "RELIGHT_MODULES"])
@pytest.mark.parametrize(
    "command", [["explain", "r"], ["recovery", "plan", "--check"], ["recovery", "resume", "r"]], ids=" ".join
)
def test_modules_of_the_current_folder_are_found(command: list[str], by: str, tmp_path: Path) -> None:
    (tmp_path / "flows_of_this_folder.py").write_text(FLOWS + "print('imported')\n")
    assert relight("migrate", cwd=tmp_path).returncode == 0
    given = ["--module", "flows_of_this_folder"] if by == "--module" else []
    environ = {} if given else {"RELIGHT_MODULES": "flows_of_this_folder"}
    done = relight(*command, *given, cwd=tmp_path, **environ)
    assert "imported" in done.stdout, done.stderr
    assert "could not be imported" not in done.stderr


def test_an_orchestrator_finds_the_modules_of_its_folder(tmp_path: Path) -> None:
    """The command runs in an interpreter of its own, as it is installed."""
    (tmp_path / "flows_of_this_folder.py").write_text(FLOWS)
    with subprocess.Popen(
        [Path(sys.executable).with_name("relight"), "orchestrator", "--module", "flows_of_this_folder"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert " drives runs of " in process.stderr.readline()
            with Relight(tmp_path / "relight.db", drive=False) as rl:
                exec(FLOWS, {"__name__": "flows_of_this_folder"})
                assert rl.start("found_here", id="r").result(timeout="60s") == 42
        finally:
            process.kill()


def test_pythonsafepath_is_respected(tmp_path: Path) -> None:
    (tmp_path / "flows_of_this_folder.py").write_text(FLOWS)
    done = subprocess.run(
        [Path(sys.executable).with_name("relight"), "orchestrator", "--module", "flows_of_this_folder"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "could not be imported: No module named 'flows_of_this_folder'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("package", "extra", "store", "leases"),
    [
        ("asyncpg", "postgres", "postgresql://127.0.0.1:1/d", "store"),
        ("grpc", "etcd", "memory:", "etcd://127.0.0.1:1"),
        ("aetcd", "etcd", "memory:", "etcd://127.0.0.1:1"),
    ],
)
@pytest.mark.parametrize("command", [True, False])
def test_a_missing_extra_is_named(
    package: str, extra: str, store: str, leases: str, command: bool, tmp_path: Path
) -> None:
    if command:
        use = f"from relight.cli.main import app; app(['orchestrator', '--db', {store!r}, '--leases', {leases!r}])"
    else:
        use = f"from relight import Relight; Relight({store!r}, leases={leases!r}).__enter__()"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{package!r}] = None; {use}"],  # as if it were not installed
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (2 if command else 1)
    said = done.stderr.splitlines()
    assert f"needs the package {package}, which is not installed: pip install 'relight[{extra}]'" in said[-1]
    assert len(said) == 1 or not command
