"""Loads the named SQL of this package: `-- name: x`, then comments that describe it, then one statement."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

# apsw does not cache a longer statement, and preparing it for each batch would cost more than the rows it writes.
MAX_STATEMENT_CHARS = 16_000

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_ROW = re.compile(r"(?<=VALUES )\([?, ]+\)")


def _load() -> dict[str, str]:
    text = files(__package__).joinpath("queries.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)[1:]
    statements = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        lines = (line.split(" --")[0].strip() for line in body.splitlines() if not line.startswith("--"))
        statements[name] = " ".join(line for line in lines if line).rstrip(";")
    return statements


SQL = _load()


@cache
def many(name: str, rows: int) -> str:
    """The query `name` with its one `VALUES (?, …)` row repeated."""
    row = _ROW.search(SQL[name])
    assert row is not None, f"query {name!r} has no VALUES row to repeat"
    values = row.group().replace(" ", "")
    return SQL[name][: row.start()] + ",".join([values] * rows) + SQL[name][row.end() :]


@cache
def most(name: str) -> int:
    """How many rows fit into one statement: a power of two."""
    rows = 1
    while len(many(name, rows * 2)) <= MAX_STATEMENT_CHARS:
        rows *= 2
    return rows
