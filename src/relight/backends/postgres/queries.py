"""Loads the named SQL of this package (`-- name: x`, comments that describe it, one statement) and its migrations."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

SCHEMA_NAME = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,30}")  # names that begin with pg_ are PostgreSQL's own

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_SCHEMA = re.compile(r"(pg_notify\(')?\brelight\.")
_MIGRATION = re.compile(r"^(\d{4})_\w+\.sql$")


def _in_schema(text: str, schema: str) -> str:
    """The files are written for the schema `relight`. In quotes, since a name may be a word of SQL's (user, order). The names of
    the channels are texts, and have none."""
    assert SCHEMA_NAME.fullmatch(schema), schema
    return _SCHEMA.sub(lambda found: f"{found[1]}{schema}." if found[1] else f'"{schema}".', text)


@cache
def queries(schema: str) -> dict[str, str]:
    """The statements by name."""
    text = files(__package__).joinpath("queries.sql").read_text(encoding="utf-8")
    parts = _NAME.split(_in_schema(text, schema))[1:]
    statements = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        lines = (line.strip() for line in body.splitlines() if not line.startswith("--"))
        statements[name] = " ".join(line for line in lines if line).rstrip(";")
    return statements


@cache
def migrations(schema: str) -> tuple[str, ...]:
    """The scripts in order; the schema's version is how many have been applied."""
    scripts = {
        int(found.group(1)): _in_schema(item.read_text(encoding="utf-8"), schema)
        for item in files(__package__).joinpath("migrations").iterdir()
        if (found := _MIGRATION.match(item.name))
    }
    assert sorted(scripts) == list(range(1, len(scripts) + 1)), "migrations are numbered from 1 without gaps"
    return tuple(scripts[number] for number in sorted(scripts))
