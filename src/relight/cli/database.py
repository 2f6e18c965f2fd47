"""Opening a database that is only looked at: nothing is recovered, nothing is driven, and no file or table is made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from relight.blocking import BlockingRelight
from relight.cli.terminal import fail
from relight.config import load_config
from relight.engine import Relight
from relight.errors import RelightError
from relight.store_url import parse_store_url

Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="PATH|URL",
        help="The SQLite file or postgresql://…; otherwise RELIGHT_STORE, otherwise relight.db here.",
    ),
]
Modules = Annotated[
    list[str] | None,
    typer.Option(
        "--module", metavar="NAME", help="Import this module's flows; may be given again. Else RELIGHT_MODULES."
    ),
]


@contextmanager
def looking(db: str | None, modules: list[str] | None = None) -> Iterator[BlockingRelight]:
    """The database, open for looking and telling. Anything that Relight refuses ends the command with one line."""
    try:
        store = load_config(db, {}, os.environ).store
        url = parse_store_url(store)
        if url.kind == "memory":
            fail("memory: holds nothing that another process could look at; name a file with --db")
        if url.kind == "sqlite" and not Path(url.place).exists():
            fail(f"there is no database {url.place}; name one with --db or RELIGHT_STORE")
        with Relight(store, modules=modules or [], drive=False, migrate=False) as rl:
            yield rl
    except RelightError as error:
        fail(error)
    except ImportError as error:
        fail(f"a module could not be imported: {error}")


def modules_of(given: list[str] | None) -> list[str]:
    """The modules whose flows a plan should know."""
    try:
        return list(given or load_config(None, {}, os.environ).modules)
    except RelightError as error:
        fail(error)
