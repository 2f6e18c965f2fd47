"""One group commit on PostgreSQL, taken apart: what the server, the driver and the store each add to it.

    one row         a transaction that inserts one journal row: the price of the sync and one round trip
    insert          the entries of all runs, by unnest: what `raw` does
    append_batch    Relight's own statement (fence and entries) with its arguments ready
    store           PostgresStore.commit: the arguments built from commits, and everything around them

All in one process, in turns, each on runs of its own, so that a slow moment hits all alike. Client CPU is this process's own:
what is left of the time is the server's work, the sync and the way between.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.measure import Bench, Section, median, number, say
from benchmarks.servers import drop, fresh_database, postgres

# As Relight journals a no-op step.
EVENT = b'["step","noop:1",1,"","0123456789abcdef","0123456789abcdef",1]'
WARM_UP = 20
LAYERS = ("one row", "insert", "append_batch", "store")


# ---- in the child


def layers(url: str, size: int, turns: int) -> dict[str, Any]:
    """Wall and CPU seconds of each commit of `size` entries, by layer."""
    from zlib import crc32

    from benchmarks.peers.raw_postgres import ENTRIES
    from relight.backends.postgres import PostgresStore
    from relight.clock import SYSTEM_CLOCK
    from relight.ports.store import Commit

    async def main() -> dict[str, Any]:
        store = PostgresStore(url, clock=SYSTEM_CLOCK)
        await store.open()
        ids = {layer: await _create(store, layer, size) for layer in LAYERS}
        committer = store._committer
        keys = {layer: [committer._keys[run_id] for run_id in ids[layer]] for layer in LAYERS}
        pool, sql = committer._pool, committer._sql["append_batch"]
        epochs, events = [1] * size, [EVENT] * size
        wall: dict[str, list[float]] = {layer: [] for layer in LAYERS}
        cpu: dict[str, list[float]] = {layer: [] for layer in LAYERS}
        for turn in range(WARM_UP + turns):
            sequence = turn + 2  # the first is the creation
            crc = crc32(EVENT, sequence)
            sequences, crcs = [sequence] * size, [crc] * size
            commits = [Commit(root_id=run_id, epoch=1, after=turn + 1, entries=[EVENT]) for run_id in ids["store"]]
            jobs: dict[str, Any] = {
                "one row": lambda: pool.fetch(ENTRIES, keys["one row"][:1], [sequence], [EVENT], [crc]),
                "insert": lambda: pool.fetch(ENTRIES, keys["insert"], sequences, events, crcs),
                "append_batch": lambda: pool.fetch(sql, keys["append_batch"], epochs, sequences, events, crcs),
                "store": lambda: store.commit(commits),
            }
            for layer, job in jobs.items():
                began, used = time.perf_counter(), time.process_time()
                await job()
                cpu[layer].append(time.process_time() - used)
                wall[layer].append(time.perf_counter() - began)
        await store.close()
        return {"wall": _after(wall), "cpu": _after(cpu)}

    return asyncio.run(main())


async def _create(store: Any, layer: str, size: int) -> list[str]:
    from benchmarks import flows
    from relight.model.run import Status
    from relight.orchestrator.start import creation
    from relight.ports.store import Committed

    commits = [creation(65_536, flows.empty, f"{layer}-{i}".replace(" ", "-"), b"{}", 1.7e9)[0] for i in range(size)]
    for commit in commits:
        assert commit.create is not None
        commit.create.status, commit.create.owner, commit.create.wake_at = Status.RUNNING, "benchmark", None
    assert all(isinstance(result, Committed) for result in await store.commit(commits))
    return [commit.root_id for commit in commits]


def _after(times: dict[str, list[float]]) -> dict[str, list[float]]:
    return {layer: values[WARM_UP:] for layer, values in times.items()}


# ---- in the parent


def run(bench: Bench) -> Section:
    section = Section(
        "commit",
        "One group commit on PostgreSQL, by layer",
        ["entries", "what", "ms", "µs per entry", "client CPU ms", "of insert"],
    )
    turns = 100 if bench.quick else 500
    with postgres() as server:
        for size in (500, 250, 50):
            say(f"commit: {size} entries")
            url = fresh_database(server)
            found = bench.child("benchmarks.commits:layers", url=url, size=size, turns=turns)
            drop(server, url)
            wall = {layer: median(found["wall"][layer]) for layer in LAYERS}
            cpu = {layer: median(found["cpu"][layer]) for layer in LAYERS}
            section.data[str(size)] = {"wall": wall, "cpu": cpu}
            for layer in LAYERS:
                entries = 1 if layer == "one row" else size
                each = number(wall[layer] / entries * 1e6)
                times = f"{wall[layer] / wall['insert']:.2f}×"
                section.rows.append(
                    [str(entries), layer, number(wall[layer] * 1e3), each, number(cpu[layer] * 1e3), times]
                )
    return section
