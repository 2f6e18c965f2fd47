"""No log line, error or output of a command may show the password that stands in the URL of the tests' PostgreSQL.

`tests/conftest.py` has every test watched: each log record that is made, those for debugging included, each error of Relight's
that is raised, whether or not the test catches it, and what processes wrote to logs in the test's folder. Helpers that read a
process's output ask `shown`.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relight.errors import RelightError
from tests.servers.postgres import PASSWORD

LOG_FILES = ("*.log", "log", "*/*.log", "*/log")


def shown(text: str, where: str) -> list[str]:
    """Each place in a text that shows the password."""
    return [f"{where}: {line}" for line in text.splitlines() if PASSWORD in line]


@contextmanager
def watching() -> Iterator[list[str]]:
    """Watch this process. Each place that is found is added to the list."""
    found: list[str] = []
    make, plain = logging.getLogRecordFactory(), RelightError.__init__
    logger = logging.getLogger("relight")
    level = logger.level

    def record(*arguments: Any, **options: Any) -> logging.LogRecord:
        made = make(*arguments, **options)
        trace = "".join(traceback.format_exception(made.exc_info[1])) if made.exc_info else ""
        found.extend(shown(f"{made.getMessage()}\n{trace}", "log line"))
        return made

    def note(error: RelightError, *arguments: Any) -> None:
        found.extend(shown(" ".join(map(str, arguments)), f"message of {type(error).__name__}"))
        plain(error, *arguments)

    logger.setLevel(logging.DEBUG)  # of a record below the logger's level nothing is made that could be searched
    logging.setLogRecordFactory(record)
    RelightError.__init__ = note  # type: ignore[method-assign, assignment]  # also of errors that the test, or the engine, catches
    try:
        yield found
    finally:
        logging.setLogRecordFactory(make)
        logger.setLevel(level)
        RelightError.__init__ = plain  # type: ignore[method-assign]


def in_logs(folder: Path) -> list[str]:
    """The logs that the processes of a test have written into its folder."""
    files = {file for pattern in LOG_FILES for file in folder.glob(pattern) if file.is_file()}
    return [one for file in sorted(files) for one in shown(file.read_text(errors="replace"), f"log {file.name}")]
