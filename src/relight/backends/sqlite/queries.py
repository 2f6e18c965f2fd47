"""The statements of this package by name, and their forms with many rows of values."""

from __future__ import annotations

import re
from functools import cache

from relight.backends.sql_files import named_statements

# apsw does not cache a longer statement, and preparing it for each batch would cost more than the rows it writes.
MAX_STATEMENT_CHARS = 16_000

_ROW = re.compile(r"(?<=VALUES )\([?, ]+\)")


SQL = named_statements(__package__)


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
