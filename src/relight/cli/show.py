"""`relight show RUN`: one run, its row and what its journal holds."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from relight.cli.database import Database, looking
from relight.cli.runs import describe, local_time, payload, status_text
from relight.cli.terminal import AsJson, make_console
from relight.errors import CorruptionError
from relight.model.replay import Ending, Open, Outcome, TreeState, restore
from relight.model.run import Run

_ENDINGS = {
    Ending.OK: "done",
    Ending.ERROR: "failed",
    Ending.CANCELLED: "cancelled",
    Ending.TIMED_OUT: "timed out",
    Ending.GIVEN_UP: "given up",
    Ending.UNSEEN: "not heard of",
}


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
        # The store itself is asked, as `explain` would: the engine has no public way to read a journal.
        (journal,) = rl.call(rl.relight.services.store.read([row.root_id]))
    operations: list[dict[str, Any]] = []
    trouble: str | None = None
    try:
        if isinstance(journal, Exception):
            raise journal
        operations = _operations(restore(journal), row)
    except CorruptionError as error:
        trouble = str(error)
    if as_json:
        print(json.dumps({**describe(row), "operations": operations, "journal_error": trouble}, indent=2))
        return
    _print(row, operations, trouble, last or len(operations))


def _operations(state: TreeState, row: Run) -> list[dict[str, Any]]:
    """Everything recorded in this run (its child runs included), in journal order: ended, then begun and not ended."""
    prefix = "" if row.is_root else row.id.removeprefix(row.root_id + "/") + "/"
    ended = [(o.sequence, _ended(k, o)) for k, o in state.outcomes.items() if k and k.startswith(prefix)]
    begun = [(o.sequence, _begun(k, o)) for k, o in state.open.items() if k and k.startswith(prefix)]
    return [operation for _, operation in sorted(ended, key=_place) + sorted(begun, key=_place)]


def _place(found: tuple[int, dict[str, Any]]) -> int:
    return found[0]


def _ended(key: str, outcome: Outcome) -> dict[str, Any]:
    error = outcome.error
    return {
        "key": key,
        "kind": outcome.kind,
        "state": _ENDINGS[outcome.ending],
        "attempt": outcome.attempt,
        "output": payload(bytes(outcome.output), outcome.blob) if outcome.ending is Ending.OK else None,
        "error": None if error is None else f"{error.type.rpartition(':')[2]}: {error.message}",
    }


def _begun(key: str, begun: Open) -> dict[str, Any]:
    return {
        "key": key,
        "kind": begun.kind,
        "state": "waiting" if begun.kind == "wait" or begun.until is not None else "begun",
        "attempt": begun.attempt,
        "output": None,
        "error": None,
    }


def _print(row: Run, operations: list[dict[str, Any]], trouble: str | None, last: int) -> None:
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


def _table(operations: list[dict[str, Any]]) -> Table:
    table = Table("operation", "kind", "state", "attempt", "result", box=None, header_style="bold", pad_edge=False)
    for one in operations:
        result = one["error"] or ("" if one["output"] is None else _short(one["output"]))
        table.add_row(escape(one["key"]), one["kind"], one["state"], str(one["attempt"]), escape(result))
    return table


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else text[:99] + "…"
