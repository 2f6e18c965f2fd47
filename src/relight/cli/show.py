"""`relight show RUN`: a summary of one run, and the operations in its journal, page by page.

The summary reads the run's row, counts the items of its foreachs, and reads the journal only if it is small. The
summary takes milliseconds for tens of thousands of items, and its time grows with their number.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from relight.blocking import BlockingRelight
from relight.cli.database import Database, looking
from relight.cli.listing import print_facts, print_list
from relight.cli.runs import describe, local_time, payload, status_text, utc_time
from relight.cli.terminal import AsJson, make_console
from relight.errors import CorruptionError, UpgradeRequiredError
from relight.handle import MOST_STEPS, SMALL_JOURNAL_BYTES, read_state
from relight.model.journal import ErrorRecord
from relight.model.operations import OperationReport, StepPage, count_steps, error_text, page
from relight.model.replay import TreeState
from relight.model.run import ForeachProgress, Run

SHOWN_FOREACHS = 20


class Listing(msgspec.Struct, frozen=True):
    """Which page of which operations is listed."""

    every_kind: bool
    failed: bool
    newest: bool
    limit: int
    after: str | None


class Found(msgspec.Struct):
    """What is known of a run. None: the journal was not read because it is large, or cannot be read (`trouble`)."""

    row: Run
    progress: list[ForeachProgress]
    journal_bytes: int
    now: float
    state: TreeState | None = None
    counts: dict[str, int] | None = None
    page: StepPage | None = None
    trouble: str | None = None


def show(
    run: Annotated[str, typer.Argument(help="The run's id; a child run's id has its root's before the first slash.")],
    db: Database = None,
    steps: Annotated[bool, typer.Option("--steps", help="List its steps, those of child runs included.")] = False,
    every_kind: Annotated[
        bool, typer.Option("--all", help="List every operation: steps, waits, child runs, items and values.")
    ] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="List only what has failed, or is tried again after a failure.")
    ] = False,
    newest: Annotated[bool, typer.Option("--newest", help="List the newest first.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=MOST_STEPS, help="List at most so many.")] = 50,
    after: Annotated[
        str | None, typer.Option("--after", metavar="CURSOR", help="List what comes after the last page's next cursor.")
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="With the tracebacks of errors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one run: where it is and how far it has come; its steps with --steps, --all or --failed."""
    lists = steps or every_kind or failed or newest or after is not None
    listing = Listing(every_kind=every_kind, failed=failed, newest=newest, limit=limit, after=after)
    with looking(db) as rl:
        found = _look(rl, run, listing if lists else None)
    if as_json:
        print(json.dumps(_as_dict(found, traceback=traceback), indent=2))
    else:
        _print(found, listing, traceback=traceback)


def _look(rl: BlockingRelight, run: str, listing: Listing | None) -> Found:
    row = rl.call(rl.relight.row(run))
    services = rl.relight.services
    found = Found(
        row=row,
        progress=rl.call(services.store.foreach_progress(row.id, row.key_prefix)),
        journal_bytes=rl.call(services.store.journal_bytes(row.root_id)),
        now=services.clock.now(),
    )
    if listing is None and found.journal_bytes > SMALL_JOURNAL_BYTES:
        return found
    try:
        state = rl.call(read_state(rl.relight, row))
    except (CorruptionError, UpgradeRequiredError) as error:
        found.trouble = str(error)
        return found
    found.state, found.counts = state, count_steps(state, row, found.now)
    if listing is not None:
        found.page = page(
            state,
            row,
            found.now,
            limit=listing.limit,
            cursor=listing.after,
            failed=listing.failed,
            newest=listing.newest,
            every_kind=listing.every_kind,
        )
    return found


def _as_dict(found: Found, *, traceback: bool) -> dict[str, Any]:
    shown = {
        **describe(found.row, traceback=traceback),
        **_generation(found.row, found.state),
        "progress": [msgspec.structs.asdict(one) for one in found.progress],
        "step_counts": found.counts,
        "journal_bytes": found.journal_bytes,
        "journal_error": found.trouble,
    }
    if found.page is not None:
        shown["operations"] = [operation_as_dict(one, traceback=traceback) for one in found.page.steps]
        shown["next_cursor"] = found.page.next_cursor
    return shown


def _generation(row: Run, state: TreeState | None) -> dict[str, Any]:
    """The number of the run's current generation, and its arguments; the row has those of the first. None for a child
    run, which has no generations of its own, and if the journal was not read."""
    if state is None or state.created is None or not row.is_root:
        return {"generation": None, "generation_input": None}
    created = state.created
    return {"generation": state.generation, "generation_input": payload(bytes(created.input), created.input_blob)}


def operation_as_dict(one: OperationReport, *, traceback: bool = False) -> dict[str, Any]:
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
        **({"traceback": one.traceback} if traceback else {}),
    }


def _print(found: Found, listing: Listing, *, traceback: bool) -> None:
    console, row = make_console(), found.row
    error = payload(row.error, "")
    print_facts(console, _facts(found, error))
    if traceback and error is not None:
        console.print(f"\n{escape(error.get('traceback', ''))}".rstrip(), soft_wrap=True)
    if found.trouble is not None:
        console.print(f"[red]its journal cannot be read:[/red] {escape(found.trouble)}", soft_wrap=True)
    if found.page is not None:
        console.print()
        _print_page(console, found.page, listing, traceback=traceback)
    elif found.trouble is None:
        console.print("\n[dim]--steps lists its steps, --all every operation, --failed what has failed[/dim]")


def _facts(found: Found, error: Any) -> list[tuple[str, str]]:
    row, now = found.row, _generation(found.row, found.state)
    facts: list[tuple[str, str]] = []

    def add(name: str, value: str) -> None:
        facts.append((name, value))

    add("run", escape(row.id))
    add("flow", escape(row.flow))
    add("status", status_text(row))
    if row.reason and error is None:
        add("reason", escape(row.reason))
    add("created", local_time(row.created_at))
    add("updated", local_time(row.updated_at))
    if row.wake_at is not None:
        add("due", local_time(row.wake_at))
    add("input", escape(_short(payload(row.input, row.input_blob))))
    if (now["generation"] or 1) > 1:
        add("generation", f"{now['generation']}, which began with {escape(_short(now['generation_input']))}")
    if row.output is not None:
        add("output", escape(_short(payload(row.output, row.output_blob))))
    if error is not None:
        add("error", escape(error_text(msgspec.convert(error, ErrorRecord)) or ""))
    for one in found.progress[:SHOWN_FOREACHS]:
        add("items", escape(_progress_text(one)))
    if len(found.progress) > SHOWN_FOREACHS:
        add("", f"and {len(found.progress) - SHOWN_FOREACHS} more; --json has all of them")
    if found.counts is not None:
        add("steps", ", ".join(f"{count} {state}" for state, count in found.counts.items()) or "none")
    elif found.trouble is None:
        add("steps", f"not counted in a journal of {found.journal_bytes / 1e6:.1f} MB; --steps does")
    return facts


def _progress_text(one: ForeachProgress) -> str:
    total = "" if one.total is None else f" of {one.total}"
    failed = f", {one.failed} failed" if one.failed else ""
    return f"{one.done}{total} done{failed} ({one.key})"


def _print_page(console: Console, shown: StepPage, listing: Listing, *, traceback: bool) -> None:
    if not shown.steps:
        console.print("nothing to list" if listing.after is None else "nothing more")
        return
    print_list(
        console,
        ("operation", "kind", "state", "attempt", "started", "took", "result"),
        [_row(one) for one in shown.steps],
    )
    if traceback:
        for one in shown.steps:
            if one.traceback is not None:
                console.print(f"\n[bold]{escape(one.key)}[/bold]\n{escape(one.traceback.rstrip())}", soft_wrap=True)
    if shown.next_cursor is not None:
        console.print(f"\n[dim]there are more: --after {shown.next_cursor}, or raise --limit[/dim]", soft_wrap=True)


def _row(one: OperationReport) -> tuple[str, ...]:
    return (
        escape(one.key),
        one.kind,
        one.state,
        str(one.attempt),
        local_time(one.started_at),
        "" if one.seconds is None else _duration(one.seconds),
        escape(_result(one)),
    )


def _result(one: OperationReport) -> str:
    """The outcome of an operation. For one that was tried more than once, also how the last attempt failed."""
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
    """The text, cut to fit a line of a table."""
    return text if len(text) <= 100 else text[:99] + "…"
