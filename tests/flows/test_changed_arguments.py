"""A step is called with other arguments than before: the run is held, and the reason names the argument."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import time
import uuid
from typing import Any

import msgspec
import pytest

from relight import flow, step, wait_for
from relight.flow.payloads import ArgumentsCodec
from relight.model.journal import StepCompleted, StepFailed, decode_event
from relight.testing.clock import START
from tests.flows.world import World


@dataclasses.dataclass
class Order:
    id: str
    at: dt.datetime | None = None


NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


@step
async def charge(order: Any, cents: int, at: Any = None, *, note: str = "") -> str:
    await asyncio.sleep(0)  # like every step that waits for something
    return "charged"


@step
async def fail(order: Any, cents: int) -> str:
    await asyncio.sleep(0)
    raise ValueError("no")


@step
async def ship(order: str) -> str:
    return "shipped"


@step(volatile=("conversation",))
async def ask(conversation: list[str], model: str) -> str:
    await asyncio.sleep(0)
    return "answer"


@step
def in_thread(order: str, cents: int) -> None: ...


@step
async def at_once(order: str, cents: int, at: Any = None) -> None: ...


@step(timeout="1h")
async def limited(order: str, cents: int) -> None:
    await asyncio.sleep(0)


async def held(world: World, charged: Any, before: tuple[Any, ...], after: tuple[Any, ...], **changed: Any) -> str:
    """A run calls a step with the first arguments, and after a crash with the others. Returns the reason of its hold."""
    lives = [(before, {}), (after, changed)]

    @flow(name="shop")
    async def shop() -> None:
        args, kwargs = lives[0]
        try:
            await charged(*args, **kwargs)
        except ValueError:
            pass
        await wait_for("go")

    rl = await world.open()
    run = await rl.start(shop.with_id("r"))
    await world.until_status("waiting", run)
    del lives[0]
    rl = await world.crash_and_reopen()
    row = await world.until_status("paused", await rl.get("r"))
    assert row.hold == "nondeterminism"
    return row.reason or ""


@pytest.mark.parametrize(
    ("before", "after", "changed", "named"),
    [
        (("a", 1), ("a", 2), {}, "argument 'cents' changed since"),
        (("a", 1), ("b", 1), {}, "argument 'order' changed since"),
        (("a", 1), ("b", 2), {}, "arguments 'order' and 'cents' changed since"),
        (("a", 1), ("a", 1, "x"), {}, "argument 'at' changed since"),
        (("a", 1), ("a", 1), {"note": "x"}, "argument 'note' changed since"),
        ((["a"], 1), (["b"], 1), {}, "argument 'order' changed since"),
        ((Order("a"), 1), (Order("a"), 2), {}, "argument 'cents' changed since"),
    ],
)
async def test_the_argument_is_named(world: World, before: Any, after: Any, changed: Any, named: str):
    reason = await held(world, charge, before, after, **changed)
    assert f"step 'charge': {named}" in reason
    assert "relight.now()" not in reason
    assert "name the argument in @step(volatile=...)" in reason


async def test_it_is_named_for_a_step_that_failed(world: World):
    assert "argument 'cents' changed" in await held(world, fail, ("a", 1), ("a", 2))


@pytest.mark.parametrize("charged", [in_thread, limited])
async def test_it_is_named_for_every_kind_of_step(world: World, charged: Any):
    assert "argument 'cents' changed" in await held(world, charged, ("a", 1), ("a", 2))


async def test_of_a_step_that_never_waits_the_arguments_are_listed(world: World):
    """To find out which argument is different would cost such a step 4 % of its time."""
    reason = await held(world, at_once, ("a", 1, NOON.isoformat()), ("a", 1, LATER.isoformat()))
    assert "arguments changed (one or more of 'order', 'cents', 'at')" in reason
    assert "'at' looks like a time: take it from relight.now()" in reason


async def test_the_only_argument_is_named(world: World):
    assert "step 'ship': argument 'order' changed" in await held(world, ship, ("a",), ("b",))


async def test_a_volatile_argument_is_never_named(world: World):
    assert "argument 'model' changed" in await held(world, ask, (["a"], "x"), (["a", "b"], "y"))


LATER = NOON + dt.timedelta(seconds=3)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (NOON, LATER),
        (NOON.date(), LATER.date() + dt.timedelta(days=1)),
        (NOON.isoformat(), LATER.isoformat()),
        (time.time() - 60, time.time()),
        (time.time_ns() - 60, time.time_ns()),
        (Order("a", NOON), Order("a", LATER)),
        ({"at": str(NOON)}, {"at": str(LATER)}),
    ],
    ids=["datetime", "date", "isoformat", "time", "time_ns", "in a struct", "in a dict"],
)
async def test_for_a_time_now_is_suggested(world: World, caplog: pytest.LogCaptureFixture, before: Any, after: Any):
    reason = await held(world, charge, ("a", 1, before), ("a", 1, after))
    assert "argument 'at' changed" in reason
    assert "'at' looks like a time: take it from relight.now()" in reason
    assert "[INPUT_MISMATCH] run r: step 'charge': argument 'at' changed" in caplog.text
    assert "relight.now()" in caplog.text


async def test_for_a_random_id_uuid_is_suggested(world: World):
    reason = await held(world, charge, (f"order-{uuid.uuid4()}", 1), (f"order-{uuid.uuid4()}", 1))
    assert "'order' looks like a random id: take it from relight.uuid()" in reason


async def test_an_entry_of_a_version_that_recorded_only_one_digest_is_understood(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    lives: list[Any] = [1, 2]

    @flow(name="shop")
    async def shop() -> None:
        await charge("a", lives[0], START)
        await wait_for("go")

    rl = await world.open()
    with monkeypatch.context() as older:
        older.setattr(ArgumentsCodec, "parts", lambda *_: ())
        older.setattr(ArgumentsCodec, "digests", lambda *given, of=ArgumentsCodec.digests: (of(*given)[0], ()))
        run = await rl.start(shop.with_id("r"))
        await world.until_status("waiting", run)
    del lives[0]
    rl = await world.crash_and_reopen()
    row = await world.until_status("paused", await rl.get("r"))
    assert "arguments changed (one or more of 'order', 'cents', 'at', 'note')" in (row.reason or "")
    lives[0] = 1
    await (await rl.get("r")).resume()
    await (await rl.get("r")).signal("go")
    await (await rl.get("r")).result()


def test_a_version_without_these_digests_reads_entries_that_have_them():
    class OldStepCompleted(msgspec.Struct, array_like=True, tag="step"):
        key: str
        output: msgspec.Raw
        blob: str
        fingerprint: str
        digest: str
        attempt: int
        at_us: int = 0
        took_us: int = 0

    new = msgspec.json.encode(StepCompleted("charge", msgspec.Raw(b"1"), "", "fp", "digest", 1, 2, 3, (4, 5)))
    assert msgspec.json.decode(new, type=OldStepCompleted).took_us == 3
    entry = decode_event(new)
    assert isinstance(entry, StepCompleted)
    assert entry.parts == (4, 5)
    old = decode_event(b'["step","charge",1,"","fp","digest",1,2,3]')
    assert isinstance(old, StepCompleted)
    assert old.parts == ()
    assert StepFailed.__struct_fields__[-1] == StepCompleted.__struct_fields__[-1] == "parts"


@pytest.mark.parametrize("after", [10**400, -(10**400)], ids=["large", "negative"])
async def test_a_number_that_no_float_can_be_is_named_as_any_other(world: World, after: int):
    now = [5]

    @step
    async def square(n: int) -> int:
        return n

    @flow
    async def work() -> str:
        await square(now[0])
        return await wait_for("go", str)

    rl = await world.open()
    run = await rl.start(work)
    await world.park(run)
    now[0] = after
    await run.signal("go", "x")
    row = await world.until_status("paused", run)
    assert row.hold == "nondeterminism"
    assert "argument 'n' changed" in row.reason
