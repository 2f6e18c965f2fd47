"""What people read fits their terminal, and nothing that is there to be copied is cut; into a pipe nothing is padded."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from relight import Relight, RunFailedError, flow, step
from relight.cli.listing import print_facts, print_list
from tests.cli.command import relight

LONG_STEP = "a_step_with_such_a_long_name_that_its_key_alone_takes_most_of_eighty_columns"
REASON = (
    "ValueError: the shop at the corner, which is said to have had cups, has had no cups since the day before yesterday"
)
ESCAPES = re.compile(r"\x1b\[[\d;]*m")


@step(name=LONG_STEP)
async def listing_step() -> str:
    return "x" * 70


@flow
async def listing_flow() -> None:
    await listing_step()
    raise ValueError(REASON.partition(": ")[2])


@flow
async def listing_held() -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A database with two failed runs, one of which has an id that Relight made."""
    folder = tmp_path_factory.mktemp("listing")
    with Relight(folder / "relight.db") as rl:
        for run in (rl.start(listing_flow.with_id("short")), rl.start(listing_flow)):
            with pytest.raises(RunFailedError):
                run.result()
    with Relight(folder / "relight.db", drive=False) as rl:
        for run_id in ("held-1", "a-run-with-an-id-that-is-longer-than-others-held-2"):
            rl.start(listing_held.with_id(run_id))
    return folder


def ids(folder) -> list[str]:
    with Relight(folder / "relight.db", drive=False) as rl:
        return [run.id for run in rl.list().runs]


def on_a_terminal(*arguments: str, cwd) -> list[str]:
    done = relight(*arguments, cwd=cwd, FORCE_COLOR="1", COLUMNS="80", TERM="xterm")
    assert done.returncode == 0, done.stderr
    return [ESCAPES.sub("", line) for line in done.stdout.splitlines()]


def piped(*arguments: str, cwd) -> list[str]:
    done = relight(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


LISTS = [
    ("runs",),
    ("recovery", "plan"),
    ("recovery", "incomplete"),
    ("show", "short", "--steps"),
    ("explain", "held-1"),
]


@pytest.mark.parametrize("command", LISTS)
def test_eighty_columns_are_enough(folder, command):
    lines = on_a_terminal(*command, cwd=folder)
    assert max(map(len, lines)) <= 80, lines
    assert lines == [line.rstrip() for line in lines]


@pytest.mark.parametrize("command", LISTS)
def test_nothing_is_padded_or_wrapped_in_a_pipe(folder, command):
    lines = piped(*command, cwd=folder)
    assert lines == [line.rstrip() for line in lines]
    assert len(lines) <= len(on_a_terminal(*command, cwd=folder))


@pytest.mark.parametrize("shown", [on_a_terminal, piped])
def test_ids_reasons_and_keys_are_there_as_a_whole(folder, shown):
    runs = shown("runs", cwd=folder)
    assert set(ids(folder)) <= {word for line in runs for word in line.split()}
    assert " ".join(" ".join(runs).split()).count(REASON) == 2
    plan = shown("recovery", "plan", cwd=folder)
    assert {"held-1", "a-run-with-an-id-that-is-longer-than-others-held-2"} <= {
        word for line in plan for word in line.split()
    }
    assert " ".join(" ".join(plan).split()).count("flow 'listing_held' is not registered") == 2
    steps = shown("show", "short", "--steps", cwd=folder)
    assert LONG_STEP in {word for line in steps for word in line.split()}


def test_a_run_is_one_line_in_a_pipe(folder):
    heading, *lines = piped("runs", cwd=folder)
    assert len(lines) == len(ids(folder))
    assert heading.split() == ["run", "flow", "status", "created", "reason"]
    assert sum(line.endswith(REASON) for line in lines) == 2


def test_times_name_their_zone(folder):
    assert re.search(
        r"created +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z+-]\S+$",
        relight("show", "short", cwd=folder).stdout,
        re.MULTILINE,
    )
    assert len(re.findall(r" \d\d:\d\d:\d\d [A-Z+-]\S+", relight("runs", cwd=folder).stdout)) == len(ids(folder))


# ---- the three forms of a list


def printed(*rows: tuple[str, ...], width: int, terminal: bool = True) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None)
    print_list(console, ("run", "status", "reason"), rows)
    return file.getvalue().splitlines()


def test_a_list_that_fits_has_one_line_for_each_row():
    assert printed(("order-1", "done", ""), ("o", "paused", "gone"), width=30) == [
        "run      status  reason",
        "order-1  done",
        "o        paused  gone",
    ]


def test_the_reason_stands_below_where_there_is_no_room():
    assert printed(("order-1", "done", ""), ("o", "paused", "its flow is gone; import it again"), width=40) == [
        "run      status",
        "order-1  done",
        "o        paused",
        "    its flow is gone; import it again",
    ]


def test_a_long_id_stands_above_the_rest_and_is_never_broken():
    assert printed(("o" * 35, "done", "its flow is gone"), ("o", "paused", ""), width=40) == [
        "run",
        "  status",
        "o" * 35,
        "  done",
        "    its flow is gone",
        "o",
        "  paused",
    ]
    assert "o" * 90 in printed(("o" * 90, "done", ""), width=40)


def test_one_long_cell_does_not_move_all_rows_of_a_pipe():
    rows = printed(("o" * 300, "done", "x" * 700), ("o", "paused", "y"), width=80, terminal=False)
    assert rows[1] == "o" * 300 + "  done    " + "x" * 700
    assert len(rows[2]) < 80


def test_only_the_names_of_facts_are_dim():
    file = io.StringIO()
    console = Console(file=file, width=50, force_terminal=True, color_system="standard", _environ={})
    print_facts(console, [("run", "order-1")])
    assert file.getvalue() == "\x1b[2mrun\x1b[0m  order-1\n"


def test_facts_are_wrapped_beside_their_names():
    file = io.StringIO()
    print_facts(
        Console(file=file, width=50, force_terminal=True, color_system=None),
        [("run", "order-1"), ("reason", "its flow is gone, as is the module that had it; import it again")],
    )
    assert file.getvalue().splitlines() == [
        "run     order-1",
        "reason  its flow is gone, as is the module that",
        "        had it; import it again",
    ]
