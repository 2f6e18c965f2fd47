"""Owners that are frozen or cut off, or that have a wrong clock or the same id as another: nothing that they do counts twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from relight import Handle, Relight
from relight.model.journal import RunRecovered
from relight.model.run import Status
from relight.telemetry import Token
from tests.cluster.arena import Arena, flows, journal
from tests.harness.cluster import Cluster, pause, until
from tests.servers.proxy import TcpProxy

TTL = 3.0  # an orchestrator sends a heartbeat every second: no machine is so busy that its lease lapses
SKEW = 3600.0
SETTLED = {"settle": True}
ETCD = ["postgres+etcd"]
POSTGRES = ["postgres", "postgres+etcd"]
IN_CI = [pytest.param("postgres+etcd", marks=pytest.mark.soak_ci)]
# Tests that do not depend on the kind of store and leases run on one kind in `make test`.
ONE_KIND = ["sqlite", *(pytest.param(kind, marks=pytest.mark.soak_ci) for kind in POSTGRES)]


def token(one: Token) -> str:
    return f"[{one}]"


async def held_by(arena: Arena, run: Handle[Any], count: int) -> str:
    """Wait until the step that lasts has begun so many times. Returns the orchestrator that began it last."""
    await until(
        lambda: len(arena.notes(key="held", run=run.id)) == count, f"the step to begin {count} times", within=60
    )
    return arena.notes(key="held", run=run.id)[-1].by


async def took_over(arena: Arena, rl: Relight, run: Handle[Any], name: str) -> list[Any]:
    """Check that `name` has the run and finishes it. Returns what must not change after that."""
    assert await held_by(arena, run, 2) == name
    arena.open_gate("open")
    assert await run.result(timeout="60s") == 6
    return [await journal(rl, run), await run.describe()]


# ---- frozen


async def test_a_frozen_owner_wakes_up_after_another_has_finished_the_run(arena: Arena):
    async with arena.opened(TTL) as (cluster, rl):
        await cluster.start("a")
        run = await rl.start(flows.gated, "open")
        await held_by(arena, run, 1)
        await cluster.start("b", arguments=SETTLED)
        await cluster.freeze("a")
        before = await took_over(arena, rl, run, "b")
        cluster.thaw("a")
        await cluster.logs("a", f"{token(Token.RUN_FENCED)} run {run.id}")
        assert [await journal(rl, run), await run.describe()] == before
        (recovered,) = [event for event in before[0] if isinstance(event, RunRecovered)]
        assert (recovered.owner, recovered.previous_owner) == (cluster.owner("b"), cluster.owner("a"))
        assert before[1].epoch == 3  # created, taken up by a, claimed by b
        assert len(await arena.verify(rl, [run])) == 1
        assert await another_is_driven(rl, cluster, "b", "a")  # a works as before


async def another_is_driven(rl: Relight, cluster: Cluster, without: str, by: str) -> bool:
    """Whether `by` takes up runs. The other orchestrator is killed, so that no other could."""
    await cluster.kill(without)
    return bool(await rl.run(flows.steps, 3) == 3)


# ---- cut off


@pytest.fixture
def proxy(arena: Arena, request: pytest.FixtureRequest) -> Iterator[TcpProxy]:
    """A proxy between `a` and the server that the test is about."""
    server = {"etcd": arena.etcd, "postgres": arena.postgres}[request.param]
    assert server is not None
    with TcpProxy("127.0.0.1", server.port) as made:
        yield made


def through(arena: Arena, proxy: TcpProxy) -> dict[str, Any]:
    """How a node reaches the one server through the proxy, and everything else directly."""
    assert arena.postgres is not None
    ports = {arena.postgres.port: "postgres"} | ({arena.etcd.port: "etcd"} if arena.etcd is not None else {})
    target = proxy._target[1]
    if ports[target] == "etcd":
        return {"leases": arena.leases.replace(f":{target}/", f":{proxy.port}/")}
    return {"store": arena.store.replace(f":{target}/", f":{proxy.port}/")}


@pytest.mark.parametrize("how", ["stall", pytest.param("cut", marks=pytest.mark.soak_ci)])
@pytest.mark.parametrize("kind", ETCD)
@pytest.mark.parametrize("proxy", ["etcd"], indirect=True)
async def test_an_owner_is_cut_off_from_its_leases_only(arena: Arena, proxy: TcpProxy, how: str):
    async with arena.opened(TTL) as (cluster, rl):
        await cluster.start("a", **through(arena, proxy))
        run = await rl.start(flows.gated, "open")
        await held_by(arena, run, 1)
        await cluster.start("b", arguments=SETTLED)
        getattr(proxy, how)()
        before = await took_over(arena, rl, run, "b")
        assert token(Token.LEASE_LOST) in cluster.log("a")
        proxy.heal()
        await cluster.logs("a", token(Token.LEASE_REGAINED))
        assert [await journal(rl, run), await run.describe()] == before
        await arena.verify(rl, [run])
        assert await another_is_driven(rl, cluster, "b", "a")


@pytest.mark.parametrize("how", ["stall", pytest.param("cut", marks=pytest.mark.soak_ci)])
@pytest.mark.parametrize("kind", POSTGRES)
@pytest.mark.parametrize("proxy", ["postgres"], indirect=True)
async def test_an_owner_is_cut_off_from_the_store_only(arena: Arena, proxy: TcpProxy, how: str):
    """With leases in etcd it stays alive for all others, and keeps its run. No other orchestrator takes the run over,
    and none needs to."""
    async with arena.opened(TTL) as (cluster, rl):
        await cluster.start("a", **through(arena, proxy))
        run = await rl.start(flows.gated, "open")
        await held_by(arena, run, 1)
        await cluster.start("b", arguments=SETTLED)
        getattr(proxy, how)()
        if arena.kind == "postgres":
            before = await took_over(arena, rl, run, "b")
            proxy.heal()
            await cluster.logs("a", token(Token.LEASE_REGAINED))
            assert [await journal(rl, run), await run.describe()] == before
        else:
            arena.open_gate("open")
            await pause(2 * TTL)  # no orchestrator may take it over in this time
            assert (await run.describe()).owner == cluster.owner("a")
            proxy.heal()
            assert await run.result(timeout="60s") == 6
            assert len(arena.notes(key="held", run=run.id)) == 1
        await arena.verify(rl, [run])
        assert await another_is_driven(rl, cluster, "b", "a")


@pytest.mark.parametrize("kind", ETCD)
async def test_the_leases_are_down_for_longer_than_the_ttl(arena: Arena):
    etcd = arena.etcd
    assert etcd is not None
    async with arena.opened(TTL) as (cluster, rl):
        await asyncio.gather(cluster.start("a"), cluster.start("b"))
        runs = [await rl.start(flows.steps.with_id(f"r{n}"), 40, 0.08) for n in range(6)]
        await until(lambda: len(arena.begun()) == len(runs))
        etcd.stop()
        try:
            for name in "ab":
                await cluster.logs(name, token(Token.LEASE_LOST))
            await pause(TTL)
            count = len(arena.notes())
            waiting = await rl.start(flows.steps.with_id("late"), 3)
            await pause(TTL)
            assert len(arena.notes()) == count  # nothing is driven
            assert await waiting.status() is Status.PENDING
        finally:
            etcd.start()
        assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [sum(range(40))] * len(runs)
        assert await waiting.result(timeout="60s") == 3
        for name in "ab":
            assert token(Token.LEASE_REGAINED) in cluster.log(name)
        await arena.verify(rl, runs)


# ---- wrong clocks, the same id, a blocked loop


@pytest.mark.parametrize("kind", ["postgres", *IN_CI])  # on one machine, which SQLite is for, there is only one clock
@pytest.mark.parametrize(
    "skew", [pytest.param(-SKEW, id="behind", marks=pytest.mark.soak_ci), pytest.param(SKEW, id="ahead")]
)
async def test_clocks_that_differ_by_an_hour(arena: Arena, skew: float):
    """No orchestrator counts as dead by another clock than the store's, and a dead one is noticed in time."""
    async with arena.opened(TTL) as (cluster, rl):
        await cluster.start("a", arguments={"skew": skew})
        first = await rl.start(flows.gated, "open")
        await held_by(arena, first, 1)
        nap = await rl.start(flows.napping, 0.5)
        await cluster.start("b", arguments=SETTLED)
        await pause(1.3 * TTL)
        assert len(arena.notes(key="held", run=first.id)) == 1  # b leaves it to a
        assert await nap.result(timeout="60s") == 3
        await cluster.kill("a")
        assert await held_by(arena, first, 2) == "b"
        await cluster.start("c", arguments={"skew": -skew, "settle": True})
        await pause(1.3 * TTL)
        assert len(arena.notes(key="held", run=first.id)) == 2  # and c leaves it to b
        arena.open_gate("open")
        assert await first.result(timeout="60s") == 6
        await arena.verify(rl, [first, nap])


@pytest.mark.parametrize("kind", ONE_KIND)
async def test_two_orchestrators_with_one_id_are_told_apart(arena: Arena):
    async with arena.opened(TTL, max_concurrent_runs=8) as (cluster, rl):  # so that neither takes all runs
        await cluster.start("a")
        mine = await rl.start(flows.gated.with_id("first"), "open")
        await held_by(arena, mine, 1)
        await cluster.start("b", orchestrator_id="a", arguments=SETTLED)
        assert token(Token.ORCHESTRATOR_ID_SHARED) not in cluster.log("b")  # both are on one machine
        runs = [await rl.start(flows.steps.with_id(f"r{n}"), 20, 0.02) for n in range(20)]
        assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [sum(range(20))] * len(runs)
        await pause(TTL)
        arena.open_gate("open")
        assert await mine.result(timeout="60s") == 6
        assert {note.by for note in arena.notes()} == {"a", "b"}  # by their nodes' names
        assert await arena.verify(rl, [mine, *runs]) == []
        # One ends, gracefully. The other stays.
        cluster.terminate("a")
        assert await cluster.ended("a") == 0
        assert await rl.run(flows.steps, 3) == 3


@pytest.mark.parametrize("kind", ONE_KIND)
async def test_a_step_that_blocks_the_event_loop_costs_no_lease(arena: Arena):
    async with arena.opened(TTL) as (cluster, rl):
        await cluster.start("a")
        run = await rl.start(flows.hogging, 2.5 * TTL)
        await until(lambda: arena.notes(key="hog"))
        await cluster.start("b", arguments=SETTLED)
        assert await run.result(timeout="60s") == 6
        assert {note.by for note in arena.notes()} == {"a"}
        assert await arena.verify(rl, [run]) == []
        for name in "ab":
            assert token(Token.LEASE_LOST) not in cluster.log(name)
            assert token(Token.OWNER_DEAD) not in cluster.log(name)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.soak_ci) for kind in ("sqlite", "postgres")), *ETCD]
)
async def test_orchestrators_come_to_agree_on_which_of_them_are_alive(arena: Arena):
    """A dead orchestrator stays in the list until its session lapses. A living one that is not in the list yet is added."""
    async with arena.opened(TTL) as (cluster, rl):

        async def listed() -> set[str]:
            sessions = await rl.services.heartbeats.call(lambda leases: leases.list_orchestrators())
            return {session.owner for session in sessions if session.fresh}

        async def listed_are(*names: str) -> None:
            wanted = {cluster.owner(name) for name in names}

            async def equal() -> bool:
                return await listed() == wanted

            await until(equal, f"{names} to be listed")

        await asyncio.gather(cluster.start("a", arguments=SETTLED), cluster.start("b", arguments=SETTLED))
        await listed_are("a", "b")
        runs = [await rl.start(flows.gated.with_id(f"r{n}"), "open") for n in range(10)]
        await until(lambda: len(arena.begun()) == len(runs))
        await cluster.kill("a")  # the list has too many until another orchestrator notices the death,
        await listed_are("b")
        await cluster.start("c")  # and, as b knows it, too few
        await listed_are("b", "c")
        await cluster.kill("b")
        await listed_are("c")
        arena.open_gate("open")
        assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [6] * len(runs)
        await arena.verify(rl, runs)
