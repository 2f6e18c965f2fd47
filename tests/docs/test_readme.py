"""The README's first screen is a promise: here its program is killed and resumed as the README says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.docs.test_snippets import ROOT, blocks

README = ROOT / "README.md"


@pytest.fixture
def app(tmp_path):
    program = next(code for kind, _, code in blocks(README) if kind == "python")
    (tmp_path / "app.py").write_text("\n".join(program))

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "app.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


def test_kill_and_resume(app):
    first = app()
    assert first.stdout is not None
    seen = [first.stdout.readline().strip() for _ in range(3)]
    first.kill()
    rest, _ = first.communicate()
    assert seen == ["working on 0", "working on 1", "working on 2"]
    last = 2 + len(rest.splitlines())  # on a busy machine the kill may come late

    second, _ = app().communicate(timeout=120)
    assert second.splitlines() in (
        [*(f"working on {n}" for n in range(last, 6)), "result: 55"],
        [*(f"working on {n}" for n in range(last + 1, 6)), "result: 55"],  # killed right after its commit
    )

    third, _ = app().communicate(timeout=120)
    assert third.splitlines() == ["result: 55"]


def test_the_first_screen_has_it_all():
    screen = "\n".join(README.read_text().splitlines()[:60])
    for needed in ("pip install", "@step", "@flow", "kill -9", "make demo", "make test"):
        assert needed in screen


def test_the_program_is_short():
    program = next(code for kind, _, code in blocks(README) if kind == "python")
    code = [line for line in program if line.strip() and not line.startswith(("#", "import", "from"))]
    assert len(code) <= 10
