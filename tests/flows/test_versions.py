"""Code that changed while runs were unfinished: fingerprints, other steps than recorded, missing flows. Also poison and
resumable."""

import asyncio
import itertools
import linecache
import logging
from typing import Any

import pytest

from relight import (
    NonDeterminismError,
    Relight,
    RunCancelledError,
    RunFailedError,
    RunStateError,
    UnknownFlowError,
    VersionMismatchError,
    continue_as,
    flow,
    step,
    wait_for,
)
from relight.flow.registry import Registry
from relight.model import journal as j
from relight.recovery.explain import Explanation
from tests.flows.world import World, until

CALLS: list[str] = []
VERSIONS = itertools.count()


@pytest.fixture(autouse=True)
def calls() -> list[str]:
    CALLS.clear()
    return CALLS


def define(registry: Registry, source: str) -> Any:
    """Define another version of a program. It replaces the flows of the version before. Returns its names."""
    for name in registry.names():
        registry.remove(name)
    names: dict[str, Any] = {"step": step, "flow": flow, "wait_for": wait_for, "called": CALLS.append}
    names["continue_as"] = continue_as
    place = f"program-{next(VERSIONS)}.py"
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)  # for fingerprints
    exec(compile(source, place, "exec"), names)
    return names["main"]


def program(body: str = "return 'old'", call: str = "work(1)", options: str = "") -> str:
    return f"""
@step{options}
async def work(n: int) -> str:
    called("work")
    {body}

@flow
async def main() -> str:
    found = await {call}
    await wait_for("go")
    return found
"""


async def waiting(world: World, main: Any, run_id: str = "r") -> None:
    run = await world.rl.start(main.with_id(run_id))
    await world.until_status("waiting", run)


async def go(world: World, run_id: str = "r") -> Any:
    run = await world.rl.get(run_id)
    await run.signal("go", id="go")
    return await run.result(timeout="60s")


# ---- fingerprints


async def test_warn_reuses_the_result_and_says_so(world: World, registry: Registry, caplog: pytest.LogCaptureFixture):
    await world.open()
    await waiting(world, define(registry, program()))
    define(registry, program("return 'new'"))
    await world.crash_and_reopen()
    assert await go(world) == "old"
    assert CALLS == ["work"]
    assert "[FINGERPRINT_MISMATCH] run r: step 'work': code or options changed" in caplog.text


async def test_rerun_runs_it_again_and_keeps_the_new_result(world: World, registry: Registry):
    await world.open(recovery={"version_mismatch": "rerun"})
    await waiting(world, define(registry, program()))
    define(registry, program("return 'new'"))
    await world.crash_and_reopen()
    await until(lambda: CALLS == ["work", "work"])
    await until(lambda: twice(world))
    await world.crash_and_reopen()
    assert await go(world) == "new"
    assert CALLS == ["work", "work"]


async def twice(world: World) -> bool:
    return sum(isinstance(event, j.StepCompleted) for event in await world.events("r")) == 2


@pytest.mark.parametrize("freed", ["code restored", "policy changed"])
async def test_fail_holds_the_run_until_a_person_decides(world: World, registry: Registry, freed: str):
    await world.open(recovery={"version_mismatch": "fail"})
    await waiting(world, define(registry, program()))
    define(registry, program("return 'new'"))
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    row = await world.until_status("paused", run)
    assert (row.hold, row.owner) == ("version", None)
    assert "step 'work'" in row.reason
    assert "resume" in row.reason
    with pytest.raises(VersionMismatchError, match=r"run 'r' is held: step 'work': code or options changed"):
        await run.result(timeout="60s")
    await run.resume()  # too early: it is held again
    await until(lambda: inbox_empty(world))
    await world.until_status("paused", run)
    if freed == "code restored":
        define(registry, program())
    else:
        rl = await world.close_and_reopen(recovery={"version_mismatch": "warn"})
        run = await rl.get("r")
    await run.resume()
    assert await go(world) == "old"
    assert CALLS == ["work"]


async def inbox_empty(world: World) -> bool:
    return not await world.rl.services.store.inbox(["r"])


@pytest.mark.parametrize(
    "same",
    [
        program("return ('old')"),
        program("return 'old'  # a comment"),
        program("\n\n    return 'old'"),
    ],
)
async def test_formatting_and_comments_do_not_matter(world: World, registry: Registry, same: str):
    await world.open(recovery={"version_mismatch": "fail"})
    await waiting(world, define(registry, program()))
    define(registry, same)
    await world.crash_and_reopen()
    assert await go(world) == "old"
    assert CALLS == ["work"]


@pytest.mark.parametrize("policy", ["warn", "rerun", "fail"])
async def test_changed_arguments_of_an_unchanged_step_hold_the_run(
    world: World, registry: Registry, policy: str, caplog: pytest.LogCaptureFixture
):
    """No change of the step explains these arguments: the recorded result belongs to another call. Only `rerun`
    executes the step again."""
    await world.open(recovery={"version_mismatch": policy})
    await waiting(world, define(registry, program()))
    define(registry, program(call="work(2)"))
    await world.crash_and_reopen()
    if policy == "rerun":
        assert await go(world) == "old"
    else:
        row = await world.until_status("paused", await world.rl.get("r"))
        assert row.hold == "nondeterminism"
        with pytest.raises(NonDeterminismError, match="argument 'n' changed"):
            await go(world)
        run = await world.rl.get("r")
        await run.cancel("enough")
        with pytest.raises(RunCancelledError, match="enough"):
            await run.result(timeout="60s")
    assert len(CALLS) == (2 if policy == "rerun" else 1)
    assert "[INPUT_MISMATCH] run r: step 'work': argument 'n' changed" in caplog.text


async def test_changed_options_count_as_changed_code(world: World, registry: Registry):
    await world.open(recovery={"version_mismatch": "rerun"})
    await waiting(world, define(registry, program()))
    define(registry, program(options="(timeout='1h')"))
    await world.crash_and_reopen()
    assert await go(world) == "old"
    assert CALLS == ["work", "work"]


TAKING = """
@flow
async def main({signature}) -> str:
    if n == 0:
        return continue_as(1, text)
    await wait_for("go")
    return str(n)
"""
OLD = "n: int, text: str"


@pytest.mark.parametrize(
    ("signature", "matter"),
    [
        (OLD + ", more: str", "and the recorded arguments lack 'more'"),
        ("n: int", "and the recorded arguments hold 'text'"),
        ("n: bytes, text: str", "argument 'n' of flow 'main' does not read back as bytes"),
    ],
)
@pytest.mark.parametrize(
    ("first", "began"), [(1, "this run was started with"), (0, "generation 2 of this run began with")]
)
@pytest.mark.parametrize("blob", [False, True])
async def test_input_that_todays_signature_does_not_take_holds_the_run(
    world: World, registry: Registry, signature: str, matter: str, first: int, began: str, blob: bool
):
    await world.open(payload_blob_threshold=1000)
    text = "x" * 2000 if blob else "x"
    run = await world.rl.start(define(registry, TAKING.format(signature=OLD)).with_id("r"), first, text)
    await world.until_status("waiting", run)
    await until(lambda: _generation(world, 2 - first))
    define(registry, TAKING.format(signature=signature))
    (before,) = await world.rl.plan()
    assert before.verdict == ("resume" if blob else "hold-version")  # a plan does not read blobs
    assert before.stuck is not blob
    assert blob or (began in before.verdict_reason and matter in before.verdict_reason)
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    row = await world.until_status("paused", run)
    assert row.hold == "version"
    assert row.reason.startswith(f"its flow does not take the arguments that {began}: ")
    assert matter in row.reason
    assert "then resume() the run" in row.reason
    found = await rl.explain("r")
    assert found.sentence.startswith("Run r is held because its code has changed: its flow does not take the arguments")
    assert len(_said(found)) == 1
    await run.resume()  # too early
    await until(lambda: _inbox_is_empty(rl))
    await world.until_status("paused", run)
    define(registry, TAKING.format(signature=OLD))
    await run.resume()
    assert await go(world) == "1"


def _said(found: Explanation) -> list[str]:
    lines = [line.text for line in found.events if line.token == "FINGERPRINT_MISMATCH"]
    assert all("does not take the arguments" in line for line in lines)
    return lines


async def _inbox_is_empty(rl: Relight) -> bool:
    return not await rl.services.store.inbox(["r"])


async def _generation(world: World, number: int) -> bool:
    return (await world.state("r")).generation == number


async def test_a_flow_that_waits_meets_a_signature_that_does_not_take_its_input(world: World, registry: Registry):
    """The run was not in memory when its code changed. It is held although no process died, and its log says so, too."""
    rl = await world.open()
    await world.park(await rl.start(define(registry, TAKING.format(signature=OLD)).with_id("r"), 1, "x"))
    define(registry, TAKING.format(signature=OLD + ", more: str"))
    run = await rl.get("r")
    await run.signal("go", id="go")
    assert (await world.until_status("paused", run)).hold == "version"
    assert len(_said(await rl.explain("r"))) == 1


# ---- other operations than recorded

FLOW = """
@step
async def a() -> str:
    called("a")
    return "a"

@step
async def b() -> str:
    called("b")
    return "b"

@step
async def c() -> str:
    called("c")
    return "c"

@flow
async def inner() -> str:
    return await c()

@flow
async def main() -> list[str | None]:
    found = []
    {steps}
    found.append(await wait_for("go"))
    return found
"""
AB = "found += [await a(), await b()]"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("found += [await c(), await b()]", r"asks for 'c' where its journal holds 'a'"),
        ("found += [await b()]", r"asks for 'b' where its journal holds 'a'"),
        ("found += [await a(), await c(), await b()]", r"asks for 'c' where its journal holds 'b'"),
        ("found += [await a()]", r"asks for '\$wait.go' where its journal holds 'b'"),
        ("found += [await a(), await inner()]", r"asks for 'inner' where its journal holds 'b'"),
        ("return [await a()]", r"the flow 'main' returned where its journal holds 'b' next"),
        ("return []", r"the flow 'main' returned where its journal holds 'a' next"),
    ],
    ids=["renamed", "first removed", "added", "last removed", "now a child", "returns early", "returns at once"],
)
async def test_other_steps_than_recorded_hold_the_run(world: World, registry: Registry, steps: str, message: str):
    await world.open()
    await waiting(world, define(registry, FLOW.format(steps=AB)))
    define(registry, FLOW.format(steps=steps))
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    row = await world.until_status("paused", run)
    assert row.hold == "nondeterminism"
    with pytest.raises(NonDeterminismError, match=message):
        await run.result(timeout="60s")
    assert CALLS == ["a", "b"]
    define(registry, FLOW.format(steps=AB))
    await run.resume()
    assert await go(world) == ["a", "b", None]
    assert CALLS == ["a", "b"]


async def test_the_flow_cannot_catch_that_it_is_held(world: World, registry: Registry):
    await world.open()
    await waiting(world, define(registry, FLOW.format(steps=AB)))
    define(registry, FLOW.format(steps="try:\n        await c()\n    except Exception:\n        return ['caught']"))
    rl = await world.crash_and_reopen()
    assert (await world.until_status("paused", await rl.get("r"))).hold == "nondeterminism"
    assert CALLS == ["a", "b"]


async def test_a_step_that_became_a_flow_of_the_same_name_is_noticed(world: World, registry: Registry):
    source = """
{kind}
async def work() -> str:
    return "x"

@flow
async def main() -> str:
    found = await work()
    await wait_for("go")
    return found
"""
    await world.open()
    await waiting(world, define(registry, source.format(kind="@step")))
    define(registry, source.format(kind="@flow"))
    rl = await world.crash_and_reopen()
    row = await world.until_status("paused", await rl.get("r"))
    assert "asks for 'work' as a run where its journal holds a step: restore the old code, then resume() " in row.reason
    assert "(`relight recovery resume RUN`), or fork it from before this point" in row.reason


async def test_steps_added_at_the_end_are_no_change(world: World, registry: Registry):
    await world.open()
    await waiting(world, define(registry, FLOW.format(steps=AB)))
    define(registry, FLOW.format(steps=AB).replace("return found", "return [*found, await c()]"))
    await world.crash_and_reopen()
    assert await go(world) == ["a", "b", None, "c"]


async def test_the_others_go_on_while_one_is_held(world: World, registry: Registry):
    await world.open()
    main = define(registry, FLOW.format(steps=AB))
    await waiting(world, main)
    await waiting(world, main, "other")
    source = FLOW.format(steps=f"{AB} if held else [await a()]")
    define(registry, source.replace("held", "True"))
    await world.crash_and_reopen()
    assert await go(world, "other") == ["a", "b", None]


# ---- a flow that is missing


async def test_a_missing_flow_holds_its_runs_until_it_is_registered(
    world: World, registry: Registry, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    await world.open()
    main = define(registry, program())
    for run_id in ("r", "s"):
        await waiting(world, main, run_id)
    registry.remove("main")
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    row = await world.until_status("paused", run)
    assert row.hold == "definition"
    assert "flow 'main' is not registered" in row.reason
    with pytest.raises(UnknownFlowError, match="'main' is not registered"):
        await run.result(timeout="60s")
    assert "[DEFINITION_MISSING] run r" in caplog.text
    registry.add(main)  # no restart, no resume
    assert await go(world, "r") == "old"
    assert await go(world, "s") == "old"
    assert "[DEFINITION_FOUND]" in caplog.text
    assert CALLS == ["work", "work"]


async def test_a_run_held_because_its_flow_is_missing_can_be_cancelled(world: World, registry: Registry):
    await world.open()
    await waiting(world, define(registry, program()))
    registry.remove("main")
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    await world.until_status("paused", run)
    await run.resume()  # in vain
    await until(lambda: world.is_("paused", run))
    await run.cancel("not any more")
    assert (await world.until_status("cancelled", run)).reason == "not any more"


# ---- poison


async def test_a_run_that_crashes_its_process_again_and_again_is_held(world: World):
    entered: list[int] = []
    harmless: list[bool] = []

    @step
    async def deadly() -> str:
        entered.append(1)
        if not harmless:
            await asyncio.Event().wait()  # the test crashes the engine here
        return "survived"

    @flow
    async def main() -> str:
        return await deadly()

    rl = await world.open(recovery={"max_attempts": 3})
    await rl.start(main.with_id("r"))
    for crashes in range(1, 4):
        await until(lambda crashes=crashes: len(entered) == crashes)  # type: ignore[misc]
        rl = await world.crash_and_reopen()
    run = await rl.get("r")
    row = await world.until_status("paused", run)
    assert row.hold == "poison"
    assert "died 3 times in a row" in row.reason
    with pytest.raises(RunStateError, match=r"run 'r' is held: its process died 3 times"):
        await run.result(timeout="60s")
    rl = await world.close_and_reopen()
    assert await (await rl.get("r")).status() == "paused"
    assert len(entered) == 3
    harmless.append(True)
    run = await rl.get("r")
    await run.resume()
    assert await run.result(timeout="60s") == "survived"


async def test_progress_between_crashes_is_no_poison(world: World):
    entered: list[int] = []

    @step
    async def work(n: int) -> int:
        entered.append(n)
        return n

    @flow
    async def main() -> list[int]:
        found = []
        for n in range(6):
            found.append(await work(n))
            await wait_for(f"go-{n}")
        return found

    rl = await world.open(recovery={"max_attempts": 2})
    await rl.start(main.with_id("r"))
    for n in range(6):
        await until(lambda n=n: waits_for(world, f"go-{n}"))  # type: ignore[misc]
        rl = await world.crash_and_reopen()
        await (await rl.get("r")).signal(f"go-{n}")
    assert await (await rl.get("r")).result(timeout="60s") == list(range(6))
    assert entered == list(range(6))


async def waits_for(world: World, name: str) -> bool:
    return any(begun.name == name for begun in (await world.state("r")).open.values())


async def test_crashes_while_it_only_waits_are_no_poison(world: World):
    """A run that sleeps for weeks outlives many restarts of its process. The run does not cause these deaths."""

    @flow
    async def main() -> str:
        return str(await wait_for("go"))

    rl = await world.open(recovery={"max_attempts": 2})
    run = await rl.start(main.with_id("r"))
    for _ in range(5):
        await world.park(run)
        rl = await world.crash_and_reopen()
        run = await rl.get("r")
    assert await go(world) == "None"


async def test_graceful_closes_count_for_nothing(world: World):
    gate = asyncio.Event()
    entered: list[int] = []

    @step
    async def slow() -> str:
        entered.append(1)
        await gate.wait()
        return "done"

    @flow
    async def main() -> str:
        return await slow()

    rl = await world.open(recovery={"max_attempts": 1}, shutdown_grace=0)
    await rl.start(main.with_id("r"))
    for times in range(1, 5):
        await until(lambda times=times: len(entered) == times)  # type: ignore[misc]
        rl = await world.close_and_reopen()
    gate.set()
    assert await (await rl.get("r")).result(timeout="60s") == "done"


# ---- resumable=False


async def test_a_flow_that_is_not_resumable_fails_after_a_crash(world: World, caplog: pytest.LogCaptureFixture):
    gate = asyncio.Event()
    calls: list[int] = []

    @step
    async def slow() -> None:
        calls.append(1)
        await gate.wait()

    @flow(resumable=False)
    async def once() -> None:
        await slow()

    rl = await world.open()
    await rl.start(once.with_id("r"))
    await until(lambda: calls)
    rl = await world.crash_and_reopen()
    run = await rl.get("r")
    with pytest.raises(
        RunFailedError, match=r"flow 'once' is marked resumable=False and its process died while it ran"
    ):
        await run.result(timeout="60s")
    row = await run.describe()
    assert (row.status, row.owner) == ("failed", None)
    assert "resumable=False" in row.reason
    assert "[RUN_NOT_RESUMABLE] run r" in caplog.text
    assert calls == [1]


async def test_a_flow_that_is_not_resumable_outlives_a_graceful_close(world: World):
    @flow(resumable=False)
    async def once() -> str:
        return str(await wait_for("go"))

    rl = await world.open()
    run = await rl.start(once.with_id("r"))
    await world.until_status("waiting", run)
    rl = await world.close_and_reopen()
    await (await rl.get("r")).signal("go", "x")
    assert await (await rl.get("r")).result(timeout="60s") == "x"
