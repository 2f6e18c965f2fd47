"""The shapes of flows that are killed at every storage operation, each with the scenario that starts and ends it.

The children that are killed import this module. The expectations are in the tests. A scenario is called in every life,
so it does what a careful caller does: it starts the run again under the same id, and repeats what was not acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import random as chance
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from relight import (
    Relight,
    Retry,
    RunStateError,
    SpawnedRun,
    StepInterruptedError,
    continue_as,
    current_step,
    flow,
    foreach,
    now,
    parallel,
    random,
    sleep,
    spawn,
    step,
    uuid,
    wait_for,
)
from relight.handle import Handle
from relight.model.run import Status
from relight.testing.crashpoints import patiently
from relight.testing.ledger import effect, note, seen
from relight.testing.life import RUN_ID, Life

NAP = 0.03  # seconds: long enough to be parked with park_after=0, short enough for a thousand times


@step
async def work(label: str) -> str:
    with effect(label):
        return label


@step
def sync_work(label: str) -> str:
    with effect(label):
        return label


# ---- steps in a row


@flow
async def ten_steps() -> list[str]:
    done = []
    for number in range(10):
        label = f"step {number}"
        done.append(await work(label))
        seen(label)
    return done


@flow
async def large_values() -> list[str]:
    """With a blob_threshold of a few bytes every payload becomes a blob."""
    return [await work(f"{number}" * 100) for number in range(3)]


@flow
async def recorded_values() -> list[str]:
    """Every repetition of the step sees the same now(), random() and uuid()."""
    first = await work(f"at {now().isoformat()}")
    number, name = random(), uuid()
    second = await work(f"{number} {name}")
    return [first, second, f"{number} {name}"]


async def crowd(rl: Relight, life: Life) -> list[Any]:
    """Many runs at once: their commits share transactions."""
    handles = await asyncio.gather(*(life.start(rl, three_steps, who, id=f"run-{who}") for who in range(6)))
    return list(await asyncio.gather(*(life.end(handle) for handle in handles)))


@flow
async def three_steps(who: int) -> list[str]:
    return [await work(f"{who}.{number}") for number in range(3)]


async def poison(rl: Relight, life: Life) -> Any:
    """How the run ended. If it was held: how it ended after it was freed."""
    handle = await life.start(rl, ten_steps)
    ended = await life.end(handle)
    if ended["status"] != "held":
        return [None, ended]
    await patiently(handle.resume)
    return [ended, await life.end(handle)]


# ---- branches


@step
async def jittered(helper: int, turn: int) -> list[int]:
    with effect(f"{helper}.{turn}"):
        await asyncio.sleep(chance.random() * 0.003)
        return [helper, turn]


async def _helper(number: int) -> list[list[int]]:
    await asyncio.sleep(chance.random() * 0.002)
    return [await jittered(number, turn) for turn in range(3)]


@flow
async def five_helpers() -> list[list[list[int]]]:
    return list(await asyncio.gather(*(_helper(number) for number in range(5))))


@flow
async def task_group() -> list[list[list[int]]]:
    """Two groups after each other, a task of its own beside them, and steps gathered directly."""
    loose = asyncio.create_task(_helper(9))
    async with asyncio.TaskGroup() as group:
        first = [group.create_task(_helper(number)) for number in range(2)]
    direct = await asyncio.gather(*(jittered(7, turn) for turn in range(3)))
    async with asyncio.TaskGroup() as group:
        second = [group.create_task(_helper(number)) for number in (2, 3)]
    return [*(task.result() for task in first + second), direct, await loose]


# ---- foreach, over items that change between the lives


_items: list[str] = []


async def _items_of(life: Life) -> None:
    _items[:] = ["a", "b", "c" if life.number == 1 else "changed", "d", "e"]


async def _handle(item: str) -> str:
    return f"{await work(f'prepare {item}')}, {await work(f'ship {item}')}"


@flow
async def one_by_one() -> list[str]:
    found: list[str] = await foreach(_items, _handle, concurrency=1)
    return [*found, await work("after")]


@flow
async def three_at_once() -> list[str]:
    found: list[str] = await foreach(_items, _handle, concurrency=3)
    return [*found, await work("after")]


@flow
async def each_a_step() -> list[str]:
    found: list[str] = await foreach(_items, work)
    return [*found, await work("after")]


async def sequential_items(rl: Relight, life: Life) -> Any:
    await _items_of(life)
    return await life.end(await life.start(rl, one_by_one))


async def concurrent_items(rl: Relight, life: Life) -> Any:
    await _items_of(life)
    return await life.end(await life.start(rl, three_at_once))


async def step_items(rl: Relight, life: Life) -> Any:
    await _items_of(life)
    return await life.end(await life.start(rl, each_a_step))


# ---- child runs and spawned runs


@dataclasses.dataclass
class Order:
    name: str
    count: int


@flow
async def typed(order: Order, at: dt.datetime, *, tags: frozenset[str] = frozenset(), ratio: float = 1.0) -> list[str]:
    """A child flow whose arguments are not plain JSON."""
    assert isinstance(order, Order)
    assert isinstance(at, dt.datetime)
    assert isinstance(tags, frozenset)
    return [await work(f"{order.name} {order.count} {at.year} {sorted(tags)} {ratio}")]


@flow
async def leaf(name: str) -> str:
    return await work(f"leaf {name}")


@flow
async def branch(name: str) -> list[str]:
    first = await leaf(f"{name}.0")
    return [first, *await asyncio.gather(leaf(f"{name}.1"), leaf(f"{name}.2")), await work(f"branch {name}")]


@flow
async def three_levels() -> list[list[str]]:
    first = await branch("a")
    return [first, *await asyncio.gather(branch("b"), branch("c"))]


@flow
async def spawned(name: str) -> list[str]:
    return [await work(f"{name} 1"), await work(f"{name} 2")]


@flow
async def spawning() -> list[list[str]]:
    await work("before")
    awaited: SpawnedRun[list[str]] = await spawn(spawned, "awaited")
    await spawn(spawned.with_id("let-go"), "let go")
    other: SpawnedRun[list[str]] = await spawn(spawned, "other")
    return [await other, await awaited, [await work("after")]]


async def spawned_runs(rl: Relight, life: Life) -> Any:
    ended = await life.end(await life.start(rl, spawning))
    return [ended, await life.end(await patiently(lambda: rl.get("let-go")))]


# ---- generations


@flow
async def turning(turn: int, found: list[str]) -> list[str]:
    """Each generation executes a step, calls a flow, awaits a run that it has spawned, and takes a signal. Some signals
    came before."""
    found.append(await work(f"turn {turn}"))
    found.append(await leaf(f"turn {turn}"))
    child: SpawnedRun[list[str]] = await spawn(spawned, f"spawned in turn {turn}")
    found += await child
    found.append(f"signal {await wait_for('go', int)}")
    return found if turn == 3 else continue_as(turn + 1, found)


async def generations(rl: Relight, life: Life) -> Any:
    handle = await life.start(rl, turning, 1, [])
    for number in (1, 2, 3):
        await _signal(life, handle, number)
    return await life.end(handle)


# ---- waits


@flow
async def napping() -> list[Any]:
    await work("before")
    begun = now()
    await sleep(NAP)
    woken = now()
    return [await work("after"), (woken - begun).total_seconds() >= NAP]


@flow
async def two_signals() -> list[Any]:
    """Two signals of one name, in order; each taken exactly once."""
    await work("before")
    first = await wait_for("go")
    between = await work("between")
    return [first, between, await wait_for("go"), await work("after")]


async def _tell(life: Life, name: str, telling: Callable[[], Awaitable[None]]) -> None:
    """A sender that knows that its signal is durable does not send it again. A sender that does not know sends it
    again. A run that has ended in the meantime (another process has driven it) needs no signal."""
    if not life.facts("told", name):
        with contextlib.suppress(RunStateError):
            await patiently(telling)
        note("told", name)


async def _signal(life: Life, handle: Handle[Any], number: int) -> None:
    name = f"signal {number}"
    await _tell(life, name, lambda: handle.signal("go", number, id=name))


async def signals_before(rl: Relight, life: Life) -> Any:
    handle = await life.start(rl, two_signals)
    await _signal(life, handle, 1)
    await _signal(life, handle, 2)
    return await life.end(handle)


async def signals_during(rl: Relight, life: Life) -> Any:
    """Each signal is sent when the run waits for it: in memory or parked."""
    handle = await life.start(rl, two_signals)
    await life.reached(handle.id, Status.WAITING)
    await _signal(life, handle, 1)

    async def waits_again() -> bool:
        row = await life.store.get_run(handle.id)
        assert row is not None
        return row.status.terminal or (row.status is Status.WAITING and bool(life.facts("end", "between")))

    await life.until(waits_again)
    await _signal(life, handle, 2)
    return await life.end(handle)


async def signals_after(rl: Relight, life: Life) -> Any:
    """The first life only waits. The signals come after the crash, or after a restart if there was no crash."""
    handle = await life.start(rl, two_signals)
    if life.number == 1:
        await life.reached(handle.id, Status.WAITING)
        return life.again()
    await _signal(life, handle, 1)
    await _signal(life, handle, 2)
    return await life.end(handle)


@flow
async def shared() -> str:
    return await work(f"signal {await wait_for('go')}")


@flow
async def joining(name: str) -> list[str]:
    awaited: SpawnedRun[str] = await spawn(shared.with_id("shared"))
    return [await work(f"{name} found it"), await awaited, await work(f"{name} joined it")]


async def joined_by_others(rl: Relight, life: Life) -> Any:
    """A run that is started from outside. Two other runs spawn under the same id, find that run, and wait for its end."""
    awaited = await life.start(rl, shared, id="shared")
    others = [await life.start(rl, joining, name, id=name) for name in ("one", "two")]
    for run in (awaited, *others):
        await life.reached(run.id, Status.WAITING)
    await _signal(life, awaited, 1)
    return [await life.end(run) for run in (awaited, *others)]


@contextlib.asynccontextmanager
async def _resource(trail: list[str]) -> AsyncIterator[None]:
    trail.append("enter")
    try:
        yield
    except Exception:
        trail.append(await work("error in the resource"))
        raise
    finally:
        trail.append(await work("exit"))


@flow
async def guarded_wait() -> list[str]:
    """Parking must be invisible: no `except` sees it, and no `finally` executes a step because of it."""
    trail = [await work("before")]
    async with _resource(trail):
        try:
            await sleep(NAP)
        except Exception:
            trail.append(await work("except"))
        finally:
            trail.append(await work("finally"))
        try:
            trail.append(str(await wait_for("never", timeout=NAP, default="nothing")))
        finally:
            trail.append(await work("finally 2"))
    return trail


# ---- failures


@step(retry=Retry(attempts=3, delay="3ms", backoff="exponential"))
async def flaky(label: str) -> str:
    with effect():
        if current_step().attempt < 3:
            raise ConnectionError(f"{label} is not there yet")
        return label


@step(retry=Retry(attempts=2, delay="3ms"))
def sync_hopeless() -> None:
    with effect():
        raise LookupError("never there")


@flow
async def retrying() -> list[str]:
    first = await flaky("first")
    try:
        await sync_hopeless()
        second = "found"
    except LookupError as error:
        second = str(error)
    return [first, second, await flaky("third")]


_life: list[Life] = []


@step
async def moody() -> str:
    """Fails until the flow around it has been retried, durably."""
    with effect("moody 2" if _life[0].facts("retrying") else "moody 1"):
        if not _life[0].facts("retrying"):
            raise ConnectionError("not yet")
        return "at last"


@flow(retry=Retry(attempts=2, delay="3ms"))
async def retried_flow() -> list[str]:
    kept = await work("kept")
    inner = await leaf("kept")
    return [kept, inner, await moody()]


async def flow_retries(rl: Relight, life: Life) -> Any:
    _life[:] = [life]
    return await life.end(await life.start(rl, retried_flow))


@step(on_crash="fail")
async def once(label: str) -> str:
    with effect(label):
        await asyncio.sleep(0)
        return label


@step(on_crash="fail", retry=Retry(attempts=2, delay="2ms"))
async def once_per_attempt(label: str) -> str:
    with effect(label):
        if current_step().attempt == 1:
            raise ConnectionError("not yet")
        return label


@flow
async def never_twice() -> list[str]:
    found: list[str] = []
    for each in (once, once_per_attempt, once):
        label = f"once {len(found)}"
        try:
            found.append(await each(label))
        except StepInterruptedError:
            found.append("interrupted")
    return [*found, await work("after")]


# ---- requests from outside


@step
async def endless(label: str) -> None:
    with effect(label):
        await asyncio.Event().wait()


@flow
async def cleaning_up(in_step: bool) -> str:
    await work("open")
    try:
        if in_step:
            await endless("endless")
        else:
            await wait_for("never")
        return "nobody cancelled it"
    finally:
        await work("close")
        await asyncio.gather(leaf("tidy"), work("report"))


async def cancelled_in_wait(rl: Relight, life: Life) -> Any:
    handle = await life.start(rl, cleaning_up, False)
    await life.reached(handle.id, Status.WAITING)
    return await _cancelled(life, handle)


async def cancelled_in_step(rl: Relight, life: Life) -> Any:
    handle = await life.start(rl, cleaning_up, True)

    async def in_step() -> bool:
        row = await life.store.get_run(handle.id)
        assert row is not None
        return row.status.terminal or bool(life.facts("start", "endless"))

    await life.until(in_step)
    return await _cancelled(life, handle)


async def cancelled_at_once(rl: Relight, life: Life) -> Any:
    """The request races with the flow's first steps. Where the flow receives it depends on timing. That the flow
    receives it does not."""
    handle = await life.start(rl, cleaning_up, False)
    return await _cancelled(life, handle)


async def _cancelled(life: Life, handle: Handle[Any]) -> Any:
    await _tell(life, "cancel", lambda: handle.cancel("enough"))
    return await life.end(handle)


@flow
async def family() -> list[str]:
    """A run that waits for what it spawned, and a child run in it: cancelling reaches them all."""
    child: SpawnedRun[str] = await spawn(cleaning_up.with_id("spawned"), False)
    try:
        return [await child]
    finally:
        await work("family")


async def cancelled_family(rl: Relight, life: Life) -> Any:
    handle = await life.start(rl, family)

    async def both_wait() -> bool:
        rows = await life.store.get_runs([RUN_ID, "spawned"])
        return len(rows) == 2 and all(row.status is Status.WAITING or row.status.terminal for row in rows)

    await life.until(both_wait)
    ended = await _cancelled(life, handle)
    return [ended, await life.end(await patiently(lambda: rl.get("spawned")))]


async def paused_and_resumed(rl: Relight, life: Life) -> Any:
    """The run is paused while it waits. The signal that comes meanwhile is not lost. After resume() the run goes on."""
    handle = await life.start(rl, two_signals)
    if not life.facts("told", "pause"):
        await life.reached(handle.id, Status.WAITING, Status.PAUSED)
        await _tell(life, "pause", handle.pause)
    if not life.facts("told", "resume"):

        async def paused() -> bool:
            """Whether the run is paused. Or it goes on already: the process was killed between the resume and the note."""
            row = await life.store.get_run(handle.id)
            assert row is not None
            return row.status is Status.PAUSED or row.status.terminal or bool(life.facts("end", "between"))

        await life.until(paused)
        await _signal(life, handle, 1)
        await _tell(life, "resume", handle.resume)
    await _signal(life, handle, 2)
    return await life.end(handle)


# ---- sync flows


@flow
def sync_child(name: str) -> str:
    found: str = sync_work(f"child {name}")
    return found


def _both(name: str) -> list[str]:
    return [sync_work(f"{name} 1"), sync_work(f"{name} 2")]


@flow
def sync_flow() -> list[Any]:
    first = sync_work("first")
    branches = parallel(lambda: _both("left"), lambda: _both("right"), lambda: sync_child("x"))
    sleep(NAP)
    items = foreach(["p", "q"], sync_child)
    return [first, branches, items, sync_child("y"), sync_work("last")]
