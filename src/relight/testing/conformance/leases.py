"""Leases: which owner gets a run, how long it keeps the run, which watches report an end. For every LeaseManager.

Fixtures to define (each test has a backing of its own, without sessions and runs):

    leases     async (owner, ttl_seconds=60.0, process=Process()) -> LeaseManager
               another contender on the same backing: opened, its session begun; closed when the test ends
    make_runs  async (n) -> ids of n unfinished root runs without an owner
    ttl        a short time to live, in seconds, for sessions that are to lapse
    lapse      async (manager): returns once the session of a manager of that ttl has lapsed. Advance the clock, or wait
               without heartbeats until `list_orchestrators` lists the session as not fresh, or not at all
    store      if the leases are in the store (`in_store`): that store, in which make_runs has made the runs

and two that have a default:

    elapse     async (seconds): let time pass for the backing; waits, unless a clock can be advanced
    skewed     async (owner, skew_seconds) -> LeaseManager, like `leases`, on a machine whose clock is so far off. By
               default such tests are skipped: processes that share a file share a clock
"""

from __future__ import annotations

import asyncio

import pytest

from relight.model.lease import Acquired, Lease, NotOwner, OwnedBy, Released
from relight.model.run import RESUMED_BY_HAND, Message, MessageKind, RunChange, Status
from relight.ports.leases import LeaseManager
from relight.ports.store import Commit, Committed, Extras, Store
from relight.testing.conformance.build import START, run_of
from relight.testing.conformance.lease_build import (
    ROUNDING_SECONDS,
    Elapse,
    Lapse,
    MakeRuns,
    OpenLeases,
    owner_of,
    session_of,
    take,
)
from relight.testing.conformance.sessions import SessionSuite


class LeaseSuite(SessionSuite):
    """`LeaseManager`: which owner has which leases, and all of SessionSuite."""

    # ---- acquiring

    async def test_of_two_contenders_exactly_one_gets_it(self, leases: OpenLeases, make_runs: MakeRuns) -> None:
        a, b = await leases("a#1"), await leases("b#1")
        won = {"a#1": 0, "b#1": 0}
        for run_id in await make_runs(20):
            calls = [a.acquire_lease([run_id]), b.acquire_lease([run_id])]
            if won["a#1"] > won["b#1"]:
                calls.reverse()  # the other contender begins
            first, second = await asyncio.gather(*calls)
            answers = [first[run_id], second[run_id]]
            assert answers.count(Acquired()) == 1, answers
            (refusal,) = [answer for answer in answers if answer != Acquired()]
            winner = await owner_of(a, run_id)
            assert isinstance(refusal, OwnedBy)
            assert refusal.owner == winner
            assert await owner_of(b, run_id) == winner
            won[refusal.owner] += 1
        assert sum(won.values()) == 20

    async def test_contenders_for_many_runs_share_them_without_overlap(
        self, leases: OpenLeases, make_runs: MakeRuns
    ) -> None:
        run_ids = await make_runs(200)
        managers = [await leases(f"{name}#1") for name in "abcd"]

        async def grab(manager: LeaseManager, start: int) -> set[str]:
            mine: set[str] = set()
            for n in range(0, 200, 20):
                part = [run_ids[(start + n + m) % 200] for m in range(20)]
                answers = await manager.acquire_lease(part)
                mine |= {run_id for run_id, answer in answers.items() if answer == Acquired()}
            return mine

        grabbed = await asyncio.gather(*(grab(manager, 50 * n) for n, manager in enumerate(managers)))
        assert sorted(run_id for mine in grabbed for run_id in mine) == sorted(run_ids)

    async def test_who_holds_it_and_until_when(self, leases: OpenLeases, make_runs: MakeRuns) -> None:
        a, b = await leases("a#1"), await leases("b#1")
        (run_id,) = await make_runs(1)
        assert await a.get_lease(run_id) is None
        await take(a, [run_id])
        session = await session_of(b, "a#1")
        assert session is not None
        (answer,) = (await b.acquire_lease([run_id])).values()
        assert isinstance(answer, OwnedBy)
        assert answer.owner == "a#1"
        assert answer.expires_at == pytest.approx(session.expires_at, abs=ROUNDING_SECONDS)
        for manager in (a, b):
            lease = await manager.get_lease(run_id)
            assert isinstance(lease, Lease)
            assert (lease.run_id, lease.owner) == (run_id, "a#1")
            assert lease.expires_at == pytest.approx(session.expires_at, abs=ROUNDING_SECONDS)

    async def test_asking_again_for_ones_own(self, leases: OpenLeases, make_runs: MakeRuns) -> None:
        a = await leases("a#1")
        run_ids = await make_runs(2)
        await take(a, run_ids)
        await take(a, run_ids)

    async def test_each_run_of_many_stands_alone(self, leases: OpenLeases, make_runs: MakeRuns) -> None:
        a, b = await leases("a#1"), await leases("b#1")
        run_ids = await make_runs(300)
        theirs, mine = run_ids[::3], run_ids[1::3]
        await take(b, theirs)
        await take(a, mine)
        answers = await a.acquire_lease(run_ids)
        assert set(answers) == set(run_ids)
        assert {run_id for run_id, answer in answers.items() if isinstance(answer, OwnedBy)} == set(theirs)
        assert await a.acquire_lease([]) == {}

    async def test_what_is_no_unfinished_root_is_left_out(self, leases: OpenLeases, make_runs: MakeRuns) -> None:
        a = await leases("a#1")
        if not a.in_store:
            pytest.skip("a manager that does not see the runs cannot tell")
        (run_id,) = await make_runs(1)
        assert await a.acquire_lease(["nobody", run_id]) == {run_id: Acquired()}
        assert await a.get_lease("nobody") is None

    async def test_two_lives_of_one_name_are_two_owners(self, leases: OpenLeases, make_runs: MakeRuns) -> None:
        before, after = await leases("host-1#1"), await leases("host-1#2")
        (run_id,) = await make_runs(1)
        await take(before, [run_id])
        assert isinstance((await after.acquire_lease([run_id]))[run_id], OwnedBy)
        assert await after.release_lease(run_id) == NotOwner("host-1#1")

    # ---- releasing

    async def test_what_is_released_is_free_for_others(self, leases: OpenLeases, make_runs: MakeRuns) -> None:
        a, b = await leases("a#1"), await leases("b#1")
        run_id, kept = await make_runs(2)
        await take(a, [run_id, kept])
        assert await a.release_lease(run_id) == Released()
        assert await b.get_lease(run_id) is None
        await take(b, [run_id])
        assert await owner_of(a, run_id) == "b#1"
        assert await owner_of(b, kept) == "a#1"

    async def test_only_the_holder_releases(self, leases: OpenLeases, make_runs: MakeRuns) -> None:
        a, b = await leases("a#1"), await leases("b#1")
        (run_id,) = await make_runs(1)
        assert await b.release_lease(run_id) == NotOwner(None)
        await take(a, [run_id])
        before = await a.get_lease(run_id)
        assert await b.release_lease(run_id) == NotOwner("a#1")
        assert await owner_of(a, run_id) == "a#1"
        assert before is not None
        assert await a.release_lease(run_id) == Released()
        assert await a.release_lease(run_id) == NotOwner(None)

    async def test_releasing_all_frees_all_of_ones_own_and_ends_the_session(
        self, leases: OpenLeases, make_runs: MakeRuns
    ) -> None:
        a, b = await leases("a#1"), await leases("b#1")
        run_ids = await make_runs(50)
        theirs, mine = run_ids[:5], run_ids[5:]
        await take(a, mine)
        await take(b, theirs)
        await a.release_all()
        assert await session_of(b, "a#1") is None
        assert await session_of(b, "b#1") is not None
        for run_id in theirs:
            assert await owner_of(b, run_id) == "b#1"
        await take(b, run_ids)
        await a.release_all()  # nothing is left to release
        assert await owner_of(b, mine[0]) == "b#1"

    @pytest.mark.parametrize("at_once", [False, True])
    @pytest.mark.parametrize("kind", [None, MessageKind.JOIN, MessageKind.SIGNAL, MessageKind.CANCEL])
    async def test_what_is_released_is_due_at_its_time_or_if_it_was_told_something(
        self,
        leases: OpenLeases,
        make_runs: MakeRuns,
        request: pytest.FixtureRequest,
        kind: MessageKind | None,
        at_once: bool,
    ) -> None:
        """Its owner may not have received the message, and the next orchestrators look only for runs that are due."""
        a = await leases("a#1")
        if not a.in_store:
            pytest.skip("a manager that does not see the runs makes none due")
        store: Store = request.getfixturevalue("store")
        run_id, joined = await make_runs(2)
        (epoch,) = (await store.claim({run_id: 1}, "a#1")).values()
        waiting = RunChange(run_id=run_id, status=Status.WAITING, owner="a#1", wake_at=START + 3600)
        (done,) = await store.commit(
            [Commit(root_id=run_id, epoch=epoch, after=1, entries=[b"w"], extras=Extras(changes=[waiting]))]
        )
        assert done == Committed(2)
        if kind is not None:
            await store.post([Message(run_id=run_id, kind=kind, name=joined, at=START + 5)])
        before = await run_of(store, run_id)
        assert (before.owner, before.wake_at) == ("a#1", START + 3600)
        if at_once:
            assert await a.release_lease(run_id) == Released()
        else:
            await a.release_all()
        row = await run_of(store, run_id)
        assert (row.owner, row.status) == (None, Status.PENDING)
        told = kind not in (None, MessageKind.JOIN)
        assert row.wake_at == (before.updated_at if told else START + 3600)

    @pytest.mark.parametrize("at_once", [False, True])
    async def test_what_was_resumed_by_hand_and_not_driven_since_stays_so_when_it_is_released(
        self, leases: OpenLeases, make_runs: MakeRuns, request: pytest.FixtureRequest, at_once: bool
    ) -> None:
        a = await leases("a#1")
        if not a.in_store:
            pytest.skip("a manager that does not see the runs does not release them")
        store: Store = request.getfixturevalue("store")
        run_ids = await make_runs(2)
        for run_id, status in zip(run_ids, (Status.PENDING, Status.RUNNING), strict=True):
            (epoch,) = (await store.claim({run_id: 1}, "a#1")).values()
            change = RunChange(run_id=run_id, status=status, owner="a#1", wake_at=START, reason=RESUMED_BY_HAND)
            (done,) = await store.commit(
                [Commit(root_id=run_id, epoch=epoch, after=1, entries=[b"w"], extras=Extras(changes=[change]))]
            )
            assert done == Committed(2)
        if at_once:
            await a.release_all()
        else:
            assert [await a.release_lease(run_id) for run_id in run_ids] == [Released(), Released()]
        rows = [await run_of(store, run_id) for run_id in run_ids]
        assert [(row.status, row.reason) for row in rows] == [(Status.PENDING, RESUMED_BY_HAND), (Status.PENDING, "")]

    async def test_a_session_that_was_released_begins_again_without_runs(
        self, leases: OpenLeases, make_runs: MakeRuns
    ) -> None:
        a, b = await leases("a#1"), await leases("b#1")
        (run_id,) = await make_runs(1)
        await take(a, [run_id])
        await a.release_all()
        await a.heartbeat()
        assert await session_of(b, "a#1") is not None
        assert await a.get_lease(run_id) is None
        await take(b, [run_id])

    async def test_closing_releases_nothing(self, leases: OpenLeases, make_runs: MakeRuns) -> None:
        a, b = await leases("a#1"), await leases("b#1")
        (run_id,) = await make_runs(1)
        await take(a, [run_id])
        await a.close()
        assert await owner_of(b, run_id) == "a#1"
        assert isinstance((await b.acquire_lease([run_id]))[run_id], OwnedBy)

    # ---- lapsing and keeping

    async def test_what_a_lapsed_session_held_is_free(
        self, leases: OpenLeases, make_runs: MakeRuns, ttl: float, lapse: Lapse
    ) -> None:
        dead, b = await leases("dead#1", ttl), await leases("b#1")
        run_ids = await make_runs(3)
        await take(dead, run_ids)
        await lapse(dead)
        assert await b.get_lease(run_ids[0]) is None
        assert await b.release_lease(run_ids[0]) == NotOwner(None)
        await take(b, run_ids)
        assert await owner_of(dead, run_ids[0]) == "b#1"
        assert await dead.release_lease(run_ids[0]) == NotOwner("b#1")
        assert await owner_of(b, run_ids[0]) == "b#1"

    async def test_one_heartbeat_keeps_all_runs(
        self, leases: OpenLeases, make_runs: MakeRuns, ttl: float, elapse: Elapse
    ) -> None:
        a, b = await leases("a#1", ttl), await leases("b#1")
        run_ids = await make_runs(20)
        await take(a, run_ids)
        for _ in range(10):  # past three times the ttl
            await elapse(ttl / 3)
            await a.heartbeat()
        answers = await b.acquire_lease(run_ids)
        assert {type(answer) for answer in answers.values()} == {OwnedBy}

    async def test_a_heartbeat_after_the_lapse_takes_nothing_back(
        self, leases: OpenLeases, make_runs: MakeRuns, ttl: float, lapse: Lapse
    ) -> None:
        late, b = await leases("late#1", ttl), await leases("b#1")
        lost, free = await make_runs(2)
        await take(late, [lost])
        await lapse(late)
        await take(b, [lost])
        await late.heartbeat()
        assert await owner_of(late, lost) == "b#1"
        await late.heartbeat()
        assert isinstance((await late.acquire_lease([lost]))[lost], OwnedBy)
        await late.heartbeat()
        assert await session_of(b, "late#1") is not None
        await take(late, [free])

    async def test_a_session_that_somebody_ended_is_as_dead_as_a_lapsed_one(
        self, leases: OpenLeases, make_runs: MakeRuns
    ) -> None:
        dead, b = await leases("dead#1"), await leases("b#1")
        run_ids = await make_runs(2)
        await take(dead, run_ids)
        await b.end_session("dead#1")
        assert await session_of(b, "dead#1") is None
        assert await session_of(b, "b#1") is not None
        assert await b.get_lease(run_ids[0]) is None
        await take(b, run_ids)
        await b.end_session("dead#1")
        await b.end_session("nobody#1")
        await dead.heartbeat()  # the process was not dead after all
        assert await session_of(b, "dead#1") is not None
        assert await owner_of(dead, run_ids[0]) == "b#1"
