"""Which processes of this machine are known to be dead. The tests use real processes. A wrong "dead" would take the runs of a
living process away."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from relight import process
from relight.model.lease import Process
from relight.process import is_dead, mark_dead, this_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody is known to be dead")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its input is closed."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def seen(pid: int) -> Process:
    stat = process._stat(pid)
    assert stat is not None
    return Process(machine=process._machine(), pid=pid, started=process._start_time(stat), session="theirs")


def test_a_session_of_this_process_lives_until_it_is_buried():
    mine = this_process("mine")
    assert not is_dead(mine)
    mark_dead("mine")
    assert is_dead(mine)


def test_a_process_that_was_killed_is_dead_also_as_a_zombie(child: subprocess.Popen[bytes]):
    theirs = seen(child.pid)
    assert not is_dead(theirs)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still in the process table
    assert is_dead(theirs)
    child.wait()
    assert is_dead(theirs)


def test_a_pid_that_is_another_process_by_now_is_dead(child: subprocess.Popen[bytes]):
    theirs = seen(child.pid)
    assert is_dead(msgspec.structs.replace(theirs, started=theirs.started - 1))
    assert not is_dead(msgspec.structs.replace(theirs, started=0)), "its start could not be read then"
    assert not is_dead(msgspec.structs.replace(theirs, started=theirs.started - 1, machine="another"))


@pytest.fixture
def hiding(tmp_path: Path) -> Path:
    """A /proc that shows no other process, as with hidepid=2."""
    boot = tmp_path / "sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text(Path("/proc/sys/kernel/random/boot_id").read_text())
    (tmp_path / "self").symlink_to("/proc/self")
    return tmp_path


def test_a_process_that_proc_does_not_show_is_asked_for(
    child: subprocess.Popen[bytes], hiding: Path, monkeypatch: pytest.MonkeyPatch
):
    theirs = seen(child.pid)
    monkeypatch.setattr(process, "_PROC", hiding)
    assert not is_dead(theirs)
    child.kill()
    child.wait()
    assert is_dead(theirs)


ASKING = """
import os, sys
from pathlib import Path
import msgspec
from relight import process
from relight.model.lease import Process
theirs = msgspec.json.decode(sys.argv[1], type=Process)
process._machine = lambda: theirs.machine  # its folders may be closed to others
process._PROC = Path(sys.argv[2])
os.setgroups([])
os.setuid(65534)
try:
    os.kill(theirs.pid, 0)
except PermissionError:
    print(process.is_dead(theirs))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_process_that_proc_does_not_show_is_alive(hiding: Path):
    """As with systemd's ProtectProc=invisible: the system refuses a signal to the process, which shows that it exists."""
    theirs = msgspec.json.encode(seen(os.getpid())).decode()
    command = [sys.executable, "-c", ASKING, theirs, str(hiding)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_a_session_is_stored_under_the_name_that_older_rows_have():
    stored = b'{"machine":"here","pid":7,"started":8,"life":"a#1","trouble":"","leases":""}'
    read = msgspec.json.decode(stored, type=Process)
    assert read.session == "a#1"
    assert msgspec.json.encode(read) == stored
