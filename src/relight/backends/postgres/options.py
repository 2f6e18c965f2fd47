"""The options of a url: Relight's own, asyncpg's, and settings of the session. Every other name is refused, before anything
is sent: asyncpg would send it to the server as a setting, and a misspelt sslmode would be a connection without TLS."""

from __future__ import annotations

from urllib.parse import parse_qsl

import msgspec

from relight.errors import ConfigError

# What asyncpg reads from a url.
DRIVER = (
    *("host", "port", "dbname", "database", "user", "password", "passfile", "service"),
    *("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "sslnegotiation"),
    *("ssl_min_protocol_version", "ssl_max_protocol_version", "target_session_attrs", "krbsrvname", "gsslib"),
)
# Settings of a session that make sense for Relight. `options=-c name=value` has all others, and a name with a dot is an
# extension's.
SESSION = (
    *("application_name", "search_path", "statement_timeout", "lock_timeout", "work_mem", "timezone", "jit"),
    *("enable_seqscan", "enable_hashjoin", "enable_mergejoin", "tcp_keepalives_idle", "tcp_keepalives_interval"),
    *("tcp_keepalives_count", "tcp_user_timeout", "client_connection_check_interval"),
    *("idle_in_transaction_session_timeout", "options"),
)
OWN = ("connect_timeout", "pgbouncer")
ATTRIBUTES = ("any", "primary", "standby", "prefer-standby", "read-write", "read-only")
MAX_PORT = 65_535

KNOWN = f"a url takes {', '.join((*OWN, *DRIVER))}, and settings of the session: {', '.join(SESSION)}"


class Options(msgspec.Struct, frozen=True):
    """Relight's own options, and the others, which are for asyncpg."""

    pgbouncer: bool
    connect_seconds: float | None
    attributes: str | None  # target_session_attrs
    rest: dict[str, str]


def parse_options(query: str, form: str) -> Options:
    """Raises ConfigError with a sentence that shows no value, because a value may be a password. If the name of an option
    may be part of a password, the sentence is `form`, which says how to write a password."""
    rest = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [name for name in rest if name not in (*OWN, *DRIVER) and not _is_setting(name)]
    if unknown and "@" in query:
        raise ConfigError(f"store: {form}")
    if unknown:
        raise ConfigError(f"store: there is no option {', '.join(unknown)}; {KNOWN}")
    flag = rest.pop("pgbouncer", "false").lower()
    if flag not in ("true", "false"):
        raise ConfigError(f"store: pgbouncer={flag} is neither true nor false")
    timeout = rest.pop("connect_timeout", "0")
    if not timeout.isdecimal():
        raise ConfigError(f"store: connect_timeout={timeout} is no number of seconds")
    attributes = rest.pop("target_session_attrs", None)
    if attributes not in (None, *ATTRIBUTES):
        raise ConfigError(f"store: target_session_attrs={attributes} is none of {', '.join(ATTRIBUTES)}")
    if not all(is_port(port) for port in rest.get("port", "5432").split(",")):
        raise ConfigError(f"store: port={rest['port']} is no port")
    # As in libpq, 0 means that the url sets no limit. Relight's own limit then applies.
    return Options(flag == "true", float(timeout) or None, attributes, rest)


def _is_setting(name: str) -> bool:
    return name.lower() in SESSION or "." in name


def is_port(text: str) -> bool:
    """Whether it is the number of a TCP port."""
    return text.isdecimal() and 0 < int(text) <= MAX_PORT
