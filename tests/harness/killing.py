"""The kill harness: it kills and freezes orchestrators at random while runs are started, and audits what really
happened.

`torment` strikes by a schedule that follows from a seed (SIGKILL, SIGKILL while starting, SIGSTOP for a while, SIGTERM,
restart). Meanwhile a client starts runs, and writes down every run that was accepted. In the end all must have
finished, with the right result. Steps and flows write down what they did and got (see `tests.harness.deeds`), and no
committed step may have begun again.

What the harness does not notice: the store fences twice, by the epoch and by the journal's last sequence. If only the
epoch is ignored (on SQLite), the audit finds nothing, because the sequence still refuses stale writes. If both are
ignored, the audit fails within seconds. The conformance suite checks that the epoch is compared. A seed gives each node
the same sequence of strikes and pauses again. It gives neither the same interleaving nor the same number of strikes,
because the time that processes take differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol

import msgspec

from relight.clock import SYSTEM_CLOCK
from relight.engine import Relight
from relight.errors import StoreUnavailableError
from relight.model.run import Run, Status
from relight.telemetry import Token
from tests.harness.cluster import Cluster, pause, until
from tests.harness.deeds import Note, audit_deeds, open_book, read_book, stale_writes, write_down

OPEN_RUNS = 60  # the driver starts no more runs while so many have not ended
START_SECONDS = 0.03  # between two starts
LOOK_SECONDS = 0.2  # between two checks which runs have ended
UP_SECONDS = (0.1, 0.9)  # between two strikes of one node
KILLS = {"kill": 1, "restart": 1, "kill starting": 2, "freeze": 0, "terminate": 0}  # SIGKILLs of each kind of strike
WEIGHTS = {"kill": 4, "restart": 3, "kill starting": 2, "freeze": 3, "terminate": 2}
FINISH_SECONDS = 120.0  # for all runs to end, after all nodes are back


# ---- striking


class Workload(Protocol):
    """What the driver starts."""

    async def start(self, rl: Relight, run_id: str) -> None:
        """Start the run, and send it the signals that it waits for. Called again with the same id if the store did not
        answer."""
        ...

    def expected(self, run_id: str) -> Any:
        """The run's result."""
        ...


class Report(msgspec.Struct, kw_only=True):
    """What was done, and what the outcome was."""

    seed: int
    strikes: dict[str, int] = {}
    accepted: int = 0
    refused: int = 0  # runs that were not accepted at the first try: the store did not answer
    steps: int = 0
    lost: list[str] = []
    repeated: list[str] = []
    stale: list[str] = []
    in_flight: list[str] = []
    broken: list[str] = []  # lines of the logs that must not be there
    finish_seconds: float = 0.0  # from the last strike until all runs had ended

    @property
    def kills(self) -> int:
        """SIGKILLs."""
        return sum(count * KILLS[kind] for kind, count in self.strikes.items())

    @property
    def bound(self) -> float | None:
        """If n kills caused no failure, fewer than 3/n of all kills do harm, with 95 % confidence (the rule of three).
        None if there was a failure, or no kill: then the rule says nothing."""
        harmed = self.lost or self.repeated or self.stale or self.broken
        return None if harmed or not self.kills else 3 / self.kills

    def __str__(self) -> str:
        strikes = ", ".join(f"{count} {kind}" for kind, count in sorted(self.strikes.items()))
        harm = "" if self.bound is None else f"; harm per kill below {self.bound:.2%} (95 %)"
        return (
            f"seed {self.seed}: {strikes} ({self.kills} SIGKILLs); {self.accepted} runs accepted, {self.steps} steps begun; lost "
            f"{len(self.lost)}, committed steps repeated {len(self.repeated)}, stale writes {len(self.stale)}, steps in flight "
            f"repeated {len(self.in_flight)}; finished {self.finish_seconds:.1f}s after the last strike{harm}"
        )

    def check(self) -> None:
        """AssertionError with everything that must not happen."""
        wrong = {"lost": self.lost, "repeated": self.repeated, "stale": self.stale, "broken": self.broken}
        found = [f"{kind}: {one}" for kind, all_ in wrong.items() for one in all_[:20]]
        assert not found, "\n".join([str(self), *found])
        assert self.accepted, f"{self}: nothing was started, so nothing was tested"


class _Striker:
    """Strikes one node at random until it is told to stop. Then it brings the node back."""

    def __init__(self, cluster: Cluster, name: str, seed: int, ttl_seconds: float, strikes: Counter[str]) -> None:
        self._cluster = cluster
        self._name = name
        self._random = Random(f"{seed}/{name}")
        self._ttl = ttl_seconds
        self._strikes = strikes

    async def run(self, seconds: float) -> None:
        until_ = SYSTEM_CLOCK.monotonic() + seconds
        await pause(self._random.uniform(0, 1))
        while SYSTEM_CLOCK.monotonic() < until_:
            (kind,) = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))
            lasts = self._random.uniform(0.1, 1.8) * self._ttl
            self._strikes[kind] += 1
            await {
                "kill": self._kill,
                "restart": self._restart,
                "freeze": self._freeze,
                "terminate": self._terminate,
                "kill starting": self._kill_starting,
            }[kind](lasts)
            await pause(self._random.uniform(*UP_SECONDS))

    async def _kill(self, lasts: float) -> None:
        await self._cluster.kill(self._name)
        await pause(lasts)
        await self._cluster.restart(self._name)

    async def _restart(self, lasts: float) -> None:
        await self._cluster.restart(self._name)

    async def _freeze(self, lasts: float) -> None:
        await self._cluster.freeze(self._name)
        await pause(lasts)
        self._cluster.thaw(self._name)

    async def _terminate(self, lasts: float) -> None:
        self._cluster.terminate(self._name)
        await self._cluster.ended(self._name)
        await self._cluster.restart(self._name)

    async def _kill_starting(self, lasts: float) -> None:
        """The node's next life is killed while it opens the store or recovers. The life after that stays."""
        await self._cluster.kill(self._name)
        await self._cluster.launch(self._cluster.processes[self._name].node)
        await pause(0.2 + 0.4 * lasts / self._ttl)
        await self._cluster.restart(self._name)


class _Driver:
    """Starts runs all the time, through a client that drives none."""

    def __init__(self, rl: Relight, workload: Workload, prefix: str, report: Report) -> None:
        self._rl = rl
        self._workload = workload
        self._prefix = prefix
        self._report = report
        self.open: set[str] = set()
        self.ended: dict[str, Run] = {}

    async def run(self) -> None:
        for number in itertools.count(1):
            run_id = f"{self._prefix}-{number}"
            await self._start(run_id)
            write_down(Note(what="accepted", run=run_id, at=SYSTEM_CLOCK.now()))
            self._report.accepted += 1
            self.open.add(run_id)
            await pause(START_SECONDS)
            while len(self.open) >= OPEN_RUNS:
                await pause(LOOK_SECONDS)
                await self.look()

    async def _start(self, run_id: str) -> None:
        for number in itertools.count():
            try:
                await self._workload.start(self._rl, run_id)
            except StoreUnavailableError:
                self._report.refused += number == 0
                await pause(LOOK_SECONDS)
            else:
                return

    async def look(self) -> bool:
        """Whether all runs have ended."""
        with contextlib.suppress(StoreUnavailableError):
            rows = await self._rl.services.store.get_runs(list(self.open))
            self.ended |= {row.id: row for row in rows if row.status.terminal}
            self.open -= self.ended.keys()
        return not self.open

    async def lost(self) -> list[str]:
        """The runs that were accepted and have not ended as they should."""
        found = [f"{run_id} has not ended: {(await self._rl.explain(run_id)).sentence}" for run_id in sorted(self.open)]
        for run_id, row in self.ended.items():
            wanted = self._workload.expected(run_id)
            if row.status is not Status.COMPLETED or msgspec.json.decode(row.output or b"null") != wanted:
                found.append(f"{run_id}: {row.status} with {row.output!r} {row.error!r} {row.reason}, not {wanted!r}")
        return found


async def torment(
    cluster: Cluster,
    names: Sequence[str],
    rl: Relight,
    workload: Workload,
    *,
    book: Path,
    seed: int,
    seconds: float,
    ttl_seconds: float,
) -> Report:
    """Strike these nodes of the cluster for so long while `rl` starts runs. Then bring them back, and audit."""
    strikes: Counter[str] = Counter()
    report = Report(seed=seed)
    open_book(book, "driver")
    driver = _Driver(rl, workload, f"run{seed}", report)
    driving = asyncio.create_task(driver.run())
    try:
        await asyncio.gather(*(_Striker(cluster, name, seed, ttl_seconds, strikes).run(seconds) for name in names))
    finally:
        driving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driving
    began = SYSTEM_CLOCK.monotonic()
    with contextlib.suppress(AssertionError):  # then these runs are lost
        await until(driver.look, "all runs to end", FINISH_SECONDS, LOOK_SECONDS)
    report.finish_seconds = SYSTEM_CLOCK.monotonic() - began
    notes = read_book(book)
    deeds = audit_deeds(notes)
    report.strikes = dict(strikes)
    report.lost = await driver.lost()
    report.steps, report.repeated, report.in_flight = deeds.starts, deeds.repeated, deeds.in_flight
    report.stale = await stale_writes(rl, list(driver.ended.values()), notes)
    report.broken = complaints(cluster)
    return report


def complaints(cluster: Cluster) -> list[str]:
    """Lines of the logs that no crash may cause."""
    bad = (
        f"[{Token.INTERNAL_ERROR}]",
        f"[{Token.JOURNAL_CORRUPT}]",
        f"[{Token.NONDETERMINISM}]",
        "Traceback (most recent",
    )
    return [
        f"{name}: {line}"
        for name in cluster.processes
        for line in cluster.log(name).splitlines()
        if any(b in line for b in bad)
    ]
