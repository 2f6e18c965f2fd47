"""The `relight` command: one file per command, put together here.

Exit codes: 0 done, 1 the command's own answer is no (the demo found a loss), 2 the command could not be done (wrong
usage, no such database, no such run). An error is one line on stderr; stdout has only the command's output.
"""

from __future__ import annotations

from typing import Annotated

import typer

import relight
from relight.cli import recovery
from relight.cli.demo import demo
from relight.cli.explain import explain
from relight.cli.migrate import migrate
from relight.cli.orchestrator import orchestrator
from relight.cli.runs import runs
from relight.cli.show import show
from relight.cli.terminal import paragraphs

app = typer.Typer(
    name="relight",
    help="Durable workflows for Python. Kill anything at any time: nothing is lost, nothing finished runs twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(relight.__version__)
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


app.command()(paragraphs(demo))
app.command()(paragraphs(runs))
app.command()(paragraphs(show))
app.command()(paragraphs(explain))
app.add_typer(recovery.app, name="recovery")
app.command()(paragraphs(orchestrator))
app.command()(paragraphs(migrate))

if __name__ == "__main__":
    app()
