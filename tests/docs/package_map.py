"""`make map`: the packages and what they import, drawn from the code into docs/ARCHITECTURE.md."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "relight"
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
BEGIN, END = "<!-- made by `make map` -->\n", "<!-- until here -->\n"


def layers() -> list[str]:
    """The modules and packages directly under `relight`, from the top down, as the import linter enforces them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"][:1]
    return [name.strip() for layer in found for name in layer.split("|")]


def files(name: str) -> list[Path]:
    """All files of a package, or the file of a module."""
    package = SOURCE / name
    return sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]


def imports(file: Path) -> Iterator[str]:
    """The names directly under `relight` that a file imports, also those that are only for the type checker."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "relight":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("relight."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("relight."))


def summary(name: str) -> str:
    """The first sentence of a docstring, without the name it begins with."""
    package = SOURCE / name
    file = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    first = re.split(r"(?<=[.])\s|\n\n", text, maxsplit=1)[0]
    return " ".join(first.split())


def drawn() -> str:
    """The table, as Markdown."""
    names = layers()
    lines = ["| from the top down | what | imports |", "|---|---|---|"]
    for name in names:
        used = {one for file in files(name) for one in imports(file)} & set(names) - {name}
        kind = f"`{name}/`" if (SOURCE / name).is_dir() else f"`{name}.py`"
        lines.append(f"| {kind} | {summary(name)} | {', '.join(one for one in names if one in used) or '–'} |")
    return "\n".join(lines) + "\n"


def with_map(page: str) -> str:
    """The page with the present table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + drawn() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text()))
