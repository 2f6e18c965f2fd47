"""Which store and which lease manager a configuration names. Drivers are loaded only where they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from relight.backends.memory import MemoryLeases, MemoryStore
from relight.backends.none import NoLeases
from relight.clock import SYSTEM_CLOCK, Clock
from relight.config import Config
from relight.errors import ConfigError
from relight.ports.leases import LeaseManager
from relight.ports.store import Store
from relight.store_url import parse_store_url, printable_url

# The top-level modules that each extra of the package installs.
_PACKAGES = {"postgres": ("asyncpg",), "etcd": ("aetcd", "grpc", "google")}


@contextmanager
def _extra(extra: str, what: str) -> Iterator[None]:
    """Around an import that needs this extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PACKAGES[extra]:
            raise
        raise ConfigError(
            f"{what} needs the package {missing}, which is not installed: pip install 'relight[{extra}]'"
        ) from error


def check_given(url: object, store: object, lease_manager: object) -> None:
    """What a program has passed to Relight(): one store, named or as an object, and a lease manager that is one."""
    if url is not None and not isinstance(url, str | os.PathLike):
        raise ConfigError(f"store: {url!r} is not accepted; expected a path, sqlite:///path, postgresql://… or memory:")
    if store is not None and not hasattr(store, "commit"):
        raise ConfigError(
            f"Relight(store={store!r}): expected a store as an object; a path or URL is the first argument, without a name"
        )
    if lease_manager is not None and not hasattr(lease_manager, "heartbeat"):
        raise ConfigError(
            f"Relight(lease_manager={lease_manager!r}): expected a lease manager as an object; etcd://… is for leases="
        )
    if url is not None and store is not None:
        raise ConfigError("Relight() was given a URL and store=, which are two stores: give one of them")


def make_store(config: Config, clock: Clock, *, create: bool = True) -> Store:
    """The store that the configuration names. Without `create`, a SQLite file must be there already."""
    url = parse_store_url(config.store)
    if url.kind == "memory":
        return MemoryStore(clock=clock)
    if url.kind == "postgresql":
        with _extra("postgres", f"store {printable_url(config.store)!r}"):
            from relight.backends.postgres import PostgresStore  # noqa: PLC0415 - asyncpg is loaded only where it is used

        return PostgresStore(url.place, clock=clock, schema=config.db_schema, migrate=config.migrate)
    from relight.backends.sqlite.store import SqliteStore  # noqa: PLC0415 - apsw is loaded only when SQLite is used

    return SqliteStore(url.place, clock=clock, migrate=config.migrate, create=create)


def make_leases(config: Config, store: Store, *, given: bool, clock: Clock = SYSTEM_CLOCK) -> LeaseManager:
    """The lease manager: the store that the configuration names, etcd, or none. A store `given` as an object may be of
    any kind, so it has no leases unless its lease manager is given too. etcd has no clock: its times come from `clock`,
    because they are compared with the store's."""
    if config.leases.startswith("etcd://"):
        with _extra("etcd", f"leases {printable_url(config.leases)!r}"):
            from relight.backends.etcd import EtcdLeases, parse_etcd_url  # noqa: PLC0415 - as in make_store

        return EtcdLeases(**parse_etcd_url(config.leases), clock=clock)
    if config.leases == "none" or given:
        return NoLeases()
    if config.leases != "store":
        raise ConfigError(f"leases {printable_url(config.leases)!r}: expected store, none or etcd://host:port,…")
    if isinstance(store, MemoryStore):
        return MemoryLeases(store, clock=SYSTEM_CLOCK)
    url = parse_store_url(config.store)
    if url.kind == "postgresql":
        from relight.backends.postgres import PostgresLeases  # noqa: PLC0415

        return PostgresLeases(url.place, schema=config.db_schema)
    from relight.backends.sqlite.leases import SqliteLeases  # noqa: PLC0415

    return SqliteLeases(url.place)
