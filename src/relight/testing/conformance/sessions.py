"""Sessions of orchestrators: how they are listed, by which clock, which watches report their ends. Part of
LeaseSuite."""

from __future__ import annotations

import pytest

from relight.model.lease import OwnedBy, Process
from relight.testing.conformance.lease_build import (
    LONG_SECONDS,
    ROUNDING_SECONDS,
    Elapse,
    Lapse,
    LeaseBase,
    MakeRuns,
    OpenLeases,
    Skewed,
    StartWatch,
    end_until_heard,
    session_of,
    take,
)


class SessionSuite(LeaseBase):
    """`heartbeat`, `list_orchestrators`, `end_session`, `watch_orphans`."""

    # ---- listing

    async def test_what_a_process_says_is_wrong_with_it_stands_in_its_session(self, leases: OpenLeases) -> None:
        a = await leases("a#1")
        b = await leases("b#1")
        a.report("its clock is broken")
        assert await a.heartbeat() is False
        sessions = {session.owner: session for session in await b.list_orchestrators()}
        assert sessions["a#1"].process.trouble == "its clock is broken"
        a.report("")
        assert await a.heartbeat() is False
        sessions = {session.owner: session for session in await b.list_orchestrators()}
        assert sessions["a#1"].process.trouble == ""

    async def test_sessions_are_listed_with_their_process(self, leases: OpenLeases) -> None:
        process = Process(machine="boot 1", pid=4711, started=123_456, session="token")
        await leases("host-1#abc", process=process)
        b = await leases("host-2#def")
        sessions = {session.owner: session for session in await b.list_orchestrators()}
        assert set(sessions) == {"host-1#abc", "host-2#def"}
        found = sessions["host-1#abc"]
        assert found.process == process
        assert found.name == "host-1"
        assert found.fresh
        assert found.expires_at - found.heartbeat_at == pytest.approx(LONG_SECONDS, abs=ROUNDING_SECONDS)
        assert found.started_at <= found.heartbeat_at < found.expires_at

    async def test_heartbeats_move_the_end_not_the_beginning(
        self, leases: OpenLeases, ttl: float, elapse: Elapse
    ) -> None:
        a = await leases("a#1")
        before = await session_of(a, "a#1")
        await elapse(ttl)
        await a.heartbeat()
        after = await session_of(a, "a#1")
        assert before is not None
        assert after is not None
        assert after.started_at == pytest.approx(before.started_at, abs=0.001)
        assert after.expires_at - before.expires_at > ttl * 0.9 - ROUNDING_SECONDS
        assert after.heartbeat_at > before.heartbeat_at

    async def test_a_lapsed_session_is_not_fresh_or_gone_until_it_begins_again(
        self, leases: OpenLeases, ttl: float, lapse: Lapse
    ) -> None:
        dead, b = await leases("dead#1", ttl), await leases("b#1")
        await dead.heartbeat()
        (first,) = [session for session in await b.list_orchestrators() if session.owner == "dead#1"]
        await lapse(dead)
        assert await session_of(b, "dead#1") is None
        assert await session_of(b, "b#1") is not None
        await dead.heartbeat()
        (again,) = [session for session in await b.list_orchestrators() if session.owner == "dead#1"]
        assert again.started_at > first.started_at, "a new session"
        assert again.expires_at > first.expires_at

    async def test_the_remains_of_a_lapsed_session_are_cleared_away(
        self, leases: OpenLeases, ttl: float, lapse: Lapse
    ) -> None:
        dead, b = await leases("dead#1", ttl), await leases("b#1")
        await lapse(dead)
        await b.forget_session("dead#1")
        assert [session.owner for session in await b.list_orchestrators()] == ["b#1"]

    @pytest.mark.parametrize("ttls", [-10, 10])
    async def test_the_clock_of_a_machine_decides_nothing(
        self, leases: OpenLeases, skewed: Skewed, make_runs: MakeRuns, ttls: int
    ) -> None:
        a, b = await leases("a#1"), await skewed("b#1", ttls * LONG_SECONDS)
        mine, theirs = await make_runs(2)
        await take(a, [mine])
        await take(b, [theirs])
        await b.heartbeat()
        assert isinstance((await b.acquire_lease([mine]))[mine], OwnedBy)
        assert isinstance((await a.acquire_lease([theirs]))[theirs], OwnedBy)
        for manager in (a, b):
            sessions = {session.owner: session for session in await manager.list_orchestrators()}
            assert sessions["a#1"].fresh
            assert sessions["b#1"].fresh
            difference = sessions["a#1"].expires_at - sessions["b#1"].expires_at
            assert difference == pytest.approx(0, abs=LONG_SECONDS / 2)

    # ---- watching

    async def test_a_lapse_is_heard_of(
        self, leases: OpenLeases, make_runs: MakeRuns, watch: StartWatch, ttl: float, lapse: Lapse
    ) -> None:
        watcher = await leases("watcher#1", ttl)
        heard = await watch(watcher)
        dead, _ = await leases("dead#1", ttl), await leases("alive#1")
        await take(dead, await make_runs(2))
        await lapse(dead)
        assert await heard.hears("dead#1")
        assert "alive#1" not in heard.owners
        assert "watcher#1" not in heard.owners, "the watcher's own session has lapsed; its watch must not report it"

    async def test_a_release_is_heard_of(self, leases: OpenLeases, make_runs: MakeRuns, watch: StartWatch) -> None:
        watcher, leaving, staying = await leases("watcher#1"), await leases("leaving#1"), await leases("staying#1")
        await take(leaving, await make_runs(2))
        heard = [await watch(watcher), await watch(staying)]
        await leaving.release_all()
        for watch_ in heard:
            assert await watch_.hears("leaving#1")
            assert set(watch_.owners) <= {"leaving#1", "probe-1#1", "probe-2#1"}

    async def test_an_end_that_somebody_made_is_heard_of_by_all_others(
        self, leases: OpenLeases, watch: StartWatch
    ) -> None:
        a, b = await leases("a#1"), await leases("b#1")
        await leases("dead#1")
        heard = [await watch(a), await watch(b)]
        await a.end_session("dead#1")
        for watch_ in heard:
            assert await watch_.hears("dead#1")

    async def test_ones_own_end_is_not_heard_of(self, leases: OpenLeases, watch: StartWatch) -> None:
        watcher, other = await leases("watcher#1"), await leases("other#1")
        heard = await watch(watcher)
        await watcher.release_all()
        await other.release_all()
        assert await heard.hears("other#1")
        assert "watcher#1" not in heard.owners

    async def test_watching_can_begin_anew(self, leases: OpenLeases, watch: StartWatch) -> None:
        watcher, first, second = await leases("watcher#1"), await leases("first#1"), await leases("second#1")
        heard = await watch(watcher)
        await first.release_all()
        assert await heard.hears("first#1")
        await heard.close()
        heard = await watch(watcher)
        await second.release_all()
        assert await heard.hears("second#1")
        assert "first#1" not in heard.owners

    async def test_a_session_that_began_again_is_heard_of_when_it_ends_again(
        self, leases: OpenLeases, watch: StartWatch
    ) -> None:
        watcher, other = await leases("watcher#1"), await leases("other#1")
        heard = await watch(watcher)
        for _ in range(2):
            await end_until_heard(heard, other, "other#1", other.release_all)
            heard.owners.clear()

    async def test_a_heartbeat_tells_whether_the_session_began_with_it(self, leases: OpenLeases) -> None:
        a, b = await leases("a#1"), await leases("b#1")
        assert await a.heartbeat() is False
        await b.end_session("a#1")
        assert await a.heartbeat() is True
        assert await a.heartbeat() is False

    async def test_an_ended_session_is_not_fresh_and_keeps_its_last_heartbeat_until_it_is_forgotten(
        self, leases: OpenLeases
    ) -> None:
        """`stale_timeout` counts from that heartbeat, also for an orchestrator that comes later. If a lease manager
        forgets it, the store has it."""
        a, b = await leases("a#1"), await leases("b#1")
        before = await session_of(b, "a#1")
        assert before is not None
        await b.end_session("a#1")
        await b.end_session("a#1")
        assert await session_of(b, "a#1") is None
        for left in [session for session in await b.list_orchestrators() if session.owner == "a#1"]:
            assert left.heartbeat_at <= left.expires_at
            if b.in_store:
                assert left.heartbeat_at == before.heartbeat_at
        if b.in_store:
            assert "a#1" in [session.owner for session in await b.list_orchestrators()]
        await b.forget_session("a#1")
        assert "a#1" not in [session.owner for session in await b.list_orchestrators()]
        assert await a.heartbeat() is True
        await b.forget_session("a#1")
        assert await session_of(b, "a#1") is not None, "a live session is not forgotten"

    async def test_since_when_the_list_is_kept(self, leases: OpenLeases) -> None:
        a = await leases("a#1")
        since = await a.listed_since()
        b = await leases("b#1")
        assert await b.listed_since() == since
