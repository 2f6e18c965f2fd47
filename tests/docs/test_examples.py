"""Every example runs, and does what its page says, also if it is run again or dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(tmp_path):
    def run_example(name: str, *arguments: str, expect: int = 0) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-W", "error", EXAMPLES / f"{name}.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run_example


def test_every_example_is_tested_and_listed():
    names = {file.stem for file in EXAMPLES.glob("*.py")}
    page = (EXAMPLES / "README.md").read_text()
    source = Path(__file__).read_text()
    assert {name for name in names if source.count(f'run("{name}"') >= 2} == names  # run again, as the page promises
    assert {name for name in names if f"({name}.py)" in page} == names


def test_checkout(run):
    first = run("checkout")
    assert first == [
        "shipping tea",
        "shipping cup",
        "shipping spoon",
        "order-1: approved by Grace: 3 parcels",
    ]
    assert run("checkout") == first[-1:]
    refused = run("checkout", "--refuse")
    assert refused == [
        "refunding charge order-2/charge",
        "order-2: refused by Grace",
    ]
    assert run("checkout", "--refuse") == refused[-1:]


def test_subscription(run):
    first = run("subscription")
    assert first == [
        "charging Ada for basic, idempotency key ada/charge",
        "charging Ada for gold, idempotency key ada/@2/charge",
        "goodbye, Ada",
        "Ada stayed for 2 months",
        "the run is in generation 2",
    ]
    assert run("subscription") == first[-2:]


def test_import_orders(run):
    killed = run("import_orders", "--die-at", "4", expect=-signal.SIGKILL)
    assert killed == ["extracting orders", *(f"loading {n}: ORDERS {n}" for n in range(5))]
    # Item 4 was in flight and is loaded again; nothing before it is, and the source is not read again.
    assert run("import_orders") == [
        *(f"loading {n}: ORDERS {n}" for n in range(4, 8)),
        "characters loaded: 64",
    ]
    assert run("import_orders") == ["characters loaded: 64"]


def test_agent(run):
    first = run("agent")
    said = [line.split(maxsplit=1)[1] for line in first]
    assert said[0] == "Plan a trip to Vienna."
    assert said[2:] == [
        "search: trains to Vienna",
        "3 results for 'trains to Vienna'",
        "ask: Which day?",
        "On Friday.",
        "research: hotels in Vienna",
        "report on hotels in Vienna: 3 results for 'hotels in Vienna'",
        "answer: Train at 9:12, and a hotel near the station.",
    ]
    assert run("agent") == first


def test_billing(run):
    first = run("billing")
    assert [line.split(maxsplit=2)[2] for line in first[:3]] == ["to Ada: 3.30", "to Grace: 4.95", "to Linus: 5.50"]
    assert first[3] == "billing-2026-11: 3 invoices, completed"
    assert run("billing") == first[3:]


def test_orchestrator(run, tmp_path):
    others = [
        subprocess.Popen(
            [sys.executable, "-W", "error", EXAMPLES / "orchestrator.py", name],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    try:
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline().endswith(" drives runs\n")
        expected = [f"album-{n}: {n}.jpg (small), {n}b.jpg (small)" for n in range(4)]
        assert run("orchestrator", "--client") == expected
        for other in others:
            other.terminate()
        said = [other.communicate(timeout=120)[0] for other in others]
        assert said == ["one has stopped\n", "two has stopped\n"]
        assert [other.returncode for other in others] == [0, 0]
        assert run("orchestrator", "--client") == expected  # finished: their results come from the store
    finally:
        for other in others:
            other.kill()
            other.wait()
