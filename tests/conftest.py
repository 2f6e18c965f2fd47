"""For all tests: the servers that they need, and at the end of the output the number of crash points that were explored.

Each worker has one server of a kind. It is started when the first test asks for it. It is defined here and nowhere else: a
fixture that several conftest files import is another fixture in each of them, and each would start a server.
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

from tests import shown_passwords
from tests.servers.etcd import EtcdServer, etcd_or_skip
from tests.servers.etcd_cluster import EtcdCluster
from tests.servers.postgres import PostgresServer, ServerMissingError

# The same examples every time, and no deadline, because the machine may be busy. For new examples: --hypothesis-profile=default.
hypothesis.settings.load_profile("ci")

# Tests start child processes for servers and for psql. In these, gRPC's fork handlers would wake pollers whose files are closed.
# Now and then such a child died of it before it became psql.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Tests kill processes, not machines. The writes of a killed process survive without a disk.
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
    """Not for the whole session: three members talk to each other all the time, also if no test uses them."""
    with (
        tempfile.TemporaryDirectory(prefix="relight-etcds-", dir=MEMORY) as folder,
        EtcdCluster(Path(folder), etcd_or_skip()) as cluster,
    ):
        yield cluster


@pytest.fixture
def etcd_cluster(etcd_members: EtcdCluster) -> Iterator[EtcdCluster]:
    """All members run at the beginning of every test."""
    yield etcd_members
    etcd_members.heal()


@pytest.fixture(autouse=True)
def no_password_is_shown(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test fails if anything that it does shows the password of the tests' PostgreSQL."""
    folder: Path | None = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    with shown_passwords.watching() as found:
        yield
    if folder is not None:
        found += shown_passwords.in_logs(folder)
    assert not found, "the password was shown: " + "; ".join(found)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """When tests are distributed over processes, they are mixed by their names. Tests that wait (for a lease to lapse,
    for a process to end) are next to each other in their files. If all processes waited at once, the machine would be
    idle. A group of tests that share a server stays together, and comes first (pytest-xdist begins with the largest
    groups)."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: crc32(_group(item).encode()))


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark else item.nodeid


def pytest_collection_finish() -> None:
    """The objects of thousands of tests do not change any more. The garbage collector need not look at them again and again."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    totals: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            totals.update({name: value for name, value in report.user_properties if name.startswith("crash ")})
    if totals:
        terminalreporter.section("crash exploration")
        terminalreporter.line(", ".join(f"{value} {name.removeprefix('crash ')}" for name, value in totals.items()))
