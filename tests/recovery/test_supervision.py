"""Long-lived tasks are begun again, whatever ends them. A process that cannot keep one alive leaves its runs to others."""

from __future__ import annotations

import asyncio
import itertools
import logging
import types
from collections.abc import Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from relight import Handle, Relight, flow, sleep, step, supervisor, wait_for
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.backends.sqlite.leases import SqliteLeases
from relight.backends.sqlite.store import SqliteStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import RelightError
from relight.flow.definitions import FlowWithId
from relight.model.lease import Acquired, NotOwner, OwnedBy, Process
from relight.orchestrator import waking
from relight.ownership.heartbeats import Heartbeats
from relight.ports.store import Commit, CommitResult
from relight.record.lane import Lane
from relight.supervisor import Part, Supervisor, Work
from tests.flows.world import until
from tests.servers.etcd import EtcdServer
from tests.servers.postgres import PostgresServer

_scenarios = itertools.count(1)
MOST_AWAITS = 60  # of one part while the scenario runs: past that, breaking it once more shows nothing new


class BugError(Exception):
    """An error that no backend should raise."""


class Breaking:
    """Ends one task once, by an exception at one of its awaits."""

    def __init__(self, part: str, number: int) -> None:
        self.part = part
        self.number = number
        self.count = 0
        self.fired = False

    def work(self, name: str, work: Work) -> Work:
        if name != self.part:
            return work
        return lambda part: self.coroutine(work(part))

    def coroutine(self, inner: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None]:
        async def broken() -> None:
            await self._drive(inner)

        return broken()

    @types.coroutine
    def _drive(self, inner: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        error: BaseException | None = None
        while True:
            try:
                waits_for = inner.send(None) if error is None else inner.throw(error)
            except StopIteration:
                return
            error = None
            self.count += not _waits_for_driver(inner)
            if self.count == self.number and not self.fired:
                self.fired = True
                error = BugError(f"await {self.number}")
                continue
            try:
                yield waits_for
            except BaseException as caught:
                error = caught


DRIVER = ("asyncpg", "postgres/connection.py")  # and where it is called to make a connection


def _waits_for_driver(task: Any) -> bool:
    """Whether it is the driver that waits, on behalf of the task. An exception there is the driver's to handle, and leaves
    connections open of which nobody knows."""
    while task is not None:
        code = getattr(task, "cr_code", None) or getattr(task, "gi_code", None)
        if code is not None and any(place in code.co_filename for place in DRIVER):
            return True
        task = getattr(task, "cr_await", None) or getattr(task, "gi_yieldfrom", None)
    return False


class Flows:
    """Three flows: one sleeps, one waits for a signal, one executes steps."""

    def __init__(self) -> None:
        @flow
        async def naps() -> str:
            await sleep("0.2s")
            return "woke"

        @flow
        async def listens() -> Any:
            return await wait_for("go")

        @step
        async def one_step(number: int) -> int:
            await asyncio.sleep(0)
            return number

        @flow
        async def works() -> int:
            return sum([await one_step(number) for number in range(5)])

        self.naps, self.listens, self.works = naps, listens, works


@pytest.fixture
def flows() -> Flows:
    return Flows()


async def accepted(rl: Relight, wanted: FlowWithId[[], Any]) -> Handle[Any]:
    """As a caller does who gets an error: the same again. While the recorder is broken, it may or may not have been written."""
    try:
        return await rl.start(wanted)
    except (BugError, RelightError):
        return await rl.start(wanted)


async def scenario(rl: Relight, flows: Flows) -> set[str]:
    """Everything that has to be done by some part of the engine: a timer, a message, commits, an orphan. Returns the runs."""
    number = next(_scenarios)
    nap = await accepted(rl, flows.naps.with_id(f"nap-{number}"))
    told = await accepted(rl, flows.listens.with_id(f"told-{number}"))
    busy = await accepted(rl, flows.works.with_id(f"busy-{number}"))

    async def parked() -> bool:
        row = await told.describe()
        return row.status == "waiting" and row.owner is None

    await until(parked)
    await told.signal("go", "now")
    assert await told.result(timeout="60s") == "now"
    assert await nap.result(timeout="60s") == "woke"
    assert await busy.result(timeout="60s") == 10
    last = await accepted(rl, flows.works.with_id(f"last-{number}"))
    assert await last.result(timeout="60s") == 10
    return {nap.id, told.id, busy.id, last.id}


def broken_supervisor(monkeypatch: pytest.MonkeyPatch, breaking: Breaking) -> None:
    keep, live = Supervisor.keep, Heartbeats._live

    def kept(self: Supervisor, name: str, work: Work, *, essential: bool = True) -> Part:
        return keep(self, name, breaking.work(name, work), essential=essential)

    monkeypatch.setattr(Supervisor, "keep", kept)
    if breaking.part == "heartbeats":
        monkeypatch.setattr(Heartbeats, "_live", lambda self: breaking.coroutine(live(self)))


async def every_await(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
    open_one: Any,
    flows: Flows,
    most: int = MOST_AWAITS,
    *,
    reported: bool = True,
    timed: bool = False,
) -> int:
    """How often the part could be broken, each time at a later await, with the scenario going well all the same. Without
    `reported`, at some of them the store is what breaks: the caller is told, or it is tried again. One that is `timed` comes
    to every await, however soon the scenario is over."""
    caplog.set_level(logging.CRITICAL, logger="relight")
    monkeypatch.setattr(supervisor, "QUIET_SECONDS", 0.5)
    for number in range(1, most):
        breaking = Breaking(part, number)
        caplog.clear()
        with monkeypatch.context() as patch:
            broken_supervisor(patch, breaking)
            async with open_one() as rl:
                runs = await scenario(rl, flows)
                await until(lambda breaking=breaking: breaking.fired or not timed)
                await until(lambda rl=rl: rl.health().ok)
                leases = rl.services.heartbeats.leases
                if isinstance(leases, Elsewhere):  # of every run it hears in the end that nobody drives it
                    await until(lambda leases=leases, runs=runs: leases.released >= runs)
                task = rl.services.supervisor.parts[part].task
                assert task is not None
                assert not task.done()
        if not breaking.fired:
            return number - 1
        said = [record.getMessage() for record in caplog.records if "[INTERNAL_ERROR]" in record.getMessage()]
        assert not reported or any(f"await {number}" in line for line in said), said
    return most


def in_memory() -> Relight:
    store = MemoryStore(clock=SYSTEM_CLOCK)
    leases = MemoryLeases(store, clock=SYSTEM_CLOCK)
    recovery = {"lease_ttl": "1s", "check_interval": "0.2s"}
    return Relight(store=store, lease_manager=leases, park_after="1ms", recovery=recovery)


@pytest.mark.parametrize("part", ["waker", "recovery", "heartbeat", "orphan-watch"])
async def test_a_part_that_breaks_at_any_of_its_awaits_is_begun_again(
    part: str, flows: Flows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(waking, "CHECK_SECONDS", 0.2)
    files = itertools.count()
    recovery = {"lease_ttl": "1s", "check_interval": "0.2s"}

    def on_sqlite() -> Relight:
        return Relight(tmp_path / f"{next(files)}.db", park_after="1ms", recovery=recovery)

    assert await every_await(monkeypatch, caplog, part, on_sqlite, flows) >= 1


class Elsewhere(MemoryLeases):
    """A manager that keeps its leases outside the store, and takes a moment for each answer."""

    name = "elsewhere"
    in_store = False

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store, clock=SYSTEM_CLOCK)
        self.acquired, self.released = set[str](), set[str]()

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        await asyncio.sleep(0)
        self.acquired.update(run_ids)
        return {}

    async def release_lease(self, run_id: str) -> NotOwner:
        await asyncio.sleep(0)
        self.released.add(run_id)
        return NotOwner(None)


class OnServer(MemoryStore):
    """With a clock of its own, and a moment for each answer."""

    async def now(self) -> float:
        await asyncio.sleep(0)
        return SYSTEM_CLOCK.now()

    async def note_session(self, owner: str, process: Process, ttl_seconds: float) -> None:
        await asyncio.sleep(0)
        await super().note_session(owner, process, ttl_seconds)

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        await asyncio.sleep(0)
        return await super().commit(commits)


def as_on_servers() -> Relight:
    """In memory, with the tasks that an engine has if its store and its lease manager are servers."""
    store = OnServer(clock=SYSTEM_CLOCK)
    leases = Elsewhere(store)
    recovery = {"lease_ttl": "1s", "check_interval": "0.2s"}
    return Relight(store=store, lease_manager=leases, park_after="1ms", recovery=recovery)


@pytest.mark.parametrize("part", ["clock", "presence", "attach"])
async def test_a_part_that_only_servers_need_is_begun_again(
    part: str, flows: Flows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`attach` waits to be wanted, and for two answers: that runs are attached, and that others are detached."""
    monkeypatch.setattr("relight.engine.CLOCK_SECONDS", 0.05)
    timed = part != "attach"
    assert await every_await(monkeypatch, caplog, part, as_on_servers, flows, 4, timed=timed) >= 3


async def test_run_keys_that_broke_on_their_way_are_brought_up_again(
    flows: Flows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its second await `attach` has taken them, and waits for the manager."""
    breaking = Breaking("attach", 2)
    broken_supervisor(monkeypatch, breaking)
    store = MemoryStore(clock=SYSTEM_CLOCK)
    leases = Elsewhere(store)
    async with Relight(store=store, lease_manager=leases, park_after="1h", recovery={"lease_ttl": "1h"}) as rl:
        await rl.start(flows.listens.with_id("r"))
        await until(lambda: leases.acquired == {"r"})
        assert breaking.fired


async def test_the_recorder_that_breaks_at_any_of_its_awaits_loses_nothing(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert await every_await(monkeypatch, caplog, "recorder-1", as_on_servers, flows, 12, reported=False) >= 6


async def test_the_recorder_that_breaks_while_it_waits_is_begun_again(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At its other awaits the store breaks: see test_broken_batches."""
    breaking = Breaking("recorder-1", 1)
    broken_supervisor(monkeypatch, breaking)
    async with in_memory() as rl:
        await until(lambda: breaking.fired)
        await scenario(rl, flows)
        assert [one.failures for one in rl.health().parts if one.name == "recorder-1"] == [1]


async def test_a_heartbeat_thread_whose_loop_breaks_has_another(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The first awaits belong to the opening. If they break, its caller gets the error."""
    recovery = {"lease_ttl": "1s", "check_interval": "0.2s"}

    def on_sqlite() -> Relight:
        return Relight(tmp_path / "relight.db", park_after="1ms", recovery=recovery)

    breaking = Breaking("heartbeats", 10**9)
    broken_supervisor(monkeypatch, breaking)
    async with on_sqlite() as rl:
        await until(lambda: breaking.count)
        opening = breaking.count
    breaking.number, breaking.count = opening, 0
    async with on_sqlite() as rl:
        await until(lambda: breaking.fired)
        await until(lambda: rl.services.heartbeats.may_drive)
        await scenario(rl, flows)
        health = rl.health()
        assert [one.failures for one in health.parts if one.name == "heartbeats"] == [1]
        await until(lambda: rl.health().ok)


def on_postgres(server: PostgresServer, schema: str, options: str = "") -> Relight:
    recovery = {"lease_ttl": "30s", "check_interval": "0.5s"}
    return Relight(server.url() + options, park_after="1ms", db_schema=schema, recovery=recovery)


# In `make test` each is broken once.
FEW_OR_ALL = pytest.mark.parametrize(
    "most", [2, pytest.param(MOST_AWAITS, marks=[pytest.mark.soak_ci, pytest.mark.timeout(600)])]
)


@FEW_OR_ALL
@pytest.mark.parametrize("part", ["clock", "tick", "listen-supervised.news", "recorder-2", "recorder-1", "attach"])
async def test_a_part_that_breaks_on_postgres_is_begun_again(
    part: str,
    most: int,
    flows: Flows,
    postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At its own awaits. At those of the driver it is the driver that breaks, and leaves its connection open."""
    monkeypatch.setattr("relight.engine.CLOCK_SECONDS", 0.05)
    monkeypatch.setattr("relight.backends.postgres.listen.PROBE_SECONDS", 0.05)
    monkeypatch.setattr("relight.backends.postgres.listen.TICK_SECONDS", 0.05)

    def open_one() -> Relight:
        return on_postgres(postgres_server, "supervised", "?pgbouncer=true" if part == "tick" else "")

    timed = part in ("clock", "tick", "listen-supervised.news")
    reported = part == "tick"
    found = await every_await(monkeypatch, caplog, part, open_one, flows, min(most, 20), reported=reported, timed=timed)
    assert found >= 1


@FEW_OR_ALL
@pytest.mark.parametrize("part", ["presence", "attach", "heartbeat", "orphan-watch"])
async def test_a_part_that_breaks_with_etcd_is_begun_again(
    part: str,
    most: int,
    flows: Flows,
    etcd_server: EtcdServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    files = itertools.count()
    recovery = {"lease_ttl": "3s", "check_interval": "0.2s"}

    def open_one() -> Relight:
        number = next(files)
        leases = f"etcd://{etcd_server.endpoint}/supervised-{tmp_path.name}-{number}"
        return Relight(tmp_path / f"{number}.db", leases=leases, park_after="1ms", recovery=recovery)

    assert await every_await(monkeypatch, caplog, part, open_one, flows, most, reported=False) >= 1


async def test_the_listener_that_breaks_is_begun_again(
    flows: Flows, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks after it has its connection, which ends with it."""
    monkeypatch.setattr("relight.backends.postgres.listen.PROBE_SECONDS", 0.05)
    name = "listen-supervised_listener.news"
    breaking = Breaking(name, 10**9)
    broken_supervisor(monkeypatch, breaking)
    async with on_postgres(postgres_server, "supervised_listener") as rl:
        await until(lambda: breaking.count > 20)  # it listens, and checks the connection again and again
        breaking.number = breaking.count + 1
        await until(lambda: breaking.fired)
        await scenario(rl, flows)
        assert [one.failures for one in rl.health().parts if one.name == name] == [1]
        seen = breaking.count
        await until(lambda: breaking.count > seen + 20)


# ---- what cannot be kept alive


class HalfBroken(SqliteStore):
    """A store that one process cannot ask for due runs."""

    broken = True

    async def next_due(self) -> float | None:
        if self.broken:
            raise BugError("an unknown kind of row")
        return await super().next_due()


async def test_a_process_that_cannot_keep_a_part_alive_lets_others_take_over(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "MOST_FAILURES", 3)
    monkeypatch.setattr(waking, "CHECK_SECONDS", 0.1)
    path = tmp_path / "relight.db"
    store = HalfBroken(path, clock=SYSTEM_CLOCK)
    recovery = {"lease_ttl": "3s", "check_interval": "0.1s"}

    def engine(on: SqliteStore, name: str) -> Relight:
        leases = SqliteLeases(path)
        return Relight(store=on, lease_manager=leases, park_after="1h", orchestrator_id=name, recovery=recovery)

    async with engine(store, "sick") as sick:
        await until(lambda: any(part.failing for part in sick.health().parts))
        run = await sick.start(flows.listens.with_id("r"))
        await until(lambda: not sick.services.heartbeats.may_drive)
        health = sick.health()
        assert not health.ok
        assert [(part.name, part.broken) for part in health.parts if part.broken] == [("waker", True)]
        async with engine(SqliteStore(path, clock=SYSTEM_CLOCK), "well") as well:
            await run.signal("go", 1)
            assert await (await well.get("r")).result(timeout="60s") == 1
        store.broken = False
        monkeypatch.setattr(supervisor, "MENDED_SECONDS", 0.0)
        await until(lambda: sick.health().ok)
        assert await sick.run(flows.works) == 10


async def test_a_recorder_that_broke_comes_back_by_itself(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that has let go of its lease drives no run and starts none. So no commit can show that its recorder
    works again."""
    monkeypatch.setattr(supervisor, "MOST_FAILURES", 2)
    monkeypatch.setattr(supervisor, "MENDED_SECONDS", 0.5)
    settle, left = Lane.finish, [2]

    def settle_or_break(self: Lane, writers: list[Any], *rest: Any) -> None:
        if writers and left[0]:
            left[0] -= 1
            raise BugError("settling")
        settle(self, writers, *rest)

    monkeypatch.setattr(Lane, "finish", settle_or_break)
    recovery = {"lease_ttl": "1s", "check_interval": "0.2s"}
    async with Relight(tmp_path / "relight.db", recovery=recovery) as rl:
        run = await rl.start(flows.works.with_id("r"))
        await until(lambda: any(part.broken for part in rl.health().parts))
        assert left == [0]
        assert await run.result(timeout="60s") == 10
        await until(lambda: rl.health().ok)
        assert [part.failures for part in rl.health().parts if part.name == "recorder-1"] == [2]


async def test_a_part_that_rests_is_mended_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a process with a bug would take and lose its lease in turns."""
    monkeypatch.setattr(supervisor, "MOST_FAILURES", 1)
    kept, mended, fails = Supervisor(), asyncio.Event(), asyncio.Event()
    fails.set()
    kept.on_mended = lambda _: mended.set()

    async def rests(part: Part) -> None:
        if fails.is_set():
            fails.clear()
            raise BugError("once")
        await part.rest(asyncio.get_running_loop().create_future())

    monkeypatch.setattr(supervisor, "MENDED_SECONDS", 0.3)
    part, begun = kept.keep("resting", rests), SYSTEM_CLOCK.monotonic()
    await until(lambda: part.broken)
    await until(mended.is_set)
    assert SYSTEM_CLOCK.monotonic() - begun >= 0.3
    assert not part.broken
    await kept.stop()


async def test_a_task_that_the_program_cancels_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    """Some programs end all tasks. Then the runs of this process are not woken any more, and the process says so."""
    async with in_memory() as rl:
        part = rl.services.supervisor.parts["waker"]
        assert part.task is not None
        part.task.cancel()
        await until(lambda: not rl.services.heartbeats.may_drive)
        assert not rl.health().ok
        assert "waker cannot be kept alive" in caplog.text


async def test_other_processes_can_see_that_an_owner_is_in_trouble(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "MOST_FAILURES", 10**6)
    path = tmp_path / "relight.db"
    store = HalfBroken(path, clock=SYSTEM_CLOCK)
    recovery = {"lease_ttl": "1s", "check_interval": "0.1s"}
    async with (
        Relight(store=store, lease_manager=SqliteLeases(path), park_after="1h", recovery=recovery) as sick,
        Relight(path, drive=False) as client,
    ):
        await sick.start(flows.listens.with_id("r"))

        async def says_so() -> bool:
            found = await client.explain("r")
            return "waker fails: BugError" in found.owner_trouble and "alive and in trouble" in found.sentence

        await until(says_so)
        store.broken = False

        async def well() -> bool:
            return not (await client.explain("r")).owner_trouble

        await until(well)


def test_a_broken_part_is_mended_by_a_good_round_that_comes_long_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first good round mended the part, its process would take and lose its lease in turns."""
    made, said = Supervisor(lambda *_: None), list[str]()
    made.on_broken = lambda part: said.append(f"{part.name} is broken")
    made.on_mended = lambda part: said.append(f"{part.name} is mended")
    part = made.part("waker")
    for _ in range(supervisor.MOST_FAILURES):
        part.failed(BugError("again"))
    part.well()
    assert part.broken
    assert said == ["waker is broken"]
    monkeypatch.setattr(supervisor, "MENDED_SECONDS", 0.0)
    part.well()
    assert not part.broken
    assert said == ["waker is broken", "waker is mended"]
