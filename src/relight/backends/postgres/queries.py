"""The statements of this package by name, and its migrations, for a schema."""

from __future__ import annotations

import re
from functools import cache

from relight.backends.sql_files import named_statements, numbered_scripts

SCHEMA_NAME = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,30}")  # names that begin with pg_ are PostgreSQL's own

_SCHEMA = re.compile(r"(pg_notify\(')?\brelight\.")


def _in_schema(text: str, schema: str) -> str:
    """The files are written for the schema `relight`: replace its name. The name is quoted, because it may be a keyword
    of SQL (user, order). The names of channels are strings, and are not quoted."""
    assert SCHEMA_NAME.fullmatch(schema), schema
    return _SCHEMA.sub(lambda found: f"{found[1]}{schema}." if found[1] else f'"{schema}".', text)


@cache
def queries(schema: str) -> dict[str, str]:
    """The statements by name."""
    return named_statements(__package__, lambda text: _in_schema(text, schema))


@cache
def migrations(schema: str) -> tuple[str, ...]:
    """The migration scripts in order."""
    return numbered_scripts(__package__, lambda text: _in_schema(text, schema))
