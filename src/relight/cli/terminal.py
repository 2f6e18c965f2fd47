"""How all commands print."""

from __future__ import annotations

import inspect
import io
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

Command = TypeVar("Command", bound=Callable[..., Any])
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

# Output into a file or a pipe is not cut off: there is no narrow window.
_WIDE_COLUMNS = 500


def paragraphs(command: Command) -> Command:
    """The command, its docstring with one line for each paragraph: in its help, typer breaks the lines of all but the
    first where the source does."""
    found = re.split(r"\n\s*\n", inspect.getdoc(command) or "")
    command.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in found)
    return command


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
