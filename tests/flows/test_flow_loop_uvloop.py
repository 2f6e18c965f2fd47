"""Under uvloop, flows behave as under asyncio's own loop, because they have a loop of their own."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvloop")
SCRIPT = Path(__file__).parent / "uvloop_child.py"


async def process(path: Path, part: str) -> Any:
    one = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        str(path),
        part,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(one.communicate(), 60)
    finally:
        if one.returncode is None:
            one.kill()
    assert one.returncode == 0, err.decode()
    return json.loads(out)


async def test_flows_run_park_crash_and_replay_under_uvloop(tmp_path: Path):
    path = tmp_path / "relight.db"
    said = await process(path, "live")
    assert "timed out" in said
    found = await process(path, "replay")
    assert found.pop("said") == ["released"]
    assert sorted(found.pop("saga")) == sorted(found_undone(said))
    assert found == {
        "race": next(one for one in said if one in ("one", "many")),
        "timing": "gone",
        "plain": "firstsecond",
        "leased": "enough",
        "task factory": "None",
    }


def found_undone(said: list[str]) -> list[str]:
    """What was booked and undone. `done` is the saga's result."""
    return [one.removeprefix("undo ") for one in said if one.startswith("undo ")]
