"""The demo's verdict must come from its ledger, and its exit code from the verdict."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import typer

from relight.cli import demo as command
from relight.cli.demo_flow import Ledger, Line

pytestmark = pytest.mark.timeout(120)


def relight(*arguments: str, cwd, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "relight.cli.main", *arguments],
        cwd=cwd,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_json_is_the_verdict_and_nothing_else(tmp_path):
    # A setting that would break the demo is not passed on to its processes.
    done = relight("demo", "--json", cwd=tmp_path, RELIGHT_RECOVERY_ENABLED="false")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r'\{"steps":20, "restored":\d+, "repeated":[01], "duplicated":0, "lost":0\}\n', done.stdout)
    verdict = json.loads(done.stdout)
    # Killed in the middle: what came before was restored, and only a step in flight was repeated.
    assert 10 <= verdict["restored"] <= 19
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_without_a_terminal_it_tells_the_story_once(tmp_path):
    done = relight("demo", "--steps", "6", "--db", "kept.db", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("process 1") == 1
    assert "SIGKILL" in done.stdout
    assert "0 finished steps ran twice, 0 lost" in done.stdout
    assert "\x1b" not in done.stdout

    # The ledger, and the run in the database that the verdict names, say the same.
    lines = Ledger(str(tmp_path / "kept.db.ledger")).read()
    assert {line.step for line in lines if line.event == "effect"} == set(range(1, 7))
    found = re.search(r"relight show (\S+) --db", done.stdout)
    assert found is not None
    shown = relight("show", found[1], "--db", "kept.db", "--steps", "--json", cwd=tmp_path)
    run = json.loads(shown.stdout)
    assert run["status"] == "completed"
    assert [one["output"] for one in run["operations"]] == [1, 4, 9, 16, 25, 36]


def test_on_a_terminal_it_is_live(tmp_path):
    main, terminal = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "relight.cli.main", "demo", "--steps", "4"],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    seen = b""
    with suppress(OSError):  # how a pty says that its other end is closed
        while part := os.read(main, 65536):
            seen += part
    os.close(main)
    assert child.wait(timeout=60) == 0, seen.decode()
    assert seen.count(b"process 1") > 3
    assert "✓" in seen.decode()


def test_a_database_that_exists_is_not_touched(tmp_path):
    (tmp_path / "mine.db").write_bytes(b"precious")
    done = relight("demo", "--db", "mine.db", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "relight: mine.db exists; the demo makes a database of its own: name a new file\n"
    assert (tmp_path / "mine.db").read_bytes() == b"precious"


def test_a_folder_that_is_missing_is_named(tmp_path):
    done = relight("demo", "--db", "no/where.db", cwd=tmp_path)
    assert done.returncode == 2
    assert "make the folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_takes_no_files_is_one_line(tmp_path):
    (tmp_path / "no.db.ledger").mkdir()  # as in a folder that is read-only: root may write into one
    done = relight("demo", "--db", "no.db", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("relight: no.db cannot be made: ")
    assert len(done.stderr.splitlines()) == 1


def test_an_error_in_the_demos_process_is_one_line(tmp_path):
    (tmp_path / "no.db-wal").mkdir()
    done = relight("demo", "--db", "no.db", cwd=tmp_path)
    assert done.returncode == 2
    assert "no.db" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- the verdict


def ledger(*lines: tuple[int, str, int]) -> list[Line]:
    return [Line(process, event, number) for process, event, number in lines]  # type: ignore[arg-type] # short to write


STORY = ledger(
    *((1, event, number) for number in (1, 2) for event in ("effect", "result")),
    (1, "effect", 3),  # in flight
    (2, "result", 1),
    (2, "result", 2),
    *((2, event, number) for number in (3, 4) for event in ("effect", "result")),
)


def test_a_kill_that_went_well():
    verdict = command.judge(STORY, 4)
    assert verdict == command.Verdict(steps=4, restored=2, repeated=1, duplicated=0, lost=0)
    assert verdict.good


def test_a_finished_step_that_ran_again_is_duplicated():
    verdict = command.judge([*STORY, *ledger((2, "effect", 1))], 4)
    assert (verdict.duplicated, verdict.repeated, verdict.restored) == (1, 1, 1)
    assert not verdict.good


def test_a_step_that_ran_twice_in_one_process_is_duplicated():
    verdict = command.judge([*STORY, *ledger((2, "effect", 4))], 4)
    assert verdict.duplicated == 1
    assert not verdict.good


def test_a_result_that_did_not_reach_the_restarted_flow_is_lost():
    assert command.judge([line for line in STORY if line != Line(2, "result", 2)], 4).lost == 1
    assert command.judge(STORY, 5).lost == 1


def test_a_result_that_no_step_computed_is_lost():
    assert command.judge([line for line in STORY if line != Line(2, "effect", 4)], 4).lost == 1


def test_a_kill_before_which_nothing_was_finished_proves_nothing():
    everything_again = ledger((1, "effect", 1), (2, "effect", 1), (2, "result", 1), (2, "effect", 2), (2, "result", 2))
    verdict = command.judge(everything_again, 2)
    assert (verdict.lost, verdict.duplicated, verdict.restored) == (0, 0, 0)
    assert not verdict.good


@pytest.mark.parametrize(("duplicated", "lost"), [(1, 0), (0, 1)])
def test_a_bad_verdict_is_exit_code_1(monkeypatch, capsys, duplicated, lost):
    bad = command.Verdict(steps=4, restored=2, repeated=1, duplicated=duplicated, lost=lost)
    monkeypatch.setattr(command.Scene, "play", lambda self: bad)
    with pytest.raises(typer.Exit) as ended:
        command.demo(steps=4, as_json=True)
    assert ended.value.exit_code == 1
    assert json.loads(capsys.readouterr().out) == {
        "steps": 4, "restored": 2, "repeated": 1, "duplicated": duplicated, "lost": lost,
    }  # fmt: skip


def test_half_a_line_is_not_read(tmp_path):
    kept = Ledger(str(tmp_path / "ledger"))
    assert kept.read() == []
    kept.append(Line(1, "effect", 1))
    with Path(kept.path).open("ab") as file:
        file.write(b'{"process":1,"eve')
    assert kept.read() == [Line(1, "effect", 1)]
