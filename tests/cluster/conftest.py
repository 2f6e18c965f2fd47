"""The stores that a cluster can be on. Servers are started once per session; every test has its own database and prefix."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from relight.testing.servers.etcd import EtcdServer, etcd_or_skip
from tests.backends.conftest import postgres_server  # noqa: F401
from tests.cluster.arena import Arena

_names = count(1)
# Processes are killed here, not machines: what they have written survives them without a disk.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
KINDS = ("sqlite", "postgres", "postgres+etcd")


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdServer]:
    with (
        tempfile.TemporaryDirectory(prefix="relight-etcd-", dir=MEMORY) as folder,
        EtcdServer(Path(folder), etcd_or_skip()) as server,
    ):
        yield server


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def arena(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Arena]:
    """What the nodes have written is found in pytest's folder afterwards."""
    postgres = request.getfixturevalue("postgres_server") if kind.startswith("postgres") else None
    etcd = request.getfixturevalue("etcd_server") if kind.endswith("etcd") else None
    with tempfile.TemporaryDirectory(prefix="relight-cluster-", dir=MEMORY) as folder:
        store = postgres.create_database() if postgres else f"{folder}/relight.db"
        leases = f"etcd://{etcd.endpoint}/test{next(_names)}" if etcd else "store"
        yield Arena(kind, Path(folder) / "nodes", store, leases, postgres, etcd)
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
