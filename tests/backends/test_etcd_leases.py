"""EtcdLeases against a real etcd that is killed, frozen and cut off."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from relight.backends.etcd import EtcdLeases, Tls, parse_etcd_url
from relight.backends.etcd.address import EtcdAddress
from relight.backends.etcd.connection import Connection
from relight.backends.etcd.leases import MAX_CALL_PART
from relight.clock import SystemClock
from relight.errors import ConfigError, LeasesUnavailableError
from relight.model.lease import Acquired, NotOwner, Orphaned, OwnedBy, Process, Released
from relight.testing import conformance
from tests.servers.etcd import EtcdServer, etcd_or_skip
from tests.servers.proxy import TcpProxy

TTL = 4.0  # a call may take three tenths of it: no machine is so busy
CALL_SECONDS = TTL / 3  # no call takes longer, whatever happens to etcd
PATIENT_TTL = 10.0  # etcd takes its time to check a password, by design
SLACK_SECONDS = 20.0  # for a busy machine: the test only checks that a call does not hang
LAPSE_SECONDS = TTL + 56  # a test waits for so long only if it fails
NOBODY = Process()
PREFIXES = (f"/relight-test-{os.getpid()}-{number}/" for number in itertools.count())


@pytest.fixture
def etcd(etcd_server):
    return etcd_server


@pytest.fixture
def own_etcd(tmp_path):
    """An etcd for tests that leave it in a state that other tests could not use."""
    servers: list[EtcdServer] = []

    def start(**options) -> EtcdServer:
        servers.append(EtcdServer(tmp_path / "etcd", etcd_or_skip(), **options))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def proxy(etcd):
    with TcpProxy("127.0.0.1", etcd.port) as proxy:
        yield proxy


@pytest.fixture
async def opened(etcd):
    """Opens managers on a prefix of this test's own. At its end they are closed in the state in which a killed process
    leaves them."""
    prefix = next(PREFIXES)
    managers: list[EtcdLeases] = []

    async def opened(
        owner: str = "a#1", *, endpoints=None, ttl: float = TTL, process: Process = NOBODY, **options
    ) -> EtcdLeases:
        leases = EtcdLeases(endpoints or [etcd.endpoint], **({"prefix": prefix} | options))
        managers.append(leases)
        await leases.open(owner, process, ttl)
        await leases.heartbeat()
        return leases

    yield opened
    for leases in managers:
        await leases.close()


async def until(condition, seconds: float = LAPSE_SECONDS):
    """Ask until the answer is true. An etcd that does not answer counts as no."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(LeasesUnavailableError):
            if answer := await condition():
                return answer
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.02)


async def beats(leases: EtcdLeases) -> bool:
    await leases.heartbeat()
    return True


@contextlib.asynccontextmanager
async def beating(*managers: EtcdLeases):
    """Send heartbeats in the background, as the heartbeat thread does, whether etcd answers or not."""

    async def beat(leases: EtcdLeases) -> None:
        while True:
            with contextlib.suppress(LeasesUnavailableError):
                await leases.heartbeat()
            await asyncio.sleep(TTL / 6)

    tasks = [asyncio.create_task(beat(leases)) for leases in managers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def orphans_of(watch, owner: str, seconds: float = LAPSE_SECONDS) -> Orphaned:
    async with asyncio.timeout(seconds):
        while True:
            orphaned = await anext(watch)
            if orphaned.owner == owner:
                return orphaned


@contextlib.contextmanager
def unavailable_in_time():
    begun = time.monotonic()
    with pytest.raises(LeasesUnavailableError):
        yield
    assert time.monotonic() - begun < CALL_SECONDS + SLACK_SECONDS


async def refuses_everything(leases: EtcdLeases) -> None:
    """For another run than that of the test: etcd may still do what was refused, when it reads the request."""
    begun = time.monotonic()
    answers = await asyncio.gather(
        leases.heartbeat(),
        leases.acquire_lease(["another"]),
        leases.release_lease("another"),
        leases.get_lease("another"),
        leases.list_orchestrators(),
        leases.end_session("nobody#1"),
        return_exceptions=True,
    )
    assert {type(answer) for answer in answers} == {LeasesUnavailableError}
    assert time.monotonic() - begun < CALL_SECONDS + SLACK_SECONDS
    with unavailable_in_time():
        await leases.release_all()


def ask(etcd: EtcdServer, path: str, **body):
    """A request of an administrator, over etcd's HTTP gateway."""
    request = urllib.request.Request(f"http://{etcd.endpoint}/v3/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


# ------------------------------------------------------------------------------------------ what every backend does --


class FarOffClock(SystemClock):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def now(self) -> float:
        return super().now() + self.seconds


@pytest.fixture
def leases(opened):
    async def leases(owner: str, ttl_seconds: float = 60.0, process: Process = NOBODY) -> EtcdLeases:
        return await opened(owner, ttl=ttl_seconds, process=process)

    return leases


@pytest.fixture
def make_runs():
    async def make_runs(count: int) -> list[str]:
        return [f"run/{number}" for number in range(count)]  # etcd knows no runs, and a user may choose any id

    return make_runs


@pytest.fixture
def ttl():
    return TTL


class EtcdLeaseSuite(conformance.LeaseSuite):
    lapse_seconds = LAPSE_SECONDS

    @pytest.fixture
    def lapse(self):
        async def lapse(leases: EtcdLeases) -> None:
            async def gone() -> bool:
                try:
                    return leases._owner not in {session.owner for session in await leases.list_orchestrators()}
                except LeasesUnavailableError:  # one round has three tenths of the ttl, and is repeated
                    return False

            await until(gone, self.lapse_seconds)

        return lapse

    @pytest.fixture
    def skewed(self, opened):
        async def skewed(owner: str, seconds: float) -> EtcdLeases:
            return await opened(owner, ttl=60.0, clock=FarOffClock(seconds))

        return skewed


class TestLeases(EtcdLeaseSuite):
    """On one etcd."""


# ------------------------------------------------------------------------------------------ etcd goes and comes back --


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_an_etcd_that_is_gone_is_unavailable_and_back_again_without_a_new_object(etcd, opened, end):
    leases = await opened()
    assert await leases.acquire_lease(["r1"]) == {"r1": Acquired()}
    getattr(etcd, end)()
    try:
        await refuses_everything(leases)
    finally:
        etcd.start()
    await until(lambda: beats(leases))
    lease = await leases.get_lease("r1")
    assert lease is not None, "etcd kept its data, and gives every lease its whole ttl again when it starts"
    assert lease.owner == "a#1"
    assert await leases.release_lease("r1") == Released()


async def test_opening_without_etcd_fails_in_time_and_the_same_object_opens_later(etcd, opened):
    leases = EtcdLeases([etcd.endpoint], prefix=next(PREFIXES))
    etcd.stop()
    try:
        with unavailable_in_time():
            await leases.open("a#1", Process(), TTL)
        with unavailable_in_time():
            await leases.heartbeat()
    finally:
        etcd.start()
    await leases.open("a#1", Process(), TTL)
    await leases.heartbeat()
    assert [session.owner for session in await leases.list_orchestrators()] == ["a#1"]
    await leases.close()


async def test_opening_is_patient_with_an_etcd_that_is_slow(opened, proxy):
    """No lease depends on a quick answer yet. Once one does, a call that hangs must leave time for another call."""
    proxy.stall()
    asyncio.get_running_loop().call_later(2 * MAX_CALL_PART * TTL, proxy.heal)
    mine = await opened("a#1", endpoints=[proxy.address])
    proxy.stall()
    with unavailable_in_time():
        await mine.heartbeat()


async def test_frozen_for_longer_than_the_ttl(etcd, opened):
    leases, other = await opened(), await opened("b#1")
    watch = other.watch_orphans()
    await leases.acquire_lease(["r1"])
    etcd.freeze()
    try:
        frozen_until = time.monotonic() + TTL + 0.5
        await refuses_everything(leases)
        while time.monotonic() < frozen_until:
            with unavailable_in_time():
                await leases.heartbeat()
    finally:
        etcd.thaw()
    # All sessions have lapsed. They begin anew, and the runs that were attached to them are free.
    assert "r1" in (await orphans_of(watch, "a#1")).run_ids
    await until(lambda: beats(leases))
    await until(lambda: beats(other))
    assert await leases.get_lease("r1") is None
    assert await other.acquire_lease(["r1"]) == {"r1": Acquired()}
    assert {session.owner for session in await other.list_orchestrators()} == {"a#1", "b#1"}


async def test_an_etcd_that_lost_its_data_is_taken_as_it_is(own_etcd, opened, tmp_path):
    etcd = own_etcd()
    leases = await opened(endpoints=[etcd.endpoint])
    async with beating(leases):
        for number in range(300):  # revisions that the empty etcd does not have, and does not reach by the deaths below
            await leases.acquire_lease([f"r{number}"])
    watch = leases.watch_orphans()
    etcd.kill()
    shutil.rmtree(tmp_path / "etcd" / "data")
    etcd.start()
    await until(lambda: beats(leases))
    assert await leases.get_lease("r1") is None

    async def death_is_told() -> bool:
        other = await opened("b#1", endpoints=[etcd.endpoint])
        await other.release_all()
        with contextlib.suppress(TimeoutError):
            return bool(await orphans_of(watch, "b#1", 1.0))
        return False

    await until(death_is_told)


# -------------------------------------------------------------------------------------------- one of two is cut off --


@pytest.mark.parametrize("fault", ["cut", "stall"])
async def test_a_manager_that_is_cut_off_loses_its_runs_to_the_other(etcd, opened, proxy, fault):
    lonely, other = await opened("a#1", endpoints=[proxy.address]), await opened("b#1")
    watch = other.watch_orphans()
    await lonely.acquire_lease(["r1"])
    async with beating(other):
        getattr(proxy, fault)()
        await refuses_everything(lonely)
        assert await orphans_of(watch, "a#1") == Orphaned("a#1", ("r1",))
        assert await other.acquire_lease(["r1"]) == {"r1": Acquired()}
        proxy.heal()
        await until(lambda: beats(lonely))
        answer = (await lonely.acquire_lease(["r1"]))["r1"]
        assert isinstance(answer, OwnedBy)
        assert answer.owner == "b#1"
        assert await lonely.release_lease("r1") == NotOwner("b#1")
        assert {session.owner for session in await lonely.list_orchestrators()} == {"a#1", "b#1"}


@pytest.mark.parametrize("fault", ["cut", "stall"])
async def test_a_watch_that_was_cut_off_tells_what_it_missed(opened, proxy, fault):
    lonely, other = await opened("a#1", endpoints=[proxy.address]), await opened("b#1")
    watch = lonely.watch_orphans()
    await other.acquire_lease(["r1"])
    third = await opened("c#1")
    await third.release_all()
    assert await orphans_of(watch, "c#1") == Orphaned("c#1")  # the watch is open
    getattr(proxy, fault)()
    await until(lambda: _refused(lonely))
    await other.release_all()
    proxy.heal()
    assert await orphans_of(watch, "b#1") == Orphaned("b#1", ("r1",))


async def test_a_watch_that_was_cut_off_tells_nothing_twice(opened, proxy):
    lonely, other = await opened("a#1", endpoints=[proxy.address]), await opened("b#1")
    watch = lonely.watch_orphans()
    third = await opened("c#1")
    await third.release_all()
    assert await orphans_of(watch, "c#1") == Orphaned("c#1")
    proxy.cut()
    await until(lambda: _refused(lonely))
    await other.release_all()
    proxy.heal()
    async with asyncio.timeout(LAPSE_SECONDS):
        assert await anext(watch) == Orphaned("b#1")


async def _refused(leases: EtcdLeases) -> bool:
    try:
        await leases.get_lease("r1")
    except LeasesUnavailableError:
        return True
    return False


async def test_a_watch_notices_a_silent_partition_by_itself(opened, proxy):
    lonely = await opened("a#1", endpoints=[proxy.address])
    watch = lonely.watch_orphans()
    other = await opened("b#1")
    await other.release_all()
    assert await orphans_of(watch, "b#1")
    proxy.stall()

    async def noticed() -> bool:
        return bool(watch.interrupted)

    await until(noticed)


async def test_a_watch_goes_on_after_a_compaction(etcd, opened, proxy):
    lonely, other = await opened("a#1", endpoints=[proxy.address]), await opened("b#1")
    watch = lonely.watch_orphans()
    third = await opened("c#1")
    await third.release_all()
    assert await orphans_of(watch, "c#1")
    proxy.cut()
    await third.heartbeat()
    await other.acquire_lease([f"r{number}" for number in range(300)])
    await third.release_all()  # before the compaction: this end is lost, and that is accepted
    revision = ask(etcd, "kv/range", key=base64.b64encode(b"/none").decode())["header"]["revision"]
    ask(etcd, "kv/compaction", revision=revision, physical=True)
    proxy.heal()
    await other.release_all()
    orphaned = await orphans_of(watch, "b#1")
    assert len(orphaned.run_ids) == 300


async def test_the_next_endpoint_is_asked_when_one_does_not_answer(etcd, opened, proxy):
    with TcpProxy("127.0.0.1", etcd.port) as second:
        leases = await opened(endpoints=[proxy.address, second.address])
        await leases.acquire_lease(["r1"])
        for fault, broken, sound in (("cut", proxy, second), ("stall", second, proxy), ("stall", proxy, second)):
            sound.heal()
            getattr(broken, fault)()
            assert (await leases.get_lease("r1")) is not None
            await leases.heartbeat()


# ---------------------------------------------------------------------------------------------------------- orphans --

CHILD = """
import asyncio, sys
from relight.backends.etcd import EtcdLeases
from relight.model.lease import Process

async def main(endpoint, prefix, ttl):
    leases = EtcdLeases([endpoint], prefix)
    await leases.open("child#1", Process(pid=7), ttl)
    await leases.heartbeat()
    await leases.acquire_lease(["r1", "r2", "r3"])
    print("ready", flush=True)
    while True:
        await asyncio.sleep(ttl / 3)
        await leases.heartbeat()

asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
"""


@pytest.fixture
def child(etcd):
    """A process with a session and three runs."""
    children: list[subprocess.Popen[bytes]] = []

    def start(prefix: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", CHILD, etcd.endpoint, prefix, str(TTL)]
        children.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE))
        assert children[-1].stdout is not None
        assert children[-1].stdout.readline() == b"ready\n"
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.communicate()


async def test_the_runs_of_a_killed_process_are_pushed(opened, child):
    prefix = next(PREFIXES)
    mine = await opened("a#1", prefix=prefix, ttl=60.0)
    watch = mine.watch_orphans()
    process = child(prefix)
    answer = (await mine.acquire_lease(["r1"]))["r1"]
    assert isinstance(answer, OwnedBy)
    assert answer.owner == "child#1"
    process.kill()
    killed = time.monotonic()
    assert await orphans_of(watch, "child#1") == Orphaned("child#1", ("r1", "r2", "r3"))
    print(f"\npushed {time.monotonic() - killed:.2f} s after the kill, ttl {TTL:g} s")
    assert set((await mine.acquire_lease(["r1", "r2", "r3"])).values()) == {Acquired()}
    assert [session.owner for session in await mine.list_orchestrators() if session.fresh] == ["a#1"]


async def test_a_thousand_runs(opened):
    mine, other = await opened("a#1"), await opened("b#1")
    watch = mine.watch_orphans()
    run_ids = [f"run-{number:04}" for number in range(1000)]
    async with beating(mine, other):
        begun = time.perf_counter()
        assert await other.acquire_lease(run_ids) == dict.fromkeys(run_ids, Acquired())
        acquired = time.perf_counter()
        assert await other.acquire_lease(run_ids) == dict.fromkeys(run_ids, Acquired())
        again = time.perf_counter()
        refused = await mine.acquire_lease(run_ids)
        asked = time.perf_counter()
        assert {answer.owner for answer in refused.values() if isinstance(answer, OwnedBy)} == {"b#1"}
        revoking = time.perf_counter()
        await other.release_all()
        revoked = time.perf_counter()
        orphaned = await orphans_of(watch, "b#1")
        pushed = time.perf_counter()
    assert orphaned == Orphaned("b#1", tuple(run_ids))
    print(
        f"\n1,000 runs: acquired in {acquired - begun:.3f} s, again in {again - acquired:.3f} s,"
        f" refused in {asked - again:.3f} s, revoked in {revoked - revoking:.3f} s, pushed {pushed - revoked:.3f} s later"
    )


async def test_a_living_owner_that_lets_go_of_a_run_is_no_orphan(opened):
    mine, other = await opened("a#1"), await opened("b#1")
    watch = mine.watch_orphans()
    await other.acquire_lease(["parked", "held"])
    await other.release_lease("parked")
    await mine.acquire_lease(["parked"])
    await mine.release_lease("parked")
    await other.release_all()
    assert await orphans_of(watch, "b#1") == Orphaned("b#1", ("held",))


async def test_the_end_of_its_own_session_is_not_told_to_a_manager(opened):
    mine, other = await opened("a#1"), await opened("b#1")
    mine_watch, other_watch = mine.watch_orphans(), other.watch_orphans()
    await mine.release_all()
    assert await orphans_of(other_watch, "a#1")
    await other.release_all()
    async with asyncio.timeout(LAPSE_SECONDS):
        assert (await anext(mine_watch)).owner == "b#1"


async def test_a_wait_for_orphans_that_is_given_up_loses_none(opened):
    mine, other = await opened("a#1"), await opened("b#1")
    watch = mine.watch_orphans()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(watch)
    await other.release_all()
    assert await orphans_of(watch, "b#1")


async def test_closing_ends_the_watch(opened):
    mine = await opened("a#1")
    waiting = asyncio.create_task(anext(mine.watch_orphans(), "ended"))
    await asyncio.sleep(0)
    await mine.close()
    async with asyncio.timeout(LAPSE_SECONDS):
        assert await waiting == "ended"
    with pytest.raises(LeasesUnavailableError):
        mine.watch_orphans()


async def test_closing_ends_a_call_that_hangs_without_cancelling_its_caller(opened, proxy):
    mine = await opened("a#1", endpoints=[proxy.address], ttl=60.0)
    proxy.stall()
    calls = [asyncio.create_task(mine.get_lease("r1")), asyncio.create_task(mine.heartbeat())]
    await asyncio.sleep(0.05)  # they may also begin after the end, and find it closed
    begun = time.monotonic()
    await mine.close()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(answer) for answer in answers} == {LeasesUnavailableError}
    assert time.monotonic() - begun < SLACK_SECONDS  # the ttl is 60 s


async def test_a_cancellation_that_comes_together_with_an_error_is_not_lost():
    """gRPC loses about one in a hundred cancellations that come in the last moments of a call that fails. It raises an
    error instead that looks like any other failure. A caller that tries again after such errors would never end."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = EtcdAddress((f"127.0.0.1:{unused.getsockname()[1]}",))
    usual = 0.0
    lost = 0
    for attempt in range(1000):
        connection = Connection(nobody, 1.0)
        call = asyncio.create_task(connection.keep_alive(7))
        begun = time.monotonic()
        until = usual * random.uniform(0.6, 1.1) if attempt > 10 else 10.0
        while not call.done() and time.monotonic() - begun < until:  # noqa: ASYNC110 - a moment within a millisecond
            await asyncio.sleep(0)
        if call.done():
            usual = 0.8 * usual + 0.2 * (time.monotonic() - begun) if usual else time.monotonic() - begun
        else:
            call.cancel()
            await asyncio.wait([call])
            lost += not call.cancelled()
        with contextlib.suppress(LeasesUnavailableError, asyncio.CancelledError):
            await call
        await connection.close()
    assert lost == 0


async def test_a_session_whose_end_was_heard_of_is_remembered_as_lapsed(opened):
    """So that other managers can tell for how long it has been silent. etcd itself keeps no record of it."""
    mine, other, stranger = await opened("a#1"), await opened("b#1", process=Process(pid=7)), await opened("c#1")
    watch = mine.watch_orphans()
    async with beating(mine, stranger):
        (before,) = [session for session in await mine.list_orchestrators() if session.owner == "b#1"]
        await orphans_of(watch, "b#1")
        heard = time.time()
        sessions = {session.owner: session for session in await mine.list_orchestrators()}
        lapsed = sessions["b#1"]
        assert [session.owner for session in sessions.values() if session.fresh] == ["a#1", "c#1"]
        assert (lapsed.process, lapsed.started_at) == (before.process, before.started_at)
        assert before.expires_at - 1 <= lapsed.expires_at <= heard  # etcd counts in whole seconds
        assert lapsed.expires_at - lapsed.heartbeat_at == pytest.approx(TTL)
        assert "b#1" not in {session.owner for session in await stranger.list_orchestrators()}  # no watch
        await mine.forget_session("b#1")  # as recovery does when that session owns no run any more
        assert "b#1" not in {session.owner for session in await mine.list_orchestrators()}
        # It ends again, and is alive again: a living session is not listed twice.
        await other.heartbeat()
        await other.release_all()
        await orphans_of(watch, "b#1")
        await other.heartbeat()
        assert [one.fresh for one in await mine.list_orchestrators() if one.owner == "b#1"] == [True]


async def test_a_session_that_lapsed_begins_anew_without_its_runs(opened):
    mine, other = await opened("a#1"), await opened("b#1")
    await mine.acquire_lease(["r1"])
    await other.end_session("a#1")
    with pytest.raises(LeasesUnavailableError, match="lapsed or was ended"):
        await mine.acquire_lease(["r2"])
    await mine.heartbeat()
    assert await mine.get_lease("r1") is None
    assert await mine.acquire_lease(["r1", "r1", "r2"]) == {"r1": Acquired(), "r2": Acquired()}


async def test_a_key_on_an_older_lease_of_its_owner_is_attached_to_the_present_one(opened):
    mine, other = await opened("a#1"), await opened("b#1")
    await mine.acquire_lease(["r1"])
    older = mine._lease
    await mine._begin()  # the answer to a first beginning may be lost
    await mine.acquire_lease(["r1"])
    await mine._etcd.revoke(older)
    lease = await other.get_lease("r1")
    assert lease is not None
    assert lease.owner == "a#1"


async def test_times_are_those_of_the_ttl_in_whole_seconds(opened):
    mine = await opened(ttl=29.5)
    before = time.time()
    (session,) = await mine.list_orchestrators()
    assert session.expires_at - session.heartbeat_at == 30
    assert before + 30 - SLACK_SECONDS < session.expires_at < time.time() + 30.1
    await mine.acquire_lease(["r1"])
    lease = await mine.get_lease("r1")
    assert lease is not None
    assert abs(lease.expires_at - session.expires_at) < 2


# ------------------------------------------------------------------------------------------- prefixes, users, TLS --


async def test_users_of_different_prefixes_do_not_meet(opened):
    base = next(PREFIXES)
    one, two = await opened("a#1", prefix=base + "x"), await opened("a#1", prefix=base + "xy/")
    watch = two.watch_orphans()
    assert await one.acquire_lease(["r1"]) == {"r1": Acquired()}
    assert await two.acquire_lease(["r1"]) == {"r1": Acquired()}
    third = await opened("b#1", prefix=base + "x/")
    await two.end_session("b#1")
    assert {session.owner for session in await one.list_orchestrators()} == {"a#1", "b#1"}
    await one.release_all()
    await third.release_all()
    assert [session.owner for session in await two.list_orchestrators()] == ["a#1"]
    last = await opened("c#1", prefix=base + "xy")
    await last.release_all()
    async with asyncio.timeout(LAPSE_SECONDS):
        assert (await anext(watch)).owner == "c#1"


async def test_a_user_with_a_password(own_etcd, opened):
    etcd = own_etcd()
    ask(etcd, "auth/user/add", name="root", password="s3cret/@")
    ask(etcd, "auth/role/add", name="root")
    ask(etcd, "auth/user/grant", user="root", role="root")
    ask(etcd, "auth/enable")
    with pytest.raises(LeasesUnavailableError, match="user name is empty"):
        await opened(ttl=PATIENT_TTL, endpoints=[etcd.endpoint])
    with pytest.raises(LeasesUnavailableError, match="authentication failed"):
        await opened(ttl=PATIENT_TTL, endpoints=[etcd.endpoint], username="root", password="wrong")
    options = parse_etcd_url(f"etcd://root:s3cret%2F%40@{etcd.endpoint}/some/where")
    leases = await opened(ttl=PATIENT_TTL, **options)
    watch = leases.watch_orphans()
    assert await leases.acquire_lease(["r1"]) == {"r1": Acquired()}
    leases._etcd.link()._token = "unknown.1"  # like a token that was not used for five minutes
    await leases.heartbeat()
    assert await leases.acquire_lease(["r1"]) == {"r1": Acquired()}
    other = await opened("b#1", ttl=PATIENT_TTL, **options)
    await other.release_all()
    assert await orphans_of(watch, "b#1")


@pytest.fixture
def certificate(tmp_path):
    if not shutil.which("openssl"):
        pytest.skip("the certificate is made with openssl")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=etcd"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(make, check=True, capture_output=True)
    return certificate, key


async def test_tls(own_etcd, opened, certificate):
    etcd = own_etcd(certificate=certificate)
    leases = await opened(**parse_etcd_url(f"etcd://{etcd.endpoint}/?ca={certificate[0]}"))
    assert await leases.acquire_lease(["r1"]) == {"r1": Acquired()}
    with pytest.raises(LeasesUnavailableError):
        await opened(endpoints=[etcd.endpoint], tls=Tls())  # an unknown authority
    with pytest.raises(LeasesUnavailableError, match="no-such-file"):
        await opened(endpoints=[etcd.endpoint], tls=Tls(ca="/no-such-file"))


@pytest.mark.parametrize(
    ("url", "endpoints", "prefix", "tls"),
    [
        ("etcd://one", ("one:2379",), "/relight/", None),
        ("etcd://one:1234,two,10.0.0.3:99/", ("one:1234", "two:2379", "10.0.0.3:99"), "/relight/", None),
        ("etcd://[::1]:1234,[::2]/a/b", ("[::1]:1234", "[::2]:2379"), "/a/b/", None),
        ("etcd://one/a%20b/?tls=true", ("one:2379",), "/a b/", Tls()),
        ("etcd://one?tls=false", ("one:2379",), "/relight/", None),
        ("etcd://one?ca=/c&cert=/d&key=/e", ("one:2379",), "/relight/", Tls("/c", "/d", "/e")),
    ],
)
def test_a_url(url, endpoints, prefix, tls):
    options = parse_etcd_url(url)
    assert (options["endpoints"], options["prefix"], options["tls"]) == (endpoints, prefix, tls)
    assert EtcdLeases(**options).in_store is False


@pytest.mark.parametrize(
    "url",
    [
        "http://one",
        "etcd://",
        "etcd://one,,two",
        "etcd://one:port",
        "etcd://one:0",
        "etcd://one:99999,two",
        "etcd://one:2379, two:2379",
        "etcd://http://one:2379,http://two:2379",
        "etcd://[::1:2379",
        "etcd://user@one",
        "etcd://one?timeout=3",
        "etcd://one?tls=maybe",
        "etcd://one?cert=/c",
        "etcd://one?tls=false&ca=/c",
        "http://user:hunter2@one",
        "etcd://user:hunter2@one:port",
        "etcd://user:hunter2@one?x=1",
        "etcd://user:hunter2/1@one",
        "etcd://user:12?hunter2@one",
        "etcd://user:1#hunter2@one",
        "etcd://user:hunter2@[::1",
    ],
)
def test_a_url_that_is_refused_does_not_show_its_password(url):
    with pytest.raises(ConfigError) as refused:
        parse_etcd_url(url)
    assert str(refused.value).startswith("leases: ")
    assert "hunter2" not in str(refused.value)


# -------------------------------------------------------------------------------------------------- no etcd at all --


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_an_etcd_a_test_is_skipped_but_fails_in_ci(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr("tests.servers.etcd.find_etcd", lambda: None)
    with pytest.raises(outcome, match="no etcd"):
        etcd_or_skip()
