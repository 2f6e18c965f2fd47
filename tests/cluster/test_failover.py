"""The primary fails and its standby takes over, while an orchestrator goes on: no accepted run is lost, no committed step is
repeated, and news is pushed again."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relight import Handle, Relight
from relight.errors import RunNotFoundError, StoreUnavailableError
from relight.orchestrator.waking import CHECK_SECONDS
from relight.telemetry import Token
from tests.cluster.arena import Arena, flows
from tests.cluster.test_scenarios import results
from tests.conftest import MEMORY
from tests.harness.cluster import pause, until
from tests.harness.deeds import audit_deeds, read_book, stale_writes
from tests.harness.killing import complaints
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import TcpProxy
from tests.servers.replica import Pair, set_option

STEPS = 30


class Site:
    """A pair of servers, and how clients reach them: by both addresses, or by one address that moves."""

    def __init__(self, pair: Pair, proxy: TcpProxy, way: str) -> None:
        self.pair = pair
        self.proxy = proxy
        self.way = way
        both = pair.create_database()
        self.store = both if way == "addresses" else f"postgresql://postgres@{proxy.address}/{both.rpartition('/')[2]}"

    def lose_primary(self) -> None:
        """Lose the primary: only the standby is left."""
        if self.way == "read-only":  # the primary goes on, and so do the connections to it
            set_option(self.pair.primary, "default_transaction_read_only", "on")
        else:
            self.pair.primary.kill()
        self.proxy.switch("127.0.0.1", self.pair.standby.port)


OTHER_WAYS = tuple(pytest.param(way, marks=pytest.mark.soak_ci) for way in ("one address", "read-only"))


@pytest.fixture(params=["addresses", *OTHER_WAYS])
def site(request: pytest.FixtureRequest, postgres_server: PostgresServer) -> Iterator[Site]:
    with Pair(postgres_server) as pair, TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        yield Site(pair, proxy, request.param)


@pytest.fixture
def arena(site: Site, tmp_path: Path) -> Iterator[Arena]:
    """After the test, the files of the node are in pytest's folder."""
    with tempfile.TemporaryDirectory(prefix="relight-cluster-", dir=MEMORY) as folder:
        yield Arena("postgres", Path(folder), site.store, "store", site.pair.primary, None)
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)


async def load(rl: Relight, runs: list[Handle[Any]]) -> None:
    """Start runs all the time. As clients do, start each again until it is accepted."""
    for number in itertools.count():
        while True:
            try:
                runs.append(await rl.start(flows.steps.with_id(f"r{number}"), STEPS, 0.02))
                break
            except StoreUnavailableError:
                await pause(0.05)
        await pause(0.02)


async def fail_over(arena: Arena, site: Site, rl: Relight, meanwhile: Token) -> list[Handle[Any]]:
    """Lose the primary under load. When the orchestrator has noticed that, promote the standby. Returns the accepted runs."""
    runs: list[Handle[Any]] = []
    loading = asyncio.create_task(load(rl, runs))
    await until(lambda: len(arena.notes("end")) > 200)
    await asyncio.to_thread(site.lose_primary)
    await arena.cluster.logs("a", "takes no writes")
    await arena.cluster.logs("a", f"[{meanwhile}]")
    await asyncio.to_thread(site.pair.standby.promote)
    before = len(runs)
    await until(lambda: len(runs) > before + 5, "new runs to be accepted")
    loading.cancel()
    assert await results(runs) == [sum(range(STEPS))] * len(runs)
    return runs


async def news_is_pushed(arena: Arena, site: Site, rl: Relight) -> None:
    """Each of these runs begins when the orchestrator gets the push, or when it looks by itself, every CHECK_SECONDS."""
    listening = "select count(*) > 1 from pg_stat_activity where query like 'LISTEN%relight.news%'"  # the client, too
    await until(lambda: site.pair.standby.sql(listening) == "t", "the orchestrator to listen", within=60)
    began = time.monotonic()
    for number in range(12):
        run = await rl.start(flows.steps.with_id(f"told-{number}"), 1)
        await until(lambda run=run: arena.notes(run=run.id))
        await run.result()
    assert time.monotonic() - began < 6 * CHECK_SECONDS  # without pushes: eleven times and more


async def test_without_synchronous_replication_it_is_the_standby_that_counts(
    postgres_server: PostgresServer, tmp_path: Path
):
    """Acknowledged commits vanish. The runs that had made them are fenced. Without a restart they go on from what is
    left. Steps that had been committed are executed again: no engine could prevent that."""
    with Pair(postgres_server, synchronous=False) as pair:
        arena = Arena("postgres", tmp_path, pair.create_database(), "store", postgres_server, None)
        async with arena.opened(60.0) as (cluster, rl):
            await cluster.start("a")
            runs = [await rl.start(flows.steps.with_id(f"r{n}"), 100, 0.02) for n in range(5)]
            await until(lambda: len(arena.notes("end")) > 50)
            await asyncio.to_thread(pair.until_level)  # the standby has all these runs, and some of their steps
            await asyncio.to_thread(pair.standby.stop)
            gone = await rl.start(flows.steps.with_id("gone"), 100, 0.02)
            before = len(arena.notes("end"))
            await until(lambda: len(arena.notes("seen")) > before + 50)
            await asyncio.to_thread(pair.primary.kill)
            await asyncio.to_thread(pair.standby.start)
            await asyncio.to_thread(pair.standby.promote)
            for run in (*runs, gone):
                await cluster.logs("a", f"[{Token.RUN_FENCED}] run {run.id}:")
            assert await results(runs) == [sum(range(100))] * len(runs)
            with pytest.raises(RunNotFoundError):
                await gone.describe()
            assert audit_deeds(read_book(arena.book)).repeated
            assert not await stale_writes(rl, [await rl.row(run.id) for run in runs], read_book(arena.book))
            assert not complaints(cluster)


async def test_an_orchestrator_goes_on_with_the_standby(arena: Arena, site: Site):
    """Its lease outlives the failover, and so do its runs in memory. Not even a step in flight is repeated."""
    async with arena.opened(60.0) as (cluster, rl):
        process = await cluster.start("a")
        runs = await fail_over(arena, site, rl, Token.COMMIT_FAILED)
        await cluster.logs("a", f"[{Token.COMMIT_RECOVERED}]")
        assert cluster.processes["a"] is process
        assert process.alive
        assert f"[{Token.LEASE_LOST}]" not in cluster.log("a")
        await news_is_pushed(arena, site, rl)
        assert await arena.verify(rl, runs) == []


@pytest.mark.soak_ci
async def test_a_failover_that_outlasts_the_lease(arena: Arena, site: Site):
    """The orchestrator lets go of its runs, and takes them up again."""
    async with arena.opened(2.0) as (cluster, rl):
        process = await cluster.start("a")
        runs = await fail_over(arena, site, rl, Token.LEASE_LOST)
        await cluster.logs("a", f"[{Token.LEASE_REGAINED}]")
        assert process.alive
        await news_is_pushed(arena, site, rl)
        await arena.verify(rl, runs)
