"""Connecting: what a url may say, the settings of a session, and PostgreSQL's errors as ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
import msgspec

from relight.errors import ConfigError, StoreUnavailableError

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record]
else:
    Connection = asyncpg.Connection

CONNECT_SECONDS = 10.0
# So that a network that was cut without a word cannot hang anybody for ever. No statement of ours takes nearly as long.
COMMAND_SECONDS = 30.0

# The functions of the schema count on this: each of their statements sees what was committed before it began.
ISOLATION = {"default_transaction_isolation": "read committed"}
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"

# Of the server's side of our sessions. The client's own side is guarded by the timeouts above.
SETTINGS = {
    "application_name": "relight",
    "jit": "off",  # compiling a statement takes longer than any of ours
    # Every statement of ours looks rows up by an index. A plan that reads all of a small table would still be in use when
    # the table has grown: statistics come a minute later.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "30000",
    "client_connection_check_interval": "10s",  # a statement whose client has gone ends
    "idle_in_transaction_session_timeout": "60s",  # and so do the locks of a client that stopped in the middle
}

# An operator may have turned this off for the database; accepted means durable. Stronger settings stay.
DURABLE = "SELECT set_config('synchronous_commit', 'on', {local}) WHERE current_setting('synchronous_commit') = 'off'"

# Classes of SQLSTATE that pass by themselves or by an operator's hand: connections, resources, operator intervention.
_PASSING_CLASSES = ("08", "53", "57")
READ_ONLY = "25006"
AGAIN = ("40001", "40P01")  # serialization failure, deadlock: the transaction did nothing, and may be given again
_PASSING = (*AGAIN, READ_ONLY, "40003", "25P03", "55P03", "58000", "58030")  # and timeouts of locks, and disk errors
# The server does not let us in: at the first attempt that is a mistake, later a password that is being changed.
_REFUSED = ("28000", "28P01", "3D000", "42501")


class Target(msgspec.Struct, frozen=True):
    """A url, taken apart."""

    dsn: str  # for asyncpg
    name: str  # for people: without the password
    pgbouncer: bool
    settings: dict[str, str]
    attributes: str | None  # target_session_attrs, if the url leaves it to us


def parse(url: str) -> Target:
    """`?pgbouncer=true` is ours; everything else is asyncpg's, and unknown options are the session's settings."""
    parts = urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres"):
        raise ConfigError(
            f"store: {parts.scheme!r} is not postgresql: a url looks like postgresql://user@host:5432/database"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    flag = options.pop("pgbouncer", "false").lower()
    if flag not in ("true", "false"):
        raise ConfigError(f"store: pgbouncer={flag} is neither true nor false")
    hosts = parts.netloc.rpartition("@")[2]
    settings = {name: value for name, value in SETTINGS.items() if name not in options} | ISOLATION
    # Of several servers only the primary can take commits, and after a failover it is another one.
    several = "," in hosts and "target_session_attrs" not in options
    return Target(
        dsn=urlunsplit(parts._replace(query=urlencode(options))),
        name=f"{parts.scheme}://{hosts}{parts.path}",
        pgbouncer=flag == "true",
        settings={} if flag == "true" else settings,
        attributes="read-write" if several else None,
    )


async def connect(target: Target, command_seconds: float = COMMAND_SECONDS) -> Connection:
    """A new session. Raises ConfigError or StoreUnavailableError, or asyncpg's own error where the server refuses us."""
    try:
        connection: Connection = await asyncpg.connect(
            target.dsn,
            timeout=min(CONNECT_SECONDS, command_seconds),
            command_timeout=command_seconds,
            statement_cache_size=0 if target.pgbouncer else 200,
            max_cached_statement_lifetime=0,
            server_settings=target.settings,
            target_session_attrs=target.attributes,  # type: ignore[arg-type]  # the stubs want an enum; a string is documented
        )
    except asyncpg.ClientConfigurationError as error:
        raise ConfigError(f"store: {target.name}: {error}") from error
    except Exception as error:
        if (passing := unavailable(error, target)) is not None:
            raise passing from error
        raise
    if not target.pgbouncer:
        try:
            await connection.execute(DURABLE.format(local="false"))
        except BaseException as error:
            connection.terminate()
            if (passing := unavailable(error, target)) is not None:
                raise passing from error
            raise
    return connection


class Connector:
    """Makes connections. Whoever is cancelled meanwhile does not break the attempt off: asyncpg would complain to the event
    loop. It is finished without them, and `spare` is given the connection."""

    def __init__(self, target: Target, spare: Callable[[Connection], None]) -> None:
        self._target = target
        self._spare = spare
        self._attempts: set[asyncio.Task[Connection]] = set()

    async def connect(self, command_seconds: float = COMMAND_SECONDS) -> Connection:
        """As `connect`."""
        attempt = asyncio.ensure_future(connect(self._target, command_seconds))
        self._attempts.add(attempt)
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            attempt.add_done_callback(self._unwanted)
            raise
        finally:
            if attempt.done():
                self._attempts.discard(attempt)

    def _unwanted(self, attempt: asyncio.Task[Connection]) -> None:
        self._attempts.discard(attempt)
        if not attempt.cancelled() and attempt.exception() is None:
            self._spare(attempt.result())

    async def close(self, seconds: float) -> None:
        """Wait for attempts that nobody waits for."""
        if self._attempts:
            await asyncio.wait(self._attempts, timeout=seconds)


def refused(error: BaseException) -> bool:
    """The server is there, and this user, password or database is not: waiting does not help."""
    return isinstance(error, asyncpg.PostgresError) and error.sqlstate in _REFUSED


def unavailable(error: BaseException, target: Target) -> StoreUnavailableError | None:
    """What may pass, as our error. None: it is something else, a bug most likely, and must be seen as what it is."""
    if isinstance(error, asyncpg.PostgresError):
        code = error.sqlstate or ""
        passes = code in _PASSING or code[:2] in _PASSING_CLASSES
    else:
        # Told by their text alone: a connection that was lost before it was used, and one to which the server has just said
        # that it is shutting down (asyncpg then takes itself to be busy). The wrong use of one looks nearly the same.
        closed = isinstance(error, asyncpg.InterfaceError) and "closed" in str(error)
        closed |= isinstance(error, asyncpg.InternalClientError) and "cannot switch to state" in str(error)
        code = type(error).__name__
        passes = closed or isinstance(error, OSError | TimeoutError | asyncpg.TargetServerAttributeNotMatched)
    if not passes:
        return None
    cause = str(error) or "no answer in time"
    return StoreUnavailableError(f"{target.name}: {cause} [{code}]; nothing of this operation is known to be written")
