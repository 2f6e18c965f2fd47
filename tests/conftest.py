"""For all tests: the servers they need, and at the end of the output the number of crash points that were explored.

There is one server of a kind per worker, started when the first test asks for it. It is defined here and nowhere else: a
fixture that several conftest files import is another one in each of them, and so would be the server.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis
import pytest

from relight.testing.servers.etcd import EtcdServer, etcd_or_skip
from relight.testing.servers.etcd_cluster import EtcdCluster
from relight.testing.servers.postgres import PostgresServer, ServerMissingError
from tests import shown_passwords

# The same examples every time, and none too slow for a busy machine. Others are tried by hand: --hypothesis-profile=default.
hypothesis.settings.load_profile("ci")

# Servers are started and asked by child processes. In those, gRPC's fork handlers would wake pollers whose files are closed,
# and now and then the child died of it before it became psql.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Processes are killed in tests, not machines: what they have written survives them without a disk.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer()
    except ServerMissingError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdServer]:
    with (
        tempfile.TemporaryDirectory(prefix="relight-etcd-", dir=MEMORY) as folder,
        EtcdServer(Path(folder), etcd_or_skip()) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def etcd_members() -> Iterator[EtcdCluster]:
    """Not for the whole session: three members talk to each other all the time, also if nobody uses them."""
    with (
        tempfile.TemporaryDirectory(prefix="relight-etcds-", dir=MEMORY) as folder,
        EtcdCluster(Path(folder), etcd_or_skip()) as cluster,
    ):
        yield cluster


@pytest.fixture
def etcd_cluster(etcd_members: EtcdCluster) -> Iterator[EtcdCluster]:
    """Whole at the beginning of every test."""
    yield etcd_members
    etcd_members.heal()


@pytest.fixture(autouse=True)
def no_password_is_shown(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, nothing of it shows the password of the tests' PostgreSQL."""
    folder: Path | None = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    with shown_passwords.watching() as found:
        yield
    if folder is not None:
        found += shown_passwords.in_logs(folder)
    assert not found, "the password was shown: " + "; ".join(found)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shared out over processes, tests are mixed, by their names: those that wait (for a lease to lapse, for a process to end)
    stand together in their files, and while all processes wait at once, the machine has nothing to do. A group of tests that
    share a server stays together, and comes first (pytest-xdist puts the largest groups in front)."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: crc32(_group(item).encode()))


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark else item.nodeid


def pytest_collection_finish() -> None:
    """Thousands of tests stay as they are from here on: the garbage collector need not look at them again and again."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    totals: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            totals.update({name: value for name, value in report.user_properties if name.startswith("crash ")})
    if totals:
        terminalreporter.section("crash exploration")
        terminalreporter.line(", ".join(f"{value} {name.removeprefix('crash ')}" for name, value in totals.items()))
