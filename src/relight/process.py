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
    """This process, in the session `life`, which counts as alive until `mark_dead(life)`."""
    _LIVES.add(life)
    pid = os.getpid()
    stat = _stat(pid)
    return Process(machine=_machine(), pid=pid, started=0 if stat is None else _start_time(stat), life=life)


def mark_dead(life: str) -> None:
    """A session of this process is over."""
    _LIVES.discard(life)


def is_of_this_machine(process: Process) -> bool:
    """Whether that process is known to be one of this machine, and of this pid namespace."""
    return process.machine != "" and process.machine == _machine()


def is_dead(process: Process) -> bool:
    """Whether that process is known to be dead. False for one of another machine: nobody here can know."""
    if not is_of_this_machine(process):
        return False
    stat = _stat(process.pid)
    if stat is None:
        return not _exists(process.pid)
    started = _start_time(stat)
    if process.pid == os.getpid() and process.started == started:
        return process.life not in _LIVES
    return started == 0 or process.started not in (0, started)  # 0: it could not be read then


def _machine() -> str:
    """This boot of this machine, and the pid namespace: in a container, pids mean nothing outside. "" if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """What /proc tells of a process, from its state on; None if it shows none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()  # its name may hold spaces and brackets


def _start_time(stat: list[str]) -> int:
    """In clock ticks since boot; 0 for a zombie."""
    return 0 if stat[0] in "ZX" else int(stat[19])


def _exists(pid: int) -> bool:
    """Whether there is a process that /proc does not show: with hidepid=2 (systemd's ProtectProc=invisible) it shows none of
    other users."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # another user's
    except (ProcessLookupError, OverflowError):
        return False
    return True
