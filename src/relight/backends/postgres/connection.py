"""Connections: what a url may say, the settings of a session, and PostgreSQL's errors as Relight's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlencode, urlsplit, urlunsplit

import asyncpg
import msgspec

from relight.backends.postgres.options import KNOWN, is_port, parse_options
from relight.errors import ConfigError, StoreUnavailableError
from relight.store_url import printable_url

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record]
else:
    Connection = asyncpg.Connection

CONNECT_SECONDS = 10.0
# The least time for each server. If a caller gives up earlier, the connection is kept for the next caller.
SERVER_SECONDS = 1.0
# A network may be cut without an error: so no caller waits longer. No statement of Relight takes nearly as long.
COMMAND_SECONDS = 30.0

# The functions of the schema rely on this: each of their statements sees what was committed before the statement began.
ISOLATION = {"default_transaction_isolation": "read committed"}
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"

# Settings of the server's side of a session. The timeouts above protect the client's side.
SETTINGS = {
    "application_name": "relight",
    "jit": "off",  # compiling a statement takes longer than executing any of Relight's
    # Every statement of Relight looks rows up by an index. A plan that reads all of a small table would still be in use
    # when the table has grown, because statistics come a minute later.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "30000",
    "client_connection_check_interval": "10s",  # ends a statement whose client is gone
    "idle_in_transaction_session_timeout": "60s",  # ends the locks of a client that stopped during a transaction
}

# An operator may have turned this off for the database, but Relight's commits must be durable. Stronger settings stay.
DURABLE = "SELECT set_config('synchronous_commit', 'on', {local}) WHERE current_setting('synchronous_commit') = 'off'"

_FORM = (
    "a url looks like postgresql://user:password@host:5432/database; in a user's name or password write / as %2F, ? as %3F, "
    "# as %23, @ as %40 and : as %3A"
)

# Classes of SQLSTATE for errors that may pass: connections, resources, operator intervention.
_PASSING_CLASSES = ("08", "53", "57")
READ_ONLY = "25006"
AGAIN = ("40001", "40P01")  # serialization failure, deadlock: the transaction wrote nothing, and may be repeated
_PASSING = (*AGAIN, READ_ONLY, "40003", "25P03", "55P03", "58000", "58030")  # and timeouts of locks, and disk errors
NO_WRITES = f"the server takes no writes: it is a standby, or was made read-only [{READ_ONLY}]"
# The server refuses this user. At the first attempt that is a mistake; later the password is probably being changed.
_REFUSED = ("28000", "28P01", "3D000", "42501")
# The server refuses a setting of the session: its name, its value, or that a session sets it.
_WRONG_SETTING = ("22023", "42602", "42704", "55P02")


class Server(msgspec.Struct, frozen=True):
    """One of the addresses that a url names."""

    address: str
    dsn: str  # for asyncpg

    def __repr__(self) -> str:  # without the password
        return self.address


class Target(msgspec.Struct, frozen=True):
    """A url, taken apart."""

    servers: tuple[Server, ...]  # in the order in which they are tried
    name: str  # for messages: without the password
    pgbouncer: bool
    settings: dict[str, str]
    attributes: str | None  # target_session_attrs
    connect_seconds: float | None  # connect_timeout

    @property
    def primary(self) -> bool:
        """Whether the server must accept writes."""
        return self.attributes in ("read-write", "primary")


def parse(url: str) -> Target:
    """Parse a url. No error message shows anything that might be a password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # the error's own message may show the password
        raise ConfigError(f"store: {_FORM}") from None
    if parts.scheme not in ("postgresql", "postgres"):
        raise ConfigError(
            f"store: {parts.scheme!r} is not postgresql: a url looks like postgresql://user@host:5432/database"
        )
    _refuse_unescaped(parts)
    options = parse_options(parts.query, _FORM)
    user, at, hosts = parts.netloc.rpartition("@")
    addresses = hosts.split(",")
    settings = {name: value for name, value in SETTINGS.items() if name not in options.rest} | ISOLATION
    # Only the primary accepts commits. After a failover another server is the primary, at the same address or the next.
    # A standby would answer reads with old data. Behind PgBouncer the check would cost four round trips.
    wanted = "read-write" if not options.pgbouncer or len(addresses) > 1 else None
    query = urlencode(options.rest)
    return Target(
        servers=tuple(
            Server(address, urlunsplit(parts._replace(netloc=f"{user}{at}{address}", query=query)))
            for address in addresses
        ),
        name=printable_url(f"{parts.scheme}://{hosts}{parts.path}"),
        pgbouncer=options.pgbouncer,
        settings={} if options.pgbouncer else settings,
        attributes=options.attributes or wanted,
        connect_seconds=options.connect_seconds,
    )


def _refuse_unescaped(parts: SplitResult) -> None:
    """Refuse a url with an unescaped character in its password. A /, ? or # ends the host for a parser, and the rest of
    the password would be shown as the path. With an @ in it, programs differ in where the password ends."""
    addresses = parts.netloc.rpartition("@")[2].split(",")
    good = (
        parts.netloc.count("@") <= 1
        and "@" not in parts.path
        and not parts.fragment
        and all(map(_is_address, addresses))
    )
    if not good or any("=" not in option for option in parts.query.split("&") if option):
        raise ConfigError(f"store: {_FORM}")


def _is_address(address: str) -> bool:
    """Whether it is a host with or without a port. An IPv6 address is in brackets."""
    _, colon, port = address.rpartition("]")[2].partition(":")
    return not colon or is_port(port)


async def connect(target: Target, command_seconds: float = COMMAND_SECONDS) -> Connection:
    """A new session, on the first server that accepts it. Raises ConfigError or StoreUnavailableError, or asyncpg's own
    error if every server refuses this user.

    asyncpg could try several servers itself, but within one deadline: a machine that is switched off does not answer,
    and the next server would never be tried.
    """
    seconds = min(CONNECT_SECONDS, command_seconds) / len(target.servers)
    if target.connect_seconds is not None:  # as in libpq, it holds for each server
        seconds = min(target.connect_seconds, command_seconds)
    seconds = max(seconds, SERVER_SECONDS)
    failures: list[Exception] = []
    for server in target.servers:
        try:
            return await _connect(target, server, seconds, command_seconds)
        except asyncpg.ClientConfigurationError as error:
            raise ConfigError(f"store: {target.name}: {error}") from error
        except Exception as error:
            if isinstance(error, asyncpg.PostgresError) and error.sqlstate in _WRONG_SETTING:
                raise ConfigError(f"store: {target.name}: {error}; {KNOWN}") from error
            if _passing(error) is None and not refused(error):
                raise
            failures.append(error)
    if all(refused(error) for error in failures):
        raise failures[0]
    causes = [_passing(error) or str(error) for error in failures]
    if len(causes) > 1:
        causes = [f"{server.address}: {cause}" for server, cause in zip(target.servers, causes, strict=True)]
    raise unknown("; ".join(causes), target) from failures[-1]


async def _connect(target: Target, server: Server, seconds: float, command_seconds: float) -> Connection:
    connection: Connection = await asyncpg.connect(
        server.dsn,
        timeout=seconds,
        command_timeout=command_seconds,
        statement_cache_size=0 if target.pgbouncer else 200,
        max_cached_statement_lifetime=0,
        server_settings=target.settings,
        target_session_attrs=target.attributes,  # type: ignore[arg-type]  # the stubs want an enum; a string is documented
    )
    if not target.pgbouncer:
        try:
            await connection.execute(DURABLE.format(local="false"))
        except BaseException:
            connection.terminate()
            raise
    return connection


def read_only(connection: Connection) -> bool:
    """Whether the server accepts no writes (any more). This sends nothing: the server's last answer has said so."""
    settings = connection.get_settings()
    return "on" in (
        getattr(settings, "in_hot_standby", "off"),
        getattr(settings, "default_transaction_read_only", "off"),
    )


class Connector:
    """Makes connections. If a caller is cancelled meanwhile, the attempt goes on: cancelled, asyncpg would report an
    error to the event loop. `spare` then gets the connection."""

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
        """Wait for attempts whose callers were cancelled."""
        if self._attempts:
            await asyncio.wait(self._attempts, timeout=seconds)


def refused(error: BaseException) -> bool:
    """Whether the server answered that this user, password or database is wrong: waiting does not help."""
    return isinstance(error, asyncpg.PostgresError) and error.sqlstate in _REFUSED


def unavailable(error: BaseException, target: Target) -> StoreUnavailableError | None:
    """Relight's error for an error that may pass. None for any other: it is probably a bug, and must stay visible."""
    cause = _passing(error)
    return None if cause is None else unknown(cause, target)


def unknown(cause: str, target: Target) -> StoreUnavailableError:
    """The error for an operation that the server did not answer. A write says more: see `writing`."""
    return StoreUnavailableError(f"{target.name}: {cause}")


def _passing(error: BaseException) -> str | None:
    """The cause of an error that may pass; None for any other error."""
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return NO_WRITES
    if isinstance(error, asyncpg.PostgresError):
        code = error.sqlstate or ""
        passes = code in _PASSING or code[:2] in _PASSING_CLASSES
    else:
        # Two errors can be recognised only by their text: of a connection that was lost before it was used, and of one
        # whose server is shutting down (asyncpg then reports to be busy). Wrong use of a connection looks similar.
        closed = isinstance(error, asyncpg.InterfaceError) and "closed" in str(error)
        closed |= isinstance(error, asyncpg.InternalClientError) and "cannot switch to state" in str(error)
        # asyncio looks host names up in a thread, and the system may refuse one.
        closed |= isinstance(error, RuntimeError) and "new thread" in str(error)
        code = type(error).__name__
        passes = closed or isinstance(error, OSError | TimeoutError)
    return f"{str(error) or 'no answer in time'} [{code}]" if passes else None
