"""Crash points: every storage operation is numbered, and a process can be killed at each of them.

    before:k   SIGKILL this process before operation k
    after:k    SIGKILL it after operation k has been applied, before the caller gets the answer
    raise:k    apply operation k, then raise StoreUnavailableError: the answer is lost, the process lives
    refuse:k   raise StoreUnavailableError instead of applying operation k: a fault that passes
    during:k   SIGKILL it in the middle of the k-th effect: in a step's body
    stall:k    SIGSTOP it before operation k; another takes up its runs; then it goes on (see `Explorer.overtake`)
    count      only count

`explore` finds out how many operations a scenario needs and tries every k of every mode: each in a real child process.
Fresh processes then resume its work until the scenario ends. The effects ledger decides (see `ledger`), not the
journal:

    report = explore("shop.flows:checkout", Order("1", 5)) # a flow and its arguments
    report.check()                                         # AssertionError naming crash points and logs
    print(report)                                          # 214 points, 140 kills: lost 0, duplicated 0, repeated 36

For more than one flow with its arguments, name a scenario instead: an `async def scenario(rl: Relight, life: Life)` that is
called in every life, starts what it needs under fixed ids, and returns the outcome once there is one.

The process that recovers is tried in the same way; then the lease manager's operations are numbered, too:

    Explorer("shop.crashes:orphans", prepares=True, places=own_leases, lives=[{"orchestrator_id": "a"}, ...])

Life 1 then only prepares (and ends itself: `life.die()`), the plans are for life 2, and later lives bring everything to
its end. Or a `witness` does, life 0, which lives all the time: it finds no run that only a restart would find.

A trial is compared with an undisturbed run: it must have the same outcome and the same effects. If a scenario differs
from life to life (a changed item, a step that must not be repeated), it judges its trials itself, with `check=`.
"""

from __future__ import annotations

import itertools
import math
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
from relight.errors import DefinitionError
from relight.flow.definitions import Flow
from relight.testing.crashing_store import READS, CrashingStore, CrashPlan, Mode, patiently
from relight.testing.forkserver import ForkServer, Order, find, main_module, tail
from relight.testing.ledger import Ledger, Line
from relight.testing.trials import Check, Outcome, Report, Trial, judge

__all__ = [
    "Check",
    "CrashPlan",
    "CrashingStore",
    "Explorer",
    "Mode",
    "Outcome",
    "Report",
    "Trial",
    "explore",
    "own_leases",
    "patiently",
]

MODES: tuple[Mode, ...] = ("before", "after", "raise", "refuse", "during")  # what `explore` tries
KILLS = ("before", "after", "during")
ON_ARRIVAL = ("before", "refuse")  # certain to happen, unlike a mode after an operation, which may fail by itself
POLL_SECONDS = 0.002
MAX_LIVES = 50  # of one trial: a scenario that does not end in so many processes will never end


Places = Callable[[Path], Mapping[str, Any]]


def _file(directory: Path) -> Mapping[str, Any]:
    return {"store": f"{directory}/app.db", "leases": "none"}


def own_leases(directory: Path) -> Mapping[str, Any]:
    """Places: a file that has the leases as well."""
    return {"store": f"{directory}/app.db", "leases": "store"}


def _sealed(scenario: str | Flow[..., Any], arguments: list[Any], keywords: Mapping[str, Any]) -> str | None:
    """Arguments of a flow in the form of the journal. None if they are plain JSON, which every process can read without
    knowing the flow. A scenario function accepts only plain JSON."""
    if not keywords and _is_plain_json(arguments):
        return None
    found = find(scenario) if isinstance(scenario, str) else scenario
    if not isinstance(found, Flow):
        what = f"the keywords {', '.join(keywords)}" if keywords else f"arguments that are no plain JSON: {arguments!r}"
        raise DefinitionError(
            f"{scenario} is a scenario and no flow, and takes a list of JSON values; it was given {what}"
        )
    return found.arguments.seal(tuple(arguments), keywords).decode()


def _path_of(flow: Flow[..., Any]) -> str:
    module = flow.fn.__module__
    return f"{main_module() if module == '__main__' else module}:{flow.fn.__qualname__}"


def _is_plain_json(value: Any) -> bool:
    if type(value) in (list, dict):
        parts = value if type(value) is list else [*value.values(), *value]
        return all(map(_is_plain_json, parts)) and (type(value) is list or all(type(key) is str for key in value))
    return value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))


class Explorer:
    """Tries a scenario under crash plans. A context manager: it owns the server that forks the processes.

    `scenario` is an import path, "module:name", of a flow or of a scenario function. `arguments` (and `keywords`) go to the
    flow: all arguments that a run of it accepts. A scenario finds them, as JSON, in `life.arguments`. `check` raises
    AssertionError if a trial's end is not right; without it, outcome and effects must be those of an undisturbed run.

    `lives` are settings beside `config` for one life after the other; the last are for all later lives too. `witness`
    are the settings of life 0, a process that lives all the time and then ends the scenario. `places` gives the
    settings that say where a trial's store and leases are: by default a file in its directory, without leases. With
    `prepares`, the first life comes before all plans; if the store is a file, that life is executed only once and its
    files are copied.

    `servers` are fork servers that other explorers of scenarios in the same module use as well: missing ones are added, and
    the caller closes them. Without it, the explorer has its own.
    """

    def __init__(
        self,
        scenario: str | Flow[..., Any],
        arguments: Sequence[Any] = (),
        *,
        keywords: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        check: Check | None = None,
        directory: Path | None = None,
        life_seconds: float = 120.0,
        lives: Sequence[Mapping[str, Any]] = (),
        places: Places | None = None,
        prepares: bool = False,
        witness: Mapping[str, Any] | None = None,
        servers: list[ForkServer] | None = None,
    ) -> None:
        self.scenario = scenario if isinstance(scenario, str) else _path_of(scenario)
        self._arguments = list(arguments)
        self._sealed = _sealed(scenario, self._arguments, keywords or {})
        self._config = dict(config or {})
        self._check = check
        # A SIGKILL loses nothing that was written, synced or not. So a disk in memory tests the same, and faster.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._own = directory is None
        self._directory = (
            Path(tempfile.mkdtemp(prefix="relight-crash-", dir=memory)) if directory is None else directory
        )
        self._life_seconds = life_seconds
        self._lives = [dict(settings) for settings in lives] or [{}]
        self._places = places or _file
        self._prepares = prepares
        self._witness = None if witness is None else dict(witness)
        self._prepared: Path | None = None  # the files that the first life has left, to be copied
        self._servers: list[ForkServer] = [] if servers is None else servers
        self._shared = servers is not None
        self._baseline: Trial | None = None
        self._trials = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the servers. The files of failed trials stay in the directory."""
        for server in () if self._shared else self._servers:
            server.close()
        if self._prepared is not None:
            shutil.rmtree(self._prepared)
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
        """Try every operation (or every `step`-th) in each of the modes. `before` are the plans of the earlier lives:
        with them, every operation of the recovery is tried."""
        report = Report(scenario=self.scenario)
        begun = SYSTEM_CLOCK.monotonic()
        for mode in modes:
            total = 0 if before else self._total(mode)
            # The number of operations depends a little on timing: the search ends with a plan that is not reached.
            for operation in itertools.count(1, step):
                if step > 1 and not before and operation > total:
                    break  # a sample need not find the exact end
                if mode in ("after", "raise") and not before and self._only_reads(operation):
                    report.passed_over += 1
                    continue
                trial = self.endure([*before, CrashPlan(mode, operation)])
                if trial.fired or trial.problems:  # a life that hangs reaches no point, but must not end the search
                    report.add(trial)
                if not trial.fired and operation > total:
                    break
        report.seconds = SYSTEM_CLOCK.monotonic() - begun
        return report

    def _only_reads(self, operation: int) -> bool:
        """A death after a read leaves the same as a death before it, and its lost answer is the same as a refusal:
        these modes would try nothing new. The neighbours are checked too: numbers depend a little on timing."""
        around = self.baseline.operations[max(operation - 2, 0) : operation + 1]
        return len(around) == 3 and READS.issuperset(around)

    def _total(self, mode: Mode) -> int:
        if mode == "during":
            return sum(line.what == "start" for line in self.baseline.lines)
        return len(self.baseline.operations)

    def overtake(self, operation: int) -> Trial:
        """Stop a process before this operation, let another process end the scenario, then let the first go on.

        The store must refuse all further writes of the first, which must come to the same outcome. A step that it was
        executing, or about to begin, may take effect once more: `late` has those.
        """
        expected = self.baseline
        trial = self._trial([CrashPlan("stall", operation)])
        first: list[Outcome | None] = []
        self._server(1)  # made in this thread: a server ends with the thread that makes it
        stalled = threading.Thread(target=lambda: first.append(self._live(trial, 1, trial.plans[0], self._server(1))))
        stalled.start()
        while stalled.is_alive() and not trial.facts("stalled"):
            stalled.join(POLL_SECONDS)
        trial.fired = bool(trial.facts("stalled"))
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
            modules = [self.scenario.partition(":")[0], "relight.testing.life:prepare"]
            self._servers.append(ForkServer(modules, [self.scenario]))
        return self._servers[number]

    def _trial(self, plans: list[CrashPlan]) -> Trial:
        directory = self._directory / f"{next(self._trials):04}"
        directory.mkdir(parents=True)
        return Trial(plans=plans, directory=directory)

    def _prepare(self, trial: Trial) -> bool:
        """The life before all plans. Its files are copied for the next trial, unless there is a witness."""
        if self._prepared is not None:
            shutil.copytree(self._prepared, trial.directory, dirs_exist_ok=True)
            return True
        if self._live(trial, 1, CrashPlan()) is None:
            return False
        here = str(self._places(trial.directory)["store"]).startswith(str(trial.directory))
        if here and self._witness is None:
            self._prepared = self._directory / "prepared"
            shutil.copytree(trial.directory, self._prepared, ignore=shutil.ignore_patterns("*-shm", "outcome-*"))
        return True

    def _judged(self, trial: Trial, expected: Trial) -> Trial:
        """Judge a trial by what it left behind; delete its files if there was no problem."""
        trial.lines = trial.read()
        trial.problems += judge(trial, expected, self._check)
        if not trial.problems:
            shutil.rmtree(trial.directory)
        return trial

    def _try(self, plans: list[CrashPlan]) -> Trial:
        trial = self._trial(plans)
        witness = None
        if self._witness is not None:
            server = self._server(1)  # made in this thread: a server ends with the thread that makes it
            witness = _Witness(trial, lambda: self._live(trial, 0, CrashPlan(), server))
        if not self._prepares or self._prepare(trial):
            self._endure(trial, witness is not None)
        if witness is not None:
            trial.outcome = witness.ended() or Outcome()
        trial.lines = trial.read()
        return trial

    def _endure(self, trial: Trial, witnessed: bool) -> None:
        """One life under each plan, then others until one ends the scenario, unless a witness ends it."""
        first = 2 if self._prepares else 1
        for life in range(first, first + MAX_LIVES):
            plan = trial.plans[life - first] if life - first < len(trial.plans) else CrashPlan()
            ended = self._live(trial, life, plan)
            if ended is None:
                return
            if life == first:
                trial.operations, trial.later = ended.operations, ended.later
            if witnessed:
                if life - first + 1 == len(trial.plans):
                    return
            elif not ended.unfinished:  # perhaps before the last plan, whose point is then not reached
                trial.outcome = ended
                return
        trial.problems.append(f"it did not end in {MAX_LIVES} lives")

    def _live(self, trial: Trial, number: int, plan: CrashPlan, server: ForkServer | None = None) -> Outcome | None:
        """One process. None if it ended in a way that no plan explains."""
        found = trial.directory / f"outcome-{number}"
        later = number == 1 + self._prepares and self._baseline is not None and self._baseline.later
        argument = {
            "scenario": self.scenario,
            "arguments": self._arguments if self._sealed is None else [],
            "sealed": self._sealed,
            "config": {**self._places(trial.directory), **self._config, **self._settings(number)},
            "directory": str(trial.directory),
            "number": number,
            "plan": plan,
            "later": later,
            "outcome": str(found),
        }
        trial.lives += 1
        ending = (server or self._server()).run(
            Order("relight.testing.life:live", argument, str(trial.log), self._life_seconds)
        )
        planned = number == len(trial.plans) + self._prepares
        if ending.signal == signal.SIGKILL and plan.mode in KILLS:
            trial.kills += 1
            trial.fired = planned
            return Outcome(unfinished=True)
        if ending.signal == signal.SIGKILL and any(line.life == number for line in trial.facts("killed")):
            return Outcome(unfinished=True)
        if ending.signal or ending.code or not found.exists():
            trial.problems.append(f"life {number} ended with signal {ending.signal}, code {ending.code}")
            return None
        outcome = msgspec.json.decode(found.read_bytes(), type=Outcome)
        if planned:
            trial.fired = outcome.fired
            if plan.mode in ON_ARRIVAL and not outcome.fired and plan.operation <= len(outcome.operations):
                trial.problems.append(f"it came past {plan}, and nothing happened")
        return outcome

    def _settings(self, number: int) -> dict[str, Any]:
        return self._witness or {} if number == 0 else self._lives[min(number, len(self._lives)) - 1]


class _Witness:
    """Life 0, in its own server. It begins before the others ("ready" in the ledger), and reads when they are over."""

    def __init__(self, trial: Trial, live: Callable[[], Outcome | None]) -> None:
        self._trial = trial
        self._outcomes: list[Outcome | None] = []
        self._thread = threading.Thread(target=lambda: self._outcomes.append(live()))
        self._thread.start()
        while self._thread.is_alive() and not trial.facts("ready"):
            self._thread.join(POLL_SECONDS)

    def ended(self) -> Outcome | None:
        """Write that all other lives are over, and wait for the witness's outcome."""
        book = Ledger(self._trial.directory / "ledger")
        book.write(Line(what="over"))
        book.close()
        self._thread.join()
        return self._outcomes[0]


def explore(
    scenario: str | Flow[..., Any],
    *arguments: Any,
    keywords: Mapping[str, Any] | None = None,
    modes: Sequence[Mode] = MODES,
    config: Mapping[str, Any] | None = None,
    check: Check | None = None,
    directory: Path | None = None,
) -> Report:
    """Try every crash point of a scenario, or of a flow with these arguments. See the module's docstring."""
    with Explorer(scenario, arguments, keywords=keywords, config=config, check=check, directory=directory) as explorer:
        return explorer.explore(modes)
