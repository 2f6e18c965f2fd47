"""`relight explain RUN`: one sentence that says why a run is where it is, then the facts."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.markup import escape

from relight.cli.database import Database, Modules, looking, modules_of
from relight.cli.listing import print_facts, print_text
from relight.cli.recovery import as_dict
from relight.cli.runs import local_time, utc_time
from relight.cli.show import operation_as_dict, shortened, step_text
from relight.cli.terminal import AsJson, make_console
from relight.recovery.explain import Explanation


def explain(
    run: Annotated[str, typer.Argument(help="The run's id; a child run is explained by its root.")],
    db: Database = None,
    module: Modules = None,
    as_json: AsJson = False,
) -> None:
    """Say why a run is where it is: a sentence, then owner, lease, epoch, what it waits for, and every recovery."""
    with looking(db, modules_of(module)) as rl:
        found = rl.explain(run)
    if as_json:
        print(json.dumps(_as_dict(found), indent=2))
    else:
        _print(found)


def _as_dict(found: Explanation) -> dict[str, Any]:
    return {
        "run": found.run_id,
        "sentence": found.sentence,
        "status": found.status.value,
        "flow": found.flow,
        "owner": found.owner,
        "owner_alive": found.owner_alive,
        "owner_trouble": found.owner_trouble,
        "last_heartbeat": utc_time(found.last_heartbeat),
        "lease_expires_at": utc_time(found.lease_expires_at),
        "epoch": found.epoch,
        "generation": found.generation,
        "input": found.input,
        "created_at": utc_time(found.created_at),
        "updated_at": utc_time(found.updated_at),
        "last_entry": found.last_entry,
        "last_operation": found.last_operation,
        "waits_for": found.waits_for,
        "unread": found.unread,
        "steps": [operation_as_dict(one) for one in found.steps],
        "plan": as_dict(found.plan),
        "events": [{"at": utc_time(line.at), "token": line.token, "text": line.text} for line in found.events],
    }


def _print(found: Explanation) -> None:
    console = make_console()
    print_text(console, escape(found.sentence))
    console.print()
    facts: list[tuple[str, str]] = []

    def add(name: str, value: str) -> None:
        facts.append((name, value))

    owner = "none" if found.owner is None else f"{found.owner} ({'alive' if found.owner_alive else 'not alive'})"
    add("flow", escape(found.flow))
    add("owner", escape(owner))
    if found.lease_expires_at is not None:
        add("last heartbeat", local_time(found.last_heartbeat))
        add("lease until", local_time(found.lease_expires_at))
    add("epoch", str(found.epoch))
    if found.generation > 1:
        add("generation", str(found.generation))
    add("input", escape(shortened(found.input)))
    add("last entry", f"{found.last_entry} {escape(found.last_operation)}".strip())
    for wait in found.waits_for:
        add("waits for", escape(wait))
    for message in found.unread:
        add("unread", escape(message))
    for one in found.steps:
        add(f"step {one.state}", escape(step_text(one)))
    if not found.status.terminal:
        add("recovery would", escape(f"{found.plan.action.value}: {found.plan.reason}"))
        if found.plan.resumes_at:
            add("at", escape(found.plan.resumes_at))
    for line in found.events:
        add(local_time(line.at), escape(f"[{line.token}] {line.text}"))
    print_facts(console, facts)
