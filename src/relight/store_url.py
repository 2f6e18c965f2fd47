"""What a store's URL says, and how a URL may be shown.

    memory:                          forgets everything with the process; for tests
    app.db, ./app.db, /srv/app.db    a SQLite file
    sqlite:///app.db                 the same file; sqlite:////srv/app.db for a path from the root
    postgresql://host/database       PostgreSQL; postgres:// is the same

SQLAlchemy names a driver in the scheme (`postgresql+asyncpg://…`, `sqlite+aiosqlite:///…`). Such a URL is accepted, and the
driver's name is ignored. Every other text with a scheme is refused, because it would silently become a file of that
name. So is a text that looks like another form of connection string (`host=… password=…`, `postgresql//…` without its
colon, `…?option=value`). A text that begins with / or . is always a path.

This module opens nothing.
"""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import parse_qsl

import msgspec

from relight.errors import ConfigError

ACCEPTED = "memory:, the path of a SQLite file, sqlite:///path or postgresql://host/database"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_MEMORY = ("memory", ":memory:")
_POSTGRES = ("postgresql", "postgres")

# Options whose values are no secret. The value of any other option is hidden, also of an unknown option.
_SHOWN = frozenset(
    {
        *(
            "application_name",
            "connect_timeout",
            "database",
            "dbname",
            "host",
            "hostaddr",
            "pgbouncer",
            "port",
            "sslmode",
        ),
        *("target_session_attrs", "tls", "user"),
    }
)
HIDDEN = "…"
_PASSWORD_FORM = "postgresql://user:password@host:5432/database"

# Signs that a text is meant as a connection, not as the name of a file.
_KEYWORDS = re.compile(
    r"(?:^|[\s;])(?:host|hostaddr|server|port|dbname|database|user|username|user id|uid|password|passwd|pwd|passfile|service|"
    r"sslmode)\s*=",
    re.IGNORECASE,
)
_NO_COLON = re.compile(r"(?:postgresql|postgres|sqlite|etcd|mysql|mariadb|file|memory)(?:\+\w+)?//", re.IGNORECASE)
_OPTIONS = re.compile(r"\?[A-Za-z_]+=")


class StoreUrl(msgspec.Struct, frozen=True):
    """A store's URL, taken apart as far as is needed to choose the backend."""

    kind: Literal["memory", "sqlite", "postgresql"]
    place: str = ""  # SQLite: the path. PostgreSQL: the URL, its scheme without a driver

    def __repr__(self) -> str:  # without the password
        return printable_url(self.place) or "memory:"


def parse_store_url(url: str) -> StoreUrl:
    """Raises ConfigError for a text that names no store. The message shows no password."""
    if url == "memory:":
        return StoreUrl("memory")
    if url in _MEMORY:
        raise ConfigError(f"store {url!r}: write memory: for a store that forgets, or ./{url} for a file of that name")
    if url.lower() in (*_POSTGRES, "sqlite"):
        raise ConfigError(f"store {url!r}: expected {ACCEPTED}; a file of that name is written ./{url}")
    found = _SCHEME.fullmatch(url)
    if found is None:
        mistaken = _mistaken(url)
        if mistaken is not None:
            raise ConfigError(f"store {printable_url(url)!r}: {mistaken}")
        return StoreUrl("sqlite", url)
    scheme, rest = found.group(1).lower(), found.group(2)
    database = scheme.partition("+")[0]
    if database in _POSTGRES and rest.startswith("//"):
        return StoreUrl("postgresql", f"{database}:{rest}")
    if database == "sqlite" and rest.startswith("///"):
        path = rest.removeprefix("///")
        if path not in ("", *_MEMORY) and "?" not in path:
            return StoreUrl("sqlite", path)
    raise ConfigError(f"store {printable_url(url)!r}: {_advice(scheme, rest)}")


def _mistaken(path: str) -> str | None:
    """Why a text without a scheme is not accepted as a path; None if it is. The reason does not show the text, which
    may have a password in it."""
    if path.startswith("//"):
        meant = "@" in path or _OPTIONS.search(path) is not None
        return f"the scheme is missing: {_PASSWORD_FORM}" if meant else None
    if path.startswith(("/", ".")):
        return None
    if _KEYWORDS.search(path) is not None:
        return f"a connection is written as a URL: {_PASSWORD_FORM}; a file whose name has a = is written ./name"
    if _NO_COLON.match(path) is not None:
        return f"a colon comes before the two slashes: {_PASSWORD_FORM}, or sqlite:///path"
    if "@" in path.partition(":")[2]:
        return f"expected {ACCEPTED} (a file whose name has a colon is written ./name)"
    if _OPTIONS.search(path) is not None:
        return "the path of a file has no options; a file whose name has a ? is written ./name"
    return None


def _advice(scheme: str, rest: str) -> str:
    database = scheme.partition("+")[0]
    name = rest.lstrip("/")
    unclear = "@" in name or _KEYWORDS.search(name) is not None  # then it is not shown: it may be a password
    if unclear and database not in _POSTGRES:
        return f"expected {ACCEPTED}"
    if database == "sqlite":
        if name in ("", *_MEMORY):
            return "write memory: for a store that forgets, or name a file"
        if "?" in name:
            return "a sqlite: URL has no options; write sqlite:///path, or the path alone if the file's name has a ?"
        return f"three slashes come before a path: sqlite:///{name}, or plainly {name}"
    if database == "file":
        return f"write the path alone: {rest if rest.startswith('/') else name}"
    if database == "memory":
        return "a store that forgets is written memory:"
    if database in _POSTGRES:
        return f"two slashes come before the host: {_PASSWORD_FORM}"
    return f"there is no store for {scheme}:; expected {ACCEPTED} (a file whose name has a colon is written ./name)"


def printable_url(url: str) -> str:
    """A URL for logs and errors: without user and password, and without the value of any option that might be a secret.
    If it is not clear which part is the password, only the scheme is shown."""
    found = _SCHEME.fullmatch(url)
    if found is None:  # a path, or a connection that has lost its scheme
        return url if _mistaken(url) is None else HIDDEN
    scheme, rest = found.groups()
    place, question, query = rest.partition("?")
    unclear = "@" in query or "#" in rest or ("@" in place and not place.startswith("//"))
    if unclear or _KEYWORDS.search(place.lstrip("/")) is not None:
        return f"{scheme}:{HIDDEN}"  # such as a password with an unescaped ?, #, / or @, or host=… password=…
    slashes = "//" if place.startswith("//") else ""
    place = place.removeprefix("//").rpartition("@")[2]
    options = [
        f"{name}={value if name in _SHOWN else HIDDEN}" for name, value in parse_qsl(query, keep_blank_values=True)
    ]
    return f"{scheme}:{slashes}{place}{question if options else ''}{'&'.join(options)}"
