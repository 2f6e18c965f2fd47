"""Reports flow code that blocks the program's loop: no run in the process goes on meanwhile.

A thread looks four times a second whether the same stretch of flow code is still running as the last time. The thread
exists only while flows are executed: after a few idle looks it ends, and the next flow starts another.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Protocol

from relight.telemetry import Token, log

LONGEST_SECONDS = 1.0
LOOK_SECONDS = 0.25
IDLE_LOOKS = 20


class Executing(Protocol):
    """A run's loop, as the watch sees it."""

    run_id: str


class BlockingWatch:
    """One per engine. `RunningLoop` sets `executing` while flow code is executed, and counts in `stretches` how often
    it was. It does so on the loop's thread, without a call: a call would cost a short step several percent."""

    def __init__(self) -> None:
        self.executing: Executing | None = None
        self.stretches = 0
        self.thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._loop_thread = threading.get_ident()

    def start(self) -> None:
        self._loop_thread = threading.get_ident()
        thread = self.thread = threading.Thread(target=self._look, name="relight-watch", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            # The system has refused a thread: flows go on without a watch, and the next flow tries again.
            self.thread = None

    def stop(self) -> None:
        self._stopped.set()

    def _look(self) -> None:
        seen, reported, same, idle = -1, -1, 0, 0
        while not self._stopped.wait(LOOK_SECONDS):
            executing, stretches = self.executing, self.stretches
            same = same + 1 if executing is not None and stretches == seen else 0
            if executing is not None and same * LOOK_SECONDS >= LONGEST_SECONDS and stretches != reported:
                reported = stretches
                log(
                    logging.WARNING,
                    Token.FLOW_BLOCKS,
                    f"run {executing.run_id}: its flow has kept the event loop for more than {LONGEST_SECONDS:.0f}s without "
                    f"awaiting anything, at {place_of(self._loop_thread)}; every run of this process stands still meanwhile",
                )
            idle = idle + 1 if executing is None and stretches == seen else 0
            if idle >= IDLE_LOOKS:
                break
            seen = stretches
        self.thread = None


def place_of(ident: int) -> str:
    """What a thread executes right now: "file:line"."""
    frame = sys._current_frames().get(ident)  # noqa: SLF001 - documented, despite its underscore
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
