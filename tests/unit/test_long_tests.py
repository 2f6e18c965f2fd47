"""Which tests run when, and that none of them depends on luck or on how fast the machine is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import seeds

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


# -------------------------------------------------------------------------------------------------- seeds --


def test_every_seed_has_its_reason():
    for line in seeds.FILE.read_text().splitlines():
        if line and not line.startswith("#"):
            assert re.fullmatch(r"[a-z/]+ +\d+(-\d+)? +\S.*", line), line


def test_seeds_are_one_or_a_range(tmp_path, monkeypatch):
    file = tmp_path / "seeds.txt"
    file.write_text("# a comment\nkills 7 it failed\nkillsmore 1 no\n\nkills    10-12  why\n")
    monkeypatch.setattr(seeds, "FILE", file)
    assert seeds.known_seeds("kills") == [7, 10, 11, 12]
    with pytest.raises(AssertionError, match="no seeds for 'other'"):
        seeds.known_seeds("other")


# ----------------------------------------------------------------------------------------------------- ci --


def test_ci_checks_and_then_tries_the_fixed_seeds():
    last = (ROOT / ".ci" / "run").read_text().splitlines()[-2:]
    assert last == ["make check", "make soak-ci"]


COLLECT = """
import sys, pytest
for marks in sys.argv[1:]:
    pytest.main(["--collect-only", "-q", "tests/cluster/test_killing.py", *(["-m", marks] if marks else [])])
    print("=====")
"""


def collected(*marks: str) -> list[list[str]]:
    """The cases of one test that each of these expressions selects. "" is the selection without an expression."""
    command = [sys.executable, "-c", COLLECT, *marks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    answers = done.stdout.split("=====\n")[:-1]
    return [[line.partition("::")[2] for line in text.splitlines() if "::test_kills" in line] for text in answers]


def test_by_their_marks_tests_are_in_one_place_each():
    """A test that is marked for `make soak` is not in CI, also if it has the mark for CI, too."""
    in_test, in_ci, in_soak = collected("", "soak_ci and not soak", "soak or soak_ci")
    assert in_test == ["test_kills[sqlite-87]", "test_kills[postgres+etcd-87]"]
    assert "test_kills[postgres-87]" in in_ci
    assert not [one for one in in_ci if "random" in one or "for_long" in one]
    assert "test_kills[postgres-random]" in in_soak


# -------------------------------------------------------------------------------------------------- deadlines --

SHORT = re.compile(r"""result\((?:timeout=)?"(?:[1-9]|[1-5]\d)s"\)""")
DEADLINE = re.compile(r"^DEADLINE_SECONDS = ([\d.]+)", re.MULTILINE)


def test_a_result_is_waited_for_patiently():
    """A deadline that only bounds hanging costs nothing, and on a busy machine everything takes longer: a minute at least."""
    for file in TESTS:
        found = [line.strip() for line in file.read_text().splitlines() if SHORT.search(line)]
        assert not found, file
        for seconds in DEADLINE.findall(file.read_text()):
            assert float(seconds) >= 60, file


# ------------------------------------------------------------------------------------------------- test-steady --


def test_runs_are_counted_and_failures_named(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_skipped(): pass\n"
    )
    steady = [sys.executable, "-m", "tests.steady", "--runs", "1", "--busy-runs", "1", "--busy", "1"]
    command = [*steady, "--folder", str(tmp_path / "logs"), "--", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    heading, idle, busy, verdict = done.stdout.splitlines()
    assert heading.split()[:6] == ["run", "beside", "seconds", "passed", "failed", "skipped"]
    number, beside, _, *counts, name = idle.split()
    assert (number, beside, counts) == ("1", "idle", ["1", "1", "1"])
    assert name.endswith("test_some::test_bad")
    assert busy.split()[:3] == ["2", "1", "busy"]
    assert verdict == "0 of 2 runs were green"
    assert "assert False" in (tmp_path / "logs" / "run-01.log").read_text()


# ------------------------------------------------------------------------------------------------- groups --


@pytest.mark.xdist_group("groups-are-kept")
def test_groups_of_tests_are_kept_together(request):
    """pytest-xdist adds a group's name to the id of a test, and distributes tests by that. With pytest 9.2 the id did
    not change, and every process started the servers of every group."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("the tests are not shared out by groups")
    assert request.node.nodeid.endswith("@groups-are-kept"), (
        "this pytest and this pytest-xdist do not keep groups together"
    )
