"""`relight orchestrator`: a process that drives runs until a signal stops it."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
from typing import Annotated, Any

import typer

from relight.cli.database import Database, Modules, fail_to_import, modules_of
from relight.cli.terminal import fail
from relight.engine import Relight
from relight.errors import ConfigError, RelightError

# Stopping takes at most shutdown_grace plus this time, even if a server or a flow hangs. Without a limit, a step that
# swallows its cancellation, or a thread of a library, would keep the process alive for ever.
STUCK_SECONDS = 15.0
STDERR = 2

# A logger of its own: that the process is ready is said without --verbose, too.
_log = logging.getLogger("relight.cli")


def orchestrator(
    db: Database = None,
    module: Modules = None,
    orchestrator_id: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="NAME", help="Stable across restarts, another on each machine; else the host's name."
        ),
    ] = None,
    leases: Annotated[str | None, typer.Option("--leases", help="store, none or etcd://host:2379,…")] = None,
    metrics: Annotated[
        int | None,
        typer.Option(
            "--metrics", metavar="PORT", min=0, max=65535, help="Serve metrics at http://127.0.0.1:PORT/metrics."
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what is resumed, not only what goes wrong.")] = False,
) -> None:
    """Drive runs: take up what is due or orphaned, until SIGTERM or SIGINT.

    The first signal stops gracefully: steps in flight may finish within shutdown_grace, and other orchestrators take up
    the runs at once. The second signal stops at once, which is as safe as any crash. A process that does not manage to
    stop is ended in the same way.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    _log.setLevel(logging.INFO)
    settings = {"orchestrator_id": orchestrator_id, "leases": leases}
    chosen: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    try:
        asyncio.run(_drive(Relight(db, modules=modules_of(module), **chosen), metrics))
    except RelightError as error:
        fail(error)
    except ImportError as error:
        fail_to_import(error)


async def _drive(relight: Relight, metrics_port: int | None) -> None:
    async with relight:
        _log.info("%s drives runs of %s", relight.services.owner, relight.store_name)
        if metrics_port is not None:
            _serve(relight, metrics_port)
        await relight.signalled()
        # After that time the process ends with code 1, and prints where each thread is. The thread that does this needs
        # nothing of the Python interpreter.
        faulthandler.dump_traceback_later(relight.config.shutdown_grace_seconds + STUCK_SECONDS, exit=True, file=STDERR)


def _serve(relight: Relight, port: int) -> None:
    """Serve metrics to this machine only, because readers need no password."""
    from prometheus_client import start_http_server  # noqa: PLC0415 - slow to load, and rarely needed

    try:
        server, _ = start_http_server(port, "127.0.0.1", relight.metrics.registry)
    except OSError as error:
        raise ConfigError(f"--metrics {port}: {error.strerror or error}; choose another port") from error
    where = f"http://127.0.0.1:{server.server_port}/metrics"
    _log.info("%s serves metrics at %s", relight.services.owner, where)
