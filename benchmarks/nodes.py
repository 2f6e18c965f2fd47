"""Orchestrators as real processes: started, signalled, and asked for what they have seen. They end with whoever started them.

A node is `python -m benchmarks.child module:function arguments`; it prints JSON, one line whenever it has something to tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, NotMeasuredError

PR_SET_PDEATHSIG = 1
ANSWER_SECONDS = 120.0
LINE_BYTES = 16_000_000  # 1,000 runs of ten steps are one line


# ---- in the node


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# ---- in the parent


class Node:
    """One process. What it writes on stderr goes to a file beside it, to be quoted when it fails."""

    def __init__(self, process: asyncio.subprocess.Process, handle: int, log: Path) -> None:
        self._process = process
        self._handle = handle
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    async def told(self) -> dict[str, Any]:
        """The next thing it tells. Raises NotMeasuredError when it ends instead, or says nothing for too long."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise NotMeasuredError(f"a node said nothing for {ANSWER_SECONDS:.0f} s; {self._last_words()}") from None
        if not line:
            raise NotMeasuredError(f"a node ended: {self._last_words()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def signal(self, number: signal.Signals) -> None:
        """By a handle of the process: asyncio's own way may reap it before asyncio does."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    async def ended(self) -> None:
        await self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"its log ends with: {lines[-1][:160]}" if lines else "its log is empty"


@contextlib.asynccontextmanager
async def node(place: Path, called: str, target: str, **arguments: Any) -> AsyncIterator[Node]:
    """A running node, killed at the end if it is still there."""
    log = place / f"{called}.log"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "benchmarks.child", target, json.dumps(arguments)),
            cwd=ROOT,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=LINE_BYTES,
        )
    handle = os.pidfd_open(process.pid)
    found = Node(process, handle, log)
    try:
        yield found
    finally:
        found.signal(signal.SIGKILL)
        await found.ended()
        os.close(handle)
        if process.stdout is not None:
            await process.stdout.read()  # to its end, so that the pipe is closed with the process and not with the loop
