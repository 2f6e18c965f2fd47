"""A cluster of real orchestrator processes on one store, to be killed, frozen and restarted.

    async with Cluster("relight.db", folder=tmp_path, module="shop.node") as cluster:
        await cluster.start("a")
        await cluster.start("b")
        await cluster.kill("a")          # SIGKILL
        await cluster.freeze("b")        # SIGSTOP: it stands still, its connections stay open
        cluster.thaw("b")

The module is run as `python -m shop.node SETTINGS`, where SETTINGS is a `Node` as JSON. It opens a Relight with these
settings, prints one line with the name of its session when it drives runs (see `ready`), and ends when it gets a
signal. Nothing here sleeps: every wait is for a condition and has a deadline. Linux kills all nodes when the thread
ends that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from relight.clock import SYSTEM_CLOCK

DEADLINE_SECONDS = 60.0  # of every wait; a test waits for so long only if it fails
POLL_SECONDS = 0.005

# This program asks Linux to kill it when its parent ends, and becomes the module. (A preexec_fn would run in a fork of
# this process, whose other threads may have locks.)
_SHIM = """
import ctypes, os, runpy, sys
parent, module = int(sys.argv[1]), sys.argv[2]
if sys.platform == "linux":
    PR_SET_PDEATHSIG, SIGKILL = 1, 9
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != parent:
        sys.exit("whoever started this is gone")
sys.argv = [module, *sys.argv[3:]]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class Node(msgspec.Struct, kw_only=True, frozen=True):
    """The settings of an orchestrator process."""

    id: str  # unless `options` give another orchestrator_id
    store: str
    leases: str = "store"
    ttl_seconds: float = 2.0
    folder: str = ""
    options: dict[str, Any] = {}  # for Relight(...), as keywords
    arguments: dict[str, Any] = {}  # for the module itself

    def settings(self) -> dict[str, Any]:
        """The keywords for Relight(self.store, …). The node looks for orphans every half ttl, so that nothing depends
        on a push."""
        recovery = {"lease_ttl": self.ttl_seconds, "check_interval": max(self.ttl_seconds / 2, 0.1)}
        return {
            "leases": self.leases,
            "orchestrator_id": self.id,
            **self.options,
            "recovery": recovery | self.options.get("recovery", {}),
        }


def told() -> Node:
    """In the module: the settings of this process."""
    return msgspec.json.decode(sys.argv[1], type=Node)


def ready(owner: str) -> None:
    """In the module: this process drives runs, in a session of this name."""
    sys.stdout.write(f"{owner}\n")
    sys.stdout.flush()


class Process(msgspec.Struct, kw_only=True):
    """One life of a node, as its cluster knows it."""

    node: Node
    process: asyncio.subprocess.Process
    owner: str = ""  # its session; "" until it is ready
    frozen: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.returncode is None


class Cluster:
    """`folder` has the logs (one per node, over all its lives). The nodes get its name, and may write there.

    `environ` is added to the nodes' environment. Options of `start` (or of the whole cluster) are keywords for Relight,
    beside those that follow from the id and the ttl.
    """

    def __init__(
        self,
        store: str,
        leases: str = "store",
        *,
        folder: Path,
        ttl_seconds: float = 2.0,
        module: str,
        environ: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self._node = Node(
            id="", store=store, leases=leases, ttl_seconds=ttl_seconds, folder=str(folder), options=dict(options or {})
        )
        self._module = module
        self._environ = os.environ | dict(environ or {})
        self.processes: dict[str, Process] = {}  # the latest life of each

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all of them, at once."""
        for name in self.processes:
            await self.kill(name)

    # ---- life

    async def start(
        self,
        name: str,
        *,
        store: str | None = None,
        leases: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Process:
        """Start a node and wait until it drives runs. `store` and `leases` may be another way to the same servers: a proxy."""
        node = msgspec.structs.replace(
            self._node,
            id=name,
            store=store or self._node.store,
            leases=leases or self._node.leases,
            options=self._node.options | options,
            arguments=dict(arguments or {}),
        )
        return await self.until_ready(await self.launch(node))

    async def launch(self, node: Node) -> Process:
        """Start a process, and do not wait for it."""
        known = self.processes.get(node.id)
        assert known is None or not known.alive, f"{node.id} is running"
        command = [sys.executable, "-c", _SHIM, str(os.getpid()), self._module, msgspec.json.encode(node).decode()]
        with self._log(node.id).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal ends the tests, and they end the nodes
            )
        self.processes[node.id] = Process(node=node, process=process)
        return self.processes[node.id]

    async def until_ready(self, process: Process) -> Process:
        """Wait for its line. If the node ends before, raise an error with its log."""
        stdout = process.process.stdout
        assert stdout is not None
        async with asyncio.timeout(DEADLINE_SECONDS):
            line = await stdout.readline()
        if not line:
            await process.process.wait()
            raise RuntimeError(
                f"{process.node.id} did not start; its log ends with:\n{self.log(process.node.id)[-3000:]}"
            )
        process.owner = line.decode().strip()
        return process

    async def kill(self, name: str) -> None:
        """SIGKILL, and wait until the node is gone. If it has ended already, do nothing."""
        process = self.processes[name]
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                process.process.kill()
        await self.ended(name)

    async def freeze(self, name: str) -> None:
        """SIGSTOP. Returns when the node stands still."""
        process = self.processes[name]
        process.frozen = True
        process.process.send_signal(signal.SIGSTOP)
        await until(lambda: _state(process.pid) in "TZX", f"{name} to stand still")

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        process = self.processes[name]
        process.frozen = False
        process.process.send_signal(signal.SIGCONT)

    def terminate(self, name: str) -> None:
        """SIGTERM: the node closes gracefully. `ended` waits for that."""
        self.processes[name].process.terminate()

    async def ended(self, name: str, within: float = DEADLINE_SECONDS) -> int:
        """Wait until the node has ended. Returns its exit code, negative for a signal."""
        process = self.processes[name].process
        try:
            async with asyncio.timeout(within):
                code = await process.wait()
                if process.stdout is not None:
                    await (
                        process.stdout.read()
                    )  # to its end: the pipe is then closed with the process, not with the loop
                return code
        except TimeoutError:
            raise AssertionError(
                f"{name} has not ended within {within:g}s; its log:\n{self.log(name)[-3000:]}"
            ) from None

    async def restart(self, name: str) -> Process:
        """Begin the next life, with the same settings. A node that still runs is killed first."""
        await self.kill(name)
        return await self.until_ready(await self.launch(self.processes[name].node))

    # ---- looking

    def owner(self, name: str) -> str:
        """The session of the node's latest life."""
        return self.processes[name].owner

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        """The log of all lives of the node so far."""
        path = self._log(name)
        return path.read_text(errors="replace") if path.exists() else ""

    async def logs(self, name: str, text: str, within: float = DEADLINE_SECONDS) -> None:
        """Wait until the node has logged this."""
        await until(lambda: text in self.log(name), f"{name} to log {text!r}", within)


async def until(
    condition: Callable[[], Any],
    what: str = "",
    within: float = DEADLINE_SECONDS,
    poll: float = POLL_SECONDS,
) -> Any:
    """Call the condition again and again until its result is true, and return the result. AssertionError after the deadline."""
    deadline = SYSTEM_CLOCK.monotonic() + within
    while True:
        found = condition()
        value = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if SYSTEM_CLOCK.monotonic() > deadline:
            raise AssertionError(f"waited {within:g}s in vain for {what or inspect.getsource(condition).strip()}")
        await pause(poll)


async def pause(seconds: float) -> None:
    """Let time pass: between two checks, or between two strikes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


def _state(pid: int) -> str:
    """What Linux says about a process: R, S, T (stopped), Z, … X: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
