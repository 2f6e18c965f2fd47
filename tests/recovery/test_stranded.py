"""Runs that no process woke: messages while the lease is lost, a full memory, broken batches, ends that no run was told of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relight import (
    Relight,
    Retry,
    RunCancelledError,
    RunStateError,
    UnknownFlowError,
    flow,
    sleep,
    spawn,
    step,
    wait_for,
)
from relight.backends.memory import MemoryLeases, MemoryStore
from relight.backends.sqlite.leases import SqliteLeases
from relight.backends.sqlite.store import SqliteStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import LeasesUnavailableError, StoreUnavailableError
from relight.execution.thread_pool import Slot, Threads
from relight.handle import Handle
from relight.model import journal as j
from relight.model.run import Hold, Run, Status
from relight.orchestrator import waking
from relight.ports.store import Commit, CommitResult, Store
from relight.record.writer import Writer
from relight.run.phase import Phase
from relight.testing.clock import FakeClock
from tests.flows.watching import turns
from tests.flows.world import World, until
from tests.recovery.engines import make_database

FAST = {"lease_ttl": "1.2s", "check_interval": "0.2s"}


class Cut(SqliteLeases):
    """Leases whose heartbeats can be cut off."""

    cut = False

    async def heartbeat(self) -> bool:
        if self.cut:
            raise LeasesUnavailableError("cut off")
        return await super().heartbeat()


def parked(run: Handle[Any], status: str = "waiting") -> Any:
    async def look() -> bool:
        row = await run.describe()
        return row.status == status and row.owner is None

    return look


# ---- messages


@pytest.mark.parametrize("told", ["signal", "cancel", "resume"])
async def test_what_a_run_is_told_while_the_lease_is_lost_is_heard_afterwards(told: str, tmp_path: Path) -> None:
    @flow
    async def waits() -> Any:
        return await wait_for("go")

    path = tmp_path / "relight.db"
    leases = Cut(path)
    store = SqliteStore(path, clock=SYSTEM_CLOCK)
    async with Relight(store=store, lease_manager=leases, park_after="1ms", recovery=FAST) as rl:
        run = await rl.start(waits.with_id("w"))
        await until(parked(run))
        if told == "resume":
            await run.signal("go", 7)
            await run.pause()
            await until(parked(run, "paused"))
        leases.cut = True
        await until(lambda: not rl.services.heartbeats.may_drive)
        async with Relight(path, drive=False) as client:
            other = await client.get("w")
            if told == "signal":
                await other.signal("go")
            elif told == "cancel":
                await other.cancel()
            else:
                await other.resume()
        heard = asyncio.Event()
        hear = rl.orchestrator.delivery.deliver_new

        async def hearing() -> None:
            await hear()
            heard.set()

        rl.orchestrator.delivery.deliver_new = hearing  # type: ignore[method-assign]
        rl.orchestrator.waker.look_for_messages()
        await heard.wait()  # while the lease is lost: the message must not be forgotten
        leases.cut = False
        if told == "cancel":
            with pytest.raises(RunCancelledError):
                await run.result(timeout="60s")
        else:
            assert await run.result(timeout="60s") == (7 if told == "resume" else None)


async def test_opening_wakes_no_run_for_a_message_that_it_has_heard(tmp_path: Path) -> None:
    @flow
    async def waits() -> Any:
        return await wait_for("go")

    path = tmp_path / "relight.db"
    async with Relight(path, park_after="1ms") as rl:
        run = await rl.start(waits.with_id("w"))
        await until(parked(run))
        await run.signal("something else")
        await until(parked(run))

        async def heard() -> bool:
            return (await run.describe()).wake_at is None

        await until(heard)
        epoch = (await run.describe()).epoch
    async with Relight(path, park_after="1ms") as rl:
        assert rl._recovery is not None
        await rl._recovery.caught_up.wait()
        rl.orchestrator.waker.look_for_messages()
        await rl.orchestrator.waker.run_once()
        assert (await (await rl.get("w")).describe()).epoch == epoch


async def test_a_doubt_stays_while_the_lease_is_lost(tmp_path: Path) -> None:
    @flow
    async def works() -> str:
        return "done"

    path = tmp_path / "relight.db"
    leases = Cut(path)
    store = SqliteStore(path, clock=SYSTEM_CLOCK)
    async with Relight(store=store, lease_manager=leases, recovery=FAST) as rl:
        leases.cut = True
        await until(lambda: not rl.services.heartbeats.may_drive)
        row = Run(
            id="r",
            root_id="r",
            flow="works",
            status=Status.RUNNING,
            created_at=1.0,
            updated_at=1.0,
            owner=rl.services.owner,
            epoch=1,
            input=b"{}",
        )
        event = j.RunCreated("", "works", "", msgspec.Raw(b"{}"), "", 1.0)
        await store.commit([Commit(root_id="r", epoch=1, create=row, entries=[j.encode_event(event)])])
        rl.orchestrator.check_ownership(["r"], crashed=False)
        await rl.orchestrator.waker.run_once()
        assert "r" in rl.orchestrator.uncertain
        leases.cut = False
        assert await (await rl.get("r")).result(timeout="60s") == "done"


async def test_a_run_that_its_owner_does_not_have_in_memory_is_found_by_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something has dropped it from memory. No other process may take it up, since its owner is alive."""
    monkeypatch.setattr(waking, "LOST_SECONDS", 0.1)
    monkeypatch.setattr(waking, "CHECK_SECONDS", 0.1)

    @flow
    async def waits() -> Any:
        return await wait_for("go")

    async with Relight(tmp_path / "relight.db", park_after="1h") as rl:
        run = await rl.start(waits.with_id("w"))
        await until(lambda: "w" in rl.orchestrator.live)
        lost = rl.orchestrator.live.pop("w")
        await until(lambda: rl.orchestrator.live.get("w") not in (None, lost))
        lost.stopping, lost.phase = "lost", Phase.LEFT
        lost.loop.unwind("lost")
        await run.signal("go", 1)
        assert await run.result(timeout="60s") == 1
        assert await recoveries(rl, "w") == 1  # so a run that brings out the bug each time is held as poison in the end


async def recoveries(rl: Relight, run_id: str) -> int:
    """How many deaths the run's journal counts."""
    (journal,) = await rl.services.store.read([run_id])
    assert isinstance(journal, j.Journal)
    events = [j.decode_event(entry.event) for entry in journal.entries]
    return sum(isinstance(event, j.RunRecovered) for event in events)


class LosesAnswers(SqliteStore):
    """A store that claims due runs, and once raises an error instead of answering."""

    def __init__(self, path: Path, error: Exception) -> None:
        super().__init__(path, clock=SYSTEM_CLOCK)
        self.error: Exception | None = error
        self.claimed: list[str] = []

    async def claim_due(self, owner: str, now: float, since: float, limit: int, but: Sequence[str]) -> list[Run]:
        rows = await super().claim_due(owner, now, since, limit, but)
        if rows and self.error is not None:
            self.claimed, error, self.error = [row.id for row in rows], self.error, None
            raise error
        return rows


@pytest.mark.parametrize("error", [StoreUnavailableError("cut off"), KeyError("a bug")], ids=repr)
async def test_a_claim_of_due_runs_whose_answer_is_lost_is_no_crash(tmp_path: Path, error: Exception) -> None:
    """No code of these runs was executed. If it counted as a crash, three lost answers would make all of them suspects."""

    @flow
    async def waits() -> Any:
        return await wait_for("go")

    path = tmp_path / "relight.db"
    async with Relight(path, park_after="1ms") as before:
        await until(parked(await before.start(waits.with_id("told"))))
    store = LosesAnswers(path, error)
    async with Relight(path, drive=False) as client:
        await client.start(waits.with_id("new"))
        for run_id in ("told", "new"):
            await (await client.get(run_id)).signal("go", run_id)
        async with Relight(store=store, lease_manager=SqliteLeases(path), recovery=FAST) as rl:
            for run_id in ("told", "new"):
                assert await (await rl.get(run_id)).result(timeout="60s") == run_id
            assert store.claimed
            assert [await recoveries(rl, run_id) for run_id in store.claimed] == [0] * len(store.claimed)


# ---- batches


class Picky(MemoryStore):
    """A store that breaks on commits with a certain text, as a server does on a value that it cannot store."""

    once = False  # only the first time
    all_of_them = False  # whatever they contain

    def __init__(self) -> None:
        super().__init__(clock=SYSTEM_CLOCK)
        self.broke = 0

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        guilty = any(b"guilty" in entry for commit in commits for entry in commit.entries if commit.create is None)
        if (guilty or self.all_of_them) and not (self.once and self.broke):
            self.broke += 1
            raise ValueError("index row size 2712 exceeds maximum 2704")
        return await super().commit(commits)


def batch_of(name: str) -> Any:
    """A flow whose runs all record their step in one batch."""
    together = asyncio.Event()
    waiting: list[str] = []

    @step
    async def meet(what: str) -> str:
        waiting.append(what)
        if len(waiting) >= 20:
            together.set()
        await together.wait()
        return what

    @flow(name=name)
    async def meets(what: str) -> str:
        return str(await meet(what))

    return meets


async def test_a_batch_is_divided_until_the_guilty_commit_is_alone() -> None:
    store = Picky()
    leases = MemoryLeases(store, clock=SYSTEM_CLOCK)
    meets = batch_of("meets")
    async with Relight(store=store, lease_manager=leases, recovery=FAST) as rl:
        runs = [await rl.start(meets.with_id(f"r{n}"), "guilty" if n == 13 else f"run {n}") for n in range(20)]
        for n, run in enumerate(runs):
            if n != 13:
                assert await run.result(timeout="60s") == f"run {n}"
        with pytest.raises(RunStateError, match="the store cannot write what this run did last"):
            await runs[13].result(timeout="60s")
        row = await runs[13].describe()
        assert (row.status, row.hold, row.owner) == (Status.PAUSED, Hold.REFUSED, None)
        assert "index row size 2712" in row.reason
        assert "is held because the store cannot write" in (await rl.explain("r13")).sentence
        assert "r13" not in rl.orchestrator.live
        store.once = True  # mended
        await runs[13].resume()
        assert await runs[13].result(timeout="60s") == "guilty"


async def test_a_fault_that_passes_costs_no_run_anything() -> None:
    store = Picky()
    store.once = True
    meets = batch_of("meets")
    async with Relight(store=store, lease_manager=MemoryLeases(store, clock=SYSTEM_CLOCK), recovery=FAST) as rl:
        runs = [await rl.start(meets, f"guilty {n}") for n in range(20)]
        assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [f"guilty {n}" for n in range(20)]
        assert store.broke == 1


async def test_a_store_that_breaks_on_everything_strands_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "LOST_SECONDS", 0.2)
    monkeypatch.setattr(waking, "CHECK_SECONDS", 0.2)
    store = Picky()
    meets = batch_of("meets")
    async with Relight(store=store, lease_manager=MemoryLeases(store, clock=SYSTEM_CLOCK), recovery=FAST) as rl:
        runs = [await rl.start(meets, f"run {n}") for n in range(19)]
        store.all_of_them = True
        with pytest.raises(ValueError, match="index row size"):
            await rl.start(meets, "run 19")
        store.all_of_them = False
        runs.append(await rl.start(meets, "run 19"))
        assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [f"run {n}" for n in range(20)]


async def test_a_bug_that_one_run_of_a_batch_brings_out_strands_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(clock=SYSTEM_CLOCK)
    meets = batch_of("meets")
    settle, broken = Writer.committed_up_to, list[str]()

    def settling(self: Writer, sequence: int) -> Any:
        if self.root_id == "r7" and sequence == 2 and not broken:
            broken.append(self.root_id)
            raise ValueError("a bug")
        return settle(self, sequence)

    monkeypatch.setattr(Writer, "committed_up_to", settling)
    async with Relight(store=store, lease_manager=MemoryLeases(store, clock=SYSTEM_CLOCK), recovery=FAST) as rl:
        runs = [await rl.start(meets.with_id(f"r{n}"), f"run {n}") for n in range(20)]
        assert await asyncio.gather(*(run.result(timeout="60s") for run in runs)) == [f"run {n}" for n in range(20)]
        assert broken


class TwoLanes(MemoryStore):
    """A store that takes two batches at once, and is slow at both."""

    lanes = 2

    def __init__(self) -> None:
        super().__init__(clock=SYSTEM_CLOCK)
        self.under_way: list[str] = []
        self.clashes: list[str] = []

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        roots = [commit.root_id for commit in commits]
        self.clashes += [root for root in roots if root in self.under_way]
        self.under_way += roots
        for _ in range(5):
            await asyncio.sleep(0)
        for root in roots:
            self.under_way.remove(root)
        return await super().commit(commits)


async def test_no_run_is_in_two_batches_at_once() -> None:
    """The second batch would not continue where the first ends. The store would take it for a stale owner's."""

    @step
    async def work(number: int) -> int:
        for _ in range(number):
            await asyncio.sleep(0)
        return number

    @flow
    async def works() -> int:
        return sum(await asyncio.gather(*(work(number) for number in range(20))))

    store = TwoLanes()
    async with Relight(store=store, lease_manager=MemoryLeases(store, clock=SYSTEM_CLOCK)) as rl:
        runs = [await rl.start(works) for _ in range(4)]
        assert [await run.result(timeout="60s") for run in runs] == [190] * 4
        assert store.clashes == []
        assert rl.metrics.value("relight_fenced_writes_total") == 0


# ---- ends


@pytest.mark.parametrize("dies_after", range(4))
async def test_a_child_cancelled_in_its_back_off_tells_its_parent_whenever_its_process_dies(
    world: World, dies_after: int
) -> None:
    """The process dies after each commit from the cancellation on."""

    @flow(retry=Retry(attempts=3, delay="1h"))
    async def failing() -> None:
        raise ValueError("x")

    @flow
    async def parent() -> str:
        child = await spawn(failing)
        try:
            await child
        except Exception as error:
            return type(error).__name__
        return "nothing"

    rl = await world.open(park_after="1ms")
    run = await rl.start(parent.with_id("p"))
    child = (await until(lambda: world.rl.services.store.get_run("p/$spawn.failing"))).id
    handle = await rl.get(child)
    await world.park(handle)
    await world.park(run)
    mortal = world._engines[rl]
    plain, commits = mortal.inner.commit, 0

    async def commit(batch: Sequence[Commit]) -> list[CommitResult]:
        nonlocal commits
        results: list[CommitResult] = await plain(batch)
        commits += any(one.root_id == child for one in batch)
        mortal.dead = commits > dies_after
        return results

    mortal.inner.commit = commit
    await handle.cancel("sold")
    await until(lambda: mortal.dead or _has_ended(mortal.inner, child))
    mortal.inner.commit = plain
    rl = await world.crash_and_reopen()
    assert await (await rl.get("p")).result(timeout="60s") == "RunCancelledError"
    row = await (await rl.get(child)).describe()
    assert (row.status, row.reason) == (Status.CANCELLED, "sold")


async def _has_ended(store: Store, run_id: str) -> bool:
    row = await store.get_run(run_id)
    return row is not None and row.status.terminal


async def test_bringing_a_row_up_to_date_tells_the_run_that_waits_for_it() -> None:
    """The journal has the end and the row does not, as after the restore of half a backup."""

    @flow
    async def failing() -> None:
        await wait_for("never")

    @flow
    async def parent() -> str:
        child = await spawn(failing)
        try:
            await child
        except Exception as error:
            return str(error)
        return "nothing"

    store = MemoryStore(clock=SYSTEM_CLOCK)
    async with Relight(store=store, park_after="1ms") as rl:
        run = await rl.start(parent.with_id("p"))
        child = await until(lambda: store.get_run("p/$spawn.failing"))
        await until(parked(await rl.get(child.id)))
        await until(parked(run))
        epochs = await store.claim({child.id: (await store.get_run(child.id)).epoch}, "somebody else")  # type: ignore[union-attr]
        end = [j.CancelRequested("", "sold", 2.0), j.RunCancelled("", "sold", 2.0)]
        entries = [j.encode_event(event) for event in end]
        after = await store.latest_sequence(child.id)
        await store.commit([Commit(root_id=child.id, epoch=epochs[child.id], after=after, entries=entries)])
    async with Relight(store=store) as rl:
        assert "sold" in await (await rl.get("p")).result(timeout="60s")
        assert (await (await rl.get(child.id)).describe()).reason == "sold"


async def test_a_child_that_is_cancelled_with_a_journal_that_cannot_be_read_tells_its_parent(world: World) -> None:
    @flow
    async def below() -> None:
        await wait_for("never")

    @flow
    async def above() -> str:
        child = await spawn(below.with_id("below"))
        try:
            await child
        except RunCancelledError as error:
            return error.reason
        return "nothing"

    rl = await world.open()
    run = await rl.start(above.with_id("above"))
    await until(lambda: world.rl.services.store.get_run("below"))
    await world.park(await rl.get("below"))
    await world.park(run)
    world.damage("below", 1)
    await (await rl.get("below")).cancel("sold")
    assert "cancelled; its journal was corrupt" in await run.result(timeout="60s")


# ---- room in memory


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_full_memory_strands_no_run(limit: int, kind: str, tmp_path: Path) -> None:
    """Nested spawns, signals to parked runs, pauses and sleeps, with room for one or two runs at a time."""

    @flow
    async def leaf(n: int) -> int:
        await sleep("10ms")
        return n + int(await wait_for("more"))

    @flow
    async def branch(n: int) -> int:
        child = await spawn(leaf.with_id(f"leaf-{n}"), n)
        extra = sum([int(await wait_for("more")) for _ in range(3)])
        return extra + int(await child)

    @flow
    async def root(count: int) -> int:
        children = [await spawn(branch.with_id(f"branch-{n}"), n) for n in range(count)]
        return sum([int(await child) for child in children])

    store = MemoryStore(clock=SYSTEM_CLOCK) if kind == "memory" else None
    leases = None if store is None else MemoryLeases(store, clock=SYSTEM_CLOCK)
    url = None if store is not None else tmp_path / "relight.db"
    async with Relight(
        url, store=store, lease_manager=leases, max_concurrent_runs=limit, park_after="1ms", recovery=FAST
    ) as rl:
        run = await rl.start(root.with_id("root"), 4)
        for n in range(4):
            await until(lambda n=n: rl.services.store.get_run(f"branch-{n}"))
            handle = await rl.get(f"branch-{n}")
            for _ in range(3):
                await handle.signal("more", 1)
            await handle.pause()
            await handle.resume()
        for n in range(4):
            await until(lambda n=n: rl.services.store.get_run(f"leaf-{n}"))
            await (await rl.get(f"leaf-{n}")).signal("more", 10)
        assert await run.result(timeout="60s") == sum(n + 10 + 3 for n in range(4))


async def test_due_runs_that_cannot_be_claimed_are_not_asked_for_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the lease is lost while many are taken up. By the test's clock no time passes, so the pause does not end."""
    monkeypatch.setattr(waking, "CHECK_SECONDS", 3600.0)
    monkeypatch.setattr(waking, "LOST_SECONDS", 3600.0)

    @flow
    async def works() -> None: ...

    class Unclaimable(MemoryStore):
        asked = 0

        async def claim_due(self, owner: str, now: float, since: float, limit: int, but: Sequence[str]) -> list[Run]:
            self.asked += 1
            return []

        async def claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
            return {}

    clock = FakeClock()
    store = Unclaimable(clock=clock)
    async with Relight(store=store, clock=clock, drive=False) as client:
        for n in range(150):
            await client.start(works.with_id(f"r{n}"))
    async with Relight(store=store, clock=clock) as rl:
        assert rl._recovery is not None
        await rl._recovery.caught_up.wait()
        for number in range(1, 4):
            await until(lambda number=number: store.asked >= number)
            for _ in range(20):
                rl.orchestrator.waker.wake_up()
                await turns()
            assert store.asked == number
            clock.advance(waking.NOT_OURS_SECONDS)


async def test_due_runs_of_other_owners_do_not_hide_own_runs_while_recovery_is_off(tmp_path: Path) -> None:
    @flow
    async def naps() -> str:
        await sleep("0.2s")
        return "woke"

    path = await make_database(tmp_path / "relight.db")
    async with Relight(path, drive=False) as client:
        for n in range(120):
            await client.start(naps.with_id(f"other-{n}"))
    async with Relight(path, park_after="1ms", recovery={"enabled": False}) as rl:
        assert await (await rl.start(naps.with_id("own"))).result(timeout="60s") == "woke"
        assert (await (await rl.get("other-0")).describe()).status is Status.PENDING


# ---- threads


async def test_a_sync_step_that_hangs_past_its_timeout_gives_its_slot_back(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    @step(timeout="0.1s")
    def hangs() -> None:
        gate.wait()  # without a limit of its own: its thread comes back at the end of the test only

    @step
    def fine() -> str:
        return "ran"

    @flow
    async def first() -> None:
        await hangs()

    @flow
    async def second() -> str:
        return str(await fine())

    async with Relight(store=MemoryStore(clock=SYSTEM_CLOCK), max_threads=1) as rl:
        try:
            one = await rl.start(first)
            with pytest.raises(Exception, match="did not finish within its timeout"):
                await one.result(timeout="60s")
            assert rl.health().abandoned_threads == 1
            assert "[THREAD_ABANDONED]" in caplog.text
            assert await (await rl.start(second)).result(timeout="60s") == "ran"
        finally:
            gate.set()
        await until(lambda: rl.health().abandoned_threads == 0)
        assert await (await rl.start(second)).result(timeout="60s") == "ran"
        await until(lambda: rl.services.threads.in_use == 0)


async def test_waiting_for_a_thread_does_not_count_against_a_timeout(world: World) -> None:
    gate, begun = threading.Event(), threading.Event()

    @step
    def holds() -> None:
        begun.set()
        gate.wait(60)

    @step(timeout="0.2s")
    def quick() -> str:
        return "ran"

    @flow
    async def holding() -> None:
        await holds()

    @flow
    async def hurried() -> str:
        return str(await quick())

    rl = await world.open(max_threads=1)
    held = await rl.start(holding)
    await until(begun.is_set)
    run = await rl.start(hurried)
    await until(lambda: rl.services.threads.wanted)
    world.clock.advance(5.0)  # many times its timeout
    gate.set()
    assert await run.result(timeout="60s") == "ran"
    await held.result(timeout="60s")


async def test_waiting_for_a_thread_after_a_crash_does_not_count_against_a_timeout(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of the attempt is in the journal: what passes before it is begun again moves it."""
    gate, begun = threading.Event(), threading.Event()
    lives: list[int] = []

    @step(timeout="10s")
    def quick() -> str:
        lives.append(1)
        if len(lives) == 1:
            begun.set()
            gate.wait()
        return "ran"

    @flow
    async def hurried() -> str:
        return str(await quick())

    plain, asked, given = Threads.slot, asyncio.Event(), asyncio.Event()

    async def slot(self: Threads, *, bounded: bool = True) -> Slot:
        asked.set()
        await given.wait()
        return await plain(self, bounded=bounded)

    await world.open()
    try:
        run = await world.rl.start(hurried)
        await until(begun.is_set)
        monkeypatch.setattr(Threads, "slot", slot)
        rl = await world.crash_and_reopen()
        await asked.wait()
        world.clock.advance("1h")
        given.set()
        assert await (await rl.get(run.id)).result(timeout="60s") == "ran"
    finally:
        gate.set()


# ---- results


async def test_a_client_that_knows_the_flow_waits_for_an_orchestrator_that_does(tmp_path: Path) -> None:
    path = await make_database(tmp_path / "relight.db")

    @flow
    async def late() -> str:
        return "done"

    async with Relight(path, drive=False, flows=[late], recovery={"check_interval": "20s"}) as client:
        run = await client.start(late.with_id("r"))
        async with Relight(path, flows=[]):  # like an orchestrator of an older version: it does not know the flow
            await until(parked(run, "paused"))
            waiting = asyncio.create_task(run.result(timeout="60s"))
            await asyncio.sleep(0)
        async with Relight(path, flows=[late]):
            assert await waiting == "done"


async def test_a_client_that_knows_the_flow_hears_that_no_orchestrator_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waking, "CHECK_SECONDS", 0.05)
    path = await make_database(tmp_path / "relight.db")

    @flow
    async def lost() -> str:
        return "done"

    async with Relight(path, drive=False, flows=[lost], recovery={"check_interval": "0.1s"}) as client:
        run = await client.start(lost.with_id("r"))
        async with Relight(path, flows=[]):
            await until(parked(run, "paused"))
        with pytest.raises(UnknownFlowError):
            await run.result(timeout="60s")
