"""relight.logger: a flow's log lines appear once, however often its code is called again."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from relight import RunLogger, current_step, flow, logger, now, parallel, sleep, step, wait_for
from tests.flows.world import World, until


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def lines() -> Any:
    handler, inner = Lines(), logger.logger
    before = inner.level
    inner.addHandler(handler)
    inner.setLevel(logging.INFO)
    yield handler
    inner.removeHandler(handler)
    inner.setLevel(before)


@step
async def charge(n: int) -> int:
    logger.info("in step %s", n)
    return n


@step
def charge_in_thread(n: int) -> int:
    logger.info("in step %s", n)
    return n


def define(kind: str) -> None:
    if kind == "async":

        @flow(name="inner")
        async def inner(n: int) -> None:
            logger.info("inner begins")
            await charge(n)
            logger.info("inner waits")
            await wait_for("inner")
            logger.info("inner ends")

        @flow(name="outer")
        async def outer() -> None:
            logger.info("begins at %s", now().year)
            await charge(1)
            logger.info("charged")
            await sleep("1h")
            logger.info("slept")
            await asyncio.gather(inner(2), branch())
            logger.info("ends")

        async def branch() -> None:
            logger.info("branch begins")
            await wait_for("branch")
            logger.info("branch ends")

    else:

        @flow(name="inner")
        def inner_sync(n: int) -> None:
            logger.info("inner begins")
            charge_in_thread(n)
            logger.info("inner waits")
            wait_for("inner")
            logger.info("inner ends")

        @flow(name="outer")
        def outer_sync() -> None:
            logger.info("begins at %s", now().year)
            charge_in_thread(1)
            logger.info("charged")
            sleep("1h")
            logger.info("slept")
            parallel(lambda: inner_sync(2), branch_sync)
            logger.info("ends")

        def branch_sync() -> None:
            logger.info("branch begins")
            wait_for("branch")
            logger.info("branch ends")


ONCE = [
    "begins at 2023",
    "in step 1",
    "charged",
    "slept",
    "inner begins",
    "branch begins",
    "in step 2",
    "inner waits",
    "branch ends",
    "inner ends",
    "ends",
]


@pytest.mark.parametrize("leave", ["park", "crash", "close"])
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_line_appears_once_wherever_the_run_waits(world: World, lines: Lines, kind: str, leave: str):
    define(kind)
    rl = await world.open()

    async def wait() -> None:
        nonlocal rl
        run = await rl.get("r")
        await world.until_status("waiting", run)
        if leave == "park":
            await world.park(run)
        elif leave == "crash":
            rl = await world.crash_and_reopen()
        else:
            rl = await world.close_and_reopen()

    await rl.start("outer", id="r")
    await wait()
    world.clock.advance("1h")
    await until(lambda: "inner waits" in lines.texts)
    await wait()
    await (await rl.get("r")).signal("branch")
    await until(lambda: "branch ends" in lines.texts)
    await wait()
    await (await rl.get("r")).signal("inner")
    await (await rl.get("r")).result()
    assert sorted(lines.texts) == sorted(ONCE)  # branches of a sync flow are threads, in any order


async def test_what_followed_from_a_step_that_ended_while_the_process_stopped_is_not_lost(world: World, lines: Lines):
    begun, go_on = asyncio.Event(), asyncio.Event()

    @step
    async def slow() -> None:
        begun.set()
        await go_on.wait()

    @flow
    async def stopped() -> None:
        await charge(1)
        logger.info("charged")
        await slow()
        logger.info("slow is over")

    rl = await world.open()
    await rl.start(stopped.with_id("r"))
    await begun.wait()
    closing = asyncio.ensure_future(world.close())
    await until(lambda: rl.orchestrator.live["r"].stopping is not None)
    go_on.set()
    await closing
    rl = await world.open()
    await (await rl.get("r")).result()
    assert lines.texts == ["in step 1", "charged", "slow is over"]


async def test_after_a_crash_only_what_the_journal_does_not_know_of_is_repeated(world: World, lines: Lines):
    begun = asyncio.Event()

    @step
    async def stuck() -> None:
        begun.set()
        if len(lines.records) == 4:  # the first life
            await asyncio.Event().wait()

    @flow
    async def crashed() -> None:
        logger.info("begins")
        await charge(1)
        logger.info("charged")
        logger.info("to be stuck")
        await stuck()
        logger.info("ends")

    rl = await world.open()
    await rl.start(crashed.with_id("r"))
    await begun.wait()
    rl = await world.crash_and_reopen()
    await (await rl.get("r")).result()
    assert lines.texts == ["begins", "in step 1", "charged", "to be stuck", "charged", "to be stuck", "ends"]


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_code_that_runs_because_its_run_leaves_memory_logs_nothing(world: World, lines: Lines, kind: str):
    """The code in `finally` runs then, and once more when the flow gets there."""
    if kind == "async":

        @flow(name="finally")
        async def in_order() -> None:
            try:
                await sleep("1h")
                logger.info("slept")
            finally:
                logger.info("cleaned up")

    else:

        @flow(name="finally")
        def in_order_sync() -> None:
            try:
                sleep("1h")
                logger.info("slept")
            finally:
                logger.info("cleaned up")

    rl = await world.open()
    run = await rl.start("finally", id="r")
    await rl.idle()
    world.clock.advance(rl.config.park_after_seconds)
    await rl.idle()
    assert not rl.orchestrator.live
    assert lines.texts == []
    world.clock.advance("1h")
    await run.result()
    assert lines.texts == ["slept", "cleaned up"]


async def test_records_say_of_which_run_they_are(world: World, lines: Lines):
    @flow
    async def child() -> None:
        logger.info("in child", extra={"order": 7})
        assert current_step_flow(await who()) == "child"

    @step
    async def who() -> list[str]:
        logger.warning("in step")
        return [current_step().flow, current_step().run_id]

    @flow
    async def parent() -> None:
        logger.info("in parent")
        await who()
        await child()
        await asyncio.create_task(branch())

    async def branch() -> None:
        logger.info("in branch")

    def current_step_flow(found: list[str]) -> str:
        return found[0]

    rl = await world.open()
    await rl.run(parent.with_id("r"))
    found = [(one.getMessage(), one.run_id, one.flow, one.key) for one in lines.records]
    assert found == [
        ("in parent", "r", "parent", ""),
        ("in step", "r", "parent", "who"),
        ("in child", "r/child", "child", "child"),
        ("in step", "r/child", "child", "child/who"),
        ("in branch", "r", "parent", "~branch"),
    ]
    assert lines.records[2].order == 7
    assert [one.funcName for one in lines.records] == ["parent", "who", "child", "who", "branch"]


def test_outside_a_run_it_is_a_logger_like_any_other(lines: Lines):
    logger.info("plain")
    logger.debug("too low")
    assert lines.texts == ["plain"]
    assert logging.Formatter("%(run_id)s|%(flow)s|%(key)s|%(message)s").format(lines.records[0]) == "|||plain"


async def test_any_logger_can_be_wrapped(world: World, caplog: pytest.LogCaptureFixture):
    shop = RunLogger(logging.getLogger("shop"))

    @flow
    async def shopping() -> None:
        shop.warning("begins")
        await sleep("1h")
        shop.exception("ends", exc_info=ValueError("x"))

    rl = await world.open()
    run = await rl.start(shopping)
    await world.park(run)
    world.clock.advance("1h")
    await run.result()
    assert [(one.name, one.levelname, one.getMessage()) for one in caplog.records if one.name == "shop"] == [
        ("shop", "WARNING", "begins"),
        ("shop", "ERROR", "ends"),
    ]
