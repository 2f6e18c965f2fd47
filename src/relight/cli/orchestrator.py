"""`relight orchestrator`: a process that drives runs until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any

import typer

from relight.cli.database import Database, Modules, modules_of
from relight.cli.terminal import fail
from relight.engine import Relight
from relight.errors import RelightError


def orchestrator(
    db: Database = None,
    module: Modules = None,
    orchestrator_id: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="NAME", help="Stable across restarts, one per orchestrator; else the host's name."
        ),
    ] = None,
    leases: Annotated[str | None, typer.Option("--leases", help="store, none or etcd://host:2379,…")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what is resumed, not only what goes wrong.")] = False,
) -> None:
    """Drive runs: take up what is due or orphaned, until SIGTERM or SIGINT.

    The first signal stops gracefully: steps in flight may finish within shutdown_grace, and others take the runs over at
    once. The second signal stops at once; that is as safe as any crash.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    settings = {"orchestrator_id": orchestrator_id, "leases": leases}
    chosen: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    try:
        asyncio.run(_drive(Relight(db, modules=modules_of(module), **chosen)))
    except RelightError as error:
        fail(error)
    except ImportError as error:
        fail(f"a module could not be imported: {error}")


async def _drive(relight: Relight) -> None:
    async with relight:
        logging.getLogger("relight").warning("%s drives runs of %s", relight.services.owner, relight.store_name)
        await relight.signalled()
