"""Connecting: what a url may say, the settings of a session, and PostgreSQL's errors as ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
import msgspec

from relight.errors import ConfigError, StoreUnavailableError
from relight.store_url import printable_url

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record]
else:
    Connection = asyncpg.Connection

CONNECT_SECONDS = 10.0
# For each server at least: whoever cannot wait as long is given the connection the next time.
SERVER_SECONDS = 1.0
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

_FORM = (
    "a url looks like postgresql://user:password@host:5432/database; in a user's name or password write / as %2F, ? as %3F, "
    "# as %23, @ as %40 and : as %3A"
)
MAX_PORT = 65_535

# Classes of SQLSTATE that pass by themselves or by an operator's hand: connections, resources, operator intervention.
_PASSING_CLASSES = ("08", "53", "57")
READ_ONLY = "25006"
AGAIN = ("40001", "40P01")  # serialization failure, deadlock: the transaction did nothing, and may be given again
_PASSING = (*AGAIN, READ_ONLY, "40003", "25P03", "55P03", "58000", "58030")  # and timeouts of locks, and disk errors
NO_WRITES = f"the server takes no writes: it is a standby, or was made read-only [{READ_ONLY}]"
# The server does not let us in: at the first attempt that is a mistake, later a password that is being changed.
_REFUSED = ("28000", "28P01", "3D000", "42501")


class Server(msgspec.Struct, frozen=True):
    """One of the addresses that a url names."""

    address: str
    dsn: str  # for asyncpg

    def __repr__(self) -> str:  # without the password
        return self.address


class Target(msgspec.Struct, frozen=True):
    """A url, taken apart."""

    servers: tuple[Server, ...]  # in the order in which they are asked
    name: str  # for people: without the password
    pgbouncer: bool
    settings: dict[str, str]
    attributes: str | None  # target_session_attrs

    @property
    def primary(self) -> bool:
        """Whether only a server that takes writes will do."""
        return self.attributes in ("read-write", "primary")


def parse(url: str) -> Target:
    """`?pgbouncer=true` is ours; everything else is asyncpg's, and unknown options are the session's settings. No message of what
    is refused here shows anything that might be a password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # its message may show the password
        raise ConfigError(f"store: {_FORM}") from None
    if parts.scheme not in ("postgresql", "postgres"):
        raise ConfigError(
            f"store: {parts.scheme!r} is not postgresql: a url looks like postgresql://user@host:5432/database"
        )
    _refuse_unescaped(parts)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    flag = options.pop("pgbouncer", "false").lower()
    if flag not in ("true", "false"):
        raise ConfigError(f"store: pgbouncer={flag} is neither true nor false")
    user, at, hosts = parts.netloc.rpartition("@")
    addresses = hosts.split(",")
    settings = {name: value for name, value in SETTINGS.items() if name not in options} | ISOLATION
    # Only the primary can take commits, and after a failover another server is the primary, at the same address or the next.
    # A standby would answer questions, from the past. To PgBouncer every question costs four round trips.
    wanted = "read-write" if flag == "false" or len(addresses) > 1 else None
    attributes = options.pop("target_session_attrs", wanted)
    query = urlencode(options)
    return Target(
        servers=tuple(
            Server(address, urlunsplit(parts._replace(netloc=f"{user}{at}{address}", query=query)))
            for address in addresses
        ),
        name=printable_url(f"{parts.scheme}://{hosts}{parts.path}"),
        pgbouncer=flag == "true",
        settings={} if flag == "true" else settings,
        attributes=attributes,
    )


def _refuse_unescaped(parts: SplitResult) -> None:
    """A password with a /, ? or # in it ends the host for whoever reads the url: what follows would be shown as its path. With an
    @ in it, the password ends early for some programs and late for others."""
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
    """Host and port; the colons of an IPv6 address stand in brackets."""
    _, colon, port = address.rpartition("]")[2].partition(":")
    return not colon or (port.isdecimal() and 0 < int(port) <= MAX_PORT)


async def connect(target: Target, command_seconds: float = COMMAND_SECONDS) -> Connection:
    """A new session, on the first server that takes us. Raises ConfigError or StoreUnavailableError, or asyncpg's own error
    where every server refuses us.

    asyncpg could ask several servers itself, but all within one deadline: a machine that is switched off answers nothing, and
    the next one would never be asked.
    """
    seconds = max(min(CONNECT_SECONDS, command_seconds) / len(target.servers), SERVER_SECONDS)
    failures: list[Exception] = []
    for server in target.servers:
        try:
            return await _connect(target, server, seconds, command_seconds)
        except asyncpg.ClientConfigurationError as error:
            raise ConfigError(f"store: {target.name}: {error}") from error
        except Exception as error:
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
    """Whether the server takes no writes (any more). It says so by itself, with its next answer: nothing is asked here."""
    settings = connection.get_settings()
    return "on" in (
        getattr(settings, "in_hot_standby", "off"),
        getattr(settings, "default_transaction_read_only", "off"),
    )


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
    cause = _passing(error)
    return None if cause is None else unknown(cause, target)


def unknown(cause: str, target: Target) -> StoreUnavailableError:
    """For whoever cannot tell what became of an operation."""
    return StoreUnavailableError(f"{target.name}: {cause}; nothing of this operation is known to be written")


def _passing(error: BaseException) -> str | None:
    """What is the matter, if it may pass."""
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return NO_WRITES
    if isinstance(error, asyncpg.PostgresError):
        code = error.sqlstate or ""
        passes = code in _PASSING or code[:2] in _PASSING_CLASSES
    else:
        # Told by their text alone: a connection that was lost before it was used, and one to which the server has just said
        # that it is shutting down (asyncpg then takes itself to be busy). The wrong use of one looks nearly the same.
        closed = isinstance(error, asyncpg.InterfaceError) and "closed" in str(error)
        closed |= isinstance(error, asyncpg.InternalClientError) and "cannot switch to state" in str(error)
        # asyncio looks names up in a thread, and the system may have none.
        closed |= isinstance(error, RuntimeError) and "new thread" in str(error)
        code = type(error).__name__
        passes = closed or isinstance(error, OSError | TimeoutError)
    return f"{str(error) or 'no answer in time'} [{code}]" if passes else None
