"""What is installed with Relight, and what the installed package says of itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import relight
from relight.backend_choice import _PACKAGES

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_DEVELOPMENT = {"dev", "bench"}
EXTRAS = sorted(set(PROJECT["optional-dependencies"]) - FOR_DEVELOPMENT)


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_-]", requirement)[0].replace("-", "_") for requirement in requirements}


def imported() -> set[str]:
    """The top-level names that the source imports."""
    found: set[str] = set()
    for file in (ROOT / "src").rglob("*.py"):
        found |= set(re.findall(r"^\s*(?:from|import) (\w+)", file.read_text(), re.MULTILINE))
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_offered_only_for_what_the_code_uses(extra: str) -> None:
    assert names(PROJECT["optional-dependencies"][extra]) <= imported()


def test_the_dev_extra_has_every_other_extra() -> None:
    developing = names(PROJECT["optional-dependencies"]["dev"])
    for extra in EXTRAS:
        assert names(PROJECT["optional-dependencies"][extra]) <= developing, extra


def test_the_extras_that_errors_and_docs_name_are_there() -> None:
    named = set(_PACKAGES)
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for group in re.findall(r"pip install '[^'\[]*\[([\w,]+)\]'", page.read_text()):
            named |= set(group.split(","))
    assert named <= set(EXTRAS)


def test_the_library_alone_needs_little() -> None:
    assert names(PROJECT["dependencies"]) == {"apsw", "msgspec", "prometheus_client", "uuid_utils"}


def test_the_version_is_that_of_the_installed_package() -> None:
    assert relight.__version__ == version("relight")
    with pytest.raises(AttributeError, match="module 'relight' has no attribute '__versions__'"):
        _ = relight.__versions__  # type: ignore[attr-defined]


def test_importing_does_not_look_for_the_version() -> None:
    code = "import sys, relight; print('importlib.metadata' in sys.modules); print(relight.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["False", version("relight")]


def test_every_pip_shows_the_licence() -> None:
    """The field that older versions of pip read. PEP 639 forbids an expression beside it."""
    assert PROJECT["license"] == {"text": "Apache-2.0"}
    assert "License :: OSI Approved :: Apache Software License" in PROJECT["classifiers"]
