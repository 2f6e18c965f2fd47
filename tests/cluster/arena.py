"""The place of a cluster test: a store of some kind, a cluster on it, and a client that drives nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relight import Handle, Relight
from relight.backend_choice import make_store
from relight.clock import SYSTEM_CLOCK
from relight.config import load_config
from relight.model.journal import AnyEvent, decode_event
from relight.model.run import Run
from tests.cluster import flows
from tests.harness.cluster import Cluster
from tests.harness.deeds import Note, audit_deeds, read_book, stale_writes
from tests.harness.killing import complaints
from tests.servers.etcd import EtcdServer
from tests.servers.postgres import PostgresServer

MODULE = "tests.cluster.node"
ROOT = Path(__file__).parents[2]


async def _make(store: str) -> None:
    """The store's tables: the client comes before the nodes, and makes no SQLite file."""
    made = make_store(load_config(store, {}, {}), SYSTEM_CLOCK)
    await made.open()
    await made.close()


class Arena:
    """A store for one test. `postgres` and `etcd` are None if the kind has none. The tests of a session share these servers."""

    def __init__(
        self, kind: str, folder: Path, store: str, leases: str, postgres: PostgresServer | None, etcd: EtcdServer | None
    ) -> None:
        self.kind = kind
        self.folder = folder
        self.store = store
        self.leases = leases
        self.postgres = postgres
        self.etcd = etcd
        self.cluster: Cluster
        self._notes: list[Note] = []  # in the order they were written
        self._read = 0  # bytes of the book

    @contextlib.asynccontextmanager
    async def opened(self, ttl_seconds: float, **options: Any) -> AsyncIterator[tuple[Cluster, Relight]]:
        """A cluster without nodes yet, and a client."""
        environ = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        await _make(self.store)
        options = {"park_after": 0.2, "shutdown_grace": 2.0} | options
        async with (
            Cluster(
                self.store,
                self.leases,
                folder=self.folder,
                ttl_seconds=ttl_seconds,
                module=MODULE,
                environ=environ,
                options=options,
            ) as cluster,
            Relight(self.store, leases=self.leases, drive=False) as rl,
        ):
            self.cluster = cluster
            yield cluster, rl

    @property
    def book(self) -> Path:
        return self.folder / "book"

    def notes(self, what: str = "start", key: str = "", run: str = "") -> list[Note]:
        """Lines of the ledger: by default the starts of steps. `key` is a part of the step's key."""
        if self.book.exists():
            with self.book.open("rb") as book:
                book.seek(self._read)
                new = book.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            self._notes += [msgspec.json.decode(line, type=Note) for line in whole.splitlines()]
        return [note for note in self._notes if note.what == what and key in note.key and run in ("", note.run)]

    def begun(self) -> set[str]:
        """Runs of which a step has begun."""
        return {note.run for note in self.notes()}

    def resumed(self, name: str) -> int:
        """How many orphans a node has taken up, over all its lives."""
        return self.cluster.log(name).count("[RUN_RESUMED]")

    def open_gate(self, gate: str) -> None:
        (self.folder / gate).touch()

    async def verify(self, rl: Relight, runs: Sequence[Handle[Any]]) -> list[str]:
        """Check that nothing committed was repeated and nothing stale was written. Returns the steps that were repeated
        in flight."""
        deeds = audit_deeds(read_book(self.book))
        assert not deeds.repeated, deeds.repeated
        stale = await stale_writes(rl, [await rl.row(run.id) for run in runs], read_book(self.book))
        assert not stale, stale
        assert not (found := complaints(self.cluster)), found
        return deeds.in_flight


async def journal(rl: Relight, run: Handle[Any]) -> list[AnyEvent]:
    found = await rl.services.store.read_from(run.id, 0, 100_000)
    return [decode_event(entry.event) for entry in found.entries]


async def rows(rl: Relight, runs: Sequence[Handle[Any]]) -> list[Run]:
    return await rl.services.store.get_runs([run.id for run in runs])


__all__ = ["Arena", "flows", "journal", "rows"]
