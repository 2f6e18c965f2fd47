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
    """Raises ConfigError. If the options may be the end of a password with an unescaped ?, its sentence is `form`, which
    says how to write a password, and shows nothing of them."""
    rest = dict(parse_qsl(query, keep_blank_values=True))
    wrong = _wrong(rest)
    if wrong:
        raise ConfigError(f"store: {form if '@' in query else wrong}")
    flag, timeout = rest.pop("pgbouncer", "false").lower(), rest.pop("connect_timeout", "0")
    attributes = rest.pop("target_session_attrs", None)
    # As in libpq, 0 means that the url sets no limit. Relight's own limit then applies.
    return Options(flag == "true", float(timeout) or None, attributes, rest)


def _wrong(options: dict[str, str]) -> str:
    """What is wrong with the names and values; empty if nothing is, as far as is known before the server is asked."""
    unknown = [name for name in options if name not in (*OWN, *DRIVER) and not _is_setting(name)]
    if unknown:
        return f"there is no option {', '.join(map(repr, unknown))}; {KNOWN}"
    flag, timeout = options.get("pgbouncer", "false"), options.get("connect_timeout", "0")
    if flag.lower() not in ("true", "false"):
        return f"pgbouncer={flag} is neither true nor false"
    if not timeout.isdecimal():
        return f"connect_timeout={timeout} is no number of seconds"
    attributes = options.get("target_session_attrs", "any")
    if attributes not in ATTRIBUTES:
        return f"target_session_attrs={attributes} is none of {', '.join(ATTRIBUTES)}"
    if not all(map(is_port, options.get("port", "5432").split(","))):
        return f"port={options['port']} is no port"
    return ""


def _is_setting(name: str) -> bool:
    return name.lower() in SESSION or "." in name


def is_port(text: str) -> bool:
    """Whether it is the number of a TCP port."""
    return text.isdecimal() and 0 < int(text) <= MAX_PORT
