"""Cheap real processes for crash tests: one process imports everything once, and forks for every life.

A fresh interpreter takes 200 ms to import Relight and a scenario, a fork 5 ms; a crash exploration needs thousands. The
server must have no threads and no event loop when it forks, which a test runner cannot guarantee for itself. So the
server is a child process, with JSON lines over its stdin and stdout. Each forked child has its own log file and a
deadline, after which it prints where every thread is, and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from relight.errors import DefinitionError

PR_SET_PDEATHSIG = 1


class Order(msgspec.Struct):
    """What one child does: it calls the function `target` ("module:name") with `argument`."""

    target: str
    argument: Any
    log: str
    seconds: float


class Ending(msgspec.Struct):
    """How a child ended: by this signal, or with this exit code."""

    signal: int
    code: int


class ForkServer:
    """The parent's end. `modules` are imported before the first fork; a function among them ("module:name") is called. What
    is `needed` must be there; if it is not, the first order raises DefinitionError."""

    def __init__(self, modules: list[str], needed: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relight.testing.forkserver", *modules, "--", *needed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},  # noqa: PTH109
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders = self._process.stdin
        self._endings = self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, order: Order) -> Ending:
        """Fork a child for this order and wait for its end."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last line says why
            self._orders.write(msgspec.json.encode(order) + b"\n")
            self._orders.flush()
        answer = self._endings.readline()
        if not answer:
            raise RuntimeError(f"the fork server ended with code {self._process.wait()}; its stderr says why")
        found = msgspec.json.decode(answer, type=Ending | str)
        if isinstance(found, str):
            raise DefinitionError(found)
        return found

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self._endings.close()
        self._process.wait()


def _serve(modules: list[str], needed: list[str]) -> None:
    """In the server: fork one child after the other, until the parent closes stdin."""
    _die_with_parent()
    try:
        for module in modules:
            importlib.import_module(module.partition(":")[0])
            if ":" in module:
                find(module)()
        for target in needed:
            find(target)
    except (ImportError, DefinitionError) as error:
        sys.stdout.buffer.write(msgspec.json.encode(f"{', '.join(needed) or modules[0]}: {error}") + b"\n")
        sys.exit(1)
    gc.collect()
    gc.freeze()  # so that children share these pages for longer
    orders, endings = sys.stdin.buffer, sys.stdout.buffer
    for text in orders:
        order = msgspec.json.decode(text, type=Order)
        child = os.fork()
        if child == 0:
            _be_child(order)
        _, status = os.waitpid(child, 0)
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        ending = Ending(killed, 0 if killed else os.WEXITSTATUS(status))
        endings.write(msgspec.json.encode(ending) + b"\n")
        endings.flush()


def _be_child(order: Order) -> None:
    """In the child: call the target, and exit without the server's own clean-up. Never returns."""
    code = 1
    try:
        _die_with_parent()
        log = os.open(order.log, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), write_through=True)
        faulthandler.dump_traceback_later(order.seconds, exit=True, file=2)
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d %(levelname)s %(message)s", force=True)
        find(order.target)(order.argument)
        code = 0
    except BaseException:
        logging.getLogger("relight.testing").exception("the child failed")
    finally:
        os._exit(code)


def find(target: str) -> Callable[..., Any]:
    """The object that "module:qualified.name" names. The running program is not imported a second time under its own
    name: the second import would make other classes than those of its objects."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise DefinitionError(f"{target!r}: name it by its module and its name, as in 'shop.flows:checkout'")
    program = module == main_module() and module not in sys.modules
    found: Any = sys.modules["__main__"] if program else importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise DefinitionError(f"{target!r}: there is no {part!r} in {getattr(found, '__name__', module)}")
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def main_module() -> str:
    """The name under which another process can import the program that is running here."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec is not None else Path(getattr(main, "__file__", None) or "").stem


def _die_with_parent() -> None:
    """End this process with its parent: a killed test runner must not leave children that drive its databases."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def tail(log: Path, lines: int = 30) -> str:
    """The end of a child's log, for the message of a failure."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"


if __name__ == "__main__":
    divider = sys.argv.index("--")
    _serve(sys.argv[1:divider], sys.argv[divider + 1 :])
