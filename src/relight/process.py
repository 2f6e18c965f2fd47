"""Which process this is, and whether another process of the same machine is dead.

A killed orchestrator leaves a session that looks alive until its lease lapses. A process of the same machine can know
at once that the orchestrator is dead: its pid is gone, or belongs to a process that was started later.
"""

from __future__ import annotations

import os
from pathlib import Path

from relight.model.lease import Process

_SESSIONS: set[str] = set()  # the owners of this process's open sessions
_PROC = Path("/proc")


def this_process(session: str, leases: str = "") -> Process:
    """This process, in this session, which counts as alive until `mark_dead(session)`."""
    _SESSIONS.add(session)
    pid = os.getpid()
    stat = _stat(pid)
    started = 0 if stat is None else _start_time(stat)
    return Process(machine=_machine(), pid=pid, started=started, session=session, leases=leases)


def mark_dead(session: str) -> None:
    """A session of this process is over."""
    _SESSIONS.discard(session)


def is_of_this_machine(process: Process) -> bool:
    """Whether that process is known to be one of this machine, and of this pid namespace."""
    return process.machine != "" and process.machine == _machine()


def is_dead(process: Process) -> bool:
    """Whether that process is known to be dead. False for a process of another machine: that cannot be known here."""
    if not is_of_this_machine(process):
        return False
    stat = _stat(process.pid)
    if stat is None:
        return not _exists(process.pid)
    started = _start_time(stat)
    if process.pid == os.getpid() and process.started == started:
        return process.session not in _SESSIONS
    return started == 0 or process.started not in (0, started)  # process.started is 0 if it could not be read


def _machine() -> str:
    """This boot of this machine, and the pid namespace: a container's pids mean nothing outside it. "" if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None if /proc does not show the process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()  # the process's name may contain spaces and brackets


def _start_time(stat: list[str]) -> int:
    """In clock ticks since boot; 0 for a zombie."""
    return 0 if stat[0] in "ZX" else int(stat[19])


def _exists(pid: int) -> bool:
    """Whether there is a process that /proc does not show: with hidepid=2 (systemd's ProtectProc=invisible), /proc
    hides the processes of other users."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # the process exists, and is another user's
    except (ProcessLookupError, OverflowError):
        return False
    return True
