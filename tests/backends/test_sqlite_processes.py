"""Several real processes on one file, and processes that are killed while they write."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import apsw
import pytest

from relight.backends.sqlite import SqliteStore
from relight.backends.sqlite.connection import connect, transaction
from relight.backends.sqlite.thread import ConnectionThread
from relight.testing.conformance.build import FixedClock, created, entries_of, new_run

CHILD = Path(__file__).with_name("sqlite_child.py")
DEADLINE_SECONDS = 120
TURNS = 100


@pytest.fixture
def path(tmp_path):
    return tmp_path / "relight.db"


async def opened(path: Path) -> SqliteStore:
    store = SqliteStore(path, clock=FixedClock())
    await store.open()
    return store


def child(*arguments: object) -> subprocess.Popen[str]:
    root = CHILD.parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    return subprocess.Popen(
        [sys.executable, str(CHILD), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


async def test_processes_that_hammer_one_file_wait_for_each_other(path):
    store = await opened(path)
    await created(store, new_run("shared"))
    children = [child("hammer", path, f"p{n}", TURNS) for n in range(4)]
    outputs = await asyncio.gather(
        *(asyncio.to_thread(process.communicate, timeout=DEADLINE_SECONDS) for process in children)
    )
    assert [process.returncode for process in children] == [0] * 4, outputs
    assert all(stderr == "" for _, stderr in outputs)
    facts = [list(map(int, stdout.split()[1:])) for stdout, _ in outputs]
    for number, (sequence, _, _) in enumerate(facts):
        for run in range(5):
            events = await entries_of(store, f"p{number}-{run}")
            assert events == [b"created"] + [b"%d" % turn for turn in range(TURNS)]
            assert len(events) == sequence

    # Each entry of the shared run was written under the epoch that it names. Epochs never fall.
    shared = [int(event) for event in (await entries_of(store, "shared"))[1:]]
    assert all(earlier <= later for earlier, later in pairwise(shared))
    assert sum(won for _, won, _ in facts) * 3 <= len(shared)
    final = await store.get_run("shared")
    assert final is not None
    assert final.epoch >= shared[-1]
    await store.close()
    assert apsw.Connection(str(path)).pragma("integrity_check") == "ok"


async def test_what_a_killed_writer_was_told_is_committed_is_there(path):
    chance = random.Random(7)
    acknowledged = 0
    for _ in range(4):
        writer = child("append", path, "run")
        assert writer.stdout is not None
        for _ in range(chance.randrange(1, 120)):
            acknowledged = int(await asyncio.to_thread(writer.stdout.readline))
        writer.kill()
        rest, stderr = await asyncio.to_thread(writer.communicate, timeout=DEADLINE_SECONDS)
        assert stderr == ""
        lines = rest.splitlines(keepends=True)
        acknowledged = max([acknowledged, *(int(line) for line in lines if line.endswith("\n"))])

        store = await opened(path)
        events = await entries_of(store, "run")
        assert len(events) >= acknowledged
        assert len(events) % 2 == 1, "half of a commit is there"
        assert events[1:] == [b"%d" % sequence for sequence in range(2, len(events) + 1)]
        await store.close()
        db = apsw.Connection(str(path))
        assert db.pragma("integrity_check") == "ok"
        db.close()
    assert acknowledged > 100


async def test_a_writer_killed_beside_another_leaves_it_unharmed(path):
    """The survivor has the file open while the other process dies with the write lock, again and again."""
    store = await opened(path)
    runs = 0
    for turn in range(3):
        victim = child("append", path, f"victim-{turn}")
        assert victim.stdout is not None
        await asyncio.to_thread(victim.stdout.readline)
        for _ in range(20):
            await created(store, new_run(f"survivor-{runs}"))
            runs += 1
        victim.kill()
        await asyncio.to_thread(victim.communicate, timeout=DEADLINE_SECONDS)
        await created(store, new_run(f"survivor-{runs}"))
        runs += 1
    assert len(await store.get_runs([f"survivor-{n}" for n in range(runs)])) == runs
    await store.close()
    assert apsw.Connection(str(path)).pragma("integrity_check") == "ok"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_child_that_is_forked_in_the_midst_of_writing_can_write(path):
    """SQLite keeps a file's locks in memory as well. A child would inherit the locks of a thread that it does not
    have."""
    begun, go_on = threading.Event(), threading.Event()

    def slowly(connection: apsw.Connection) -> None:
        with transaction(connection):
            begun.set()
            assert go_on.wait(60)

    thread = ConnectionThread("writer", lambda _: connect(path, create=True), lambda error: error)
    writing = asyncio.ensure_future(thread.call(slowly))
    await asyncio.to_thread(begun.wait)
    threading.Timer(0.2, go_on.set).start()
    child = os.fork()
    if child == 0:
        try:
            with transaction(connect(path, create=False, busy_retries=10)):
                os._exit(0)
        finally:
            os._exit(1)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    await writing
    await thread.close()
