"""A run whose status is of a newer version counts as unfinished, and is shown so. It is left to an orchestrator of that
version."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from relight import Relight, flow, wait_for
from relight.model.decisions import Action
from relight.model.run import Hold, Status
from tests.cli.command import relight
from tests.flows.world import World

NEWER = "was written by a newer version of Relight"


@pytest.fixture(params=["sqlite", "postgres"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    server = request.getfixturevalue("postgres_server") if request.param == "postgres" else None
    made = World(request.param, tmp_path, server)
    yield made
    await made.end()


def rewrite(world: World, run_id: str, status: str, owner: str | None = None) -> None:
    """Write the row as a newer version would."""
    if world.server is not None:
        who = "NULL" if owner is None else f"'{owner}'"
        world.server.sql(f"UPDATE {world.schema}.runs SET status = '{status}', owner = {who} WHERE id = '{run_id}'")
        return
    with contextlib.closing(apsw.Connection(str(world.path))) as db:
        db.set_busy_timeout(5000)
        db.execute("UPDATE runs SET status = ?, owner = ? WHERE id = ?", (status, owner, run_id))


async def three(world: World) -> Relight:
    """A run as this version knows it, and two runs of a newer version. A dead owner owns one of the two."""

    @flow
    async def listens() -> Any:
        return await wait_for("go")

    rl = await world.open(park_after="1ms", recovery={"check_interval": "1h"})
    for name in ("known", "throttled", "owned"):
        await world.park(await rl.start(listens.with_id(name)))
        world.clock.advance(1)
    rewrite(world, "throttled", "2:throttled")
    rewrite(world, "owned", "3:draining", "gone#1")
    return rl


async def test_runs_of_a_newer_version_are_listed_as_unfinished(world: World) -> None:
    rl = await three(world)
    rows = await rl.incomplete()
    assert [row.id for row in rows] == ["owned", "throttled", "known"]
    assert [bool(row.newer) for row in rows] == [True, True, False]
    assert [row.id for row in await rl.incomplete(2)] == ["owned", "throttled"]
    for row in rows[:2]:
        assert (row.status, row.hold) == (Status.PAUSED, Hold.UPGRADE)
        assert NEWER in row.reason


async def test_runs_of_a_newer_version_are_found_by_the_status_that_is_shown(world: World) -> None:
    rl = await three(world)

    async def found(**where: Any) -> list[str]:
        page = await rl.list(limit=1, **where)
        ids = [row.id for row in page.runs]
        while page.next_cursor is not None:
            page = await rl.list(limit=1, cursor=page.next_cursor, **where)
            ids += [row.id for row in page.runs]
        return ids

    assert await found() == ["owned", "throttled", "known"]
    assert await found(flow="listens") == ["owned", "throttled", "known"]
    assert await found(status="paused") == ["owned", "throttled"]
    assert await found(status="paused", flow="listens") == ["owned", "throttled"]
    assert await found(status="waiting") == ["known"]
    assert await found(status="waiting", flow="listens") == ["known"]
    assert await found(status=("completed", "failed")) == []
    rewrite(world, "known", "2:throttled")
    assert await found(parent="nobody") == []


async def test_plan_and_explain_leave_such_runs_to_a_newer_version(world: World) -> None:
    rl = await three(world)
    plan = {one.run_id: one for one in await rl.plan()}
    assert set(plan) == {"owned", "throttled", "known"}
    for name in ("owned", "throttled"):
        assert plan[name].action is plan[name].verdict is Action.LEAVE
        assert NEWER in plan[name].reason
        assert plan[name].stuck
        assert NEWER in (await rl.explain(name)).sentence
    assert not plan["known"].stuck


async def test_the_command_shows_runs_of_a_newer_version(world: World) -> None:
    if world.server is not None:
        pytest.skip("the command is the same")
    await three(world)
    await world.close()
    run = relight("recovery", "incomplete", "--db", str(world.path), cwd=world.path.parent, RELIGHT_LEASES="none")
    assert run.returncode == 0, run.stderr
    for name in ("owned", "throttled", "known"):
        assert name in run.stdout
    assert " ".join(run.stdout.split()).count(NEWER) == 2
