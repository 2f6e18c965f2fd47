"""Trials and their results: how a trial ended, whether that was right, the report on all trials. See `crashpoints`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from relight.testing.crashing_store import CrashPlan
from relight.testing.forkserver import tail
from relight.testing.ledger import Audit, Line, audit, read_ledger


class Outcome(msgspec.Struct, kw_only=True):
    """What a life wrote at its end; a life that was killed has written none."""

    value: Any = None
    unfinished: bool = False  # the scenario needs another life
    operations: list[str] = []
    fired: bool = False
    later: bool = False  # the life called `begins`: operations are those since then


class Trial(msgspec.Struct, kw_only=True):
    """One scenario under one series of plans, from the first process to the end."""

    plans: list[CrashPlan]
    directory: Path
    operations: list[str] = []  # of the first life under a plan, if it was not killed
    later: bool = False  # the same as in Outcome
    outcome: Outcome = msgspec.field(default_factory=Outcome)
    lines: list[Line] = []
    audit: Audit = msgspec.field(default_factory=Audit)
    lives: int = 0
    kills: int = 0
    fired: bool = False  # at least one plan reached its operation
    problems: list[str] = []

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def late(self) -> list[str]:
        """Effects that a process began after it was overtaken."""
        return [line.effect for line in self.split()[1] if line.what == "start"]

    def split(self) -> tuple[list[Line], list[Line]]:
        """The lines in two parts: all others, and those that a process wrote after it had been overtaken."""
        if not any(line.what == "continued" for line in self.lines):
            return self.lines, []
        # Life 1 counts as overtaken from the first line of another life on. That other life begins when life 1 is
        # stopped. The line "continued" would be too late: another thread of life 1 may write before it.
        place = next((place for place, line in enumerate(self.lines) if line.life > 1), len(self.lines))
        after = [line for line in self.lines[place:] if line.life == 1]
        return [*self.lines[:place], *(line for line in self.lines[place:] if line.life != 1)], after

    def read(self) -> list[Line]:
        return read_ledger(self.directory / "ledger")

    def facts(self, what: str) -> list[Line]:
        return [line for line in self.read() if line.what == what]

    @property
    def comebacks(self) -> int:
        """How often the last life brought runs back into memory that were recovered, or had been parked."""
        return sum(self.outcome.operations.count(name) for name in ("claim", "claim_due"))

    def __str__(self) -> str:
        return ", ".join(str(plan) for plan in self.plans)


class Report(msgspec.Struct, kw_only=True):
    """What an exploration found. Call `check()`, which raises if there were problems."""

    scenario: str
    points: int = 0  # crash points that were reached
    passed_over: int = 0  # points at which another mode tries the same
    kills: int = 0
    lives: int = 0  # processes
    lost: int = 0
    duplicated: int = 0
    repeated: int = 0
    seconds: float = 0.0
    problems: list[str] = []  # crash point, what is wrong, end of the log

    def add(self, trial: Trial) -> None:
        self.points += trial.fired
        self.kills += trial.kills
        self.lives += trial.lives
        self.lost += len(trial.audit.lost)
        self.duplicated += len(trial.audit.duplicated)
        self.repeated += len(trial.audit.repeated)
        self.problems += [f"at {trial}: {what}\n{tail(trial.log)}\n({trial.directory})" for what in trial.problems]

    def plus(self, other: Report) -> Report:
        """The sum of both reports."""
        added = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__[1:]}
        return Report(scenario=self.scenario, **added)

    def check(self) -> None:
        """Raise AssertionError unless everything explored was as it must be."""
        if self.problems:
            shown = "\n\n".join(self.problems[:5])
            raise AssertionError(f"{self}\n{len(self.problems)} problems, of which the first:\n\n{shown}")

    def __str__(self) -> str:
        return (
            f"{self.scenario}: {self.points} points, {self.kills} kills, {self.lives} processes in {self.seconds:.1f}s: "
            f"lost {self.lost}, duplicated {self.duplicated}, repeated in flight {self.repeated}"
        )


Check = Callable[[Trial], None]


def judge(trial: Trial, expected: Trial, check: Check | None) -> list[str]:
    """What is wrong with a trial's end, by the ledger and by `check`; without that, by an undisturbed trial."""
    if trial.problems:
        return []  # the trial did not come to an end that could be judged
    wanted = _finished(expected.lines) if check is None else []
    on_time, late = trial.split()
    trial.audit = audit(on_time, wanted)
    problems = [f"lost: {name}" for name in trial.audit.lost]
    problems += [f"written after it was overtaken: {line.effect}" for line in late if line.what == "committed"]
    problems += [f"duplicated: {name}" for name in trial.audit.duplicated]
    problems += [f"claimed at an epoch that is not greater: {line.run} at {line.index}" for line in _shrunk(on_time)]
    if check is not None:
        try:
            check(trial)
        except AssertionError as error:
            problems.append(str(error) or "check() failed")
    elif trial.outcome.value != expected.outcome.value:
        problems.append(f"the outcome is {trial.outcome.value!r} instead of {expected.outcome.value!r}")
    return problems


def _finished(lines: list[Line]) -> list[str]:
    """Effects that have ended. Some never do: effects of steps that are not repeated after their process has died."""
    ended = {line.effect for line in lines if line.what in ("end", "failed")}
    return [name for name in audit(lines).effects if name in ended]


def _shrunk(lines: list[Line]) -> list[Line]:
    """Claims whose epoch is not greater than the epochs of all earlier claims."""
    epochs: dict[str, int] = {}
    found = []
    for line in lines:
        if line.what == "claimed":
            if line.index <= epochs.get(line.run, 0):
                found.append(line)
            epochs[line.run] = max(line.index, epochs.get(line.run, 0))
    return found
