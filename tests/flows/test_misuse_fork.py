"""os.fork after opening (gunicorn --preload): the child gets a clear error when it uses Relight, and the parent is not harmed."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "forking_child.py"
KIND = pytest.mark.parametrize("kind", ["async", "blocking"])


async def fork(path: Path, kind: str, action: str) -> dict[str, Any]:
    """The lines of child and parent. Both have ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        str(path),
        kind,
        action,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 60)
    except TimeoutError:
        pytest.fail(f"{kind}, {action}: parent or child hangs")
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own, for parent and child
            await process.wait()
    told: dict[str, Any] = {}
    for line in out.decode().splitlines():
        told.update(json.loads(line))
    assert process.returncode == 0, err.decode()
    return told


USES = {("async", "start"), ("async", "result"), ("async", "list"), ("blocking", "run"), ("blocking", "signal")}


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        pytest.param(kind, action, marks=() if (kind, action) in USES else pytest.mark.soak_ci)
        for kind in ("async", "blocking")
        for action in ("start", "run", "result", "signal", "list")
    ],
)
async def test_the_childs_use_is_refused_and_the_parent_goes_on(tmp_path: Path, kind: str, action: str):
    told = await fork(tmp_path / "relight.db", kind, action)
    assert "Error: " in str(told["child"]), told
    assert "fork" in told["child"]
    assert told["parent"] == [6, "from the parent"]


@KIND
async def test_a_child_that_leaves_the_with_block_ends_nothing_of_the_parents(tmp_path: Path, kind: str):
    told = await fork(tmp_path / "relight.db", kind, "leave")
    assert told["parent"] == [6, "from the parent"]
    assert told["child"] is None or "fork" in told["child"]


@KIND
async def test_a_child_may_open_a_relight_of_its_own(tmp_path: Path, kind: str):
    told = await fork(tmp_path / "relight.db", kind, "open another")
    assert told["child"] == 8
    assert told["parent"] == [6, "from the parent"]
