"""Time, ids and randomness from the operating system."""

from __future__ import annotations

import asyncio
import os
import random
import time
from uuid import UUID

import pytest

from relight.clock import Clock, Entropy, StoreClock, SystemClock, SystemEntropy, block
from relight.testing.clock import START, FakeClock


def test_now_is_unix_time_and_monotonic_is_not():
    clock: Clock = SystemClock()
    before = time.time()
    assert before <= clock.now() <= time.time()
    before = time.monotonic()
    assert before <= clock.monotonic() <= time.monotonic()


def test_block_holds_the_thread_for_as_long():
    before = time.monotonic()
    block(0.02)
    assert time.monotonic() - before >= 0.02


async def test_call_later_calls_back_unless_cancelled():
    clock = SystemClock()
    called: list[str] = []
    done = asyncio.Event()
    clock.call_later(0.001, lambda: called.append("cancelled")).cancel()
    clock.call_later(0.002, lambda: called.append("first"))
    clock.call_later(0.02, done.set)
    await asyncio.wait_for(done.wait(), 60)
    assert called == ["first"]


def test_run_ids_are_uuid7_unique_and_in_order_of_creation():
    entropy: Entropy = SystemEntropy()
    ids = [entropy.run_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))
    assert UUID(ids[0]).version == 7
    assert str(UUID(ids[0])) == ids[0], "canonical spelling: the same run must not have two ids"


def test_uuids_are_random_standard_uuids():
    entropy = SystemEntropy()
    first, second = entropy.uuid(), entropy.uuid()
    assert type(first) is UUID
    assert first.version == 4
    assert first != second


def test_random_stays_in_its_interval():
    entropy = SystemEntropy()
    drawn = [entropy.random() for _ in range(1_000)]
    assert all(0 <= value < 1 for value in drawn)
    assert len(set(drawn)) > 990


def test_a_flow_that_seeds_the_global_generator_does_not_seed_relights():
    state = random.getstate()
    try:
        random.seed(0)
        first = SystemEntropy().random()
        random.seed(0)
        assert SystemEntropy().random() != first
    finally:
        random.setstate(state)


# Python 3.12 and later warn about any fork of a process with threads, and pytest-xdist's workers have some.
@pytest.mark.filterwarnings("ignore:.*use of fork.* may lead to deadlocks:DeprecationWarning")
def test_a_forked_child_does_not_repeat_its_parents_ids():
    entropy = SystemEntropy()
    entropy.run_id()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, f"{entropy.run_id()} {entropy.uuid()} {entropy.random()}".encode())
        finally:
            os._exit(0)  # in any case the child ends here: no second copy of the test run
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        theirs = pipe.read().split()
    ours = [entropy.run_id(), str(entropy.uuid()), str(entropy.random())]
    assert len(theirs) == 3
    assert not set(theirs) & set(ours)


async def test_a_server_s_clock_is_set_by_the_answer_with_the_shortest_way():
    """The first question has to wait for a connection. That would make the clock wrong by half of the wait."""
    base = FakeClock()
    clock = StoreClock(base)
    ways = iter([(0.0, 4.0), (0.02, 0.02), (0.001, 0.001), (9.0, 9.0)])  # there, and back

    async def ask() -> float:
        there, back = next(ways)
        base.advance(there)
        now = base.now() + 100.0
        base.advance(back)
        return now

    assert await clock.follow(ask)
    assert clock.now() == pytest.approx(base.now() + 100.0, abs=1e-6)
    assert next(ways) == (9.0, 9.0), "the third answer was good enough"


async def test_a_store_without_a_server_has_no_clock_to_follow():
    async def ask() -> None:
        return None

    clock = StoreClock(FakeClock())
    assert not await clock.follow(ask)
    assert clock.offset == 0.0


def test_a_fake_clock_advances_to_its_next_timer():
    clock = FakeClock()
    called: list[float] = []
    clock.call_later(5, lambda: called.append(clock.now() - START))
    clock.call_later(3, lambda: called.append(clock.now() - START)).cancel()
    clock.call_later(7, lambda: called.append(clock.now() - START))
    assert clock.advance_to_next()
    assert called == [5]
    assert clock.advance_to_next()
    assert called == [5, 7]
    assert not clock.advance_to_next()
    assert clock.now() == START + 7
