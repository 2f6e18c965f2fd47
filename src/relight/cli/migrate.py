"""`relight migrate`: create or upgrade the tables of a store."""

from __future__ import annotations

import asyncio
import os

from relight.cli.database import Database
from relight.cli.terminal import AsJson, fail, make_console
from relight.clock import SYSTEM_CLOCK
from relight.config import Config, load_config
from relight.errors import RelightError
from relight.parts import make_store


def migrate(db: Database = None, as_json: AsJson = False) -> None:
    """Create the store's tables, or bring them up to this version. Safe to run twice, and by many at once.

    Opening a store does the same, unless `migrate` is set to false: then this command does, before a deployment.
    """
    try:
        config = load_config(db, {"migrate": True}, os.environ)
        if config.store == "memory:":
            fail("memory: has no tables; name a file or postgresql://… with --db")
        asyncio.run(_open_and_close(config))
    except RelightError as error:
        fail(error)
    print('{"migrated": true}') if as_json else make_console().print("the store is up to date")


async def _open_and_close(config: Config) -> None:
    store = make_store(config, SYSTEM_CLOCK)
    await store.open()
    await store.close()
