"""`relight runs`: list runs, newest first."""

from __future__ import annotations

import datetime as dt
import json
from typing import Annotated, Any

import typer
from rich.markup import escape

from relight.cli.database import Database, looking
from relight.cli.listing import print_list
from relight.cli.terminal import AsJson, make_console
from relight.model.run import Run, Status


def runs(
    db: Database = None,
    status: Annotated[list[Status] | None, typer.Option("--status", help="Only these; may be given again.")] = None,
    flow: Annotated[str | None, typer.Option("--flow", help="Only runs of this flow.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List root runs, newest first."""
    with looking(db) as rl:
        page = rl.list(status=tuple(status or ()), flow=flow, limit=limit)
    if as_json:
        print(json.dumps([describe(run) for run in page.runs], indent=2))
        return
    console = make_console()
    if page.runs:
        rows = [
            (escape(run.id), escape(run.flow), status_text(run), local_time(run.created_at), escape(run.reason))
            for run in page.runs
        ]
        print_list(console, ("run", "flow", "status", "created", "reason"), rows)
    else:
        console.print("no runs")
    if page.next_cursor is not None:
        console.print(f"[dim]more than {limit}: raise --limit[/dim]")


def describe(run: Run, *, traceback: bool = False) -> dict[str, Any]:
    """A run's row as JSON: times as ISO 8601 in UTC, payloads as JSON (or the digest of their blob)."""
    error = payload(run.error, "")
    if error is not None and not traceback:
        error.pop("traceback", None)
    return {
        "id": run.id,
        "flow": run.flow,
        "status": run.status.value,
        "hold": None if run.hold is None else run.hold.value,
        "reason": run.reason,
        "root": run.root_id,
        "parent": run.parent_id,
        "owner": run.owner,
        "epoch": run.epoch,
        "created_at": utc_time(run.created_at),
        "updated_at": utc_time(run.updated_at),
        "wake_at": utc_time(run.wake_at),
        "input": payload(run.input, run.input_blob),
        "output": payload(run.output, run.output_blob),
        "error": error,
    }


def payload(data: bytes | None, blob: str) -> Any:
    """A stored payload: its JSON, or the digest of its blob."""
    if blob:
        return {"blob": blob}
    return json.loads(data) if data else None


def utc_time(seconds: float | None) -> str | None:
    """ISO 8601, to the millisecond."""
    return None if seconds is None else dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="milliseconds")


def local_time(seconds: float | None) -> str:
    """A time in the time zone of this machine, for people. Each time names the zone, because summer time is another."""
    return "" if seconds is None else f"{dt.datetime.fromtimestamp(seconds, dt.UTC).astimezone():%Y-%m-%d %H:%M:%S %Z}"


def status_text(run: Run) -> str:
    """The status, and the hold of a paused run, as rich markup."""
    colour = _COLOURS.get(run.status, "")
    text = run.status.value if run.hold is None else f"{run.status.value} ({run.hold.value})"
    return f"[{colour}]{text}[/{colour}]" if colour else text


_COLOURS = {Status.COMPLETED: "green", Status.FAILED: "red", Status.PAUSED: "yellow", Status.CANCELLED: "dim"}
