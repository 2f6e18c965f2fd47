"""Rounds of a background part: when they are made, and that there is never more than one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from relight.backends.postgres import listen
from relight.supervisor import Supervisor
from relight.ticker import Ticker
from tests.flows.world import until

FOR_EVER = 1000.0


class Rounds:
    def __init__(self) -> None:
        self.made = 0
        self.under_way = self.most_at_once = 0
        self.gate: asyncio.Event | None = None
        self.failures: list[Exception] = []

    async def run_once(self) -> None:
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.failures:
                raise self.failures.pop()
            self.made += 1
        finally:
            self.under_way -= 1


@pytest.fixture
async def keep() -> AsyncIterator[Callable[[Ticker], None]]:
    supervisor = Supervisor()
    yield lambda ticker: supervisor.keep("part", ticker.run, essential=False) and None
    await supervisor.stop()


async def test_a_round_is_made_when_it_is_wanted(keep):
    rounds = Rounds()
    ticker = Ticker(rounds.run_once, FOR_EVER)
    keep(ticker)
    for n in range(1, 4):
        ticker.wake()
        assert not ticker.resting
        await until(lambda n=n: rounds.made == n)
        await until(lambda: ticker.resting)


async def test_a_round_is_made_when_its_time_has_come(keep):
    rounds = Rounds()
    keep(Ticker(rounds.run_once, 0.01))
    await until(lambda: rounds.made >= 3)


async def test_what_is_wanted_during_a_round_is_one_round_after_it(keep):
    rounds = Rounds()
    rounds.gate = asyncio.Event()
    over: list[int] = []
    ticker = Ticker(rounds.run_once, FOR_EVER, round_over=lambda: over.append(rounds.made))
    keep(ticker)
    ticker.wake()
    await until(lambda: rounds.under_way == 1)
    for _ in range(5):
        ticker.wake()
    rounds.gate.set()
    await until(lambda: ticker.resting)
    assert over == [1, 2]
    assert rounds.most_at_once == 1


async def test_a_round_that_raises_is_made_again_and_is_under_way_until_then(keep):
    rounds = Rounds()
    rounds.failures = [ValueError("once")]
    ticker = Ticker(rounds.run_once, FOR_EVER)
    keep(ticker)
    ticker.wake()
    await until(lambda: not rounds.failures)
    assert not ticker.resting
    await until(lambda: ticker.resting and rounds.made == 1)


async def test_where_nothing_can_be_listened_for_every_round_says_that_news_may_have_been_missed(
    monkeypatch: pytest.MonkeyPatch,
):
    missed: list[int] = []
    monkeypatch.setattr(listen, "TICK_SECONDS", FOR_EVER)
    polling = listen.Polling(lambda: missed.append(1))
    await polling.run_once()
    await polling.run_once()
    assert missed == [1, 1]
    await polling.close()
    monkeypatch.setattr(listen, "TICK_SECONDS", 0.01)
    polling = listen.Polling(lambda: missed.append(1))
    await until(lambda: len(missed) >= 5)
    await polling.close()
