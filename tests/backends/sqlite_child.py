"""Child processes of test_sqlite_processes: `python sqlite_child.py ROLE PATH …`. Each prints one line per fact."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

from relight.backends.sqlite import SqliteStore
from relight.clock import SystemClock
from relight.ports.store import Committed, Fenced
from relight.testing.conformance.build import appending, but, creation, new_run


def say(*words: object) -> None:
    print(*words, flush=True)


async def hammer(store: SqliteStore, name: str, rounds: str) -> None:
    """Commit to this process's own runs as fast as possible, and compete for the shared run in between."""
    mine = [new_run(f"{name}-{n}") for n in range(5)]
    await store.commit([creation(run) for run in mine])
    sequence, fenced, won = 1, 0, 0
    for turn in range(int(rounds)):
        results = await store.commit([appending(run, sequence, b"%d" % turn) for run in mine])
        sequence += 1
        assert results == [Committed(sequence)] * len(mine), results
        if turn % 5 == 0:
            outcome = await fight(store, name)
            won += outcome == "won"
            fenced += outcome == "fenced"
    say("done", sequence, won, fenced)


async def fight(store: SqliteStore, name: str) -> str:
    """Claim the shared run and write to it until the other process has claimed it."""
    run = await store.get_run("shared")
    assert run is not None
    claimed = await store.claim({"shared": run.epoch}, name)
    if not claimed:
        return "lost"
    mine = but(run, epoch=claimed["shared"])
    after = await store.latest_sequence("shared")
    for _ in range(3):
        (result,) = await store.commit([appending(mine, after, b"%d" % mine.epoch)])
        if isinstance(result, Fenced):
            assert result.epoch is not None
            # The other process wrote between this claim and the first look at the journal, or has claimed the run
            # since.
            assert result.epoch >= mine.epoch
            return "fenced"
        assert isinstance(result, Committed)
        after = result.sequence
    return "won"


async def append(store: SqliteStore, run_id: str) -> None:
    """Append without end. Print each sequence only after it is committed."""
    run = new_run(run_id)
    after = await store.latest_sequence(run_id)
    if not after:
        await store.commit([creation(run)])
        after = 1
    while True:
        events = [b"%d" % (after + 1), b"%d" % (after + 2)]
        (result,) = await store.commit([appending(run, after, *events)])
        assert isinstance(result, Committed), result
        after = result.sequence
        say(after)


async def main(role: str, path: str, *arguments: str) -> None:
    store = SqliteStore(path, clock=SystemClock())
    await store.open()
    roles: dict[str, Callable[..., Awaitable[None]]] = {"hammer": hammer, "append": append}
    await roles[role](store, *arguments)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
