"""Orchestrators with leases in an etcd of three members: what happens when one member dies, or the majority."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from relight.errors import StoreUnavailableError
from relight.model.run import Status
from relight.telemetry import Token
from tests.cluster.arena import Arena, flows, rows
from tests.cluster.test_fencing import held_by, token
from tests.conftest import MEMORY
from tests.harness.cluster import pause, until
from tests.servers.etcd import EtcdServer
from tests.servers.etcd_cluster import EtcdCluster
from tests.servers.postgres import PostgresServer

TTL = 8.0  # an election of a second fits into it, at any time between two heartbeats
SHORT_TTL = 2.0  # of orchestrators whose sessions have to lapse

_names = count(1)
pytestmark = pytest.mark.xdist_group("etcd-cluster")  # all these tests share three servers


@pytest.fixture
def members(etcd_cluster: EtcdCluster) -> EtcdCluster:
    return etcd_cluster


@pytest.fixture
def arena(members: EtcdCluster, postgres_server: PostgresServer, tmp_path: Path) -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="relight-cluster-", dir=MEMORY) as folder:
        store, leases = postgres_server.create_database(), url(members)
        yield Arena("postgres+etcd", Path(folder) / "nodes", store, leases, postgres_server, None)
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)


def url(members: EtcdCluster, first: EtcdServer | None = None) -> str:
    """A URL with all members. A client asks the first one first."""
    endpoints = sorted(members.endpoints, key=lambda one: first is not None and one != first.endpoint)
    return f"etcd://{','.join(endpoints)}/test{next(_names)}"


@pytest.mark.parametrize(
    ("which", "fault"),
    [
        ("leader", "freeze"),
        pytest.param("follower", "kill", marks=pytest.mark.soak_ci),
        pytest.param("leader", "kill", marks=pytest.mark.soak_ci),
    ],
)
async def test_a_member_is_gone_and_no_orchestrator_lets_go_of_its_runs(
    arena: Arena, members: EtcdCluster, which: str, fault: str
):
    member = members.leader() if which == "leader" else members.followers()[0]
    arena.leases = url(members, first=member)
    async with arena.opened(TTL, max_concurrent_runs=1) as (cluster, rl):
        # `a` learns of a death by a push only: it looks once an hour.
        await cluster.start("a", recovery={"check_interval": "1h"}, arguments={"settle": True})
        mine = await rl.start(flows.gated, "mine")
        await held_by(arena, mine, 1)
        getattr(member, fault)()
        members.leader()  # wait: a short ttl would lapse during an election
        others = await rl.start(flows.gated, "others")
        await cluster.start("b", recovery={"lease_ttl": SHORT_TTL})
        assert await held_by(arena, others, 1) == "b"
        await cluster.kill("b")
        arena.open_gate("mine")
        assert await mine.result(timeout="60s") == 6
        assert await held_by(arena, others, 2) == "a"
        arena.open_gate("others")
        assert await others.result(timeout="60s") == 6
        assert token(Token.LEASE_LOST) not in cluster.log("a")
        assert {note.by for note in arena.notes(run=mine.id)} == {"a"}
        assert len(await arena.verify(rl, [mine, others])) == 1


@pytest.mark.parametrize("fault", ["kill", pytest.param("freeze", marks=pytest.mark.soak_ci)])
async def test_without_a_majority_nothing_is_driven_and_with_it_work_goes_on(
    arena: Arena, members: EtcdCluster, fault: str
):
    async with arena.opened(SHORT_TTL) as (cluster, rl):
        await asyncio.gather(cluster.start("a"), cluster.start("b"))
        runs = [
            await rl.start(flows.gated.with_id(f"r{n}"), "open") for n in range(6)
        ]  # none ends before its gate is opened
        await until(lambda: len(arena.notes(key="held")) == len(runs))
        for member in members.followers():
            getattr(member, fault)()
        for name in "ab":
            await cluster.logs(name, token(Token.LEASE_LOST))

        async def released() -> bool:
            try:
                return {(row.status, row.owner) for row in await rows(rl, runs)} == {(Status.PENDING, None)}
            except StoreUnavailableError:
                return False

        await until(released, "all runs to be released")
        steps = len(arena.notes())
        late = await rl.start(flows.steps.with_id("late"), 3)
        await pause(SHORT_TTL)  # in which nothing may happen
        assert len(arena.notes()) == steps
        assert await late.status() is Status.PENDING
        members.heal()
        arena.open_gate("open")
        assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [6] * len(runs)
        assert await late.result(timeout="60s") == 3
        for name in "ab":
            await cluster.logs(name, token(Token.LEASE_REGAINED))  # the other may have finished all runs
        await arena.verify(rl, [*runs, late])
