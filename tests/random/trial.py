"""A trial: a batch of programs in one of the modes, from their start to their end, in as many processes as that takes."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any, Self

import msgspec

from relight.testing.forkserver import ForkServer, tail
from relight.testing.forkserver import Order as ForkOrder
from tests.random.book import read_book
from tests.random.check import problems
from tests.random.life import Order

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
HANGING_SECONDS = 120.0  # for a life: it takes so long only in a failure

_schemas = itertools.count(1)  # one server serves several Trials

BASE: dict[str, Any] = {"recovery": {"version_mismatch": "fail"}, "shutdown_grace": "5s"}
MODES: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "parked": {"park_after": "1ms"},
    "checkpoints": {"checkpoint": {"every": 5}, "park_after": "1ms"},
    "killed": {},  # and the settings of one of the others, by chance
}


class Found(msgspec.Struct):
    """What is wrong with a program."""

    seed: int
    mode: str
    problems: list[str]
    folder: str
    log: str

    def text(self) -> str:
        """The problem for a person: what it is, and how to see it again."""
        again = f"python -m tests.random {self.seed} --mode {self.mode} --copies 10 --times 20 --shrink"
        return "\n  ".join([f"seed {self.seed}, {self.mode}; again: {again}", *self.problems])


class Trials:
    """Makes trials. `server` is the PostgreSQL on which schemas are made. None: SQLite."""

    def __init__(self, postgres: str | None = None, plant: str = "", patience: float = 30.0) -> None:
        self._postgres = postgres
        self._plant = plant
        self._patience = patience
        self._folder = Path(tempfile.mkdtemp(prefix="relight-random-", dir=MEMORY))
        self._numbers = itertools.count(1)
        self._fork: ForkServer | None = None
        self.programs = 0
        self.kills = 0
        self.lives = 0

    def __enter__(self) -> Self:
        self._fork = ForkServer(["tests.random.life:prepare"])
        return self

    def __exit__(self, *_: object) -> None:
        if self._fork is not None:
            self._fork.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, programs: list[dict[str, Any]], mode: str, seed: int = 0) -> list[Found]:
        """The problems of each program. None, if all is well. `seed` decides about kills."""
        number = next(self._numbers)
        folder = self._folder / f"{number:05}"
        folder.mkdir()
        chance = Random(f"{seed} {mode} {[program['seed'] for program in programs]}")
        config = {**BASE, **MODES[mode]}
        if mode == "killed":
            config |= MODES[chance.choice(("undisturbed", "parked", "checkpoints"))]
        if self._postgres is None:
            url = str(folder / "runs.db")
        else:
            url = self._postgres
            config["db_schema"] = f"random_{os.getpid()}_{next(_schemas)}"
        runs = {f"p{at}": program for at, program in enumerate(programs)}
        order = Order(
            folder=str(folder), url=url, config=config, programs=runs, plant=self._plant, patience=self._patience
        )
        kills, trouble = self._live(order, chance, mode == "killed")
        self.programs += len(programs)
        lines = read_book(folder / "book")
        log = folder / "log"
        found = []
        for run, program in runs.items():
            wrong = trouble + problems(run, program, lines, kills)
            if wrong:
                found.append(Found(program["seed"], mode, wrong, str(folder), tail(log)))
        if not found:
            shutil.rmtree(folder)
        return found

    def _live(self, order: Order, chance: Random, killing: bool) -> tuple[int, list[str]]:
        """Run life after life. Returns how many were killed, and what went wrong in the last."""
        folder = Path(order.folder)
        kills = 0
        most = chance.randint(1, 5) if killing else 0
        total = 40 * len(order.programs)  # how many lines a life writes, about
        for number in itertools.count(1):
            order.number = number
            order.kill_at, order.kill_after = 0, 0.0
            if number <= most:
                if chance.random() < 0.6:
                    order.kill_at = chance.randint(1, total // number)
                else:
                    order.kill_after = chance.uniform(0.005, 0.01 + 0.005 * len(order.programs))
            assert self._fork is not None
            ending = self._fork.run(
                ForkOrder("tests.random.life:live", msgspec.to_builtins(order), str(folder / "log"), HANGING_SECONDS)
            )
            self.lives += 1
            if ending.signal and (order.kill_at or order.kill_after):
                kills += 1
                self.kills += 1
            elif ending.signal or ending.code:
                return kills, [f"life {number} ended with {ending}"]
            else:
                return kills, []
        raise AssertionError
