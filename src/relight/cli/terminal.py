"""How all commands print."""

from __future__ import annotations

import io
import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

# Output into a file or a pipe is not cut off: there is no narrow window.
_WIDE_COLUMNS = 500


def fail(message: object) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"relight: {message}", file=sys.stderr)
    raise typer.Exit(2)


def make_console(*, quiet: bool = False) -> Console:
    """Stdout, for output that people read."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ✓ shows a question mark, not a traceback
    console = Console(quiet=quiet, highlight=False)
    return console if console.is_terminal else Console(quiet=quiet, highlight=False, width=_WIDE_COLUMNS)
