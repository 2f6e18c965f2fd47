"""Texts that some store cannot keep: every store refuses them in the same way, or replaces them in texts for people."""

from __future__ import annotations

from typing import Any

import pytest

from relight.errors import ConfigError, PayloadError, StoreError
from relight.model.run import SERVER_LOG, LogLine, Message, MessageKind, RunFilter, Status
from relight.ports.store import Committed, Store
from relight.testing.conformance.build import (
    START,
    Suite,
    appending,
    changing,
    commit_one,
    created,
    creation,
    new_run,
    run_of,
    spawned_by,
)

# NUL alone, at the beginning, in the middle and at the end; halves of a surrogate pair.
UNSTORABLE = ("\0", "\0run", "ru\0n", "run\0", "\ud800", "run\udfff")
each_unstorable = pytest.mark.parametrize("text", UNSTORABLE, ids=[ascii(text) for text in UNSTORABLE])


class TextSuite(Suite):
    """Ids, names, reasons, log lines and the filters of a listing."""

    @each_unstorable
    async def test_nothing_is_found_under_an_id_that_no_run_can_have(self, store: Store, text: str) -> None:
        await created(store, new_run())
        assert await store.get_run(text) is None
        assert [run.id for run in await store.get_runs(["run", text])] == ["run"]
        assert await store.item_results(text) == []

    @each_unstorable
    async def test_a_run_with_such_an_id_or_flow_is_refused(self, store: Store, text: str) -> None:
        parent = new_run()
        await created(store, parent)
        for commit in (
            creation(new_run(text)),
            creation(new_run("other", flow=text)),
            appending(parent, 1, b"2", runs=[spawned_by(parent, text)], spawned=[(text, b"1")]),
        ):
            with pytest.raises(PayloadError, match="NUL"):
                await store.commit([commit])
        assert await store.get_runs(["other"]) == []
        assert await store.latest_sequence("run") == 1, "a part of a refused commit was written"

    @each_unstorable
    async def test_a_message_with_such_a_name_or_dedup_is_refused(self, store: Store, text: str) -> None:
        run = new_run()
        await created(store, run)
        for part in ({"run_id": text}, {"name": text}, {"dedup": text}):
            fields: dict[str, Any] = {"run_id": "run", "kind": MessageKind.SIGNAL, "name": "go"} | part
            with pytest.raises(PayloadError, match="NUL"):
                await store.post([Message(**fields)])
            with pytest.raises(PayloadError, match="NUL"):
                await store.commit([appending(run, 1, b"2", messages=[Message(**fields)])])
        assert await store.inbox(["run"]) == []
        assert await store.latest_sequence("run") == 1, "a part of a refused commit was written"

    @each_unstorable
    async def test_in_reasons_and_log_lines_it_is_replaced(self, store: Store, text: str) -> None:
        run = new_run()
        await created(store, run)
        line = LogLine(run_id="run", at=START, text=f"it said {text}")
        change = changing(run, Status.RUNNING, owner="me", reason=f"because of {text}")
        assert await commit_one(store, appending(run, 1, b"2", changes=[change], log=[line])) == Committed(2)
        reason = (await run_of(store, "run")).reason
        (written,) = await store.read_log("run", SERVER_LOG, 0, 10)
        for found in (reason, written.text):
            assert found.startswith(("because of ", "it said "))
            assert "\0" not in found
            found.encode()
        await store.hold({"run": 1}, changing(run, Status.PAUSED, reason=text))
        assert (await run_of(store, "run")).status is Status.PAUSED

    # ---- listings

    @pytest.mark.parametrize("since", ["1d", "2026-01-01", True, float("nan"), b"1", [1.0]], ids=repr)
    async def test_a_time_that_is_none_is_refused(self, store: Store, since: Any) -> None:
        await created(store, new_run())
        with pytest.raises(ConfigError, match=r"list\(since="):
            await store.list_runs(RunFilter(since=since))

    async def test_since_takes_whole_numbers_and_infinity(self, store: Store) -> None:
        await created(store, new_run())
        assert len((await store.list_runs(RunFilter(since=int(START)))).runs) == 1
        assert len((await store.list_runs(RunFilter(since=float("-inf")))).runs) == 1
        assert (await store.list_runs(RunFilter(since=float("inf")))).runs == []

    @each_unstorable
    async def test_a_listing_that_asks_for_such_a_text_is_refused(self, store: Store, text: str) -> None:
        await created(store, new_run())
        for where in (RunFilter(flow=text), RunFilter(parent_id=text), RunFilter(cursor=f"1.0:{text}")):
            with pytest.raises(PayloadError, match="NUL"):
                await store.list_runs(where)

    @pytest.mark.parametrize("wrong", [7, b"checkout", ["checkout"]], ids=repr)
    async def test_a_listing_that_asks_for_no_text_at_all_is_refused(self, store: Store, wrong: Any) -> None:
        for where in (RunFilter(flow=wrong), RunFilter(parent_id=wrong), RunFilter(cursor=wrong)):
            with pytest.raises(PayloadError, match="give a str"):
                await store.list_runs(where)

    async def test_a_cursor_that_no_listing_gave_is_refused(self, store: Store) -> None:
        with pytest.raises(StoreError, match="pass next_cursor as it came"):
            await store.list_runs(RunFilter(cursor="yesterday"))
