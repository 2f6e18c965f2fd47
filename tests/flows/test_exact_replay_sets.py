"""Sets of tasks have the same order in every process. By memory address, the order would be different after each restart."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.flows import exact_replay_child as child

LIVES = 1  # eight tasks in random order have the same order as before in one of 40,320 cases


async def process(path: Path, shape: str, part: str, seed: int) -> Any:
    """The output of a new process, with its own hash seed and memory layout."""
    one = await asyncio.create_subprocess_exec(
        sys.executable,
        child.__file__,
        str(path),
        shape,
        part,
        str(seed),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
    )
    try:
        out, err = await asyncio.wait_for(one.communicate(), 60)
    finally:
        if one.returncode is None:
            one.kill()
    assert one.returncode == 0, err.decode()
    return json.loads(out) if out else None


@pytest.mark.parametrize("shape", sorted(child.SHAPES))
async def test_eight_branches_that_end_in_one_commit(tmp_path: Path, shape: str):
    for life in range(LIVES):
        path = tmp_path / f"{life}.db"
        await process(path, shape, "live", seed=life)
        found = await process(path, shape, "replay", seed=100 + life)
        assert isinstance(found, list), found
        assert {one for one in found if one.isdigit()} == {str(n) for n in range(child.BRANCHES)}
