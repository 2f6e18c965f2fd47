"""PostgresStore behind a real PgBouncer in transaction mode, which gives each transaction any of its server connections."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from relight.backends.postgres import PostgresLeases, PostgresStore
from relight.model.lease import Acquired, Process
from relight.model.run import Message, MessageKind, Status
from relight.ports.store import Committed, Fenced
from relight.testing.conformance.build import (
    START,
    FixedClock,
    appending,
    changing,
    created,
    entries_of,
    new_run,
)
from relight.testing.conformance.lease_build import DEADLINE_SECONDS, pause

pytestmark = pytest.mark.xdist_group("pgbouncer")  # all share one

PACKAGES = ("pgbouncer", "libc-ares2", "libevent-2.1-7")

CONFIG = """
[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
pool_mode = transaction
default_pool_size = 3
max_client_conn = 50
logfile = {folder}/log
"""


def _find(folder: Path) -> tuple[Path, dict[str, str]]:
    """The program, and the environment that it needs. It is installed, or unpacked from Debian's packages."""
    installed = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if installed is not None:
        return Path(installed), {}
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("there is no pgbouncer")
    try:
        shutil.copytree(_unpacked(), folder / "root")  # to a place that its user can read
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"there is no pgbouncer, and Debian's cannot be had: {error}")
    libraries = ":".join(str(path) for path in (folder / "root/usr/lib").glob("*-linux-gnu*"))
    return folder / "root/usr/sbin/pgbouncer", {"LD_LIBRARY_PATH": libraries}


def _unpacked() -> Path:
    """Debian's packages, unpacked without installing them, kept for the next time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relight"
    unpacked = cache / "pgbouncer"
    if not unpacked.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            folder = Path(name)
            for package in PACKAGES:
                subprocess.run(
                    ["apt-get", "download", package], cwd=folder, capture_output=True, check=True, timeout=30
                )
            for archive in folder.glob("*.deb"):
                subprocess.run(["dpkg", "-x", archive, folder / "root"], capture_output=True, check=True, timeout=30)
            try:
                (folder / "root").rename(unpacked)
            except OSError:
                if not unpacked.exists():  # otherwise another test process was faster
                    raise
    return unpacked


@pytest.fixture(scope="module")
def bouncer(postgres_server):
    """Its port."""
    with tempfile.TemporaryDirectory(prefix="relight-pgbouncer-", dir="/tmp") as name:
        folder = Path(name)
        program, environment = _find(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "config").write_text(CONFIG.format(server=postgres_server.port, port=port, folder=folder))
        (folder / "users").write_text('"postgres" ""\n')
        as_nobody: dict[str, Any] = {}
        if os.getuid() == 0:  # PgBouncer refuses to run as root
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            folder.chmod(0o755)
            as_nobody = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        command = [str(program), str(folder / "config")]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **as_nobody
        )
        try:
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


@pytest.fixture
async def make(bouncer, postgres_schema):
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", bouncer)
                break
            except OSError:
                await pause(0.02)
    writer.close()
    await writer.wait_closed()
    stores = []

    async def make():
        url = f"postgresql://postgres@127.0.0.1:{bouncer}/postgres?pgbouncer=true"
        store = PostgresStore(url, clock=FixedClock(), schema=postgres_schema)
        stores.append(store)
        await store.open()
        return store

    yield make
    for store in stores:
        await store.close()


async def test_many_at_once_over_few_connections(make):
    """Four stores, a dozen connections, three server sessions: nothing depends on which session a transaction gets."""
    stores = [await make() for _ in range(4)]
    runs = [new_run(f"run-{n}") for n in range(40)]
    await created(stores[0], *runs)

    async def drive(store, mine):
        for sequence in range(1, 9):
            results = await store.commit([appending(run, sequence, b"%d" % sequence) for run in mine])
            assert results == [Committed(sequence + 1)] * len(mine)
            await store.post([Message(run_id=mine[0].id, kind=MessageKind.SIGNAL)])
            assert len(await store.read([run.id for run in mine])) == len(mine)

    async with asyncio.timeout(DEADLINE_SECONDS):
        await asyncio.gather(*(drive(store, runs[n::4]) for n, store in enumerate(stores)))
    expected = [b"created", *(b"%d" % n for n in range(1, 9))]
    assert [await entries_of(stores[1], run.id) for run in runs] == [expected] * 40
    assert len(await stores[0].messages_after(0, 100)) == 32


async def test_everything_that_takes_more_than_one_statement(make):
    store, other = await make(), await make()
    run = new_run()
    await created(store, run)
    batch = [appending(run, 1, b"2"), appending(run, 2, b"3", changes=[changing(run, Status.WAITING, wake_at=START)])]
    assert await store.commit(batch) == [Committed(2), Committed(3)]
    assert await other.commit(batch) == [Committed(2), Committed(3)]
    assert await other.claim({"run": 1}, "you") == {"run": 2}
    assert await store.commit([appending(run, 3, b"4")]) == [Fenced(2, "you")]


async def test_leases(make, bouncer):
    store = await make()
    await created(store, new_run(owner=None, status=Status.PENDING))
    url = f"postgresql://postgres@127.0.0.1:{bouncer}/postgres?pgbouncer=true"
    a, b = (PostgresLeases(url, schema=store.schema) for _ in range(2))
    for name, manager in (("a#1", a), ("b#1", b)):
        await manager.open(name, Process(), 60.0)
        await manager.heartbeat()
    assert await a.acquire_lease(["run"]) == {"run": Acquired()}

    async def first() -> str:
        async for orphaned in b.watch_orphans():
            return orphaned.owner
        return ""

    async with asyncio.timeout(DEADLINE_SECONDS):
        watching = asyncio.create_task(first())
        await pause(0.1)
        await a.release_all()
        assert await watching == "a#1"
    assert await b.acquire_lease(["run"]) == {"run": Acquired()}
    for manager in (a, b):
        await manager.close()
