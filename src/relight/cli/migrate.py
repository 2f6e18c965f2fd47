"""`relight migrate`: create or upgrade the tables of a store."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Annotated

import typer

from relight.backend_choice import make_store
from relight.cli.database import Database
from relight.cli.terminal import AsJson, fail, make_console
from relight.clock import SYSTEM_CLOCK
from relight.config import Config, load_config
from relight.errors import RelightError


def migrate(
    db: Database = None,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if the store is not up to date.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create the store's tables, or bring them up to this version. Safe to run twice, and by many at once.

    Opening a store does the same, unless `migrate` is set to false. Then run this command before a deployment.
    """
    try:
        config = load_config(db, {"migrate": True}, os.environ)
        if config.store == "memory:":
            fail("memory: has no tables; name a file or postgresql://… with --db")
        if check:
            found, newest = asyncio.run(make_store(config, SYSTEM_CLOCK).schema_version())
            _say(found, newest, as_json=as_json)
            return
        asyncio.run(_open_and_close(config))
    except RelightError as error:
        fail(error)
    print('{"migrated": true}') if as_json else make_console().print("the store is up to date")


def _say(found: int, newest: int, *, as_json: bool) -> None:
    up_to_date = found >= newest
    if as_json:
        print(json.dumps({"version": found, "newest": newest, "up_to_date": up_to_date}))
    elif found > newest:
        text = f"the store has version {found}, this Relight knows {newest}, and can go on with it"
        make_console().print(text)
    elif up_to_date:
        make_console().print("the store is up to date")
    else:
        state = "has no tables yet" if found == 0 else f"has version {found} of {newest}"
        make_console().print(f"the store {state}: `relight migrate` brings it up to date")
    if not up_to_date:
        raise typer.Exit(1)


async def _open_and_close(config: Config) -> None:
    store = make_store(config, SYSTEM_CLOCK)
    await store.open()
    await store.close()
