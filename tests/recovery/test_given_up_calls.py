"""What becomes of a run when its caller gives up, its engine closes, or its code cannot be called, in the middle of a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from relight import Relight, flow, spawn, wait_for
from relight.backend_choice import make_leases
from relight.config import load_config
from relight.errors import RelightError, StoreUnavailableError
from relight.model.run import Hold, Message, MessageKind, Status
from relight.orchestrator import waking
from relight.ports.store import Commit, CommitResult
from tests.flows.world import until
from tests.recovery.engines import Engines, Work
from tests.servers.etcd import EtcdServer


class HeldBack:
    """Keeps back the answers of the commits that `which` chooses, until `go_on` is set: they are written meanwhile or not."""

    def __init__(self, store: Any, which: Callable[[Commit], bool], *, written: bool = True) -> None:
        self.came, self.go_on = asyncio.Event(), asyncio.Event()
        inner = store.commit

        async def commit(commits: Sequence[Commit]) -> list[CommitResult]:
            if self.go_on.is_set() or not any(map(which, commits)):
                return await inner(commits)  # type: ignore[no-any-return]
            results = await inner(commits) if written else None
            self.came.set()
            await self.go_on.wait()
            return results if results is not None else await inner(commits)

        store.commit = commit


@pytest.fixture(autouse=True)
def _no_look_for_lost_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would find what these tests are about half a minute later, and count a crash."""
    monkeypatch.setattr(waking, "LOST_SECONDS", 3600.0)


async def on_etcd(engines: Engines, place: str, work: Work) -> Relight:
    """An engine on the same store, whose leases are in etcd."""
    leases = make_leases(load_config("memory:", {"leases": f"etcd://{place}"}, {}), engines.store, given=False)
    recovery = {"lease_ttl": "3s", "check_interval": "1s"}
    rl = Relight(
        store=engines.store, lease_manager=leases, flows=[work.flow], recovery=recovery, shutdown_grace="100ms"
    )
    await rl.open()
    return rl


# ---- calls that are given up


@pytest.mark.parametrize("written", [False, True], ids=["written after", "written before"])
async def test_a_start_that_was_given_up_while_it_was_written_leaves_no_run_behind(engines: Engines, written: bool):
    """The look at the store must not come before the row: nobody would drive a run whose owner is alive."""

    @flow(resumable=False)  # if this counted as a crash, the run would fail
    async def once() -> str:
        return "done"

    rl = await engines.start("a")
    held = HeldBack(engines.store, lambda commit: commit.create is not None, written=written)
    starting = asyncio.create_task(rl.start(once.with_id("r")))
    await held.came.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    held.go_on.set()
    await until(lambda: _is(rl, "r", Status.COMPLETED))
    assert await (await rl.start(once.with_id("r"))).result(timeout="60s") == "done"


async def test_a_start_that_was_given_up_before_it_was_sent_is_not_written(engines: Engines):
    @flow
    async def once(name: str) -> str:
        return name

    rl = await engines.start("a")
    held = HeldBack(engines.store, lambda commit: commit.root_id == "first")
    first = asyncio.create_task(rl.start(once.with_id("first"), "first"))
    await held.came.wait()
    second = asyncio.create_task(rl.start(once.with_id("second"), "second"))
    await until(lambda: len(rl.services.recorder._creations) == 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    held.go_on.set()
    assert await (await first).result(timeout="60s") == "first"
    assert await engines.store.get_run("second") is None
    assert await rl.run(once.with_id("second"), "other") == "other"


async def test_a_client_forgets_the_starts_that_have_failed(engines: Engines, monkeypatch: pytest.MonkeyPatch):
    """It owns no run, so there is nothing to look for, and nothing to remember."""

    @flow
    async def once() -> str:
        return "done"

    client = await engines.start("client", drive=False)
    commit = engines.store.commit

    async def down(commits: Sequence[Commit]) -> list[CommitResult]:
        raise StoreUnavailableError("down")

    monkeypatch.setattr(engines.store, "commit", down)
    with pytest.raises(StoreUnavailableError):
        await client.start(once.with_id("r"))
    monkeypatch.setattr(engines.store, "commit", commit)
    assert not client.orchestrator.uncertain


async def test_a_resume_that_was_given_up_between_claim_and_commit_is_looked_at(engines: Engines):
    work = Work()
    dead = await engines.start("dead")
    await dead.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    off = {"recovery": {"enabled": False}}
    rl = await engines.start("a", **off)
    dead.services.heartbeats.stop_now()
    await until(lambda: _is_orphan(rl, dead))
    held = HeldBack(engines.store, lambda commit: any(b"resumed" in entry for entry in commit.entries), written=False)
    resuming = asyncio.create_task(rl.resume("r"))
    await held.came.wait()
    resuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resuming
    held.go_on.set()
    work.gate.set()
    assert await (await rl.get("r")).result(timeout="60s") == 7


async def test_a_run_that_is_resumed_where_its_flow_is_unknown_goes_to_a_process_that_knows_it(engines: Engines):
    """With recovery off, nobody would look for a run that is held because its flow was unknown."""

    @flow
    async def once() -> str:
        return "done"

    off = {"recovery": {"enabled": False}}
    client = await engines.start("client", drive=False, flows=[once])
    await client.start(once.with_id("r"))
    await engines.start("knows", flows=[once], **off)
    stranger = await engines.start("stranger", flows=[], **off)
    await stranger.resume("r")
    assert await (await client.get("r")).result(timeout="60s") == "done"


# ---- an engine that closes


async def test_closing_does_not_cut_off_what_is_being_held(engines: Engines):
    """A run that was left half-way out of memory would keep the engine from closing for the whole grace."""
    work = Work()
    dead = await engines.start("dead")
    for number in range(20):
        await dead.start(work.flow.with_id(f"r{number}"))
    await until(lambda: work.begun == 20)
    dead.services.heartbeats.stop_now()
    rl = await engines.start("a", flows=[], shutdown_grace="1h")
    held = HeldBack(engines.store, lambda commit: any(one.hold for one in commit.extras.changes), written=False)
    await held.came.wait()
    closing = asyncio.create_task(rl.close())
    await until(lambda: rl.orchestrator.stopping)
    held.go_on.set()
    async with asyncio.timeout(60):
        await closing
    rows = await engines.store.get_runs([f"r{number}" for number in range(20)])
    assert {row.owner for row in rows} <= {None, dead.services.owner}
    assert any(row.hold is Hold.DEFINITION for row in rows)


async def test_closing_releases_what_is_being_taken_up_also_with_etcd(engines: Engines, etcd_server: EtcdServer):
    """Otherwise every orderly stop in that moment would count as a death of the run."""
    work = Work()
    dead = await on_etcd(engines, f"{etcd_server.endpoint}/closing", work)
    await dead.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    dead.services.heartbeats.stop_now()
    held = HeldBack(engines.store, lambda commit: any(b'"recovered"' in entry for entry in commit.entries))
    rl = await on_etcd(engines, f"{etcd_server.endpoint}/closing", work)
    await held.came.wait()
    closing = asyncio.create_task(rl.close())
    await until(lambda: rl.orchestrator.stopping)
    held.go_on.set()
    await closing
    (row,) = await engines.store.get_runs(["r"])
    assert (row.status, row.owner) == (Status.PENDING, None)
    await dead.close()


# ---- a run whose code cannot be called


@pytest.mark.parametrize("why", ["its flow is unknown", "its journal is corrupt"])
async def test_cancelling_a_run_whose_code_cannot_be_called_reaches_what_it_has_spawned(engines: Engines, why: str):
    @flow
    async def below() -> None:
        await wait_for("never")

    @flow
    async def above() -> None:
        await (await spawn(below.with_id("below")))

    first = await engines.start("a", flows=[above, below], park_after="10ms")
    await first.start(above.with_id("above"))
    await until(lambda: _is(first, "below", Status.WAITING))
    await until(lambda: _is(first, "above", Status.WAITING))
    await first.close()
    if why == "its journal is corrupt":
        engines.store.trees["above"].entries[1].data = b'["step"'
    flows = [below] if why == "its flow is unknown" else [above, below]
    second = await engines.start("b", flows=flows)
    await (await second.get("above")).cancel("the house was sold")
    await until(lambda: _is(second, "above", Status.CANCELLED))
    await until(lambda: _is(second, "below", Status.CANCELLED))
    assert (await second.row("below")).reason == "the house was sold"


async def test_a_run_that_is_joined_while_its_end_is_written_tells_the_run_that_waits(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
):
    """The store puts the message into that run's inbox. Nobody would look there before the next poll."""
    work = Work()
    rl = await engines.start("a")
    await rl.start(work.flow.with_id("t"))
    ending = HeldBack(engines.store, lambda commit: any(one.status.terminal for one in commit.extras.changes))
    work.gate.set()
    await ending.came.wait()
    looked = asyncio.Event()
    monkeypatch.setattr(rl.orchestrator, "look_for_messages", looked.set)
    rl.orchestrator.live["t"].deliver(Message(run_id="t", kind=MessageKind.JOIN, name="waits", id=10**6))
    ending.go_on.set()
    async with asyncio.timeout(60):
        await looked.wait()


async def test_a_run_that_is_held_for_a_newer_version_keeps_no_lease(engines: Engines, etcd_server: EtcdServer):
    """With etcd the lease is a key of its own: it would keep the version that understands the run from taking it up."""
    work = Work()
    dead = await on_etcd(engines, f"{etcd_server.endpoint}/newer", work)
    await dead.start(work.flow.with_id("r"))
    await until(lambda: work.begun == 1)
    dead.services.heartbeats.stop_now()
    tree = engines.store.trees["r"]
    tree.append([b'["9:from-the-future", "x"]'])
    rl = await on_etcd(engines, f"{etcd_server.endpoint}/newer", work)
    await until(lambda: _is(rl, "r", Status.PAUSED))
    assert (await rl.row("r")).hold is Hold.UPGRADE

    async def free() -> bool:
        return await rl.services.heartbeats.call(lambda leases: leases.get_lease("r")) is None

    await until(free)
    await rl.close()
    await dead.close()


async def _is(rl: Relight, run_id: str, status: Status) -> bool:
    try:
        return (await rl.row(run_id)).status is status
    except RelightError:
        return False


async def _is_orphan(rl: Relight, dead: Relight) -> bool:
    listed = await rl.services.heartbeats.call(lambda leases: leases.list_orchestrators())
    return not any(session.owner == dead.services.owner and session.fresh for session in listed)
