"""EtcdLeases on an etcd of three members, as in production: one member dies or is frozen, or the majority is gone."""

from __future__ import annotations

import asyncio
import os
import time
from itertools import count

import pytest

from relight.backends.etcd import EtcdLeases, parse_etcd_url
from relight.errors import LeasesUnavailableError
from relight.model.lease import Acquired, Orphaned, Process
from tests.backends.test_etcd_leases import SLACK_SECONDS, EtcdLeaseSuite, beating, beats, orphans_of, until
from tests.servers.etcd import EtcdServer
from tests.servers.etcd_cluster import EtcdCluster

TTL = 4.0  # an election takes a second here, and every heartbeat in between fails
LAPSE_SECONDS = 2 * TTL + 52  # a test waits for so long only if it fails
NOBODY = Process()
PREFIXES = (f"/relight-cluster-{os.getpid()}-{number}/" for number in count())

# All these tests share three servers, and bring them into states that other tests could not use.
pytestmark = pytest.mark.xdist_group("etcd-cluster")


@pytest.fixture
def cluster(etcd_cluster: EtcdCluster) -> EtcdCluster:
    return etcd_cluster


@pytest.fixture
async def opened(cluster):
    """Opens managers by a URL with all members. The member that the test is about is the first in it."""
    prefix = next(PREFIXES)
    managers: list[EtcdLeases] = []

    async def opened(
        owner: str = "a#1", *, first: EtcdServer | None = None, ttl: float = TTL, process: Process = NOBODY, **options
    ) -> EtcdLeases:
        endpoints = sorted(cluster.endpoints, key=lambda one: first is not None and one != first.endpoint)
        leases = EtcdLeases(**parse_etcd_url(f"etcd://{','.join(endpoints)}{prefix}"), **options)
        managers.append(leases)
        await leases.open(owner, process, ttl)
        await leases.heartbeat()
        return leases

    yield opened
    await asyncio.gather(*(leases.close() for leases in managers))


def chosen(cluster: EtcdCluster, which: str) -> EtcdServer:
    return cluster.leader() if which == "leader" else cluster.followers()[0]


# ------------------------------------------------------------------------------------------ what every backend does --


@pytest.fixture
def leases(opened):
    async def leases(owner: str, ttl_seconds: float = 60.0, process: Process = NOBODY) -> EtcdLeases:
        return await opened(owner, ttl=ttl_seconds, process=process)

    return leases


@pytest.fixture
def make_runs():
    async def make_runs(count: int) -> list[str]:
        return [f"run/{number}" for number in range(count)]

    return make_runs


@pytest.fixture
def ttl():
    return 2.0


@pytest.mark.soak_ci  # `make test` has it on one etcd
class TestLeases(EtcdLeaseSuite):
    """On a cluster."""

    lapse_seconds = LAPSE_SECONDS


# ------------------------------------------------------------------------------------------------ one of three is gone --


@pytest.mark.parametrize("which", ["leader", "follower"])
@pytest.mark.parametrize("fault", ["kill", "freeze"])
async def test_the_member_that_a_manager_uses_is_gone_and_nothing_is_lost(cluster, opened, which, fault):
    """Neither the session nor the keys on it are lost, nor a death that happens while the watch moves to another
    member."""
    member = chosen(cluster, which)
    mine = await opened("a#1", first=member)
    other = await opened("b#1", first=next(one for one in cluster.members if one is not member))
    watch = mine.watch_orphans()
    await mine.acquire_lease(["r1"])
    await other.acquire_lease(["r2"])
    third = await opened("c#1")
    await third.release_all()
    assert await orphans_of(watch, "c#1") == Orphaned("c#1")  # the watch is open, on that member
    session = mine._lease
    async with beating(mine):
        getattr(member, fault)()
        begun = time.monotonic()
        await until(lambda: _released(other))  # the next leader may have to be elected first
        assert await orphans_of(watch, "b#1", LAPSE_SECONDS) == Orphaned("b#1", ("r2",))
        await until(lambda: beats(mine))
        switched = time.monotonic() - begun
        assert await mine.heartbeat() is False
        assert mine._lease == session, "it is the same session"
        assert (await mine.acquire_lease(["r1", "r2"])) == {"r1": Acquired(), "r2": Acquired()}
    print(f"\n{which} {fault}: told and served again after {switched:.2f} s")


async def _released(leases: EtcdLeases) -> bool:
    await leases.release_all()
    return True


async def test_a_call_waits_for_an_election(cluster, monkeypatch):
    """It waits as long as any call may take. Until then all members refuse at once, and that is no reason to fail."""
    monkeypatch.setattr(
        "relight.backends.etcd.leases.MAX_CALL_SECONDS", LAPSE_SECONDS
    )  # however long an election takes
    leader, (left, other) = cluster.leader(), cluster.followers()
    mine = EtcdLeases([left.endpoint, leader.endpoint], next(PREFIXES))
    await mine.open("a#1", NOBODY, 4 * LAPSE_SECONDS)
    await mine.heartbeat()
    hasty = EtcdLeases([left.endpoint], next(PREFIXES))
    await hasty.open("b#1", NOBODY, 1.0)
    await hasty.heartbeat()  # from here on it is
    leader.kill()
    other.freeze()
    try:
        async with asyncio.timeout(LAPSE_SECONDS):
            while not await _refused_for_want_of_a_leader(hasty):
                pass
        asyncio.get_running_loop().call_later(0.5, other.thaw)
        assert await mine.acquire_lease(["r1"]) == {"r1": Acquired()}
    finally:
        await mine.close()
        await hasty.close()


async def _refused_for_want_of_a_leader(leases: EtcdLeases) -> bool:
    try:
        await leases.get_lease("r1")
    except LeasesUnavailableError as error:
        return "no leader" in str(error)
    return False


async def test_members_die_one_after_the_other_and_come_back(cluster, opened):
    """After every switch the watch goes on at the last revision that it has seen, also on a member that has just
    started and has to catch up."""
    mine = await opened("a#1")
    watch = mine.watch_orphans()
    session = mine._lease
    async with beating(mine):
        for number, member in enumerate((*cluster.members, cluster.members[0])):
            member.kill()
            other = await until(lambda owner=f"b#{number}": opened(owner))
            await other.acquire_lease([f"r{number}"])
            await other.release_all()
            assert await orphans_of(watch, f"b#{number}", LAPSE_SECONDS) == Orphaned(f"b#{number}", (f"r{number}",))
            member.start()
            cluster.leader()
        await until(lambda: beats(mine))
    assert mine._lease == session


# ------------------------------------------------------------------------------------------------- the majority is gone --


@pytest.mark.parametrize("fault", ["kill", "freeze"])
async def test_without_a_majority_no_request_is_answered(cluster, opened, fault):
    last, *majority = cluster.members
    mine, other = await opened("a#1", first=last), await opened("b#1", first=last)
    watch = mine.watch_orphans()
    await other.acquire_lease(["r2"])
    for member in majority:
        getattr(member, fault)()
    # The member that is left answers no manager, whatever it knows.
    for leases in (mine, other):
        await until(lambda leases=leases: _refuses(leases))
        begun = time.monotonic()
        questions = [
            leases.heartbeat(),
            leases.acquire_lease(["r1"]),
            leases.get_lease("r2"),
            leases.list_orchestrators(),
            leases.end_session("nobody#1"),
        ]
        answers = await asyncio.gather(*questions, return_exceptions=True)
        assert {type(answer) for answer in answers} == {LeasesUnavailableError}, answers
        assert time.monotonic() - begun < TTL * 0.3 + SLACK_SECONDS
    await until(lambda: _interrupted(watch))
    cluster.heal()
    await until(lambda: beats(mine))
    await until(lambda: _released(other))
    assert (await orphans_of(watch, "b#1", LAPSE_SECONDS)).owner == "b#1"
    assert await mine.acquire_lease(["r1"]) == {"r1": Acquired()}


async def _refuses(leases: EtcdLeases) -> bool:
    """A leader that has lost its followers keeps leases alive until it notices that by itself: for an election timeout
    or two."""
    try:
        await leases.heartbeat()
    except LeasesUnavailableError:
        return True
    return False


async def _interrupted(watch) -> bool:
    return bool(watch.interrupted)
