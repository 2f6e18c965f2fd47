"""Crash points: every storage operation is numbered, and a process can be killed at each of them.

    before:k   SIGKILL this process before operation k
    after:k    SIGKILL it after operation k has been applied, before the caller hears of it
    raise:k    apply operation k, then raise StoreUnavailableError: the answer is lost, the process lives
    refuse:k   raise StoreUnavailableError instead of applying operation k: a fault that passes
    during:k   SIGKILL it in the middle of the k-th effect: in a step's body
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
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec

from relight.clock import SYSTEM_CLOCK
from relight.errors import StoreUnavailableError
from relight.flow.definitions import Flow
from relight.model import journal as j
from relight.model.run import Hold, ItemResult, Message, Page, Run, RunChange, RunFilter
from relight.ports.store import Commit, CommitResult, Committed, Store
from relight.testing.forkserver import ForkServer, Order, tail
from relight.testing.ledger import Audit, Ledger, Line, audit, read_ledger

T = TypeVar("T")
Mode = Literal["before", "after", "raise", "refuse", "during", "count"]
MODES: tuple[Mode, ...] = ("before", "after", "raise", "refuse", "during")
KILLS = ("before", "after", "during")
MAX_LIVES = 50  # of one trial: a scenario that does not end in so many processes never will


class CrashPlan(msgspec.Struct, frozen=True):
    """What happens at which operation."""

    mode: Mode = "count"
    operation: int = 0

    @classmethod
    def parse(cls, text: str) -> CrashPlan:
        """From "before:7"."""
        mode, _, number = text.partition(":")
        return msgspec.convert({"mode": mode, "operation": int(number or 0)}, cls)

    def __str__(self) -> str:
        return self.mode if self.mode == "count" else f"{self.mode}:{self.operation}"


class CrashingStore:
    """A Store that numbers the operations on another one and crashes at the planned one. Give it to `Relight(store=...)`."""

    def __init__(self, inner: Store, plan: CrashPlan, ledger: Ledger | None = None) -> None:
        self._inner = inner
        self._plan = plan
        self._ledger = ledger
        self.operations: list[str] = []  # their names, in the order of their numbers
        self.fired = False  # a planned raise or refusal has happened

    async def _do(self, name: str, operation: Coroutine[Any, Any, T]) -> T:
        self.operations.append(name)
        mode = self._plan.mode if self._plan.operation == len(self.operations) else None
        if mode == "before":
            self._die(name)
        if mode == "refuse":
            operation.close()
            self.fired = True
            raise StoreUnavailableError(f"crash point {self._plan}: {name}() was refused")
        result = await operation
        if mode == "after":
            self._die(name)
        if mode == "raise":
            self.fired = True
            raise StoreUnavailableError(f"crash point {self._plan}: the answer of {name}() was lost")
        return result

    def effect_begun(self, number: int) -> None:
        """The ledger's word that the so-and-so-manieth effect has begun."""
        if self._plan == CrashPlan("during", number):
            self._die("effect")

    def _die(self, name: str) -> None:
        if self._ledger is not None:
            self._ledger.write(Line(what="killed", label=f"{self._plan} {name}"))
        os.kill(os.getpid(), signal.SIGKILL)

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        return await self._do("commit", self._commit(commits))

    async def _commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        """Commit, and write down which steps are durable now: from here on they may not run again."""
        results = await self._inner.commit(commits)
        for commit, result in zip(commits, results, strict=True):
            if self._ledger is not None and type(result) is Committed:
                for entry in commit.entries:
                    line = _durable(commit.root_id, j.decode_event(entry))
                    if line is not None:
                        self._ledger.write(line)
        return results

    # ---- the port, one by one: a new method of it must show up here as a type error, not slip through unnumbered

    async def open(self) -> None:
        await self._do("open", self._inner.open())

    async def close(self) -> None:
        await self._do("close", self._inner.close())

    def watch(self, changed: Callable[[], None]) -> None:
        self._inner.watch(changed)

    async def get_run(self, run_id: str) -> Run | None:
        return await self._do("get_run", self._inner.get_run(run_id))

    async def get_runs(self, run_ids: Sequence[str]) -> list[Run]:
        return await self._do("get_runs", self._inner.get_runs(run_ids))

    async def list_runs(self, where: RunFilter) -> Page:
        return await self._do("list_runs", self._inner.list_runs(where))

    async def claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
        return await self._do("claim", self._inner.claim(epochs, owner))

    async def hold(self, epochs: dict[str, int], status: RunChange) -> None:
        await self._do("hold", self._inner.hold(epochs, status))

    async def due(self, now: float, limit: int) -> list[Run]:
        return await self._do("due", self._inner.due(now, limit))

    async def next_due(self) -> float | None:
        return await self._do("next_due", self._inner.next_due())

    async def held(self, hold: Hold, flows: Sequence[str], limit: int) -> list[Run]:
        return await self._do("held", self._inner.held(hold, flows, limit))

    async def post(self, messages: Sequence[Message]) -> list[int | None]:
        return await self._do("post", self._inner.post(messages))

    async def inbox(self, root_ids: Sequence[str]) -> list[Message]:
        return await self._do("inbox", self._inner.inbox(root_ids))

    async def messages_after(self, message_id: int, limit: int) -> list[Message]:
        return await self._do("messages_after", self._inner.messages_after(message_id, limit))

    async def item_results(self, run_id: str, key: str | None = None) -> list[ItemResult]:
        return await self._do("item_results", self._inner.item_results(run_id, key))

    async def put_blob(self, data: bytes) -> str:
        return await self._do("put_blob", self._inner.put_blob(data))

    async def get_blob(self, digest: str) -> bytes | None:
        return await self._do("get_blob", self._inner.get_blob(digest))

    async def read_from(self, root_id: str, sequence: int, limit: int) -> j.Journal:
        return await self._do("read_from", self._inner.read_from(root_id, sequence, limit))

    async def read(self, root_ids: Sequence[str]) -> list[j.Journal | Exception]:
        return await self._do("read", self._inner.read(root_ids))

    async def latest_sequence(self, root_id: str) -> int:
        return await self._do("latest_sequence", self._inner.latest_sequence(root_id))

    async def checkpoint(self, root_id: str, epoch: int, sequence: int, state: bytes) -> bool:
        return await self._do("checkpoint", self._inner.checkpoint(root_id, epoch, sequence, state))

    async def get_checkpoint(self, root_id: str) -> int | None:
        return await self._do("get_checkpoint", self._inner.get_checkpoint(root_id))

    async def list_active_roots(self, after: str | None, limit: int) -> list[Run]:
        return await self._do("list_active_roots", self._inner.list_active_roots(after, limit))


def _durable(root_id: str, event: j.AnyEvent) -> Line | None:
    """What a committed entry means to the audit."""
    if isinstance(event, j.StepCompleted | j.StepFailed | j.StepRetrying):
        ok = isinstance(event, j.StepCompleted)
        return Line(what="committed", run=root_id, key=event.key, attempt=event.attempt, ok=ok)
    if isinstance(event, j.ForeachCut):
        return Line(what="cut", run=root_id, key=event.key, index=event.index)
    if isinstance(event, j.RunRetrying):
        return Line(what="retrying", run=root_id, key=event.key)
    return None


async def patiently(operation: Callable[[], Awaitable[T]], tries: int = 20) -> T:
    """What a careful caller does: whoever hears StoreUnavailableError knows nothing, and asks again.

    Only for what may be asked twice: starting with an id, signalling with an id, waiting for a result.
    """
    for _ in range(tries - 1):
        try:
            return await operation()
        except StoreUnavailableError:
            pass
    return await operation()


# ---- exploring, in the process of the tests


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
        self._server = ForkServer(["relight.testing.life", self.scenario.partition(":")[0]])
        self._baseline: Trial | None = None
        self._trials = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server. What failed stays in the directory, to be looked at."""
        self._server.close()
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
        trial = self._try(list(plans))
        if not trial.problems:
            trial.problems += _judge(trial, expected, self._check)
        if not trial.problems:
            shutil.rmtree(trial.directory)
        return trial

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

    def _try(self, plans: list[CrashPlan]) -> Trial:
        directory = self._directory / f"{next(self._trials):04}"
        directory.mkdir(parents=True)
        trial = Trial(plans=plans, directory=directory)
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
        trial.lines = read_ledger(directory / "ledger")
        return trial

    def _live(self, trial: Trial, number: int, plan: CrashPlan) -> Outcome | None:
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
        ending = self._server.run(Order("relight.testing.life:live", argument, str(trial.log), self._life_seconds))
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
    wanted = audit(expected.lines).effects if check is None else []
    trial.audit = audit(trial.lines, wanted)
    problems = [f"lost: {name}" for name in trial.audit.lost]
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
