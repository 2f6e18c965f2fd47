"""`relight orchestrator`: it drives runs that others start, releases them when it is told to, and always reacts to a
second signal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import platform
import re
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight import Relight
from relight.model.run import Run, Status
from tests.cli import shop
from tests.cli.shop import marks, open_gate, orchestrator, relight, until
from tests.recovery.engines import make_database

pytestmark = pytest.mark.timeout(120)

TGKILL = {"x86_64": 234, "aarch64": 131}.get(platform.machine(), 0)


@pytest.fixture
def started():
    """Starts orchestrators. Those that a test leaves running are killed."""
    processes = []

    def start(folder: Path, *arguments: str, **environ: str):
        process = orchestrator(folder, *arguments, **environ)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def client(folder: Path) -> Relight:
    return Relight(folder / "relight.db", drive=False)


async def row_of(folder: Path, run_id: str) -> Run:
    async with client(folder) as rl:
        return await rl.row(run_id)


def sessions(folder: Path) -> list[str]:
    with sqlite3.connect(folder / "relight.db") as db:
        return [owner for (owner,) in db.execute("SELECT owner FROM orchestrators")]


async def test_it_drives_what_a_client_starts(tmp_path, started):
    open_gate(tmp_path)
    process = started(tmp_path, "--id", "one")
    async with client(tmp_path) as rl:
        runs = [await rl.start(shop.shop_order.with_id(f"order-{n}"), n) for n in range(5)]
        assert [await run.result(timeout="60s") for run in runs] == [f"{n} open" for n in range(5)]
    assert marks(tmp_path, "price") == 5
    (owner,) = sessions(tmp_path)
    assert owner.startswith("one#")
    process.terminate()
    assert process.wait(timeout=60) == 0
    assert sessions(tmp_path) == []


@pytest.mark.parametrize("one", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_releases_the_runs_for_others(tmp_path, started, one):
    process = started(tmp_path, "--id", "one", RELIGHT_SHUTDOWN_GRACE="100ms")
    async with client(tmp_path) as rl:
        await rl.start(shop.shop_order.with_id("order"), 3)
    until(lambda: marks(tmp_path, "gate") == 1)
    process.send_signal(one)
    assert process.wait(timeout=60) == 0
    row = await row_of(tmp_path, "order")
    assert (row.status, row.owner, row.reason) == (Status.PENDING, None, "released")
    assert sessions(tmp_path) == []

    open_gate(tmp_path)
    started(tmp_path, "--id", "two")
    async with client(tmp_path) as rl:
        assert await (await rl.get("order")).result(timeout="60s") == "3 open"
        events = (await rl.explain("order")).events
    assert marks(tmp_path, "price") == 1, "a committed step never runs again"
    assert [line.token for line in events] == ["RUN_RELEASED"], "a release is no crash"


async def test_a_step_in_flight_may_finish_within_the_grace(tmp_path, started):
    process = started(tmp_path, "--id", "one", RELIGHT_SHUTDOWN_GRACE="30s")
    async with client(tmp_path) as rl:
        await rl.start(shop.shop_order.with_id("order"), 3)
        until(lambda: marks(tmp_path, "gate") == 1)
        process.terminate()
        await asyncio.sleep(0.2)
        assert process.poll() is None
        open_gate(tmp_path)
        assert process.wait(timeout=60) == 0
        started(tmp_path, "--id", "two")
        assert await (await rl.get("order")).result(timeout="60s") == "3 open"
    assert marks(tmp_path, "gate") == 1


@pytest.mark.skipif(sys.platform != "linux" or not TGKILL, reason="a system call of Linux sends signals to threads")
def test_a_signal_that_another_thread_gets_is_heard_at_once(tmp_path):
    """The system may deliver a signal to any thread, for example when a stopped process goes on. The main thread sleeps
    meanwhile, and here nothing else wakes it for an hour."""
    command = (
        "from relight.cli import main; from relight.orchestrator import waking; waking.CHECK_SECONDS = 3600.0; "
        f"main.app(['orchestrator', '--module', '{shop.MODULE}'])"
    )
    hour = {"RELIGHT_RECOVERY_LEASE_TTL": "3h", "RELIGHT_RECOVERY_CHECK_INTERVAL": "1h"}
    with run_code(tmp_path, command, **hour) as process:
        until(lambda: shop.count_lines(tmp_path / "log", " drives runs of ") == 1)
        _until_it_sleeps(process.pid)
        others = [int(thread.name) for thread in Path(f"/proc/{process.pid}/task").iterdir()]
        others.remove(process.pid)
        assert ctypes.CDLL(None).syscall(ctypes.c_long(TGKILL), process.pid, others[-1], signal.SIGTERM) == 0
        assert process.wait(timeout=60) == 0


def _until_it_sleeps(pid: int) -> None:
    """Whether the main thread has not run for half a second."""
    status, seen = Path(f"/proc/{pid}/task/{pid}/status"), ("", 0.0)

    def still() -> bool:
        nonlocal seen
        switches = next(line for line in status.read_text().splitlines() if line.startswith("voluntary"))
        if switches != seen[0]:
            seen = switches, time.monotonic()
        return time.monotonic() - seen[1] > 0.5

    until(still)


@contextlib.contextmanager
def run_code(folder: Path, code: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that executes this Python code and logs to `log`. If it has not ended at the end, it is killed."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, env=shop.environ(folder, **environ), stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", ["gate", "thread", "block"])
async def test_a_second_signal_ends_it_at_once_whatever_a_step_does(tmp_path, started, how):
    process = started(tmp_path, "--id", "one", RELIGHT_SHUTDOWN_GRACE="60s")
    async with client(tmp_path) as rl:
        if how == "gate":
            await rl.start(shop.shop_order.with_id("order"), 3)
        else:
            await rl.start(shop.shop_busy.with_id("order"), how)
    until(lambda: marks(tmp_path, how) == 1)
    process.terminate()
    await asyncio.sleep(0.2)
    assert process.poll() is None, "the first signal lets the step finish"
    process.terminate()
    assert process.wait(timeout=60) == 1
    row = await row_of(tmp_path, "order")
    assert not row.status.terminal
    assert row.owner is not None, "it had no time to release anything: this was a crash"
    assert row.owner.startswith("one#")


async def test_one_that_does_not_manage_to_stop_ends_all_the_same(tmp_path):
    """It ends after the grace and STUCK_SECONDS, which are fewer here. The end of its log shows where it stood."""
    command = (
        "from relight.cli import main, orchestrator; orchestrator.STUCK_SECONDS = 3.0; "
        f"main.app(['orchestrator', '--module', '{shop.MODULE}'])"
    )
    await make_database(tmp_path / "relight.db")  # the client may come first
    with run_code(tmp_path, command, RELIGHT_SHUTDOWN_GRACE="100ms") as process:
        async with client(tmp_path) as rl:
            await rl.start(shop.shop_stuck.with_id("stuck"))
        until(lambda: marks(tmp_path, "deaf") == 1)
        process.terminate()
        assert process.wait(timeout=60) == 1
    told = (tmp_path / "log").read_text()
    assert "[UNWIND_STUCK]" in told
    assert "Timeout (0:00:03" in told


async def test_killed_and_started_again_it_goes_on_at_once(tmp_path, started):
    """The lease has 30 s left. On the same machine it is noticed that the process is gone."""
    first = started(tmp_path, "--id", "one")
    async with client(tmp_path) as rl:
        await rl.start(shop.shop_order.with_id("order"), 3)
        until(lambda: marks(tmp_path, "gate") == 1)
        first.kill()
        first.wait()
        open_gate(tmp_path)
        started(tmp_path, "--id", "one")
        assert await (await rl.get("order")).result(timeout="60s") == "3 open"
        events = (await rl.explain("order")).events
    assert [line.token for line in events] == ["RUN_RESUMED", "STEP_REPEATED"]
    assert (marks(tmp_path, "price"), marks(tmp_path, "gate")) == (1, 2)


@pytest.mark.parametrize("name", [("--id", "one"), ()], ids=["given", "default"])
async def test_two_workers_of_one_machine_may_have_one_name(tmp_path, started, name):
    """As the workers of one server do. They are told apart, none logs a warning, and one takes over from the other at once."""
    first = started(tmp_path, *name, "--verbose")
    async with client(tmp_path) as rl:
        await rl.start(shop.shop_order.with_id("order"), 5)
    until(lambda: marks(tmp_path, "gate") == 1)
    started(tmp_path, *name, "--verbose", RELIGHT_RECOVERY_CHECK_INTERVAL="200ms")
    owners = sessions(tmp_path)
    assert len({owner.partition("#")[0] for owner in owners}) == 1
    assert len(owners) == 2
    first.kill()
    first.wait()
    until(lambda: marks(tmp_path, "gate") == 2)  # the other worker has looked at all sessions, more than once
    assert "[ORCHESTRATOR_ID_SHARED]" not in (tmp_path / "log").read_text()
    open_gate(tmp_path)
    async with client(tmp_path) as rl:
        assert await (await rl.get("order")).result(timeout="60s") == "5 open"


def test_it_serves_its_metrics_to_this_machine(tmp_path, started):
    started(tmp_path, "--id", "one", "--metrics", "0")
    log = tmp_path / "log"
    until(lambda: "/metrics" in log.read_text())
    found = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", log.read_text())
    assert found is not None
    with urllib.request.urlopen(found[0], timeout=10) as page:
        assert b"relight_recovery_claims_total 0.0" in page.read()
    taken = relight("orchestrator", "--metrics", found[1], cwd=tmp_path)
    assert taken.returncode == 2
    assert f"relight: --metrics {found[1]}: Address already in use; choose another port" in taken.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--module", "no_such_module"], "No module named 'no_such_module'"),
        (["--db", "mysql://host/db"], "there is no store for mysql:"),
        (["--db", "."], "is a directory"),
        (["--leases", "zookeeper"], "leases 'zookeeper': expected store, none or etcd"),
    ],
)
def test_what_it_cannot_do_is_one_line(tmp_path, arguments, problem):
    done = relight("orchestrator", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("relight: ")
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1
