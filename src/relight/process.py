"""Which process this is, and whether another one of the same machine is dead.

A killed orchestrator leaves a session that looks alive until its lease lapses. Whoever starts on the same machine can tell
at once: its pid is gone, or belongs to a process that was started later.
"""

from __future__ import annotations

import os
from pathlib import Path

from relight.model.lease import Process

_LIVES: set[str] = set()  # the sessions of this very process that are open
_PROC = Path("/proc")


def this_process(life: str) -> Process:
    """This process, in the session `life`, which counts as alive until `bury(life)`."""
    _LIVES.add(life)
    pid = os.getpid()
    return Process(machine=_machine(), pid=pid, started=_started(pid) or 0, life=life)


def bury(life: str) -> None:
    """A session of this process is over."""
    _LIVES.discard(life)


def is_dead(process: Process) -> bool:
    """Whether that process is known to be dead. False for one of another machine: nobody here can know."""
    if not process.machine or process.machine != _machine():
        return False
    if process.pid == os.getpid() and process.started == (_started(process.pid) or 0):
        return process.life not in _LIVES
    return _started(process.pid) != process.started


def _machine() -> str:
    """This boot of this machine, and the pid namespace: in a container, pids mean nothing outside. "" if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When that process started, in clock ticks since boot; None if it is gone, or a zombie."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # its name may hold spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])
