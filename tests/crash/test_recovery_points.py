"""A recovering process is killed before and after every call to the store and to the lease manager, or the answer is
lost. Then another orchestrator must bring every run to the end that it would have come to without the kill.

The scenarios are in `estates.py`. They are judged as in `test_every_point.py`. In addition, the rows of runs that had
ended stay the same to the byte, epochs only grow, children end with their root, and no run is left that waits for a
restart.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from relight.ports.leases import LeaseManager
from relight.testing.crashing_leases import CrashingLeases
from relight.testing.crashpoints import Check, CrashPlan, Explorer, Mode, Report, Trial, own_leases
from relight.testing.ledger import read_ledger
from tests.crash.conftest import ForkServers, Verify
from tests.servers.etcd import EtcdServer
from tests.servers.postgres import PostgresServer

_names = count(1)
MODES: tuple[Mode, ...] = ("before", "after", "raise", "refuse")
MOST: dict[Mode, int] = {"before": 5, "after": 2, "raise": 3}

# A ttl that is longer than every trial: deaths are noticed because the processes are on this machine, and there is only
# one heartbeat. The process that is killed looks for orphans once, when it opens, so that its operations are the same
# in every trial. The process after it looks often.
SELDOM: dict[str, Any] = {"lease_ttl": "1h", "check_interval": "1h", "version_mismatch": "fail"}
OFTEN: dict[str, Any] = SELDOM | {"check_interval": "0.2s"}


def _life(name: str, recovery: Mapping[str, Any] = SELDOM, **options: Any) -> dict[str, Any]:
    return {"orchestrator_id": name, "recovery": dict(recovery), **options}


DEAD = _life("a", park_after="5ms", shutdown_grace="50ms")
NEXT = _life("c", OFTEN)


class Case(NamedTuple):
    scenario: str
    lives: list[dict[str, Any]]  # one prepares (if `prepares`), one is killed, one brings all to its end
    prepares: bool = True


CASES = {
    "another takes over": Case("estate", [DEAD, _life("b"), NEXT]),
    "restarted under the same id": Case("estate", [DEAD, _life("a"), NEXT]),
    "auto_resume is off": Case(
        "given_up", [DEAD, _life("b", SELDOM | {"auto_resume": False}), _life("c", OFTEN | {"auto_resume": False})]
    ),
    "too old to be resumed": Case(
        "given_up",
        [DEAD, _life("b", SELDOM | {"max_resume_age": "1ms"}), _life("c", OFTEN | {"max_resume_age": "1ms"})],
    ),
    "resumed by hand": Case("resumed_by_hand", [DEAD, _life("b", drive=False), NEXT]),
    "closing": Case("closing", [DEAD, NEXT], prepares=False),
}

Explorers = Callable[..., Explorer]


@pytest.fixture
def explorers(fork_servers: ForkServers) -> Iterator[Explorers]:
    """Explorers of the cases, by name. A witness takes the place of the last life."""
    made: list[Explorer] = []

    def make(name: str, *, witness: bool = False, **options: Any) -> Explorer:
        case = CASES[name]
        explorer = Explorer(
            f"tests.crash.estates:{case.scenario}",
            lives=case.lives,
            prepares=case.prepares,
            witness=case.lives[-1] if witness else None,
            servers=fork_servers("tests.crash.estates"),
            **{"places": own_leases, **options},
        )
        made.append(explorer)
        return explorer

    yield make
    for explorer in made:
        explorer.close()


def explored(explorer: Explorer, steps: Mapping[Mode, int]) -> Report:
    """One report on every n-th operation in each mode."""
    whole = Report(scenario=explorer.scenario)
    for mode, step in steps.items():
        one = explorer.explore((mode,), step=step)
        # How many there are depends on timing: batches are divided differently, and some calls come after some time.
        assert one.points, "no operation was reached"
        whole = whole.plus(one)
    return whole


def test_the_leases_wrap_every_operation_of_the_port() -> None:
    """As for the store: a new method of the port must be counted, too."""
    operations = {name for name, _ in inspect.getmembers(LeaseManager, inspect.iscoroutinefunction)}
    wrapped = {name for name, method in vars(CrashingLeases).items() if inspect.iscoroutinefunction(method)}
    assert operations == {name for name in wrapped if not name.startswith("_")}


# The time of each in `make test` is bounded. A kill "after" the k-th operation is much like one "before" the next.
@pytest.mark.timeout(600)  # a matrix of processes, however busy the machine is
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("another takes over", {"after": 7, "raise": 11}),
        ("restarted under the same id", {"after": 13}),
        ("auto_resume is off", {"after": 7, "raise": 11}),
        ("too old to be resumed", {"after": 13}),
        ("resumed by hand", {"before": 9, "after": 3, "raise": 4}),
        ("closing", {"after": 3, "raise": 3}),
        *(pytest.param(name, dict(MOST), marks=pytest.mark.soak_ci, id=f"{name}, most") for name in CASES),
    ],
)
def test_another_orchestrator_brings_every_run_to_its_end(
    name: str, steps: dict[Mode, int], explorers: Explorers, verify: Verify
) -> None:
    verify(explored(explorers(name), steps))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("another takes over", {"after": 13}),
        ("auto_resume is off", {"after": 13}),
        ("resumed by hand", {"after": 5}),
        ("closing", {"after": 2}),
        *(pytest.param(name, {"after": 3}, marks=pytest.mark.soak_ci, id=f"{name}, more") for name in CASES),
    ],
)
def test_an_orchestrator_that_was_there_all_the_time_needs_no_restart(
    name: str, steps: dict[Mode, int], explorers: Explorers, verify: Verify
) -> None:
    verify(explored(explorers(name, witness=True), steps))


# ---- a message comes while the run is being paused


def _told(kind: str) -> Check:
    ends = {"cancel": ["cancelled", None, None, None], "resume": ["completed", None, '["r slow","r after"]', None]}

    def check(trial: Trial) -> None:
        found = trial.outcome.value
        if found == "it was never started":
            assert not trial.facts("accepted")
        else:
            assert found == {"r": ends[kind]}, f"{found} instead of {ends[kind]}"

    return check


@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", [{"after": 6}, pytest.param(dict.fromkeys(MODES, 1), marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["cancel", "resume"])
def test_a_message_in_the_moment_in_which_the_owner_pauses_the_run_and_dies(
    kind: str, steps: dict[Mode, int], verify: Verify
) -> None:
    """The other orchestrator has read the message and left it to the owner. The run must not wait for a restart."""
    with Explorer(
        "tests.crash.estates:told_while_paused",
        [kind],
        check=_told(kind),
        lives=[DEAD],
        places=own_leases,
        witness=_life("c"),
    ) as explorer:
        verify(explored(explorer, steps))
        if "after" in steps:  # and that commit in any case, however the operations before it are numbered
            commits = [n for n, name in enumerate(explorer.baseline.operations, 1) if name == "commit"]
            report = Report(scenario=f"{explorer.scenario}, when it is paused")
            for operation in range(commits[-1] - 1, commits[-1] + 2):
                report.add(explorer.endure([CrashPlan("after", operation)]))
            verify(report)


# ---- the row names another owner than the lease


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "steps", [{"after": 11, "raise": 13}, pytest.param(dict.fromkeys(MODES, 1), marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("when", ["claim", "owners"])
def test_the_process_that_corrects_an_owner_dies(
    when: str, steps: dict[Mode, int], etcd_server: EtcdServer, verify: Verify
) -> None:
    """The holder of the lease was not able to claim the run, and is not told of the correction. It has to look for it."""
    names: dict[Path, str] = {}

    def places(directory: Path) -> dict[str, Any]:
        prefix = names.setdefault(directory, f"wrong{next(_names)}")
        ledger = directory / "ledger"
        deadline = time.monotonic() + 120
        while _what(ledger, "killed") and not _what(ledger, "claiming"):
            time.sleep(0.005)  # between the lives 1 and 2: the witness has all leases before life 2 begins
            assert time.monotonic() < deadline, "the witness did not take over"
        return {"store": f"{directory}/app.db", "leases": f"etcd://{etcd_server.endpoint}/{prefix}"}

    with Explorer(
        "tests.crash.estates:wrong_owner",
        [when],
        lives=[DEAD, _life("b")],
        prepares=True,
        witness=_life("c", OFTEN),
        places=places,
    ) as explorer:
        assert "correct_owner" in explorer.baseline.operations
        verify(explored(explorer, steps))


def _what(ledger: Path, what: str) -> bool:
    return any(line.what == what for line in read_ledger(ledger))


# ---- everything


@pytest.mark.soak
@pytest.mark.parametrize("witness", [False, True], ids=["restart", "witness"])
@pytest.mark.parametrize("name", CASES)
def test_every_point_of_recovery(name: str, witness: bool, explorers: Explorers, verify: Verify) -> None:
    verify(explored(explorers(name, witness=witness), dict.fromkeys(MODES, 1)))


@pytest.fixture(params=["postgres", "postgres+etcd"])
def server_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Places on servers: a schema and a prefix for every trial."""
    server: PostgresServer = request.getfixturevalue("postgres_server")
    etcd = request.getfixturevalue("etcd_server") if request.param.endswith("etcd") else None
    url = server.create_database()
    names: dict[Path, str] = {}

    def places(directory: Path) -> dict[str, Any]:
        name = names.setdefault(directory, f"trial_{next(_names)}")
        leases = "store" if etcd is None else f"etcd://{etcd.endpoint}/{name}"
        return {"store": url, "db_schema": name, "leases": leases}

    return {"places": places}


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_every_point_of_recovery_on_servers(
    name: str, server_options: dict[str, Any], explorers: Explorers, verify: Verify
) -> None:
    verify(explored(explorers(name, **server_options), dict.fromkeys(("after", "raise"), 1)))
