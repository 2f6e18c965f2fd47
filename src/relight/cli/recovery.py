"""`relight recovery`: what is unfinished, what recovery would do with it, and bringing a run back by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich.markup import escape

from relight.cli.database import Database, Modules, looking, modules_of
from relight.cli.listing import print_list
from relight.cli.runs import describe, local_time, status_text, utc_time
from relight.cli.terminal import AsJson, make_console, paragraphs
from relight.model.decisions import Action
from relight.recovery.plan import Planned

T = TypeVar("T")

app = typer.Typer(
    help="What is unfinished, what recovery would do with it and why; resume by hand.", no_args_is_help=True
)


Limit = Annotated[int, typer.Option("--limit", min=1, help="At most so many, the newest.")]


@app.command()
@paragraphs
def incomplete(db: Database = None, limit: Limit = 100, as_json: AsJson = False) -> None:
    """List unfinished root runs, newest first."""
    with looking(db) as rl:
        rows = rl.incomplete(limit + 1)
    rows = _shortened(rows, limit)
    if as_json:
        print(json.dumps([describe(row) for row in rows], indent=2))
        return
    console = make_console()
    if not rows:
        console.print("nothing is unfinished")
        return
    headings = ("run", "flow", "status", "owner", "created", "due")
    print_list(
        console,
        headings,
        [
            (
                escape(row.id),
                escape(row.flow),
                status_text(row),
                escape(row.owner or ""),
                local_time(row.created_at),
                local_time(row.wake_at),
            )
            for row in rows
        ],
    )
    for row in rows:
        if row.newer:
            console.print(f"run {escape(row.id)}: {escape(row.newer)}", soft_wrap=True)


@app.command()
@paragraphs
def plan(
    db: Database = None,
    module: Modules = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if any run would not go on: for deployment pipelines.")
    ] = False,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Say what recovery would do with unfinished runs, and why. Nothing is done.

    Import your flows with --module (or RELIGHT_MODULES): runs of a flow that is unknown here would be held. --check
    looks at every unfinished run, whatever --limit says, and first shows those that would not go on.
    """
    with looking(db, modules_of(module)) as rl:
        found = rl.plan(None if check else limit + 1)
    stuck = [one for one in found if one.stuck]
    shown = _shortened([*stuck, *(one for one in found if not one.stuck)] if check else found, limit)
    if as_json:
        print(json.dumps([as_dict(one) for one in shown], indent=2))
    else:
        _print_plan(shown)
    if check and stuck:
        print(f"relight: {len(stuck)} of {len(found)} unfinished runs would not go on", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
@paragraphs
def resume(
    run: Annotated[str, typer.Argument(help="The run's id.")],
    db: Database = None,
    module: Modules = None,
    as_json: AsJson = False,
) -> None:
    """Bring a run back by hand: an orphan, a held run, or a run that recovery has given up on.

    Then any orchestrator may take it up, also one whose recovery is off. A run that is alive, or has ended for good, is
    refused. This command drives nothing and needs no --module; with one, the message of a refusal may say more.
    """
    with looking(db, modules_of(module)) as rl:
        rl.resume(run)
        row = rl.call(rl.relight.row(run))
    if as_json:
        print(json.dumps(describe(row), indent=2))
    else:
        flow = escape(repr(row.flow))
        make_console().print(f"run {escape(run)} is free: an orchestrator that knows its flow {flow} takes it up")


def _shortened(found: Sequence[T], limit: int) -> Sequence[T]:
    """At most `limit` of them. If there are more, a line on stderr says so, because stdout may be JSON."""
    if len(found) > limit:
        print(f"relight: more than {limit}: raise --limit to see them", file=sys.stderr)
    return found[:limit]


def as_dict(planned: Planned) -> dict[str, Any]:
    """One line of the plan as JSON."""
    return {
        "run": planned.run_id,
        "flow": planned.flow,
        "status": planned.status.value,
        "owner": planned.owner,
        "action": planned.action.value,
        "reason": planned.reason,
        "until": utc_time(planned.until),
        "verdict": planned.verdict.value,
        "verdict_reason": planned.verdict_reason,
        "resumes_at": planned.resumes_at,
        "repeats": planned.repeats,
        "changed_steps": planned.changed_steps,
        "stuck": planned.stuck,
        "trouble": planned.trouble,
    }


_COLOURS = {Action.RESUME: "green", Action.LEAVE: "dim", Action.FINISH: "green"}


def _print_plan(found: Sequence[Planned]) -> None:
    console = make_console()
    if not found:
        console.print("nothing is unfinished")
        return
    rows = []
    for one in found:
        colour = "red" if one.stuck else _COLOURS.get(one.action, "yellow")
        notes = [one.reason]
        if one.stuck and one.verdict_reason != one.reason:
            when = "when it goes on" if one.owner is None else "if its owner stopped"
            notes.append(f"but {when}: {one.verdict_reason}")
        if one.repeats:
            notes.append(f"repeats {', '.join(one.repeats)}")
        if one.changed_steps:
            notes.append(f"changed since: {', '.join(one.changed_steps)}")
        action = f"[{colour}]{one.action.value}[/{colour}]"
        cells = escape(one.run_id), escape(one.flow), one.status.value, action, escape(one.resumes_at)
        rows.append((*cells, escape("; ".join(notes))))
    print_list(console, ("run", "flow", "status", "recovery would", "at", "reason"), rows)
