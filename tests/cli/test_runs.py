"""The commands that look at a database: they change nothing, and say in one line what is wrong."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from relight import Relight, Retry, RunFailedError, continue_as, current_step, flow, foreach, step, wait_for
from relight.backends.sqlite.store import SqliteStore
from relight.clock import SYSTEM_CLOCK
from relight.handle import SMALL_JOURNAL_BYTES
from relight.model.operations import _ENDINGS
from relight.model.replay import Ending
from tests.cli.command import relight


@step(retry=Retry(attempts=2))
async def cli_add(a: int, b: int) -> int:
    return a + b


@step
async def cli_fail(what: str) -> None:
    raise ValueError(f"no {what}")


@flow
async def cli_child(n: int) -> int:
    return await cli_add(n, 1)


@flow
async def cli_parent(n: int) -> int:
    return await cli_child(await cli_add(n, n))


@step(retry=Retry(attempts=2))
async def cli_twice() -> None:
    if current_step().attempt == 1:
        raise OSError("not yet")


@flow
async def cli_flaky() -> None:
    await cli_twice()


@flow
async def cli_broken() -> None:
    await cli_fail("[bold]luck[/bold]")


@flow
async def cli_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(cli_fail("cups"))


@step
async def cli_load(n: int) -> str:
    return "x" * 40_000


@flow
async def cli_import(count: int) -> int:
    return len(await foreach(range(count), cli_load))


@flow
async def cli_again(n: int, text: str) -> int:
    return n if n == 3 else continue_as(n + 1, text)


@flow
async def cli_waiting() -> str:
    await cli_add(1, 1)
    return str(await wait_for("go", timeout="1h"))


@pytest.fixture
async def folder(tmp_path):
    """A database with one run of each kind: completed, failed, waiting out of memory."""
    async with Relight(tmp_path / "relight.db", park_after="50ms") as rl:
        await rl.run(cli_parent.with_id("parent"), 2)
        broken = await rl.start(cli_broken.with_id("broken"))
        waiting = await rl.start(cli_waiting.with_id("waiting"))
        with pytest.raises(Exception, match="luck"):
            await broken.result()
        while (await waiting.describe()).owner is not None:  # parked; before that, closing would release it
            await rl.services.store.latest_sequence("waiting")
    return tmp_path


def test_runs_lists_newest_first(folder):
    done = relight("runs", cwd=folder)
    assert done.returncode == 0, done.stderr
    heading, *lines = done.stdout.splitlines()
    assert heading.split() == ["run", "flow", "status", "created", "reason"]
    assert [line.split()[:3] for line in lines] == [
        ["waiting", "cli_waiting", "waiting"],
        ["broken", "cli_broken", "failed"],
        ["parent", "cli_parent", "completed"],
    ]


def test_runs_filters_and_gives_json(folder):
    def ids(*arguments: str) -> list[str]:
        return [run["id"] for run in json.loads(relight("runs", "--json", *arguments, cwd=folder).stdout)]

    assert ids() == ["waiting", "broken", "parent"]
    assert ids("--status", "failed", "--status", "waiting") == ["waiting", "broken"]
    assert ids("--flow", "cli_parent") == ["parent"]
    assert ids("--limit", "1") == ["waiting"]
    assert ids("--status", "paused") == []
    (parent,) = json.loads(relight("runs", "--json", "--flow", "cli_parent", cwd=folder).stdout)
    assert (parent["status"], parent["input"], parent["output"]) == ("completed", {"n": 2}, 5)
    assert parent["created_at"].endswith("+00:00")


def test_runs_says_when_there_are_more(folder):
    assert "more than 2" in relight("runs", "--limit", "2", cwd=folder).stdout


def test_looking_changes_nothing(folder):
    def shown() -> dict[str, Any]:
        run: dict[str, Any] = json.loads(relight("show", "waiting", "--all", "--json", cwd=folder).stdout)
        for one in run["operations"]:
            assert one.pop("seconds") is not None  # which grow while it waits
        return run

    before = shown()
    assert before["status"] == "waiting"
    relight("runs", cwd=folder)
    assert shown() == before


def test_show_has_the_row_and_its_operations(folder):
    run = json.loads(relight("show", "parent", "--all", "--json", cwd=folder).stdout)
    assert run["status"] == "completed"
    assert [(one["key"], one["kind"], one["state"], one["output"]) for one in run["operations"]] == [
        ("cli_add", "step", "done", 4),
        ("cli_child/cli_add", "step", "done", 5),
        ("cli_child", "run", "done", 5),
    ]
    child = json.loads(relight("show", "parent/cli_child", "--all", "--json", cwd=folder).stdout)
    assert (child["root"], child["parent"]) == ("parent", "parent")
    assert (run["generation"], run["generation_input"], child["generation"]) == (1, run["input"], None)
    assert [one["key"] for one in child["operations"]] == ["cli_child/cli_add"]


async def test_the_arguments_of_the_current_generation_are_shown(tmp_path):
    async with Relight(tmp_path / "relight.db", payload_blob_threshold=1000) as rl:
        for run_id, text in (("small", "[b]x"), ("large", "x" * 2000)):
            await rl.run(cli_again.with_id(run_id), 1, text)
        small, large = await rl.explain("small"), await rl.explain("large")
    assert (small.generation, json.loads(small.input)) == (3, {"n": 3, "text": "[b]x"})
    assert large.input.startswith("blob ")
    shown = json.loads(relight("show", "small", "--json", cwd=tmp_path).stdout)
    assert shown["input"] == {"n": 1, "text": "[b]x"}
    assert (shown["generation"], shown["generation_input"]) == (3, {"n": 3, "text": "[b]x"})
    assert json.loads(relight("explain", "small", "--json", cwd=tmp_path).stdout)["input"] == small.input
    for command in ("show", "explain"):
        assert '{"n":3,"text":"[b]x"}' in relight(command, "small", cwd=tmp_path).stdout.replace(", ", ",").replace(
            ": ", ":"
        )
    blob = json.loads(relight("show", "large", "--json", cwd=tmp_path).stdout)["generation_input"]["blob"]
    assert large.input == f"blob {blob}"
    assert large.input in relight("explain", "large", cwd=tmp_path).stdout


def test_show_has_times_and_errors_of_attempts(tmp_path):
    folder = tmp_path
    with Relight(tmp_path / "relight.db") as rl:
        rl.run(cli_flaky.with_id("flaky"))
    run = json.loads(relight("show", "flaky", "--steps", "--json", cwd=folder).stdout)
    (one,) = run["operations"]
    assert (one["attempt"], one["state"], one["error"], one["last_error"]) == (2, "done", None, "OSError: not yet")
    assert run["created_at"] <= one["started_at"] <= one["ended_at"] <= run["updated_at"]
    assert 0 <= one["seconds"] < 60
    shown = relight("show", "flaky", "--steps", cwd=folder, COLUMNS="250").stdout
    assert "started" in shown
    assert "after OSError: not yet" in shown


def test_show_is_a_summary_unless_more_is_asked_for(folder):
    summary = relight("show", "parent", cwd=folder).stdout
    assert "2 done" in summary
    assert "cli_child" not in summary
    assert "--steps lists its steps" in summary
    found = json.loads(relight("show", "parent", "--json", cwd=folder).stdout)
    assert (found["step_counts"], found["progress"], found["journal_error"]) == ({"done": 2}, [], None)
    assert found["journal_bytes"] > 0
    assert "operations" not in found


def test_show_lists_page_by_page(folder):
    def page(*arguments: str) -> tuple[list[str], str | None]:
        found = json.loads(relight("show", "parent", "--json", *arguments, cwd=folder).stdout)
        return [one["key"] for one in found["operations"]], found["next_cursor"]

    assert page("--steps") == (["cli_add", "cli_child/cli_add"], None)
    keys, cursor = page("--all", "--limit", "2")
    assert keys == ["cli_add", "cli_child/cli_add"]
    assert cursor is not None
    assert page("--all", "--limit", "2", "--after", cursor) == (["cli_child"], None)
    (last,), cursor = page("--newest", "--limit", "1")
    assert (last, cursor is not None) == ("cli_child/cli_add", True)
    assert page("--newest", "--limit", "1", "--after", str(cursor)) == (["cli_add"], None)
    assert page("--failed") == ([], None)
    text = relight("show", "parent", "--steps", "--limit", "1", cwd=folder).stdout
    assert "there are more: --after ended:" in text
    assert "cli_child" not in text
    assert "nothing to list" in relight("show", "parent", "--failed", cwd=folder).stdout
    done = relight("show", "parent", "--after", "nonsense", cwd=folder)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_tracebacks_are_shown_on_request(folder):
    for arguments in ((), ("--failed",)):
        assert "Traceback" not in relight("show", "broken", *arguments, cwd=folder).stdout
        assert "Traceback" not in relight("show", "broken", "--json", *arguments, cwd=folder).stdout
        shown = relight("show", "broken", "--traceback", *arguments, cwd=folder).stdout
        assert shown.count("Traceback (most recent call last)") == 1 + len(arguments)
        assert 'raise ValueError(f"no {what}")' in shown
    found = json.loads(relight("show", "broken", "--failed", "--json", "--traceback", cwd=folder).stdout)
    (step,) = found["operations"]
    assert (step["key"], step["state"]) == ("cli_fail", "failed")
    assert "in cli_fail" in step["traceback"]
    assert "in cli_broken" in found["error"]["traceback"]
    assert (
        "traceback" not in json.loads(relight("runs", "--json", "--flow", "cli_broken", cwd=folder).stdout)[0]["error"]
    )


def test_why_a_run_has_failed_is_said_in_the_list(folder):
    (failed,) = json.loads(relight("runs", "--json", "--status", "failed", cwd=folder).stdout)
    assert failed["reason"] == "ValueError: no [bold]luck[/bold]"
    assert "ValueError: no [bold]luck[/bold]" in relight("runs", cwd=folder).stdout


def test_of_an_exception_group_the_first_member_is_named(tmp_path):
    with Relight(tmp_path / "relight.db") as rl:
        run = rl.start(cli_group.with_id("group"))
        with pytest.raises(RunFailedError, match="the first is ValueError: no cups"):
            run.result()
    (failed,) = json.loads(relight("runs", "--json", cwd=tmp_path).stdout)
    said = "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception), the first is ValueError: no cups"
    assert failed["reason"] == said
    assert said in relight("show", "group", cwd=tmp_path).stdout


async def test_a_large_run_is_not_read_for_its_summary(tmp_path):
    """However much the run has done, the journal is not read, and may even be damaged."""
    async with Relight(tmp_path / "relight.db") as rl:
        await rl.run(cli_import.with_id("large"), 40)
        assert await rl.services.store.journal_bytes("large") > SMALL_JOURNAL_BYTES
        damaged = "UPDATE journal SET crc = crc + 1"
        await rl.services.store._write(lambda db: db.execute(damaged).fetchall())  # type: ignore[attr-defined]
    found = json.loads(relight("show", "large", "--json", cwd=tmp_path).stdout)
    assert found["progress"] == [{"key": "$foreach", "done": 40, "failed": 0, "total": 40}]
    assert (found["step_counts"], found["generation"]) == (None, None)
    text = relight("show", "large", cwd=tmp_path).stdout
    assert "40 of 40 done ($foreach)" in text
    assert "not counted in a journal of" in text
    assert "its journal cannot be read" in relight("show", "large", "--steps", cwd=tmp_path).stdout


def test_show_has_a_word_for_every_ending():
    assert set(_ENDINGS) == set(Ending)


def test_show_tells_errors_and_waits_to_people(folder):
    failed = relight("show", "broken", cwd=folder).stdout
    assert "ValueError: no [bold]luck[/bold]" in failed
    waiting = relight("show", "waiting", "--all", cwd=folder).stdout
    assert "$wait.go" in waiting
    assert "due" in waiting


async def test_show_of_a_corrupt_journal_says_where(folder):
    store = SqliteStore(folder / "relight.db", clock=SYSTEM_CLOCK)
    await store.open()
    await store._write(lambda db: db.execute("UPDATE journal SET event = x'00' WHERE sequence = 2").fetchall())
    await store.close()
    run = json.loads(relight("show", "parent", "--json", cwd=folder).stdout)
    assert run["status"] == "completed"
    assert "entry 2" in run["journal_error"]
    assert "its journal cannot be read" in relight("show", "parent", cwd=folder).stdout


@pytest.mark.parametrize("command", [["runs"], ["show", "x"], ["runs", "--json"]])
def test_a_missing_database_is_one_line_and_no_file(tmp_path, command):
    done = relight(*command, "--db", "none.db", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "relight: there is no database none.db; name one with --db or RELIGHT_STORE\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("store", "problem"),
    [
        (".", "is a directory"),
        ("text.txt", "is not a Relight database"),
        ("memory:", "memory: has nothing"),
        ("mysql://host/db", "there is no store for mysql:"),
        ("postgresql://127.0.0.1:1/d?pool_size=5", "there is no option 'pool_size'; a url takes connect_timeout, "),
        ("postgresql://127.0.0.1:1/d?target_session_attrs=foo", "target_session_attrs=foo is none of any, "),
        ("postgresql://127.0.0.1:1/d?connect_timeout=5", "127.0.0.1"),
        ("sqlite:///none.db", "there is no database none.db"),
    ],
)
def test_what_is_no_database_is_one_line(tmp_path, store, problem):
    (tmp_path / "text.txt").write_text("no database at all, but long enough to be looked at by SQLite" * 40)
    done = relight("runs", cwd=tmp_path, RELIGHT_STORE=store)
    assert done.returncode == 2
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "store",
    [
        "host=h password=hunter2 dbname=y",
        "postgresql//u:hunter2@h/x",
        "postgresql://u:hun@hunter2@h/x",
        "a.db?key=hunter2",
    ],
)
def test_what_may_be_a_password_is_not_shown(tmp_path, store):
    done = relight("runs", "--db", store, cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no database" not in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_run_is_one_line(folder):
    done = relight("show", "nobody", cwd=folder)
    assert (done.returncode, done.stderr) == (2, "relight: no run has the id 'nobody'\n")


def test_looking_imports_no_modules_of_the_user(folder):
    (folder / "trap.py").write_text("raise SystemExit('imported')")
    done = relight("runs", cwd=folder, RELIGHT_MODULES="trap", PYTHONPATH=f"{Path.cwd() / 'src'}:{folder}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [["recovery", "plan"], ["recovery", "resume"], ["orchestrator"], ["migrate"]])
def test_lines_of_help_break_where_the_terminal_does(tmp_path, command):
    done = relight(*command, "--help", cwd=tmp_path, COLUMNS="80", TERMINAL_WIDTH="80")
    text = done.stdout.partition("Usage:")[2].partition("╭")[0]
    lines = [line.strip() for line in text.splitlines()][1:]
    for line, following in pairwise(lines):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > 76, text


def test_the_command_lists_its_commands(tmp_path):
    done = relight("--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in ("demo", "runs", "show", "explain", "recovery", "orchestrator", "migrate"):
        assert command in done.stdout
