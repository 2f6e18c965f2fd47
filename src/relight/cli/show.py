"""`relight show RUN`: one run, its row and what its journal holds."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from relight.cli.database import Database, looking
from relight.cli.runs import describe, local_time, payload, status_text, utc_time
from relight.cli.terminal import AsJson, make_console
from relight.errors import CorruptionError, UpgradeRequiredError
from relight.handle import read_state
from relight.model.operations import OperationReport, operations
from relight.model.replay import TreeState
from relight.model.run import Run


def show(
    run: Annotated[str, typer.Argument(help="The run's id; a child run's id has its root's before the first slash.")],
    db: Database = None,
    last: Annotated[
        int, typer.Option(min=0, help="Of more operations than this, show only the last; 0: all. --json has all.")
    ] = 1000,
    as_json: AsJson = False,
) -> None:
    """Show one run: its row, and every operation in its journal."""
    with looking(db) as rl:
        row = rl.get(run).describe()
        reports: list[OperationReport] = []
        state: TreeState | None = None
        trouble: str | None = None
        try:
            state = rl.call(read_state(rl.relight, row))
            reports = operations(state, row, rl.relight.services.clock.now())
        except (CorruptionError, UpgradeRequiredError) as error:
            trouble = str(error)
    now = _generation(row, state)
    if as_json:
        listed = [operation_as_dict(one) for one in reports]
        print(json.dumps({**describe(row), **now, "operations": listed, "journal_error": trouble}, indent=2))
        return
    _print(row, now, reports, trouble, last or len(reports))


def _generation(row: Run, state: TreeState | None) -> dict[str, Any]:
    """Which generation of the run is the current one, and its arguments: the row has those of the first. None of a child run,
    which has no generations of its own, and where the journal cannot be read."""
    if state is None or state.created is None or not row.is_root:
        return {"generation": None, "generation_input": None}
    created = state.created
    return {"generation": state.generation, "generation_input": payload(bytes(created.input), created.input_blob)}


def operation_as_dict(one: OperationReport) -> dict[str, Any]:
    """An operation as JSON, in the same way as a run's row."""
    return {
        "key": one.key,
        "kind": one.kind,
        "state": one.state,
        "attempt": one.attempt,
        "started_at": utc_time(one.started_at),
        "attempt_started_at": utc_time(one.attempt_started_at),
        "ended_at": utc_time(one.ended_at),
        "seconds": None if one.seconds is None else round(one.seconds, 6),
        "until": utc_time(one.until),
        "deadline": utc_time(one.deadline),
        "output": None if one.output is None else payload(one.output, one.output_blob),
        "error": one.error,
        "last_error": one.last_error,
    }


def _print(row: Run, now: dict[str, Any], operations: list[OperationReport], trouble: str | None, last: int) -> None:
    console = make_console()
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    facts.add_row("run", escape(row.id))
    facts.add_row("flow", escape(row.flow))
    facts.add_row("status", status_text(row))
    if row.reason:
        facts.add_row("reason", escape(row.reason))
    facts.add_row("created", local_time(row.created_at))
    facts.add_row("updated", local_time(row.updated_at))
    if row.wake_at is not None:
        facts.add_row("due", local_time(row.wake_at))
    facts.add_row("input", escape(_short(payload(row.input, row.input_blob))))
    if (now["generation"] or 1) > 1:
        facts.add_row("generation", f"{now['generation']}, which began with {escape(_short(now['generation_input']))}")
    if row.output is not None:
        facts.add_row("output", escape(_short(payload(row.output, row.output_blob))))
    if row.error is not None:
        error = payload(row.error, "")
        facts.add_row("error", escape(f"{error['type'].rpartition(':')[2]}: {error['message']}"))
    console.print(facts)
    if trouble is not None:
        console.print(f"[red]its journal cannot be read:[/red] {escape(trouble)}")
    if operations:
        console.print()
        if len(operations) > last:
            console.print(f"[dim]{len(operations) - last} earlier operations are left out; --last 0 shows all[/dim]")
        console.print(_table(operations[-last:]))


def _table(operations: list[OperationReport]) -> Table:
    headings = ("operation", "kind", "state", "attempt", "started", "took", "result")
    table = Table(*headings, box=None, header_style="bold", pad_edge=False)
    for one in operations:
        table.add_row(
            escape(one.key),
            one.kind,
            one.state,
            str(one.attempt),
            local_time(one.started_at),
            "" if one.seconds is None else _duration(one.seconds),
            escape(_result(one)),
        )
    return table


def _result(one: OperationReport) -> str:
    """What came of it; of one that was tried more than once, how the last attempt failed."""
    if one.error is not None:
        return one.error
    parts = []
    if one.output is not None:
        parts.append(_short(payload(one.output, one.output_blob)))
    if one.until is not None and one.state in ("waiting", "backing off"):
        parts.append(f"until {local_time(one.until)}")
    if one.last_error is not None:
        parts.append(f"after {one.last_error}")
    return ", ".join(parts)


def step_text(one: OperationReport) -> str:
    """A step that is running or backing off, on one line."""
    took = "" if one.seconds is None else f", for {_duration(one.seconds)}"
    result = _result(one)
    return f"{one.key}, attempt {one.attempt}{took}" + (f", {result}" if result else "")


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.1f}ms" if seconds < 1 else f"{seconds:.1f}s"


def _short(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False))


def shortened(text: str) -> str:
    """For a line of a table."""
    return text if len(text) <= 100 else text[:99] + "…"
