"""A commit is fenced although no other process has claimed the run. If its owner let go of such a run, no other process
could take it, because the row still names that owner."""

from __future__ import annotations

from typing import Any

from relight.backends.postgres import PostgresStore
from relight.clock import SYSTEM_CLOCK
from relight.model.run import Run, Status
from relight.ports.store import Commit, Committed, Extras
from tests.servers.postgres import PostgresServer


def _run(run_id: str, root_id: str) -> Run:
    return Run(
        id=run_id,
        root_id=root_id,
        flow="f",
        status=Status.RUNNING,
        owner="o#1",
        epoch=1,
        created_at=1.0,
        updated_at=1.0,
    )


async def test_a_new_connection_of_another_lane_fences_no_commit(postgres_server: PostgresServer, monkeypatch: Any):
    store = PostgresStore(postgres_server.url(), clock=SYSTEM_CLOCK, schema="false_fence")
    await store.open()
    try:
        created = Commit(root_id="r", epoch=1, entries=[b"[]"], create=_run("r", "r"))
        await store.commit([created])
        committer = store._committer
        provide = committer._provide_keys

        async def provided(*arguments: Any) -> None:
            committer._pool.made += 1  # meanwhile: another lane has made a connection,
            committer._forget_keys()  # and begins its own commit on it
            await provide(*arguments)

        monkeypatch.setattr(committer, "_provide_keys", provided)
        child = Commit(root_id="r", epoch=1, after=1, entries=[b"[]"], extras=Extras(runs=[_run("r/c", "r")]))
        assert await store.commit([child]) == [Committed(2)]
    finally:
        await store.close()
