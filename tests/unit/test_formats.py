"""How this version reads what a newer version has written."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest

from relight.model.formats import compatible_since, not_understood
from relight.model.run import Hold, MessageKind, Status, message_of, run_of

ROW: dict[str, Any] = {"id": "r", "root_id": "r", "flow": "f", "created_at": 1.0, "updated_at": 2.0}


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("hold", [None, *Hold])
def test_what_is_known_reads_as_it_is(status: Status, hold: Hold | None):
    run = run_of(status.value, None if hold is None else hold.value, "why", **ROW)
    assert (run.status, run.hold, run.reason, run.newer) == (status, hold, "why", "")


def test_an_unknown_status_reads_as_held_for_a_newer_version():
    run = run_of("2:resting", None, "tired", **ROW)
    assert (run.status, run.hold) == (Status.PAUSED, Hold.UPGRADE)
    assert run.reason == f"{not_understood('its status', '2:resting')} (tired)"
    assert run.newer


def test_an_unknown_hold_of_a_run_that_has_ended_leaves_it_ended():
    assert run_of("paused", "2:quota", "", **ROW).status is Status.PAUSED
    ended = run_of("cancelled", "2:quota", "", **ROW)
    assert ended.status is Status.CANCELLED
    assert ended.newer


def test_an_unknown_message_keeps_its_kind_as_its_name():
    message = message_of("2:poke", "go", run_id="r")
    assert (message.kind, message.name) == (MessageKind.NEWER, "2:poke")
    assert message_of("signal", "go", run_id="r").kind is MessageKind.SIGNAL
    assert message_of("newer", "go", run_id="r").kind is MessageKind.NEWER


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_every_migration_since_says_with_what_it_can_be_shared(backend: str):
    scripts = sorted(files(f"relight.backends.{backend}").joinpath("migrations").iterdir(), key=lambda one: one.name)
    texts = [script.read_text() for script in scripts if script.name.endswith(".sql")]
    first = next(n for n, text in enumerate(texts, start=1) if text.startswith("-- compatible since "))
    for number, text in enumerate(texts, start=1):
        assert number < first or compatible_since(text, number) < number, f"migration {number} stops older processes"


def test_a_migration_that_does_not_say_so_stops_older_processes():
    assert compatible_since("CREATE TABLE x (y);", 9) == 9
    assert compatible_since("-- compatible since 0007\nCREATE TABLE x (y);", 9) == 7
