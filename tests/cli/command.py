"""Runs the `relight` command as a process of its own, to its end. The process is forked from one that has loaded the command's
code, which takes a fifth of the time. `test_starting.py` tests that the command also starts in a new interpreter.
"""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from relight.testing.forkserver import ForkServer, Order

DEADLINE_SECONDS = 120.0  # a test waits for so long only if it fails

_server: list[ForkServer] = []


def relight(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `relight ARGUMENTS` in the folder `cwd`, with these variables beside those of the test."""
    if not _server:
        # The fork server dies with the thread that starts it. It is never closed: it ends when this process does.
        assert threading.current_thread() is threading.main_thread()
        _server.append(ForkServer(["relight.cli.main", "relight.backends.sqlite.store", "tests.cli.command"]))
    with tempfile.TemporaryDirectory(prefix="relight-command-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        argument = {
            "arguments": arguments,
            "cwd": str(cwd),
            "environ": {**os.environ, **environ},
            "out": str(out),
            "err": str(err),
        }
        ending = _server[0].run(Order("tests.cli.command:execute", argument, str(err), DEADLINE_SECONDS))
        code = -ending.signal if ending.signal else ending.code
        return subprocess.CompletedProcess(["relight", *arguments], code, out.read_text(), err.read_text())


def execute(order: dict[str, Any]) -> None:
    """Runs in the forked process, and never returns."""
    logging.getLogger().handlers.clear()  # as in a new interpreter
    logging.getLogger().setLevel(logging.WARNING)
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["cwd"])
    sys.path[0] = str(Path(sys.executable).parent)  # where the installed script is
    sys.argv = ["relight", *order["arguments"]]
    for number, path in ((1, order["out"]), (2, order["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False))
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), line_buffering=True)
    code = 0
    try:
        from relight.cli.main import app

        app(prog_name="relight")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
