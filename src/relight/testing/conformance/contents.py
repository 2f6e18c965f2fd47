"""What a commit may have besides entries and rows: blobs, items of foreachs, log lines."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from relight.model.run import SERVER_LOG, ForeachProgress, ItemResult, LogLine, Run, Status, totals_row
from relight.ports.store import Committed, Fenced, Store
from relight.testing.conformance.build import (
    START,
    Suite,
    appending,
    but,
    child_of,
    commit_one,
    created,
    creation,
    ended,
    new_run,
)


def item(key: str, index: int, output: bytes = b"null", run_id: str = "run") -> ItemResult:
    """An item's result."""
    return ItemResult(run_id=run_id, key=key, index=index, digest=f"d{index}", output=output)


def line(text: str, run_id: str = "run", stream: str = SERVER_LOG) -> LogLine:
    """A line of a log, written at START."""
    return LogLine(run_id=run_id, at=START, text=text, stream=stream)


async def texts(store: Store, run_id: str, stream: str = SERVER_LOG) -> list[str]:
    """A whole log."""
    return [found.text for found in await store.read_log(run_id, stream, 0, 1000)]


class ContentSuite(Suite):
    """Blobs, item results and logs."""

    # ---- blobs and items

    async def test_blobs_are_kept_once_by_their_content(self, store: Store) -> None:
        data = b"\x00\xff" * 50_000
        digest = sha256(data).hexdigest()
        await commit_one(store, creation(new_run(), blobs={digest: data}))
        assert await store.put_blob(data) == digest
        assert await store.put_blob(data) == digest
        assert await store.get_blob(digest) == data
        assert await store.get_blob(sha256(b"").hexdigest()) is None
        assert await store.get_blob(await store.put_blob(b"")) == b""

    async def test_item_results_come_by_foreach_and_index(self, store: Store) -> None:
        run = new_run()
        child: Run = child_of(run, "sub")
        items = [item("b", 0), item("a", 10), item("a", 9), item("a", 2), item("a", 0, run_id=child.id)]
        await commit_one(store, creation(run, runs=[child], items=items))
        assert await store.item_results("run") == [item("a", 2), item("a", 9), item("a", 10), item("b", 0)]
        assert await store.item_results("run", "b") == [item("b", 0)]
        assert await store.item_results(child.id) == [item("a", 0, run_id=child.id)]
        assert await store.item_results("run", "c") == []
        await commit_one(store, appending(run, 1, b"2", items=[item("a", 9, b"2")]))
        assert await store.item_results("run", "a") == [item("a", 2), item("a", 9, b"2"), item("a", 10)]

    async def test_how_far_each_foreach_has_come(self, store: Store) -> None:
        run = new_run()
        child: Run = child_of(run, "sub")
        items = [
            totals_row("run", "b", 7, 0),
            *(item("b", n) for n in (0, 4, 2)),
            item("c", 0),  # written by a version that wrote no totals
            totals_row("run", "d", 0, 0),
            totals_row("run", "b[0@d0]/e", 5, 0),  # inside an item
            item("b[0@d0]/e", 0),
            totals_row(child.id, "b[1@d1]/sub/b", 1, 0),
        ]
        await commit_one(store, creation(run, runs=[child], items=items))
        assert await store.foreach_progress("run") == [
            ForeachProgress(key="b", done=3, failed=0, total=7),
            ForeachProgress(key="c", done=1, failed=0, total=None),
            ForeachProgress(key="d", done=0, failed=0, total=0),
        ]
        within = ForeachProgress(key="b[1@d1]/sub/b", done=0, failed=0, total=1)
        assert await store.foreach_progress(child.id, "b[1@d1]/sub/") == [within]
        assert await store.foreach_progress(child.id) == []
        assert await store.foreach_progress("nobody") == await store.foreach_progress("\0") == []
        assert {found.index for found in await store.item_results("run")} == {0, 2, 4}
        assert [found.index for found in await store.item_results("run", "b")] == [0, 2, 4]
        again = appending(run, 1, b"2", cut_items=[("run", "b", 0)], items=[totals_row("run", "b", 9, 2), item("b", 1)])
        await commit_one(store, again)
        assert (await store.foreach_progress("run"))[0] == ForeachProgress(key="b", done=1, failed=2, total=9)

    async def test_cutting_drops_a_foreachs_items_from_there_on(self, store: Store) -> None:
        run = new_run()
        items = [item("a", n) for n in range(12)] + [item("b", 5), item("a", 9, run_id="run/sub")]
        await commit_one(store, creation(run, runs=[child_of(run, "sub")], items=items))
        cut = appending(run, 1, b"cut", cut_items=[("run", "a", 2), ("run", "c", 0)])
        assert await commit_one(store, cut) == Committed(2)
        assert await store.item_results("run") == [item("a", 0), item("a", 1), item("b", 5)]
        assert await store.item_results("run/sub") == [item("a", 9, run_id="run/sub")]

    async def test_a_cut_goes_before_the_items_of_its_commit_and_behind_those_of_earlier_ones(
        self, store: Store
    ) -> None:
        run = new_run()
        await commit_one(store, creation(run, items=[item("a", 1), item("a", 2)]))
        await store.commit(
            [
                appending(run, 1, b"2", items=[item("a", 3), item("a", 4)]),
                appending(run, 2, b"3", items=[item("a", 1, b"again")], cut_items=[("run", "a", 1)]),
                appending(run, 3, b"4", items=[item("a", 2, b"again")]),
            ]
        )
        assert await store.item_results("run") == [item("a", 1, b"again"), item("a", 2, b"again")]

    async def test_a_repeated_commit_cuts_nothing_more(self, store: Store) -> None:
        run = new_run()
        await created(store, run)
        cut = appending(run, 1, b"2", cut_items=[("run", "a", 0)])
        await commit_one(store, cut)
        await commit_one(store, appending(run, 2, b"3", items=[item("a", 0)]))
        assert await commit_one(store, cut) == Committed(2)
        assert await store.item_results("run") == [item("a", 0)]

    # ---- logs

    async def test_a_line_reads_back_as_it_was_written(self, store: Store) -> None:
        await created(store, new_run())
        written = LogLine(run_id="run", at=START + 0.1234567, text="ä\n€😀", token="claimed", stream="step")
        await store.append_log([written])
        (found,) = await store.read_log("run", "step", 0, 10)
        assert found.id > 0
        assert found == msgspec.structs.replace(written, id=found.id)

    async def test_lines_are_read_oldest_first_in_pages(self, store: Store) -> None:
        await created(store, new_run())
        await store.append_log([line(f"{n}") for n in range(7)])
        await store.append_log([line("7")])
        found: list[LogLine] = []
        while page := await store.read_log("run", SERVER_LOG, found[-1].id if found else 0, 3):
            assert len(page) <= 3
            found += page
        assert [each.text for each in found] == [f"{n}" for n in range(8)]
        assert [each.id for each in found] == sorted({each.id for each in found})

    async def test_each_run_and_stream_has_a_log_of_its_own(self, store: Store) -> None:
        a, b = new_run("a"), new_run("b")
        child = child_of(a, "sub")
        await store.commit([creation(a, runs=[child]), creation(b)])
        await store.append_log(
            [line("1", "a"), line("2", "b"), line("3", child.id), line("4", "a", "step"), line("5", "nobody")]
        )
        assert await texts(store, "a") == ["1"]
        assert await texts(store, "b") == ["2"]
        assert await texts(store, child.id) == ["3"]
        assert await texts(store, "a", "step") == ["4"]
        assert await texts(store, "nobody") == []
        assert await texts(store, "a", "nothing") == []
        await store.append_log([])
        await created(store, new_run("nobody"))
        assert await texts(store, "nobody") == [], "a line outlived its being dropped"

    async def test_whoever_sees_it_may_log_it_also_of_a_finished_run(self, store: Store, other: Store) -> None:
        run = new_run()
        await created(store, run)
        await other.append_log([line("theirs")])
        await store.append_log([line("ours")])
        await ended(store, run)
        await other.append_log([line("after the end")])
        assert await texts(store, "run") == ["theirs", "ours", "after the end"]

    async def test_lines_of_a_commit(self, store: Store) -> None:
        run = new_run()
        child = child_of(run, "sub")
        batch = [
            creation(run, runs=[child], log=[line("1"), line("2", child.id), line("dropped", "nobody")]),
            appending(run, 1, b"2", log=[line("3"), line("4")]),
            appending(but(run, epoch=0), 2, b"late", log=[line("late")]),
        ]
        assert await store.commit(batch) == [Committed(1), Committed(2), Fenced(1, "me")]
        assert await texts(store, "run") == ["1", "3", "4"]
        assert await texts(store, child.id) == ["2"]
        assert await store.commit(batch[1:2]) == [Committed(2)]
        assert await texts(store, "run") == ["1", "3", "4"], "a line was written again"
        assert (await store.get_run("run")) == run

    async def test_a_line_that_is_given_again_is_written_once(self, store: Store) -> None:
        """If the answer to a commit without entries was lost, the journal does not show that it was written."""
        run = new_run()
        await created(store, run)
        commit = appending(run, 1, log=[line("released"), line("and more")])
        for _ in range(3):
            assert await commit_one(store, commit) == Committed(1)
        for _ in range(3):
            await store.append_log([line("seen"), line("seen", stream="step")])
        assert await texts(store, "run") == ["released", "and more", "seen"]
        assert await texts(store, "run", "step") == ["seen"]
        later = msgspec.structs.replace(line("seen"), at=START + 1)
        await store.append_log([later])
        assert await texts(store, "run") == ["released", "and more", "seen", "seen"]

    async def test_the_newest_lines_can_be_asked_for(self, store: Store) -> None:
        await created(store, new_run())
        await store.append_log([line(f"{n}") for n in range(10)])
        newest = await store.read_log("run", SERVER_LOG, 0, 3, newest=True)
        assert [found.text for found in newest] == ["7", "8", "9"], "the newest, but the oldest of them first"
        after = newest[1].id
        assert [found.text for found in await store.read_log("run", SERVER_LOG, after, 3, newest=True)] == ["9"]
        assert await store.read_log("run", "step", 0, 3, newest=True) == []

    async def test_many_lines(self, store: Store) -> None:
        run = new_run(status=Status.RUNNING)
        await commit_one(store, creation(run, log=[line(f"{n}") for n in range(700)]))
        assert await texts(store, "run") == [f"{n}" for n in range(700)]
