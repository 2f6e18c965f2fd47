"""The SQL files of a backend: named statements, and migrations in their order."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_MIGRATION = re.compile(r"^(\d{4})_\w+\.sql$")


def named_statements(package: str, change: Callable[[str], str] = str) -> dict[str, str]:
    """The statements in the package's queries.sql: `-- name: x`, then comments that describe it, then one statement.
    `change` may rewrite the text first."""
    text = change(files(package).joinpath("queries.sql").read_text(encoding="utf-8"))
    parts = _NAME.split(text)[1:]
    statements = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        lines = (line.split(" --")[0].strip() for line in body.splitlines() if not line.startswith("--"))
        statements[name] = " ".join(line for line in lines if line).rstrip(";")
    return statements


def numbered_scripts(package: str, change: Callable[[str], str] = str) -> tuple[str, ...]:
    """The package's migrations in order; the schema's version is how many have been applied."""
    scripts = {
        int(found.group(1)): change(item.read_text(encoding="utf-8"))
        for item in files(package).joinpath("migrations").iterdir()
        if (found := _MIGRATION.match(item.name))
    }
    assert sorted(scripts) == list(range(1, len(scripts) + 1)), "migrations are numbered from 1 without gaps"
    return tuple(scripts[number] for number in sorted(scripts))
