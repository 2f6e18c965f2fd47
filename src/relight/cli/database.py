"""Opening a database as a client: nothing is recovered, nothing is driven, and no file or table is created."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

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
        "--module",
        metavar="NAME",
        help="Import this module's flows, from the current folder or an installed package; may be given again. "
        "Else RELIGHT_MODULES.",
    ),
]


@contextmanager
def looking(db: str | None, modules: list[str] | None = None) -> Iterator[BlockingRelight]:
    """The database, open to read it and to post messages. Every error of Relight ends the command with one line."""
    try:
        store = load_config(db, {}, os.environ).store
        url = parse_store_url(store)
        if url.kind == "memory":
            fail("memory: has nothing that another process could read; name a file with --db")
        if url.kind == "sqlite" and not Path(url.place).exists():
            fail(f"there is no database {url.place}; name one with --db or RELIGHT_STORE")
        with Relight(store, modules=modules or [], drive=False, migrate=False) as rl:
            yield rl
    except RelightError as error:
        fail(error)
    except ImportError as error:
        fail_to_import(error)


def modules_of(given: list[str] | None) -> list[str]:
    """The modules whose flows a command should know. This makes the current folder importable, as `python -m` does: the
    path of an installed script begins with the script's own folder, and does not have the current one."""
    try:
        modules = list(given or load_config(None, {}, os.environ).modules)
    except RelightError as error:
        fail(error)
    here = str(Path.cwd())
    if modules and not sys.flags.safe_path and here not in sys.path:  # PYTHONSAFEPATH forbids it
        sys.path.insert(0, here)
    return modules


def fail_to_import(error: ImportError) -> NoReturn:
    """End the command: a module of the user, or one that it imports, is missing or broken."""
    missing = isinstance(error, ModuleNotFoundError)
    where = f"; looked in {Path.cwd()} and where Python finds packages" if missing else ""
    fail(f"a module could not be imported: {error}{where}")
