"""The address of etcd, and the user that Relight is there.

etcd://user:password@host:2379,host2:2379/prefix?tls=true&ca=/path/ca.pem&cert=/path/cert.pem&key=/path/key.pem
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from relight.errors import ConfigError, LeasesUnavailableError

DEFAULT_PORT = 2379
MAX_PORT = 65_535
DEFAULT_PREFIX = "/relight/"

# Written without a password, which must not end up in a log.
_FORM = "etcd://[user:password@]host[:2379][,host2...][/prefix][?tls=true&ca=FILE&cert=FILE&key=FILE]"


class Tls(msgspec.Struct, frozen=True):
    """Files in PEM form. Without `ca` the system's authorities are trusted; `cert` and `key` are the client's."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """The authorities, the client's key, its certificate. Read at every connection: the files may be renewed."""
        try:
            ca, key, cert = (Path(file).read_bytes() if file else None for file in (self.ca, self.key, self.cert))
        except OSError as error:  # the file may be about to be renewed, so the error may pass
            raise LeasesUnavailableError(f"cannot read etcd's TLS file {error.filename}: {error.strerror}") from error
        return ca, key, cert


class EtcdAddress(msgspec.Struct, frozen=True):
    """A cluster, the prefix of the keys in it, and Relight's user there."""

    endpoints: tuple[str, ...]  # "host:port"
    prefix: str = DEFAULT_PREFIX
    username: str = ""
    password: str = ""
    tls: Tls | None = None

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("leases: no etcd endpoint is given")
        if not self.prefix.endswith("/"):
            raise ConfigError(
                f"leases: the etcd prefix {self.prefix!r} must end with a slash, or /a would also mean the keys of /ab"
            )
        if bool(self.username) != bool(self.password):
            raise ConfigError("leases: etcd needs both a user and a password, or neither")

    def __repr__(self) -> str:  # without the password
        return f"etcd://{','.join(self.endpoints)}{self.prefix}"


class EtcdOptions(TypedDict):
    """What a URL says, as arguments of EtcdLeases."""

    endpoints: tuple[str, ...]
    prefix: str
    username: str
    password: str
    tls: Tls | None


def parse_etcd_url(url: str) -> EtcdOptions:
    """Parse `leases: etcd://…`. No error message shows the password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that do not close; the error's own message may show the password
        raise ConfigError(f"leases: an etcd URL looks like {_FORM}") from None
    if parts.scheme != "etcd" or parts.fragment:
        raise ConfigError(f"leases: an etcd URL looks like {_FORM}")
    if "@" in parts.path or "@" in parts.query:  # it is not shown: it may be the end of a password
        raise ConfigError(
            "leases: an etcd URL has an @ after its first / or ?; in a password (and anywhere but before the hosts) "
            "write / as %2F, ? as %3F and @ as %40"
        )
    if parts.path.startswith("//"):
        raise ConfigError(f"leases: write the endpoints of an etcd URL without http:// or https://: {_FORM}")
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    at = EtcdAddress(
        endpoints=tuple(_endpoints(hosts.split(","))),
        prefix=_prefix(unquote(parts.path)),
        username=unquote(username),
        password=unquote(password),
        tls=_tls(parts.query),
    )
    return EtcdOptions(endpoints=at.endpoints, prefix=at.prefix, username=at.username, password=at.password, tls=at.tls)


def _endpoints(hosts: Sequence[str]) -> Iterator[str]:
    for host in hosts:
        name, port = host, ""
        if ":" in host.rpartition("]")[2]:  # an IPv6 address is in brackets
            name, _, port = host.rpartition(":")
        if not name or any(map(str.isspace, host)) or (port and not (port.isdecimal() and 0 < int(port) <= MAX_PORT)):
            raise ConfigError(f"leases: {name!r} is no etcd host with a port; a URL looks like {_FORM}")
        yield f"{name}:{port or DEFAULT_PORT}"


def _prefix(path: str) -> str:
    if path in {"", "/"}:
        return DEFAULT_PREFIX
    return path if path.endswith("/") else path + "/"


def _tls(query: str) -> Tls | None:
    options = dict(parse_qsl(query, keep_blank_values=True))
    wanted = options.pop("tls", "true" if options else "false")
    unknown = sorted(options.keys() - {"ca", "cert", "key"})  # their values are not shown: one may be a password
    if unknown or wanted not in {"true", "false"}:
        raise ConfigError(
            f"leases: the etcd URL takes tls=true|false, ca, cert and key, not {', '.join(unknown) or 'that'}"
        )
    if wanted == "false":
        if options:
            raise ConfigError("leases: the etcd URL names TLS files, yet says tls=false")
        return None
    if ("cert" in options) != ("key" in options):
        raise ConfigError("leases: the etcd URL needs both cert and key, or neither")
    return Tls(**options)
