"""The servers that measurements run on: private ones, on this machine, that sync what they commit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.measure import NotMeasuredError, say
from tests.servers.postgres import PostgresServer, ServerMissingError

# The same for everybody. The first three are PostgreSQL's defaults; the tests' servers turn them off.
SYNCED = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "256MB",
    "max_connections": "300",
    "max_wal_size": "4GB",  # so that no checkpoint of the server's own falls into one contestant's time
    "checkpoint_timeout": "30min",
}


@contextlib.contextmanager
def postgres(**settings: str) -> Iterator[PostgresServer]:
    """A server of this section's own. Without the programs, the section is not measured, and says so."""
    try:
        server = PostgresServer(SYNCED | settings)
    except ServerMissingError as error:
        raise NotMeasuredError(str(error)) from None
    with server:
        version = server.sql("SHOW server_version")
        say(f"PostgreSQL {version} on port {server.port}")
        yield server


def fresh_database(server: PostgresServer) -> str:
    """Empty, and with nothing left to write of what others did before."""
    url = server.create_database()
    server.sql("CHECKPOINT")
    return url


def drop(server: PostgresServer, url: str) -> None:
    server.sql(f'DROP DATABASE "{url.rpartition("/")[2]}" WITH (FORCE)')
