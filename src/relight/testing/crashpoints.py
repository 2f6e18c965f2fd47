"""Crash points: every storage operation is numbered, and a process can be killed at each of them.

    before:k   SIGKILL this process before operation k
    after:k    SIGKILL it after operation k has been applied, before the caller hears of it
    raise:k    apply operation k, then raise StoreUnavailableError: the answer is lost, the process lives
    refuse:k   raise StoreUnavailableError instead of applying operation k: a fault that passes
    during:k   SIGKILL it in the middle of the k-th effect: in a step's body
    stall:k    SIGSTOP it before operation k; another process takes over; then it goes on (see `Explorer.overtake`)
    count      only count

`explore` finds out how many operations a scenario takes and tries every k of every mode: each in a real child process, which
is then resumed in fresh ones until the scenario ends. It judges by the effects ledger (see `ledger`), not by the journal:

    report = explore("shop.flows:checkout", "order-1")     # a flow and its arguments
    report.check()                                         # AssertionError naming crash points and logs
    print(report)                                          # 214 points, 140 kills: lost 0, duplicated 0, repeated 36

For more than one flow with its arguments, name a scenario instead: an `async def scenario(rl: Relight, life: Life)` that is
called in every life, starts what it needs under fixed ids, and returns the outcome once there is one.

The oracle is an undisturbed run: it must give the same outcome and have had the same effects. What a scenario does
differently from life to life (a changed item, a step that may not be repeated) it judges itself, with `check=`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from relight.clock import SYSTEM_CLOCK
from relight.flow.definitions import Flow
from relight.testing.crashing_store import CrashingStore, CrashPlan, Mode, patiently
from relight.testing.forkserver import ForkServer, Order, tail
from relight.testing.ledger import Audit, Line, audit, read_ledger

__all__ = ["CrashPlan", "CrashingStore", "Explorer", "Mode", "Outcome", "Report", "Trial", "explore", "patiently"]

MODES: tuple[Mode, ...] = ("before", "after", "raise", "refuse", "during")  # what `explore` tries
KILLS = ("before", "after", "during")
POLL_SECONDS = 0.002
MAX_LIVES = 50  # of one trial: a scenario that does not end in so many processes never will


class Outcome(msgspec.Struct, kw_only=True):
    """What a life left behind: only lives that were not killed do."""

    value: Any = None
    unfinished: bool = False  # the scenario wants another life
    operations: list[str] = []
    fired: bool = False


class Trial(msgspec.Struct, kw_only=True):
    """One scenario under one series of plans, from the first process to the end."""

    plans: list[CrashPlan]
    directory: Path
    operations: list[str] = []  # of the first life, if it was not killed
    outcome: Outcome = msgspec.field(default_factory=Outcome)
    lines: list[Line] = []
    audit: Audit = msgspec.field(default_factory=Audit)
    lives: int = 0
    kills: int = 0
    fired: bool = False  # at least one plan came to its operation
    problems: list[str] = []

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def late(self) -> list[str]:
        """Effects that a process began after it was overtaken."""
        return [line.effect for line in self.split()[1] if line.what == "start"]

    def split(self) -> tuple[list[Line], list[Line]]:
        """The lines, apart from those of a process that had been overtaken, and these."""
        if not any(line.what == "continued" for line in self.lines):
            return self.lines, []
        # From the other's first line on: it begins when the first is stopped, and a thread of that one may write before its
        # main thread has said that it continues.
        place = next((place for place, line in enumerate(self.lines) if line.life > 1), len(self.lines))
        after = [line for line in self.lines[place:] if line.life == 1]
        return [*self.lines[:place], *(line for line in self.lines[place:] if line.life != 1)], after

    def read(self) -> list[Line]:
        return read_ledger(self.directory / "ledger")

    def facts(self, what: str) -> list[Line]:
        return [line for line in self.read() if line.what == what]

    @property
    def comebacks(self) -> int:
        """How often the last life brought a run back into memory: recovered, or parked before."""
        return self.outcome.operations.count("claim")

    def __str__(self) -> str:
        return ", ".join(str(plan) for plan in self.plans)


class Report(msgspec.Struct, kw_only=True):
    """What an exploration found. `check()` before believing it."""

    scenario: str
    points: int = 0  # crash points that were reached
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


class Explorer:
    """Tries a scenario under crash plans. A context manager: it owns the server that forks the processes.

    `scenario` is an import path, "module:name", of a flow or of a scenario function; `arguments` go to the flow, or to the
    scenario in `life.arguments`. `check` raises AssertionError when a trial's end is not right; without it, outcome and
    effects must be those of an undisturbed run.
    """

    def __init__(
        self,
        scenario: str | Flow[..., Any],
        arguments: Sequence[Any] = (),
        *,
        config: Mapping[str, Any] | None = None,
        check: Check | None = None,
        directory: Path | None = None,
        life_seconds: float = 30.0,
    ) -> None:
        self.scenario = (
            f"{scenario.fn.__module__}:{scenario.fn.__qualname__}" if isinstance(scenario, Flow) else scenario
        )
        self._arguments = list(arguments)
        self._config = dict(config or {})
        self._check = check
        # A SIGKILL leaves what was written whole, synced or not: on a disk in memory every sync is as true, and faster.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._own = directory is None
        self._directory = (
            Path(tempfile.mkdtemp(prefix="relight-crash-", dir=memory)) if directory is None else directory
        )
        self._life_seconds = life_seconds
        self._servers: list[ForkServer] = []
        self._baseline: Trial | None = None
        self._trials = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server. What failed stays in the directory, to be looked at."""
        for server in self._servers:
            server.close()
        if self._own and not any(self._directory.iterdir()):
            self._directory.rmdir()

    @property
    def baseline(self) -> Trial:
        """The undisturbed run."""
        if self._baseline is None:
            self._baseline = self._try([CrashPlan()])
            if self._baseline.problems:
                raise AssertionError(
                    f"{self.scenario} fails without any crash: {self._baseline.problems[0]}\n{tail(self._baseline.log)}"
                )
            shutil.rmtree(self._baseline.directory)
        return self._baseline

    def endure(self, plans: Sequence[CrashPlan]) -> Trial:
        """One life under each plan, then lives without one, until the scenario ends."""
        expected = self.baseline
        return self._judged(self._try(list(plans)), expected)

    def explore(self, modes: Sequence[Mode] = MODES, *, before: Sequence[CrashPlan] = (), step: int = 1) -> Report:
        """Every operation (or every `step`-th) in each of the modes. `before` are the plans of the lives before: with
        them, every operation of the recovery is tried."""
        report = Report(scenario=self.scenario)
        begun = SYSTEM_CLOCK.monotonic()
        for mode in modes:
            total = 0 if before else self._total(mode)
            # How many operations there are depends a little on timing: what ends the search is a plan that is not reached.
            for operation in itertools.count(1, step):
                trial = self.endure([*before, CrashPlan(mode, operation)])
                if not trial.fired:
                    if operation > total:
                        break
                    continue
                report.add(trial)
        report.seconds = SYSTEM_CLOCK.monotonic() - begun
        return report

    def _total(self, mode: Mode) -> int:
        if mode == "during":
            return sum(line.what == "start" for line in self.baseline.lines)
        return len(self.baseline.operations)

    def overtake(self, operation: int) -> Trial:
        """Stop a process before this operation, let another take over and end the scenario, then let the first go on.

        The store must refuse whatever the first still writes, and it must come to the same end. A step it was in the middle
        of, or about to begin, may take effect once more: `late` has those.
        """
        expected = self.baseline
        trial = self._trial([CrashPlan("stall", operation)])
        first: list[Outcome | None] = []
        self._server(1)  # made here: it lives no longer than the thread that makes it
        stalled = threading.Thread(target=lambda: first.append(self._live(trial, 1, trial.plans[0], self._server(1))))
        stalled.start()
        while stalled.is_alive() and not trial.facts("stalled"):
            stalled.join(POLL_SECONDS)
        trial.fired = bool(trial.facts("stalled"))
        trial.lives = 1 + trial.fired
        trial.outcome = (self._live(trial, 2, CrashPlan()) if trial.fired else None) or Outcome()
        for line in trial.facts("stalled"):
            os.kill(int(line.label), signal.SIGCONT)
        stalled.join()
        if not trial.fired:
            trial.outcome = first[0] or Outcome()
        elif first[0] is not None and first[0].value != trial.outcome.value:
            trial.problems.append(f"the overtaken process ends with {first[0].value!r}, not {trial.outcome.value!r}")
        return self._judged(trial, expected)

    def _server(self, number: int = 0) -> ForkServer:
        while len(self._servers) <= number:
            self._servers.append(ForkServer(["relight.testing.life", self.scenario.partition(":")[0]]))
        return self._servers[number]

    def _trial(self, plans: list[CrashPlan]) -> Trial:
        directory = self._directory / f"{next(self._trials):04}"
        directory.mkdir(parents=True)
        return Trial(plans=plans, directory=directory)

    def _judged(self, trial: Trial, expected: Trial) -> Trial:
        """Look at what is left behind; what is right need not be kept."""
        trial.lines = trial.read()
        trial.problems += _judge(trial, expected, self._check)
        if not trial.problems:
            shutil.rmtree(trial.directory)
        return trial

    def _try(self, plans: list[CrashPlan]) -> Trial:
        trial = self._trial(plans)
        for life in range(1, MAX_LIVES + 1):
            plan = plans[life - 1] if life <= len(plans) else CrashPlan()
            trial.lives = life
            ended = self._live(trial, life, plan)
            if ended is None:
                break
            if life == 1:
                trial.operations = ended.operations
            if not ended.unfinished:  # perhaps before the last plan's turn: then that one's point cannot be reached
                trial.outcome = ended
                break
        else:
            trial.problems.append(f"it did not end in {MAX_LIVES} lives")
        trial.lines = trial.read()
        return trial

    def _live(self, trial: Trial, number: int, plan: CrashPlan, server: ForkServer | None = None) -> Outcome | None:
        """One process. None: it ended in a way that no plan explains."""
        found = trial.directory / f"outcome-{number}"
        argument = {
            "scenario": self.scenario,
            "arguments": self._arguments,
            "config": self._config,
            "directory": str(trial.directory),
            "number": number,
            "plan": plan,
            "outcome": str(found),
        }
        ending = (server or self._server()).run(
            Order("relight.testing.life:live", argument, str(trial.log), self._life_seconds)
        )
        if ending.signal == signal.SIGKILL and plan.mode in KILLS:
            trial.kills += 1
            trial.fired = number == len(trial.plans)
            return Outcome(unfinished=True)
        if ending.signal or ending.code or not found.exists():
            trial.problems.append(f"life {number} ended with signal {ending.signal}, code {ending.code}")
            return None
        outcome = msgspec.json.decode(found.read_bytes(), type=Outcome)
        if number == len(trial.plans):
            trial.fired = outcome.fired
        return outcome


def _judge(trial: Trial, expected: Trial, check: Check | None) -> list[str]:
    if trial.problems:
        return []  # it did not come to an end that could be judged
    wanted = audit(expected.lines).effects if check is None else []
    on_time, late = trial.split()
    trial.audit = audit(on_time, wanted)
    problems = [f"lost: {name}" for name in trial.audit.lost]
    problems += [f"written after it was overtaken: {line.effect}" for line in late if line.what == "committed"]
    problems += [f"duplicated: {name}" for name in trial.audit.duplicated]
    if check is not None:
        try:
            check(trial)
        except AssertionError as error:
            problems.append(str(error) or "check() failed")
    elif trial.outcome.value != expected.outcome.value:
        problems.append(f"the outcome is {trial.outcome.value!r} instead of {expected.outcome.value!r}")
    return problems


def explore(
    scenario: str | Flow[..., Any],
    *arguments: Any,
    modes: Sequence[Mode] = MODES,
    config: Mapping[str, Any] | None = None,
    check: Check | None = None,
    directory: Path | None = None,
) -> Report:
    """Every crash point of a scenario, or of a flow with these arguments. See the module's docstring."""
    with Explorer(scenario, arguments, config=config, check=check, directory=directory) as explorer:
        return explorer.explore(modes)
