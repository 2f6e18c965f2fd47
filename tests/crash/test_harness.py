"""The exploration itself: that it counts everything, judges rightly, and notices an engine that is broken."""

from __future__ import annotations

import datetime as dt
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relight.backends.memory import MemoryStore
from relight.clock import SYSTEM_CLOCK
from relight.errors import DefinitionError, PayloadError, StoreUnavailableError
from relight.ports.store import Store
from relight.testing.crashpoints import Check, CrashingStore, CrashPlan, Explorer, Mode, explore
from relight.testing.forkserver import Ending, Order, find
from relight.testing.ledger import Ledger, Line, audit, effect, read_ledger, seen
from tests.crash.checks import never_twice
from tests.crash.conftest import ForkServers
from tests.crash.shapes import Order as OrderOfSpoons
from tests.crash.shapes import typed

# ---- broken engines are noticed

BROKEN: dict[str, tuple[str, Check | None]] = {
    "no_waiting_for_commits": ("duplicated: crash-test/work", None),
    "no_start_in_the_journal": ("'crash-test/once#1 once 0': 2", never_twice),
    "no_recovery": ("duplicated: crash-test/work", None),
    "careless_flow": ("duplicated: crash-test/careless", None),
    "another_end_each_time": ("the outcome is 2 instead of 1", None),
    "forgetting_flow": ("lost: crash-test/forgetting", None),
}


@pytest.mark.parametrize("scenario", BROKEN)
@pytest.mark.parametrize(
    ("modes", "step"),
    [
        pytest.param(("after", "during"), 7, id="sample"),  # about as `make test` does it
        pytest.param(("before", "after", "during"), 4, marks=pytest.mark.soak_ci, id="more"),
    ],
)
def test_an_engine_broken_on_purpose_is_noticed(
    scenario: str, modes: tuple[Mode, ...], step: int, tmp_path: Path, fork_servers: ForkServers
) -> None:
    problem, check = BROKEN[scenario]
    servers = fork_servers("tests.crash.broken")
    with Explorer(f"tests.crash.broken:{scenario}", check=check, directory=tmp_path, servers=servers) as explorer:
        report = explorer.explore(modes, step=step)
    assert problem in str(report.problems)
    with pytest.raises(AssertionError, match="problems, of which the first"):
        report.check()


def test_a_scenario_that_fails_by_itself_is_told_at_once(tmp_path: Path) -> None:
    with (
        Explorer("tests.crash.shapes:leaf", directory=tmp_path) as explorer,  # a flow that needs an argument
        pytest.raises(AssertionError, match=r"(?s)fails without any crash.*leaf"),
    ):
        explorer.explore()


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("nope:flow", "nope:flow: No module named 'nope'"),
        ("tests.crash.shapes:nope", "there is no 'nope' in tests.crash.shapes"),
        ("tests.crash.shapes", "name it by its module and its name"),
    ],
)
def test_a_scenario_that_is_not_there_is_named(scenario: str, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        explore(scenario)


def test_a_flow_and_its_arguments_are_a_scenario() -> None:
    report = explore("tests.crash.shapes:leaf", "x", modes=("during",))
    report.check()
    assert (report.points, report.kills, report.repeated) == (1, 1, 1)
    assert "1 points, 1 kills" in str(report)


ORDER = OrderOfSpoons("spoon", 5)
NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize("flow", ["tests.crash.shapes:typed", typed], ids=["by name", "itself"])
@pytest.mark.parametrize("keywords", [None, {"tags": frozenset("ab"), "ratio": 0.5}], ids=["positional", "keywords"])
def test_a_flow_is_explored_with_whatever_it_takes(flow: Any, keywords: dict[str, Any] | None) -> None:
    report = explore(flow, ORDER, NOON, keywords=keywords, modes=("during",))
    report.check()
    assert (report.points, report.kills, report.repeated) == (1, 1, 1)
    (tags, ratio) = ("['a', 'b']", 0.5) if keywords else ("[]", 1.0)
    with Explorer(flow, [ORDER, NOON], keywords=keywords) as explorer:
        outcome = explorer.baseline.outcome.value
    assert outcome == {"status": "completed", "result": [f"spoon 5 2026 {tags} {ratio}"]}


SCRIPT = """
from dataclasses import dataclass
from relight import flow, step
from relight.testing.crashpoints import explore
from relight.testing.ledger import effect

@dataclass
class Amount:
    cents: int

@step
async def pay(cents: int) -> int:
    with effect():
        return cents

@flow
async def transfer(amount: Amount) -> int:
    return await pay(amount.cents)

if __name__ == "__main__":
    for flow_or_name in (transfer, "script:transfer"):
        report = explore(flow_or_name, Amount(250), modes=("during",))
        report.check()
        print(report.kills)
"""


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("shapes", "name it by its module and its name, as in 'shop.flows:checkout'"),
        ("tests.crash.shapes:", "name it by its module and its name"),
        ("tests.crash.shapes:nothing", "there is no 'nothing' in tests.crash.shapes"),
    ],
)
def test_a_wrong_path_is_refused_with_a_sentence(path: str, advice: str) -> None:
    with pytest.raises(DefinitionError, match=advice):
        find(path)


def test_a_program_explores_a_flow_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("1\n1\n", 0), done.stderr


def test_arguments_that_a_flow_does_not_take_are_refused_before_anything_is_started() -> None:
    with pytest.raises(PayloadError, match=r"argument \$.order.* of flow 'typed' cannot be journaled"):
        explore("tests.crash.shapes:typed", NOON, NOON)
    with pytest.raises(PayloadError, match="NaN does not survive JSON"):
        explore("tests.crash.shapes:typed", ORDER, NOON, keywords={"ratio": float("nan")})
    with pytest.raises(DefinitionError, match="is a scenario and no flow, and takes a list of JSON values"):
        explore("tests.crash.shapes:joined_by_others", ORDER)


def write_modules(path: str) -> None:
    """This function runs in a child of the fork server."""
    Path(path).write_text("\n".join(sys.modules))


def test_lives_find_the_backend_loaded_by_the_server_they_are_forked_from(tmp_path: Path) -> None:
    """If each life loaded it, an exploration would take twice as long."""
    with Explorer("tests.crash.shapes:ten_steps", directory=tmp_path) as explorer:
        order = Order("tests.crash.test_harness:write_modules", str(tmp_path / "modules"), str(tmp_path / "log"), 30.0)
        assert explorer._server().run(order) == Ending(0, 0)
    assert "relight.backends.sqlite.store" in (tmp_path / "modules").read_text().splitlines()


# ---- every operation is numbered


def test_the_store_wraps_every_operation_of_the_port() -> None:
    """A new method of the port must be counted too."""
    operations = {name for name, method in inspect.getmembers(Store, inspect.iscoroutinefunction)}
    wrapped = {name for name, method in vars(CrashingStore).items() if inspect.iscoroutinefunction(method)}
    assert operations == {name for name in wrapped if not name.startswith("_")}


async def test_operations_are_numbered_from_one() -> None:
    store = CrashingStore(MemoryStore(clock=SYSTEM_CLOCK), CrashPlan.parse("raise:2"))
    await store.open()
    with pytest.raises(StoreUnavailableError, match="raise:2: the answer of put_blob"):
        await store.put_blob(b"x")
    assert store.fired
    digest = await store.put_blob(b"x")
    assert await store.get_blob(digest) == b"x"
    assert store.operations == ["open", "put_blob", "put_blob", "get_blob"]


async def test_operations_are_numbered_from_where_it_begins() -> None:
    store = CrashingStore(MemoryStore(clock=SYSTEM_CLOCK), CrashPlan.parse("refuse:1"), later=True)
    await store.open()
    await store.put_blob(b"x")
    store.points.begin()
    with pytest.raises(StoreUnavailableError, match="refuse:1"):
        await store.put_blob(b"x")
    assert store.operations == ["put_blob"]


async def test_a_raise_commits_and_a_refusal_does_not() -> None:
    inner = MemoryStore(clock=SYSTEM_CLOCK)
    for plan, there in (("raise:1", b"raise:1"), ("refuse:1", None)):
        with pytest.raises(StoreUnavailableError):
            await CrashingStore(inner, CrashPlan.parse(plan)).put_blob(plan.encode())
        digest = await MemoryStore(clock=SYSTEM_CLOCK).put_blob(plan.encode())
        assert await inner.get_blob(digest) == there


@pytest.mark.parametrize("text", ["before:7", "after:1", "raise:3", "refuse:4", "during:5", "count"])
def test_plans_read_as_they_are_written(text: str) -> None:
    assert str(CrashPlan.parse(text)) == text


def test_an_unknown_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="somewhere"):
        CrashPlan.parse("somewhere:3")


# ---- the ledger


def line(what: str, key: str = "step", life: int = 1, **fields: object) -> Line:
    return Line(what=what, run="run", key=key, life=life, **fields)  # type: ignore[arg-type]


START, END, COMMITTED = line("start"), line("end"), line("committed")


def test_a_step_in_flight_may_be_repeated_once_per_kill() -> None:
    found = audit([START, END, line("start", life=2), line("start", life=3), line("end", life=3)], ["run/step#1"])
    assert found.repeated == ["run/step#1"] * 2
    assert found.duplicated == found.lost == []


def test_a_committed_step_may_not_be_repeated() -> None:
    found = audit([START, END, COMMITTED, line("start", life=2)])
    assert found.duplicated == ["run/step#1"]


def test_a_step_may_not_be_repeated_without_a_kill() -> None:
    assert audit([START, END, START]).duplicated == ["run/step#1"]


def test_a_step_may_not_be_repeated_once_the_flow_has_seen_its_result() -> None:
    first, second = line("start", label="pay"), line("start", label="pay", life=2)
    assert audit([first, second]).duplicated == []
    assert audit([first, Line(what="seen", label="pay", life=1), second]).duplicated == ["run/step#1 pay"]


def test_an_effect_that_never_finished_is_lost() -> None:
    assert audit([START], ["run/step#1", "run/other#1"]).lost == ["run/step#1", "run/other#1"]


def test_attempts_are_counted_apart() -> None:
    lines = [START, COMMITTED, line("start", attempt=2), line("end", attempt=2)]
    assert audit(lines).effects == ["run/step#1", "run/step#2"]
    assert audit(lines).duplicated == []


def test_what_a_cut_foreach_forgets_may_be_done_again() -> None:
    item = "$foreach[{index}@d]/step"
    done = [line(what, item.format(index=index)) for index in (0, 1) for what in ("start", "end", "committed")]
    again = [line("start", item.format(index=index), life=2) for index in (0, 1)]
    found = audit([*done, line("cut", "$foreach", life=2, index=1), *again])
    assert found.duplicated == ["run/$foreach[0@d]/step#1"]


def test_what_failed_in_a_flow_that_is_retried_may_be_done_again() -> None:
    failed = [START, line("failed"), line("committed", ok=False)]
    kept = [line("start", "kept"), line("end", "kept"), line("committed", "kept")]
    found = audit([*failed, *kept, line("retrying", ""), START, line("start", "kept")])
    assert found.duplicated == ["run/kept#1"]


def test_lines_are_durable_and_read_back(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "ledger", life=3)
    book.write(line("start", label="a\nb"))
    book.write(COMMITTED)
    book.close()
    assert read_ledger(tmp_path / "ledger") == [line("start", life=3, label="a\nb"), line("committed", life=3)]
    assert read_ledger(tmp_path / "none") == []


def test_outside_a_crash_test_nothing_is_written() -> None:
    with effect("anything"):
        seen("anything")
