"""What must go on when orchestrators die, stop, come back, and when the store restarts under them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from relight import Handle, Relight
from relight.errors import StoreUnavailableError
from relight.model.run import Status
from tests.cluster.arena import Arena, flows, rows
from tests.harness.cluster import DEADLINE_SECONDS, pause, until

TTL = 2.0
# No test waits for this lapse: a run that is taken over was released, or its process is known to be dead.
LONG_TTL = 3600.0
SETTLED = {"settle": True}


async def results(runs: Sequence[Handle[Any]], within: str = "100s") -> list[Any]:
    try:
        return await asyncio.gather(*(run.result(timeout=within) for run in runs))
    except TimeoutError:
        rl = runs[0]._relight
        left = [row for row in await rows(rl, runs) if not row.status.terminal]
        why = "\n".join([(await rl.explain(row.id)).sentence for row in left[:10]])
        raise AssertionError(f"{len(left)} runs have not ended, such as\n{why}") from None


# The other kinds are in `make soak-ci` and `make soak`. A test that depends on the kind of store says so.
ALL_KINDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.soak), "postgres+etcd"]


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.soak),
        pytest.param("postgres+etcd", marks=pytest.mark.soak_ci),
    ]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_restarted_with_the_same_id_its_runs_go_on_at_once(arena: Arena):
    async with arena.opened(LONG_TTL) as (cluster, rl):
        await cluster.start("a")
        runs = [await rl.start(flows.steps.with_id(f"r{n}"), 20, 0.02) for n in range(10)]
        await until(lambda: len(arena.begun()) == len(runs))
        await cluster.restart("a")
        assert await results(runs) == [sum(range(20))] * len(runs)
        in_flight = await arena.verify(rl, runs)
        assert 0 < len(in_flight) <= len(runs)  # one step of each, once


@pytest.mark.parametrize("within", [DEADLINE_SECONDS, pytest.param(TTL + 2.0, id="in time", marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_another_takes_over_within_the_ttl_and_two_seconds(arena: Arena, within: float):
    """`make soak` checks that it takes no longer, on a machine that does nothing else."""
    async with arena.opened(TTL) as (cluster, rl):
        await cluster.start("a")
        runs = [await rl.start(flows.gated.with_id(f"r{n}"), "open") for n in range(10)]
        await until(lambda: len(arena.notes(key="held")) == len(runs))
        await cluster.start("b", arguments=SETTLED)
        killed = time.time()
        await cluster.kill("a")
        await until(lambda: len(arena.notes(key="held")) == 2 * len(runs), within=within)
        taken = [note.at - killed for note in arena.notes(key="held")][len(runs) :]
        print(f"{arena.kind}: resumed {taken[0]:.2f}s to {taken[-1]:.2f}s after the kill")
        arena.open_gate("open")
        assert await results(runs) == [6] * len(runs)
        assert len(await arena.verify(rl, runs)) == len(runs)


async def test_two_die_and_a_third_takes_all(arena: Arena):
    async with arena.opened(TTL) as (cluster, rl):
        await asyncio.gather(*(cluster.start(name, max_concurrent_runs=10) for name in "ab"))
        runs = [await rl.start(flows.gated.with_id(f"r{n}"), "open") for n in range(20)]
        await until(lambda: len(arena.notes(key="held")) == len(runs))
        assert {note.by for note in arena.notes(key="held")} == {"a", "b"}
        await cluster.start("c", arguments=SETTLED)
        await asyncio.gather(cluster.kill("a"), cluster.kill("b"))
        arena.open_gate("open")
        assert await results(runs) == [6] * len(runs)
        assert len(await arena.verify(rl, runs)) == len(runs)
        assert {note.by for note in arena.notes(key="held")[len(runs) :]} == {"c"}


async def test_an_orchestrator_dies_while_it_recovers(arena: Arena):
    count = 100
    async with arena.opened(LONG_TTL) as (cluster, rl):
        await cluster.start("a")
        runs = [await rl.start(flows.gated.with_id(f"r{n}"), "open") for n in range(count)]
        await until(lambda: len(arena.notes(key="held")) == count)
        await cluster.kill("a")
        # However fast it is, it has room for half of them only: it dies before it has recovered the others.
        await cluster.start("b", recovery={"max_startup_recovery": 10}, max_concurrent_runs=count // 2)
        await until(lambda: arena.resumed("b") >= 20)
        await cluster.kill("b")
        arena.open_gate("open")
        await cluster.start("c")
        assert await results(runs) == [6] * count
        in_flight = await arena.verify(rl, runs)
        assert count <= len(in_flight) <= 2 * count  # in flight: all at a's death, some at b's death


async def test_a_tree_of_child_flows_is_half_done(arena: Arena):
    depth, width = 3, 3
    async with arena.opened(LONG_TTL) as (cluster, rl):
        await cluster.start("a")
        run = await rl.start(flows.tree, depth, width, 0.05, "open")
        await until(lambda: len(arena.notes("end")) >= 30)
        await cluster.kill("a")
        assert len(arena.notes("end")) < 80  # the gate is closed: 67 at most
        arena.open_gate("open")
        await cluster.start("b")
        assert await run.result(timeout="60s") == 80
        in_flight = await arena.verify(rl, [run])
        assert len(in_flight) <= width**depth


@pytest.mark.parametrize("longest", [DEADLINE_SECONDS, pytest.param(1.0, id="in time", marks=pytest.mark.soak)])
async def test_what_a_stopping_orchestrator_had_is_taken_over_at_once(arena: Arena, longest: float):
    async with arena.opened(LONG_TTL) as (cluster, rl):
        await asyncio.gather(cluster.start("a"), cluster.start("b"))
        runs: list[Handle[Any]] = []
        busy = asyncio.Semaphore(40)  # so many at once: more would wait for the machine, not for a takeover
        ending: list[asyncio.Task[Any]] = []

        async def load() -> None:
            while True:
                await busy.acquire()
                shape: tuple[Any, ...] = (flows.spawning, 2, 0.05) if len(runs) % 4 == 0 else (flows.steps, 15, 0.05)
                runs.append(await rl.start(shape[0].with_id(f"r{len(runs)}"), *shape[1:]))
                ending.append(asyncio.create_task(runs[-1].result()))
                ending[-1].add_done_callback(lambda _: busy.release())
                await asyncio.sleep(0.01)

        loading = asyncio.create_task(load())
        await until(lambda: {note.by for note in arena.notes()} == {"a", "b"} and len(arena.notes()) > 200)
        cluster.terminate("a")
        stopped = time.time()
        assert await cluster.ended("a") == 0
        await pause(0.3)  # runs are still started
        loading.cancel()
        wanted = [7 if index % 4 == 0 else sum(range(15)) for index in range(len(runs))]
        assert await results(runs) == wanted
        assert await arena.verify(rl, runs) == []  # steps in flight could finish: nothing at all was repeated
        print(f"{arena.kind}: {len(runs)} runs; longest gap {_longest_gap(arena, stopped):.2f}s")
        assert _longest_gap(arena, stopped) < longest  # far less than the ttl


def _longest_gap(arena: Arena, stopped: float) -> float:
    """The longest time from a run's last step on `a` to its first step elsewhere, for the runs that `a` had when it was
    told to stop. Runs that spawn others do not count: they wait for these between two steps."""
    spawning = {note.run.partition("/")[0] for note in arena.notes() if "/" in note.run}
    last = {note.run: note.at for note in arena.notes("end") if note.by == "a" and note.run not in spawning}
    gaps = [0.0]
    for run_id, at in last.items():
        after = [note.at - at for note in arena.notes(run=run_id) if note.by != "a" and note.at > at]
        if after and at > stopped - 0.2:
            gaps.append(min(after))
    assert len(gaps) > 1, "nothing was taken over"
    return max(gaps)


async def test_the_second_signal_ends_it_at_once(arena: Arena):
    async with arena.opened(LONG_TTL, park_after="1h", shutdown_grace="1h") as (cluster, rl):
        await cluster.start("a")
        busy = await rl.start(flows.gated, "open")
        waiting = await rl.start(flows.asking)
        await until(lambda: arena.notes(key="held"))

        async def blocked() -> bool:
            return await waiting.status() is Status.WAITING

        await until(blocked)
        cluster.terminate("a")

        async def parked() -> bool:  # waiting runs are released at once; the step in flight has its grace
            row = await waiting.describe()
            return row.status is Status.WAITING and row.owner is None

        await until(parked)
        assert cluster.processes["a"].alive
        cluster.terminate("a")
        assert await cluster.ended("a") == 1
        arena.open_gate("open")
        await cluster.start("b")
        await waiting.signal("first", 10)
        await waiting.signal("second", 20)
        assert await results([busy, waiting]) == [6, 36]
        assert len(await arena.verify(rl, [busy, waiting])) == 1


async def test_a_rolling_restart_under_load(arena: Arena):
    async with arena.opened(LONG_TTL) as (cluster, rl):
        await asyncio.gather(*(cluster.start(name) for name in "abc"))
        runs: list[Handle[Any]] = []
        busy = asyncio.Semaphore(15)  # so many at once, however long a restart takes
        ending: list[asyncio.Task[Any]] = []

        async def load() -> None:
            while True:
                await busy.acquire()
                runs.append(await rl.start(flows.steps.with_id(f"r{len(runs)}"), 20, 0.03))
                ending.append(asyncio.create_task(runs[-1].result()))
                ending[-1].add_done_callback(lambda _: busy.release())

        loading = asyncio.create_task(load())
        for name in "abc":
            await until(lambda: any(note.by == name for note in arena.notes()[-200:]))
            cluster.terminate(name)
            assert await cluster.ended(name) == 0
            await cluster.restart(name)
        loading.cancel()
        assert await results(runs) == [sum(range(20))] * len(runs)
        assert await arena.verify(rl, runs) == []


async def test_a_backlog_larger_than_the_memory_drains(arena: Arena):
    count, room = 100, 10
    async with arena.opened(LONG_TTL) as (cluster, rl):
        await cluster.start("a")
        runs = [await rl.start(flows.gated.with_id(f"r{n}"), "open") for n in range(count)]
        await until(lambda: len(arena.notes(key="held")) == count)
        await cluster.kill("a")
        arena.open_gate("open")
        await cluster.start("b", max_concurrent_runs=room)
        assert await results(runs) == [6] * count
        assert len(await arena.verify(rl, runs)) == count


@pytest.mark.parametrize("kind", ["postgres", pytest.param("postgres+etcd", marks=pytest.mark.soak_ci)])
async def test_the_store_restarts_in_the_middle_of_recovering(arena: Arena):
    count = 100
    assert arena.postgres is not None
    async with arena.opened(LONG_TTL) as (cluster, rl):
        await cluster.start("a")
        runs = [await rl.start(flows.gated.with_id(f"r{n}"), "open") for n in range(count)]
        await until(lambda: len(arena.notes(key="held")) == count)
        await cluster.kill("a")
        await cluster.start("b", recovery={"max_startup_recovery": 10}, max_concurrent_runs=count // 2)  # as above
        await until(lambda: arena.resumed("b") >= 20)
        arena.postgres.restart()
        arena.open_gate("open")
        await _all_end(rl, runs)
        assert {row.status for row in await rows(rl, runs)} == {Status.COMPLETED}
        assert await results(runs) == [6] * count
        await arena.verify(rl, runs)


async def _all_end(rl: Relight, runs: Sequence[Handle[Any]]) -> None:
    async def ended() -> bool:
        try:
            return all(row.status.terminal for row in await rows(rl, runs))
        except StoreUnavailableError:  # the connections of this process were cut, too
            return False

    await until(ended, within=100)
