"""Which owners are alive if the lease manager has lost its data, was not there, or is not the manager that an engine asks."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from relight import Relight
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.backends.sqlite.store import SqliteStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import ConfigError, RunStateError
from relight.model.lease import Process, Session
from relight.model.run import Status
from relight.ownership import liveness
from relight.ownership.liveness import Presence
from relight.process import _machine, mark_dead
from relight.ticker import Ticker
from tests.harness.cluster import until
from tests.recovery.engines import Engines as Apart
from tests.recovery.engines import Work, make_database
from tests.recovery.test_etcd import recovered
from tests.servers.etcd import EtcdServer, etcd_or_skip

TTL = 3.0


class Engines:
    """Engines on one file, each with its own configuration."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: list[Relight] = []

    async def open(self, name: str, leases: str, **options: Any) -> Relight:
        recovery = {"lease_ttl": TTL, "check_interval": 0.2, **options.pop("recovery", {})}
        rl = Relight(
            self.path, leases=leases, orchestrator_id=name, recovery=recovery, shutdown_grace="100ms", **options
        )
        await rl.open()
        self.opened.append(rl)
        return rl

    async def die(self, rl: Relight) -> None:
        """End the engine so that it looks like a killed process to the others."""
        rl.services.heartbeats.stop_now()
        mark_dead(rl.services.owner)


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[Engines]:
    made = Engines(tmp_path / "relight.db")
    yield made
    for rl in made.opened:
        await rl.close()


@pytest.fixture
async def apart() -> AsyncIterator[Apart]:
    """Engines whose leases may be cut off, one by one."""
    made = Apart()
    yield made
    await made.end()


# ---- an etcd that comes back empty


async def test_no_orchestrator_is_taken_for_dead_because_etcd_has_lost_its_data(engines: Engines, tmp_path: Path):
    """The engine that registers first finds no other in the list, although all are alive."""
    with EtcdServer(tmp_path / "etcd", etcd_or_skip()) as server:
        leases = f"etcd://{server.endpoint}/lost"
        work = Work()
        opened = [await engines.open(f"engine-{n}", leases, recovery={"lease_ttl": 9.0}) for n in range(3)]
        runs = [await rl.start(work.flow.with_id(f"run-{n}")) for n, rl in enumerate(opened)]
        await until(lambda: work.begun == 3)
        server.kill()
        shutil.rmtree(tmp_path / "etcd" / "data")
        server.start()
        owners = {rl.services.owner for rl in opened}

        async def all_listed() -> bool:
            listed = await opened[0].services.heartbeats.call(lambda leases: leases.list_orchestrators())
            return {session.owner for session in listed if session.fresh} == owners

        await until(all_listed, "all to register again", within=60)
        rounds = [rl._recovery for rl in opened]
        for one in rounds:
            assert one is not None
            await one.round(100)
        for rl, run in zip(opened, runs, strict=True):
            row = await run.describe()
            assert (row.owner, row.epoch) == (rl.services.owner, 1)
        work.gate.set()
        assert [await run.result(timeout="60s") for run in runs] == [7, 7, 7]
        assert work.begun == 3


def _session(owner: str, *, fresh: bool, at: float, process: Process = Process()) -> Session:  # noqa: B008 - it is frozen
    return Session(owner=owner, process=process, started_at=0.0, heartbeat_at=at, expires_at=at + 30, fresh=fresh)


@pytest.mark.parametrize(
    ("listed", "noted", "complete_at", "alive", "again"),
    [
        (True, None, 0.0, True, None),
        (False, True, 0.0, False, None),  # the manager has seen it end
        (None, None, 0.0, False, None),
        (None, None, 150.0, True, 150.0),  # the list is too young
        (None, True, 0.0, True, 120.0),  # the store has seen it less than a ttl ago
        (None, True, 150.0, True, 150.0),
        (None, False, 0.0, False, None),
        (None, False, 150.0, True, 150.0),
    ],
)
def test_which_owner_is_alive_follows_from_the_lists(
    listed: bool | None, noted: bool | None, complete_at: float, alive: bool, again: float | None
):
    presence = Presence(
        {} if listed is None else {"a#1": _session("a#1", fresh=listed, at=80.0)},
        {} if noted is None else {"a#1": _session("a#1", fresh=noted, at=90.0)},
        complete_at,
        now=100.0,
    )
    assert presence.is_alive("a#1") is alive
    assert presence.look_again_at("a#1") == again


def test_a_process_that_is_known_to_be_gone_is_dead_whatever_the_list_is_worth():
    gone = Process(machine=_machine(), pid=2**22 - 1, started=1, session="x")
    presence = Presence({}, {"a#1": _session("a#1", fresh=True, at=90.0, process=gone)}, 150.0, now=100.0)
    assert not presence.is_alive("a#1")


@pytest.mark.parametrize("kept_by", ["store", "etcd"])
async def test_an_owner_may_die_in_the_middle_of_a_round(engines: Engines, etcd_server: EtcdServer, kept_by: str):
    """The owner was alive when the round read the sessions. The same round must end the owner's session and take its
    runs over. If it took the owner for dead and left the session, the leases would be refused until the next round."""
    leases = "store" if kept_by == "store" else f"etcd://{etcd_server.endpoint}/middle-of-a-round"
    work = Work()
    a = await engines.open("a", leases)
    run = await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    b = await engines.open("b", leases, recovery={"lease_ttl": 600.0, "check_interval": 3600.0})
    recovery, store = b._recovery, b.services.store
    assert recovery is not None
    await recovery.caught_up.wait()
    inner = store.owners

    async def owners() -> list[str]:
        await engines.die(a)
        return await inner()

    store.owners = owners  # type: ignore[method-assign]
    assert await recovery.run_once() == 1
    work.gate.set()
    assert await (await b.get(run.id)).result(timeout="60s") == 7


# ---- being seen


class Elsewhere(MemoryLeases):
    """A manager that keeps its leases outside the store."""

    name = "elsewhere"
    in_store = False


async def test_each_round_of_presence_notes_the_session_unless_the_lease_is_lost(monkeypatch: pytest.MonkeyPatch):
    made: list[Ticker] = []

    class Kept(Ticker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(liveness, "Ticker", Kept)
    store, noted = MemoryStore(clock=SYSTEM_CLOCK), list[str]()
    note = store.note_session

    async def noting(owner: str, process: Process, ttl_seconds: float) -> None:
        noted.append(owner)
        await note(owner, process, ttl_seconds)

    monkeypatch.setattr(store, "note_session", noting)
    async with Relight(
        store=store, lease_manager=Elsewhere(store, clock=SYSTEM_CLOCK), recovery={"lease_ttl": "1h"}
    ) as rl:
        (presence,) = made
        owner = rl.services.owner
        assert noted == [owner]
        await presence._run_once()
        assert noted == [owner, owner]
        rl.services.heartbeats._lost = True  # others may take its runs: it must not look alive
        await presence._run_once()
        assert noted == [owner, owner]
        rl.services.heartbeats._lost = False
        await presence._run_once()
        assert noted == [owner, owner, owner]


# ---- stale_timeout


async def test_stale_timeout_counts_from_the_last_heartbeat_also_if_the_death_was_seen_early(engines: Engines):
    """Its process is known to be gone, so its session, which would last for ten minutes, is ended at once. That must not make
    it forgotten: the run, whose time would count instead, is an hour old."""
    work, stale = Work(), 4.0
    a = await engines.open("a", "store", recovery={"lease_ttl": 600.0})
    run = await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    with contextlib.closing(apsw.Connection(str(engines.path))) as db:
        db.set_busy_timeout(60_000)
        db.execute("UPDATE runs SET created_at = created_at - 3600").fetchall()
        assert db.changes() == 1
    (session,) = await a.services.heartbeats.call(lambda leases: leases.list_orchestrators())
    await engines.die(a)
    b = await engines.open("b", "store", recovery={"stale_timeout": stale})
    at = await recovered(b, run)
    assert at - session.heartbeat_at >= stale
    work.gate.set()
    assert await (await b.get("r")).result(timeout="60s") == 7


async def test_stale_timeout_with_etcd_for_an_orchestrator_that_was_not_there(
    engines: Engines, etcd_server: EtcdServer
):
    work, stale = Work(), 8.0
    leases = f"etcd://{etcd_server.endpoint}/stale"
    a = await engines.open("a", leases)
    run = await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    await engines.die(a)
    died = time.time()
    client = Relight(engines.path, leases=leases, drive=False)
    async with client:

        async def forgotten() -> bool:
            return not await client.services.heartbeats.call(lambda leases: leases.list_orchestrators())

        await until(forgotten, "etcd to forget it", within=60)
    b = await engines.open("b", leases, recovery={"stale_timeout": stale})
    at = await recovered(b, run)
    assert at - died >= stale - TTL / 2  # the last note was a third of the ttl ago at most
    work.gate.set()
    assert await (await b.get("r")).result(timeout="60s") == 7


# ---- the store knows its lease manager


async def test_opening_with_another_lease_manager_is_refused(engines: Engines, etcd_server: EtcdServer):
    """Such an engine would take the living owner for dead. Once, `resume` freed a run that was alive, and its step ran twice."""
    work = Work()
    leases = f"etcd://{etcd_server.endpoint}/known"
    a = await engines.open("a", leases)
    run = await a.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    for options in ({"drive": False}, {}, {"leases": "none"}, {"leases": f"etcd://{etcd_server.endpoint}/other"}):
        with pytest.raises(
            ConfigError, match=r"the leases of this store are kept by 'etcd://.*/known/'.*RELIGHT_LEASES"
        ):
            await Relight(engines.path, **options).open()
    async with Relight(engines.path, leases=leases, drive=False) as client:
        with pytest.raises(RunStateError, match="is alive"):
            await client.resume("r")
        assert "which is alive" in (await client.explain("r")).sentence
    work.gate.set()
    assert await run.result(timeout="60s") == 7
    assert work.begun == 1


async def test_another_manager_may_be_used_once_no_session_of_the_old_one_is_alive(
    engines: Engines, etcd_server: EtcdServer
):
    async with Relight(await make_database(engines.path), drive=False):
        pass  # no process has driven a run yet: no lease manager is remembered
    for leases in ("store", f"etcd://{etcd_server.endpoint}/change", "none", "store"):
        async with Relight(engines.path, leases=leases, recovery={"lease_ttl": TTL}) as rl:
            known = await rl.services.store.lease_manager()
            assert known is not None
            assert known.split(":")[0] == leases.split(":")[0]
        await until(lambda: _nobody(engines.path), "the last note to lapse", within=60, poll=0.1)
    with pytest.raises(ConfigError, match="kept by 'store'"):
        await Relight(engines.path, leases="none", drive=False).open()


async def _nobody(path: Path) -> bool:
    store = SqliteStore(path, clock=SYSTEM_CLOCK)
    await store.open()
    try:
        return not any(session.fresh for session in await store.sessions())
    finally:
        await store.close()


# ---- an outage for all


async def test_after_an_outage_the_others_are_given_a_moment_to_renew_their_leases(apart: Apart):
    """The first engine that reaches the lease manager again must not take over the runs of all others: they are alive, and
    what their steps have done meanwhile would be done again."""
    work = Work()
    a, b = await apart.start("a"), await apart.start("b")
    await b.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    for name in ("a", "b"):
        apart.leases[name].cut = True
    await until(lambda: time.monotonic() > b.services.heartbeats.valid_until + 0.1, "both leases to lapse")
    await until(lambda: time.monotonic() > a.services.heartbeats.valid_until + 0.1)
    # As on a server that is down: the run could not be released either.
    epoch = (await a.row("r")).epoch
    row = apart.store.runs["r"]
    row.owner, row.status = b.services.owner, Status.RUNNING
    apart.store.data.unfinished["r"] = row
    apart.leases["a"].cut = False
    await until(lambda: a.services.heartbeats.may_drive)
    assert a._recovery is not None
    assert await a._recovery.round(100) == 0
    assert (await a.row("r")).epoch == epoch
    # And if b is dead after all, its run is recovered when that moment is over.
    work.gate.set()
    assert await (await a.get("r")).result(timeout="60s") == 7
    assert (await a.row("r")).epoch == epoch + 1
