"""Style as tests: the rules of the source tree, so that no reader has to check them."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "relight"
FILES = sorted(SOURCE.rglob("*.py"))

MAX_LINES = 400
MAX_IMPORT_PARTS = 3.0  # times the import of asyncio and logging, which Relight needs in any case
NOT_IMPORTED = {"typer", "rich", "asyncpg", "litestar", "uvicorn", "aetcd", "nats", "pydantic"}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "jsonpickle", "marshal", "shelve"}


def run_tool(name: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a development tool of the environment that runs these tests."""
    tool = Path(sys.executable).with_name(name)
    return subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=300, check=False, **options)


# -------------------------------------------------------------------------------------------------- layers --


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the package `relight` in `folder` against the contracts of this project."""
    config = str(ROOT / "pyproject.toml")
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return run_tool("lint-imports", "--no-cache", "--config", config, cwd=folder, env=environ)


def test_dependencies_point_one_way():
    checked = lint_imports(SOURCE.parent)
    assert checked.returncode == 0, checked.stdout + checked.stderr


AGAINST_THE_LAYERS = [
    ("model", "ports"),
    ("model", "clock"),
    ("model", "asyncio"),
    ("ports", "backends.memory"),
    ("ports", "flow"),
    ("flow", "run"),
    ("flow", "engine"),
    ("run", "recovery"),
    ("run", "backends.sqlite"),
    ("run", "apsw"),
    ("record", "run"),
    ("execution", "record"),
    ("ownership", "run"),
    ("recovery", "orchestrator"),
    ("orchestrator", "handle"),
    ("recovery", "engine"),
    ("engine", "typer"),
    ("engine", "cli"),
    ("backends.memory", "backends.sqlite"),
    ("backends.sqlite", "run"),
    ("backends.sqlite", "telemetry"),
    ("errors", "clock"),
    ("run.values", "run.leaving"),
    ("run.phase", "run.live_run"),
    ("record.writer", "record.recorder"),
    ("recovery.facts", "recovery.take_up"),
    ("orchestrator.memory", "orchestrator.waking"),
]


def test_imports_against_the_layers_are_noticed(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "relight", ignore=shutil.ignore_patterns("__pycache__"))
    lines = []
    for importer, imported in AGAINST_THE_LAYERS:
        module = tmp_path / "relight" / Path(*importer.split("."))
        file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        name = imported if imported in {"apsw", "asyncio", "typer"} else f"relight.{imported}"
        source = file.read_text() + f"\nimport {name}\n"
        file.write_text(source)
        lines.append(f"relight.{importer} -> {name} (l.{len(source.splitlines())})")

    checked = lint_imports(tmp_path)

    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert "BROKEN" in checked.stdout
    missing = [line for line in lines if line not in checked.stdout]
    assert not missing, checked.stdout


def test_an_import_that_the_layers_ignore_is_for_the_type_checker_only():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    ignored = [edge.split(" -> ") for contract in contracts for edge in contract.get("ignore_imports", ())]
    assert len(ignored) > 10
    for importer, imported in ignored:
        file = SOURCE.parent.joinpath(*importer.split(".")).with_suffix(".py")
        assert not [line for line, name in runtime_imports(file) if name == imported], f"{importer} imports {imported}"


def runtime_imports(file: Path) -> list[tuple[int, str]]:
    """Line and module of each import of a file, but for those under `if TYPE_CHECKING:`."""
    found: list[tuple[int, str]] = []

    def collect(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                continue
            for part in ast.walk(node):
                if isinstance(part, ast.Import):
                    found.extend((part.lineno, alias.name) for alias in part.names)
                elif isinstance(part, ast.ImportFrom) and part.module is not None:
                    found.append((part.lineno, part.module))
                    found.extend((part.lineno, f"{part.module}.{alias.name}") for alias in part.names)

    collect(ast.parse(file.read_text()).body)
    return found


# ------------------------------------------------------------------------------------- time from one place --


@pytest.mark.parametrize(
    "code",
    [
        "import time\n",
        "from time import sleep\n",
        "import random\n",
        "import secrets\n",
        "import uuid_utils\n",
        "import uuid\n\nuuid.uuid4()\n",
        "import os\n\nos.urandom(3)\n",
        "import asyncio\n\nasyncio.sleep(1)\n",
        "from datetime import UTC, datetime\n\ndatetime.now(UTC)\n",
    ],
)
def test_the_linter_refuses_another_source_of_time_ids_or_chance(code):
    def lint(path: str) -> str:
        arguments = ["check", "--no-cache", "--select", "TID251", "--stdin-filename", path, "-"]
        return run_tool("ruff", *arguments, input=code, cwd=ROOT).stdout

    assert "TID251" in lint("src/relight/run/execute.py")
    assert "TID251" not in lint("src/relight/clock.py")
    assert "TID251" not in lint("tests/unit/test_clock.py")


# -------------------------------------------------------------------------------------------------- import --


def import_relight(then: str, name: str = "relight") -> str:
    """Import the package in a fresh interpreter, run `then`, and return what it printed."""
    code = f"import sys, time; begun = time.process_time(); import {name}; {then}"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPATH"] = str(SOURCE.parent)
    child = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300, env=environ
    )
    return child.stdout


def test_import_is_quick():
    import_relight("pass")  # compiles the bytecode, which is done once per installation
    # Processor time, the best of many, compared with what every such program imports. So the result does not depend on
    # whether the machine is slow, or busy with the other half of the test run.
    seconds: dict[str, float] = {}
    for _ in range(20):
        for name in ("relight", "asyncio, logging"):
            taken = float(import_relight("print(time.process_time() - begun)", name))
            seconds[name] = min(seconds.get(name, taken), taken)
        if seconds["relight"] <= MAX_IMPORT_PARTS * seconds["asyncio, logging"]:
            break
    assert seconds["relight"] <= MAX_IMPORT_PARTS * seconds["asyncio, logging"], seconds


def test_import_loads_nothing_that_is_not_used():
    loaded = set(import_relight("print(*sys.modules)").split())
    assert "relight" in loaded
    assert not NOT_IMPORTED & loaded


# -------------------------------------------------------------------------------------------------- source --


def test_there_is_source_to_check():
    assert SOURCE / "clock.py" in FILES


def test_a_file_is_short_enough_to_be_read():
    lines = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in FILES}
    too_long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert not too_long, "find the second thing that these files do"


def test_payloads_are_data():
    found = {str(file.relative_to(ROOT)): sorted(imported(file) & PICKLES) for file in FILES}
    assert not {name: pickles for name, pickles in found.items() if pickles}


def imported(file: Path) -> set[str]:
    """The packages that a file imports from."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found
