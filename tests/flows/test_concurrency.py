"""Branches of a flow: in whatever order they run, each gets its own results, live and on replay."""

import asyncio
import contextvars
import random as random_module
import threading
from collections import Counter
from typing import Any

import pytest

from relight import Retry, RunFailedError, flow, parallel, random, sleep, spawn, step, uuid, wait_for
from relight.errors import DefinitionError, StepError
from relight.model import journal as j
from relight.model.run import Message, MessageKind
from tests.flows.world import World, until


class Delays:
    """A seeded source of small delays, so that branches finish in a random order. It also counts effects."""

    def __init__(self, seed: int) -> None:
        self.source = random_module.Random(seed)
        self.effects: Counter[str] = Counter()

    async def spend(self, label: str) -> None:
        for _ in range(self.source.randrange(12)):
            await asyncio.sleep(0)
        if self.source.random() < 0.2:
            await asyncio.sleep(0.001)
        self.effects[label] += 1


async def crash_after(world: World, run_id: str, count: int) -> set[str]:
    """Crash when so many operations are recorded. Returns which these were."""
    await until(lambda: _reached(world, run_id, count))
    await world.crash()
    rl = await world.open(recovery_enabled=False)
    kept = set(await world.recorded(run_id))
    await world.close()
    assert rl is world.rl
    return kept


async def _reached(world: World, run_id: str, count: int) -> bool:
    return len(await world.recorded(run_id)) >= count


# ---- results never mix


@pytest.mark.parametrize("seed", range(8))
async def test_gathered_helpers_never_get_each_others_results(world: World, seed: int):
    delays = Delays(seed)

    @step
    async def work(branch: int, turn: int) -> str:
        await delays.spend(f"{branch}.{turn}")
        return f"{branch}.{turn}"

    async def helper(branch: int) -> list[str]:
        return [await work(branch, turn) for turn in range(3)]

    @flow
    async def fan() -> list[list[str]]:
        return await asyncio.gather(*(helper(branch) for branch in range(5)))

    rl = await world.open()
    run = await rl.start(fan.with_id("r"))
    kept = await crash_after(world, "r", 1 + seed * 2)
    rl = await world.open()
    assert await (await rl.get(run.id)).result() == [[f"{b}.{t}" for t in range(3)] for b in range(5)]
    keys = {f"{b}.{t}": f"~helper{f':{b}' if b else ''}/work{f':{t}' if t else ''}" for b in range(5) for t in range(3)}
    for label, key in keys.items():
        assert delays.effects[label] == 1 if key in kept else delays.effects[label] in (1, 2)


@pytest.mark.parametrize("seed", range(4))
async def test_nested_groups_with_sync_and_async_steps(world: World, seed: int):
    delays = Delays(seed)

    @step
    async def leaf(path: str) -> str:
        await delays.spend(path)
        return path

    @step
    def sync_leaf(path: str) -> str:
        delays.effects[path] += 1
        return path

    async def inner(path: str) -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(leaf(f"{path}.{n}")) for n in range(2)]
            tasks.append(group.create_task(sync_leaf(f"{path}.s")))
        return [task.result() for task in tasks]

    async def outer(path: str) -> list[Any]:
        first = await leaf(f"{path}.first")
        rest: Any = await asyncio.gather(inner(f"{path}.a"), inner(f"{path}.b"))
        return [first, *rest]

    @flow
    async def nested() -> list[Any]:
        return await asyncio.gather(*(outer(str(n)) for n in range(3)))

    def expected(path: str) -> list[Any]:
        return [f"{path}.first"] + [[f"{path}.{ab}.0", f"{path}.{ab}.1", f"{path}.{ab}.s"] for ab in "ab"]  # type: ignore[list-item]

    rl = await world.open()
    run = await rl.start(nested.with_id("r"))
    await crash_after(world, "r", 3 + 4 * seed)
    rl = await world.open()
    assert await (await rl.get(run.id)).result() == [expected(str(n)) for n in range(3)]
    assert max(delays.effects.values()) <= 2


async def test_the_same_step_called_many_times_at_once(world: World):
    @step
    async def square(n: int) -> int:
        await asyncio.sleep(0)
        return n * n

    @flow
    async def squares() -> list[int]:
        return await asyncio.gather(*(square(n) for n in range(100)))

    rl = await world.open()
    run = await rl.start(squares)
    assert await run.result() == [n * n for n in range(100)]
    keys = [key for key in await world.recorded(run.id) if key]
    assert len(set(keys)) == 100


async def test_a_branch_is_named_when_it_is_made_not_when_it_runs(world: World):
    """The first task waits until the second is done. It keeps the first name, because it was made first."""
    order: list[str] = []

    @step
    async def note(name: str) -> str:
        order.append(name)
        return name

    async def branch(name: str, before: asyncio.Event | None, after: asyncio.Event) -> str:
        if before is not None:
            await before.wait()
        found = await note(name)
        after.set()
        return found

    @flow
    async def two() -> list[str]:
        first, second = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(branch("one", second, first)), asyncio.create_task(branch("two", None, second))]
        found = [await task for task in tasks]
        await wait_for("go")
        return found

    rl = await world.open()
    run = await rl.start(two)
    await world.until_status("waiting", run)
    assert order == ["two", "one"]
    assert await world.recorded(run.id) == ["~branch:1/note", "~branch/note"]
    rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    await run.signal("go")
    assert await run.result() == ["one", "two"]
    assert order == ["two", "one"]


# ---- the order in which outcomes reach a flow


async def test_wait_first_completed_replays_the_same_winner(world: World):
    winners: list[str] = []
    calls: list[str] = []
    gates = {name: asyncio.Event() for name in "abc"}

    @step
    async def race(name: str) -> str:
        calls.append(name)
        await gates[name].wait()
        return name

    @flow
    async def racing() -> list[str]:
        pending = {asyncio.create_task(race(name)) for name in "abc"}
        order = []
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1
            order.append(done.pop().result())
            winners.append(order[-1])
        await wait_for("go")
        return order

    rl = await world.open()
    run = await rl.start(racing.with_id("r"))
    for count, name in enumerate("cab", start=1):
        gates[name].set()
        await until(lambda count=count: len(winners) == count)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()  # all gates are open now: only the journal knows which branch won
    run = await rl.get("r")
    await run.signal("go")
    assert await run.result() == ["c", "a", "b"]
    assert winners == ["c", "a", "b"] * 2
    assert sorted(calls) == ["a", "b", "c"]


async def test_the_first_of_two_branches_decides_also_after_a_crash_in_between(world: World):
    gates = {"fast": asyncio.Event(), "slow": asyncio.Event()}
    picked: list[str] = []
    effects: list[str] = []

    @step
    async def ask(name: str) -> str:
        await gates[name].wait()
        return name

    @step
    async def use(name: str) -> str:
        effects.append(name)
        return name

    @flow
    async def first_answer() -> list[str]:
        tasks = [asyncio.create_task(ask("slow")), asyncio.create_task(ask("fast"))]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        winner = done.pop().result()
        picked.append(winner)
        used = await use(winner)
        both = await asyncio.gather(*tasks)
        return [used, *both]

    rl = await world.open()
    await rl.start(first_answer.with_id("r"))
    gates["fast"].set()
    await until(lambda: effects)
    await until(lambda: _reached(world, "r", 2))
    await world.crash()
    gates["slow"].set()
    rl = await world.open()
    assert await (await rl.get("r")).result() == ["fast", "slow", "fast"]
    assert picked == ["fast", "fast"]
    assert effects == ["fast"]


async def test_a_dead_heat_has_one_winner_live_and_replayed(world: World):
    """One commit records both. Still the flow sees one of them first, and on replay it sees the same one first."""
    gate = asyncio.Event()
    seen: list[list[str]] = []

    @step
    async def race(name: str) -> str:
        await gate.wait()
        return name

    @flow
    async def racing() -> list[str]:
        tasks = [asyncio.create_task(race(name), name=name) for name in "abc"]
        order: list[str] = []
        seen.append(order)
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            order.append("+".join(sorted(task.result() for task in done)))
        await wait_for("go")
        return order

    rl = await world.open()
    run = await rl.start(racing.with_id("r"))
    await until(lambda: len(gate._waiters) == 3)
    gate.set()
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    await (await rl.get("r")).signal("go")
    assert await (await rl.get("r")).result() == ["a", "b", "c"]
    assert seen == [["a", "b", "c"]] * 2


async def test_large_results_do_not_lose_their_place(world: World):
    """On replay, a large result takes a moment longer, because it has to be read. Still no other outcome may come before it."""
    gates = {name: asyncio.Event() for name in ("large", "small")}
    seen: list[str] = []

    @step
    async def race(name: str) -> str:
        await gates[name].wait()
        return name * (1000 if name == "large" else 1)

    @flow
    async def racing() -> None:
        tasks = [asyncio.create_task(race(name)) for name in ("small", "large")]
        for future in asyncio.as_completed(tasks):
            seen.append((await future)[:5])
        await wait_for("go")

    world.slow["get_blob"] = 200
    rl = await world.open(payload_blob_threshold=1000)
    run = await rl.start(racing)
    for count, name in enumerate(("large", "small"), start=1):
        gates[name].set()
        await until(lambda count=count: len(seen) == count)
    await world.until_status("waiting", run)
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 4)
    assert seen == ["large", "small"] * 2


async def test_as_completed_replays_the_same_order(world: World):
    orders: list[list[int]] = []
    gates = [asyncio.Event() for _ in range(4)]

    @step
    async def number(n: int) -> int:
        await gates[n].wait()
        return n

    @flow
    async def collect() -> list[int]:
        order: list[int] = []
        orders.append(order)
        for future in asyncio.as_completed([number(n) for n in range(4)]):
            order.append(await future)
        await wait_for("go")
        return order

    rl = await world.open()
    run = await rl.start(collect.with_id("r"))
    for count, n in enumerate((2, 0, 3, 1), start=1):
        await until(lambda: orders)
        gates[n].set()
        await until(lambda count=count: len(orders[0]) == count)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    await (await rl.get("r")).signal("go")
    assert await (await rl.get("r")).result() == [2, 0, 3, 1]
    assert orders == [[2, 0, 3, 1]] * 2


async def test_replay_goes_on_when_a_recorded_branch_is_no_longer_asked_for(world: World):
    """The loser is cancelled after it has recorded a step. On replay it is cancelled before it can ask for its next step."""
    gate = asyncio.Event()
    calls: list[str] = []

    @step
    async def tick(n: int) -> int:
        calls.append(f"tick {n}")
        return n

    @step
    async def finish() -> str:
        calls.append("finish")
        await gate.wait()
        return "won"

    @flow
    async def with_a_clock() -> str:
        async def clock() -> None:
            for n in range(3):
                await tick(n)
            await asyncio.Event().wait()

        ticking = asyncio.create_task(clock())
        won = await finish()
        ticking.cancel()
        await asyncio.wait([ticking])
        await wait_for("go")
        return won

    rl = await world.open()
    run = await rl.start(with_a_clock.with_id("r"))
    await until(lambda: len(calls) == 4)
    await until(lambda: _reached(world, "r", 3))
    gate.set()
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    await (await rl.get("r")).signal("go")
    assert await (await rl.get("r")).result() == "won"
    assert sorted(calls) == ["finish", "tick 0", "tick 1", "tick 2"]


# ---- operations that a flow cancels itself


async def test_a_step_the_flow_gave_up_on_is_given_up_on_again_by_replay(world: World):
    """asyncio.timeout() around a step. After a crash the flow must go the same way, or it would find another step in
    the journal."""
    calls: list[str] = []

    @step
    async def slow() -> str:
        calls.append("slow")
        await asyncio.Event().wait()
        return "never"

    @step
    async def fallback() -> str:
        calls.append("fallback")
        return "instead"

    @flow
    async def patient() -> str:
        try:
            async with asyncio.timeout(0.02):
                answer = await slow()
        except TimeoutError:
            answer = await fallback()
        await wait_for("go")
        return answer

    rl = await world.open()
    run = await rl.start(patient.with_id("r"))
    await until(lambda: calls)
    world.clock.advance(0.02)
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    await (await rl.get("r")).signal("go")
    assert await (await rl.get("r")).result("60s") == "instead"
    assert calls == ["slow", "fallback"]  # to be given up on is an end like any other: the step is not begun again


@pytest.mark.parametrize("what", ["step", "retried", "sleep", "signal", "child", "spawn", "join"])
@pytest.mark.parametrize("commit", [1, 2])
async def test_giving_up_while_a_commit_is_under_way(world: World, what: str, commit: int):
    """The flow's own timeout is due while the operation waits for its first or second commit. Replay goes the same way."""

    @step
    async def done() -> str:
        return "done"

    @step(retry=Retry(2), on_crash="fail")
    async def retried() -> str:
        return "done"

    @flow
    async def quick() -> str:
        return await done()

    @step
    async def fallback() -> str:
        return "instead"

    operations: dict[str, Any] = {
        "step": lambda: done(),
        "retried": lambda: retried(),
        "sleep": lambda: sleep(0),
        "signal": lambda: wait_for("there", str),
        "child": lambda: quick(),
        "spawn": lambda: spawn(quick.with_id("s")),
        "join": lambda: spawned[0],
    }
    spawned: list[Any] = []

    @flow
    async def impatient() -> str:
        if what == "join":
            spawned[:] = [await spawn(quick.with_id("s"))]
        await wait_for("begin")
        try:
            async with asyncio.timeout(0.05):
                answer = str(await operations[what]())
        except TimeoutError:
            answer = await fallback()
        await wait_for("go")
        return answer

    rl = await world.open()
    run = await rl.start(impatient.with_id("r"))
    await run.signal("there", "signal")
    await world.until_status("waiting", run)
    store: Any = rl.services.store
    commits: list[int] = []
    plain = store.commit

    async def slow_commit(batch: Any) -> Any:
        commits.append(1)
        if len(commits) == 1 + commit:  # the first commit is that of the signal that lets it begin
            world.clock.advance(0.05)
        return await plain(batch)

    store.commit = slow_commit
    await run.signal("begin")
    await until(lambda: _waits_for(world, "r", "go"))
    first = [key for key in await world.recorded("r") if "$" not in key]
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    await run.signal("go")
    answer = await run.result("60s")
    assert answer == ("instead" if "fallback" in first else answer)
    assert [key for key in await world.recorded("r") if key and "$" not in key] == first


async def test_a_loser_that_was_cancelled_is_not_begun_again_by_replay(world: World):
    calls: list[str] = []

    @step
    async def answer(name: str) -> str:
        calls.append(name)
        if name == "slow":
            await asyncio.Event().wait()
        return name

    @flow
    async def first_of() -> str:
        tasks = [asyncio.create_task(answer("slow")), asyncio.create_task(answer("fast"))]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await wait_for("go")
        return done.pop().result()

    rl = await world.open()
    run = await rl.start(first_of.with_id("r"))
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    await (await rl.get("r")).signal("go")
    assert await (await rl.get("r")).result("60s") == "fast"
    assert sorted(calls) == ["fast", "slow"]


async def test_a_child_run_the_flow_gave_up_on(world: World):
    calls: list[str] = []

    @step
    async def note(what: str) -> str:
        calls.append(what)
        return what

    @flow
    async def child() -> str:
        try:
            await note("begun")
            await asyncio.Event().wait()
        finally:
            await note("cleaned up")
        return "never"

    @flow
    async def parent() -> list[str]:
        found = []
        for _ in range(2):
            try:
                async with asyncio.timeout(0.02):
                    found.append(await child())
            except TimeoutError:
                found.append(await note("too late"))
        await wait_for("go")
        return found

    rl = await world.open()
    run = await rl.start(parent.with_id("r"))
    once = ["begun", "cleaned up", "too late"]
    for turn in range(2):
        await until(lambda turn=turn: len(calls) == 3 * turn + 1)
        await world.until_status("waiting", run)
        world.clock.advance(0.02)
    await until(lambda: _waits_for(world, "r", "go"))
    assert calls == once * 2
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    await run.signal("go")
    assert await run.result("60s") == ["too late", "too late"]
    assert calls == once * 2
    children = (await rl.list(parent="r")).runs
    assert {child.id: child.status for child in children} == {"r/child": "cancelled", "r/child:1": "cancelled"}
    assert "gave up on it" in children[0].reason


async def test_given_up_in_an_attempt_of_a_flow_that_is_retried(world: World):
    calls: list[str] = []

    @step
    async def slow() -> str:
        calls.append("slow")
        if len(calls) == 1:
            await asyncio.Event().wait()
        return "at last"

    @flow(retry=Retry(2))
    async def impatient() -> str:
        async with asyncio.timeout(0.02 if not calls else 10):
            return await slow()

    rl = await world.open()
    run = await rl.start(impatient)
    await until(lambda: calls)
    world.clock.advance(0.02)
    assert await run.result("60s") == "at last"
    assert calls == ["slow", "slow"]


async def test_a_step_whose_body_raises_cancelled_error_by_itself(world: World):
    @step
    async def odd() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task

    @flow
    async def catching() -> str:
        """The flow was not cancelled. In every life it gets an error of the step."""
        try:
            await odd()
        except StepError as error:
            caught = f"caught {error.type_name}"
        await wait_for("go")
        return caught

    rl = await world.open()
    run = await rl.start(catching.with_id("r"))
    await world.until_status("waiting", run)
    rl = await world.crash_and_reopen()
    await (await rl.get("r")).signal("go")
    assert await (await rl.get("r")).result("60s") == "caught CancelledError"


async def test_a_signal_that_comes_as_the_flow_gives_up_is_kept_for_the_next_wait(world: World):
    gate = asyncio.Event()
    message = Message(run_id="r", kind=MessageKind.SIGNAL, name="answer", payload=b'"yes"')

    @step
    async def enough() -> None:
        await gate.wait()
        # One commit records the end of the wait and the signal, in this order.
        asyncio.get_running_loop().call_soon(live.deliver, message)

    @flow
    async def impatient() -> list[str]:
        waiting = asyncio.create_task(wait_for("answer"))
        await enough()
        waiting.cancel()
        await asyncio.wait([waiting])
        return [str(waiting.cancelled()), await wait_for("answer", str)]

    async def deaf() -> None:
        """Otherwise the poll could deliver the signal too early."""

    rl = await world.open()
    rl.orchestrator.delivery.deliver_new = deaf  # type: ignore[method-assign]
    run = await rl.start(impatient.with_id("r"))
    live = rl.orchestrator.live["r"]
    await until(lambda: _count(world, "r", j.WaitStarted, 1))
    (message.id,) = await rl.services.store.post([message])  # type: ignore[assignment]
    gate.set()
    assert await run.result("60s") == ["True", "yes"]
    assert await _count(world, "r", j.SignalReceived, 2)


async def test_a_wait_the_flow_gave_up_on_does_not_take_a_later_signal(world: World):
    @flow
    async def impatient() -> str:
        try:
            async with asyncio.timeout(0.02):
                return str(await wait_for("answer"))
        except TimeoutError:
            pass
        return "gave up, then " + await wait_for("late", str)

    rl = await world.open()
    run = await rl.start(impatient.with_id("r"))
    await until(lambda: _waits_for(world, "r", "answer"))
    world.clock.advance(0.02)
    await until(lambda: _waits_for(world, "r", "late"))
    await run.signal("answer", "too late")
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    await run.signal("late", "this")
    assert await run.result("60s") == "gave up, then this"


async def _waits_for(world: World, run_id: str, name: str) -> bool:
    return any(isinstance(event, j.WaitStarted) and event.name == name for event in await world.events(run_id))


# ---- errors in branches


async def test_a_failed_branch_fails_gather_and_the_others_are_recorded(world: World):
    gate = asyncio.Event()

    @step
    async def fail() -> None:
        raise ValueError("branch")

    @step
    async def other() -> str:
        await gate.wait()
        return "other"

    @flow
    async def both() -> list[Any]:
        task = asyncio.create_task(other())
        try:
            await asyncio.gather(fail(), task)
        except ValueError as error:
            gate.set()
            return [str(error), await task]
        return []

    rl = await world.open()
    assert await rl.run(both) == ["branch", "other"]


async def test_gather_with_return_exceptions_replays_errors_in_place(world: World):
    seen: list[list[str]] = []

    @step
    async def maybe(n: int) -> int:
        if n % 2:
            raise ValueError(f"odd {n}")
        return n

    @flow
    async def mixed() -> None:
        found = await asyncio.gather(*(maybe(n) for n in range(4)), return_exceptions=True)
        seen.append([repr(one) for one in found])
        await wait_for("go")

    rl = await world.open()
    await world.until_status("waiting", await rl.start(mixed))
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 2)
    assert seen[0] == seen[1] == ["0", "ValueError('odd 1')", "2", "ValueError('odd 3')"]


async def test_a_task_group_raises_the_same_group_after_replay(world: World):
    seen: list[str] = []

    @step
    async def fail(name: str) -> None:
        raise KeyError(name)

    @flow
    async def grouped() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail("one"))
        except* KeyError as errors:
            seen.append(repr(errors.exceptions))
        await wait_for("go")

    rl = await world.open()
    await world.until_status("waiting", await rl.start(grouped))
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 2)
    assert seen[0] == seen[1] == "(KeyError('one'),)"


async def test_a_failed_branch_that_is_not_awaited_fails_nothing_else(world: World):
    @step
    async def fail() -> None:
        raise ValueError("lost")

    @flow
    async def careless() -> str:
        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        return repr(task.exception())

    rl = await world.open()
    assert await rl.run(careless) == "ValueError('lost')"


# ---- waits and values in branches


async def test_each_branch_has_its_own_timers_and_signals(world: World):
    @flow
    async def branches() -> list[Any]:
        async def signalled(name: str) -> str:
            return f"{name}={await wait_for(name)}"

        async def timed(seconds: float) -> float:
            await sleep(seconds)
            return seconds

        ended: Any = await asyncio.gather(signalled("a"), timed(20), signalled("b"), timed(10))
        return ended

    rl = await world.open()
    run = await rl.start(branches)
    await run.signal("b", 2)
    await until(lambda: _count(world, run.id, j.WaitStarted, 3))
    world.clock.advance("15s")
    rl = await world.crash_and_reopen()
    run = await rl.get(run.id)
    world.clock.advance("10s")
    await run.signal("a", 1)
    assert await run.result() == ["a=1", 20, "b=2", 10]


async def _count(world: World, run_id: str, kind: type[j.Event], count: int) -> bool:
    return sum(isinstance(event, kind) for event in await world.events(run_id)) >= count


async def test_values_drawn_in_branches_replay_in_their_branch(world: World):
    seen: list[list[Any]] = []

    async def draw(n: int) -> list[Any]:
        await asyncio.sleep(0.001 * (3 - n))
        return [random(), uuid()]

    @flow
    async def drawing() -> None:
        seen.append(await asyncio.gather(*(draw(n) for n in range(3))))
        await wait_for("go")

    world.entropy.number = 0.25
    rl = await world.open()
    run = await rl.start(drawing)
    await world.until_status("waiting", run)
    world.clock.advance(0.003)
    await until(lambda: _waits_for(world, run.id, "go"))
    world.entropy.number = 0.75
    await world.crash_and_reopen()
    await until(lambda: len(seen) == 2)
    assert seen[0] == seen[1]
    assert len({pair[1] for pair in seen[0]}) == 3


# ---- contexts

USER: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")


async def test_context_variables_reach_steps_and_branches(world: World):
    @step
    async def who() -> str:
        return USER.get()

    @step
    def who_sync() -> str:
        return USER.get()

    async def branch(name: str) -> list[str]:
        USER.set(name)
        await asyncio.sleep(0)
        return [await who(), await who_sync()]

    @flow
    async def asking() -> list[Any]:
        USER.set("flow")
        found = await asyncio.gather(branch("a"), branch("b"))
        return [await who(), *found]

    rl = await world.open()
    assert await rl.run(asking) == ["flow", ["a", "a"], ["b", "b"]]
    assert USER.get() == "nobody"


async def test_two_tasks_given_the_same_context_are_two_branches(world: World):
    @step
    async def echo(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async def twice(n: int) -> list[int]:
        return [await echo(n), await echo(n)]

    @flow
    async def shared() -> list[list[int]]:
        context = contextvars.copy_context()
        tasks = [asyncio.create_task(twice(n), context=context) for n in range(3)]
        return [await task for task in tasks]

    rl = await world.open()
    run = await rl.start(shared)
    assert await run.result() == [[0, 0], [1, 1], [2, 2]]
    assert len([key for key in await world.recorded(run.id) if key]) == 6


# ---- parallel, in sync flows


async def test_parallel_gives_results_in_order_and_runs_at_once(world: World):
    barrier = threading.Barrier(3, timeout=60)

    @step
    def meet(n: int) -> int:
        barrier.wait()
        return n

    @flow
    def meeting() -> list[int]:
        return parallel(lambda: meet(1), lambda: meet(2), lambda: meet(3))

    rl = await world.open()
    assert await rl.run(meeting) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(4))
async def test_parallel_branches_never_mix_after_a_crash(world: World, seed: int):
    delays = Delays(seed)

    @step
    async def work(branch: int, turn: int) -> str:
        await delays.spend(f"{branch}.{turn}")
        return f"{branch}.{turn}"

    def branch(number: int) -> list[str]:
        return [work(number, turn) for turn in range(3)]  # type: ignore[misc]

    @flow
    def fan() -> list[Any]:
        return parallel(*(lambda n=n: branch(n) for n in range(4)))  # type: ignore[misc]

    rl = await world.open()
    await rl.start(fan.with_id("r"))
    await crash_after(world, "r", 1 + 2 * seed)
    rl = await world.open()
    assert await (await rl.get("r")).result() == [[f"{b}.{t}" for t in range(3)] for b in range(4)]
    assert max(delays.effects.values()) <= 2


async def test_nested_parallel_and_child_flows(world: World):
    @step
    def add(a: int, b: int) -> int:
        return a + b

    @flow
    def pair(n: int) -> list[int]:
        return parallel(lambda: add(n, 1), lambda: add(n, 2))

    @flow
    def outer() -> list[Any]:
        return parallel(lambda: pair(10), lambda: parallel(lambda: add(1, 1), lambda: pair(20)))

    rl = await world.open()
    run = await rl.start(outer)
    assert await run.result() == [[11, 12], [2, [21, 22]]]
    page = await rl.list(roots_only=False, flow="pair")
    assert len(page.runs) == 2


async def test_parallel_raises_the_first_error_after_all_have_ended(world: World):
    done: list[str] = []
    gate = threading.Event()

    @step
    def fail() -> None:
        gate.set()
        raise ValueError("branch")

    @step
    def other() -> str:
        gate.wait(60)
        done.append("other")
        return "other"

    @flow
    def failing() -> str:
        try:
            parallel(lambda: fail(), lambda: other())
        except ValueError as error:
            return f"{error}, {done}"
        return "no error"

    rl = await world.open()
    run = await rl.start(failing)
    assert await run.result() == "branch, ['other']"
    assert {key for key in await world.recorded(run.id) if key} == {"~lambda/fail", "~lambda:1/other"}


async def test_parallel_without_branches(world: World):
    @flow
    def nothing() -> list[Any]:
        return parallel()

    rl = await world.open()
    assert await rl.run(nothing) == []


async def test_parallel_branches_wait_for_signals_without_holding_threads(world: World):
    @flow
    def both() -> list[Any]:
        return parallel(lambda: wait_for("a"), lambda: wait_for("b"))

    rl = await world.open()
    run = await rl.start(both)
    await until(lambda: _count(world, run.id, j.WaitStarted, 2))
    await until(lambda: run.id not in rl.orchestrator.live or world.clock.advance("1s"))
    await run.signal("b", 2)
    await run.signal("a", 1)
    assert await run.result() == [1, 2]


async def test_parallel_in_an_async_flow_is_refused(world: World):
    @flow
    async def wrong() -> None:
        parallel(lambda: 1)

    rl = await world.open()
    with pytest.raises(RunFailedError, match=r"in an async flow use asyncio.gather") as raised:
        await rl.run(wrong)
    assert isinstance(raised.value.__cause__, DefinitionError)


# ---- many runs at once


async def test_many_runs_at_once_keep_their_results_apart(world: World):
    @step
    async def tag(run: int, n: int) -> str:
        await asyncio.sleep(0)
        return f"{run}-{n}"

    @flow
    async def tagged(run: int) -> list[str]:
        return [*await asyncio.gather(tag(run, 0), tag(run, 1)), await tag(run, 2)]

    rl = await world.open()
    found = await asyncio.gather(*(rl.run(tagged, n) for n in range(60)))
    assert found == [[f"{n}-0", f"{n}-1", f"{n}-2"] for n in range(60)]
