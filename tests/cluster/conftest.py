"""The stores that a cluster can be on. Servers are shared; every test has its own database and prefix."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.cluster.arena import Arena
from tests.conftest import MEMORY

_names = count(1)
# PostgreSQL that keeps its own leases is much like the two others. What is special about it is in the tests of its backend.
KINDS = ("sqlite", pytest.param("postgres", marks=pytest.mark.soak_ci), "postgres+etcd")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def arena(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Arena]:
    """After the test, the files of the nodes are in pytest's folder."""
    postgres = request.getfixturevalue("postgres_server") if kind.startswith("postgres") else None
    etcd = request.getfixturevalue("etcd_server") if kind.endswith("etcd") else None
    with tempfile.TemporaryDirectory(prefix="relight-cluster-", dir=MEMORY) as folder:
        store = postgres.create_database() if postgres else f"{folder}/relight.db"
        leases = f"etcd://{etcd.endpoint}/test{next(_names)}" if etcd else "store"
        yield Arena(kind, Path(folder) / "nodes", store, leases, postgres, etcd)
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
