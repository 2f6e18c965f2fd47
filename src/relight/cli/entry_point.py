"""What the installed `relight` script calls. It imports neither typer nor rich at its top: they come with the extra `cli`, and
without them the command says so in one line."""

from __future__ import annotations

import sys


def main() -> None:
    """The command, or what to install for it."""
    try:
        from relight.cli.main import app  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "relight":
            raise
        print(
            f"relight: the command needs the package {missing}, which is not installed: pip install 'relight[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    app()
