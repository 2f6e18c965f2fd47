"""What type checkers say about user code, and whether it is true when the code runs.

The files in `programs/` are user code. As a user would, the tests check them by `mypy --strict` and by pyright, against
the installed package. A line that ends in `# error` must be an error for both checkers, and no other line may be one.
The programs without such lines are also run: then what `assert_type` says of a value must be true. The examples and the
README are user code, too. mypy also checks the other pages. Each checker runs once, over everything, because a run
takes seconds.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import relight
import relight.sync
from tests.docs.test_readme import README
from tests.docs.test_snippets import PAGES, ROOT, program

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
WITH_MISTAKES = [file for file in PROGRAMS if "# error\n" in file.read_text()]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SYNC_STUB = Path(relight.sync.__file__).with_suffix(".pyi")


def mypy(files: list[Path], folder: Path) -> dict[tuple[str, int], str]:
    """The errors that mypy finds, by file and line."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file=",
            "--no-error-summary",
            "--cache-dir=.cache",
            *files,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(.+?):(\d+): error: (.+)$", done.stdout, re.MULTILINE)
    assert done.returncode == bool(found), done.stdout + done.stderr
    return {(Path(file).name, int(line)): message for file, line, message in found}


def pyright(files: list[Path], folder: Path) -> dict[tuple[str, int], str]:
    """The errors that pyright finds, by file and line."""
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *files],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["summary"]["filesAnalyzed"] == len(files), answer["summary"]
    return {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1): one["message"]
        for one in answer["generalDiagnostics"]
        if one["severity"] == "error"
    }


@pytest.mark.parametrize("check", [mypy, pyright])
def test_the_programs_have_the_types_they_say_and_no_mistake_is_missed(check, tmp_path):
    assert Path(relight.__file__).is_relative_to(ROOT / "src"), (
        "checkers look at what is installed: that must be this code"
    )
    expected = {
        (file.name, number)
        for file in PROGRAMS
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if line.endswith("  # error")
    }
    pages = {page_name(page): program(page) for page in (PAGES if check is mypy else [README])}
    for name, code in pages.items():
        (tmp_path / name).write_text(code)
    found = check([*PROGRAMS, *EXAMPLES, *(tmp_path / name for name in pages)], tmp_path)
    assert not {place: message for place, message in found.items() if place not in expected}, "these are no mistakes"
    assert not sorted(expected - set(found)), "these are mistakes"


def page_name(page: Path) -> str:
    """A page's program as a file: README.md is page_readme.py, with the line numbers of the page."""
    return f"page_{page.stem.replace('-', '_').lower()}.py"


def test_there_are_mistakes_and_programs_without():
    assert [file.name for file in WITH_MISTAKES] == ["wrong.py"]
    assert len(PROGRAMS) > 3
    names = [*(file.name for file in [*PROGRAMS, *EXAMPLES]), *(page_name(page) for page in PAGES)]
    assert len(set(names)) == len(names), "errors are known by the file's name"


# Checks assert_type when the program runs, without the parts of a type that only a checker knows and isinstance does not.
CHECKED = """
import runpy, sys, types, typing

def holds(value, kind):
    if kind is typing.Any or kind is None:
        return kind is typing.Any or value is None
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(holds(value, one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(holds(item, typing.get_args(kind)[0]) for item in value)
    return isinstance(value, typing.get_origin(kind) or kind)

def assert_type(value, kind):
    assert holds(value, kind), f"{value!r} is no {kind}"
    global count
    count += 1
    return value

count = 0
typing.assert_type = assert_type
runpy.run_path(sys.argv[1], run_name="__main__")
assert count, "nothing was checked"
"""


@pytest.mark.parametrize("file", [file for file in PROGRAMS if file not in WITH_MISTAKES], ids=lambda file: file.stem)
def test_the_types_are_true_when_the_program_runs(file, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHECKED, file],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- relight.sync: the same functions, with other types


def test_relight_sync_has_the_functions_of_relight():
    assert set(relight.sync.__all__) <= set(relight.__all__)
    assert all(getattr(relight.sync, name) is getattr(relight, name) for name in relight.sync.__all__)


def test_the_stub_of_relight_sync_has_the_parameters_of_the_functions():
    """The last overload of a function has all of its parameters."""
    stub = {node.name: node for node in ast.parse(SYNC_STUB.read_text()).body if isinstance(node, ast.FunctionDef)}
    functions = [name for name in relight.sync.__all__ if isinstance(getattr(relight, name), FunctionType)]
    assert set(functions) == set(stub)
    for name, node in stub.items():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        parameters = inspect.signature(getattr(relight, name)).parameters.values()
        named = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        assert [argument.arg for argument in arguments] == [one for one in named if one != "fn"], name
