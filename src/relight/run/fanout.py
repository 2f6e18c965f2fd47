"""foreach and parallel: many branches, each a scope of its own, with progress kept per item.

A foreach has no entry for its end: its items are its record. An item's scope is `$foreach[index@digest]`, so that a
changed item finds none of the old item's work. Sequential: the longest matching prefix is kept, and what is recorded
beyond it is forgotten. Concurrent: each item is compared by itself. A ForeachCut entry makes that durable when replay
is over.

For progress, a foreach has one more row among its items, with the index -1: how many items there are and how many have
failed (`model/run.py: totals_row`). It is noted when the foreach begins and when an item fails, and is part of the next
commit. Replay never reads it.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from relight.errors import Unwind
from relight.flow.definitions import Definition, Step, return_annotation
from relight.flow.fingerprint import text_digest
from relight.flow.payloads import ValueCodec
from relight.flow.scope import CURRENT, Scope, here
from relight.model.journal import ItemCompleted
from relight.model.outcomes import item_path
from relight.model.replay import Outcome, item_index, item_scope
from relight.model.run import ItemResult, totals_row
from relight.run import cancel, replaying
from relight.run.operation import Finished, Operation, Recorded
from relight.run.steps import StepOperation
from relight.run.sync_flows import FlowThread
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.execution.run_loop import FlowTask
    from relight.run.live_run import LiveRun


class _Item:
    __slots__ = ("digest", "index", "scope_path", "value")

    def __init__(self, foreach: str, index: int, value: Any, digest: str) -> None:
        self.index = index
        self.value = value
        self.digest = digest
        self.scope_path = item_scope(foreach, index, self.digest)


async def foreach(
    run: LiveRun, scope: Scope, items: list[Any], each: Callable[..., Any], concurrency: int
) -> list[Any]:
    """See flow.operations.foreach. The items' results are the foreach's only record: there is no entry for its end."""
    scope = here(scope)
    key = scope.begin("$foreach")
    todo = [_Item(key, index, value, digest) for index, (value, digest) in enumerate(_digests(key, items, each))]
    codec = each.result if isinstance(each, Definition) else ValueCodec(return_annotation(each), f"result of {key}")
    changed = _forget_changed(run, scope, key, todo, sequential=concurrency == 1)
    # If all items have ended, their commits contain the totals. A foreach without items has no such commit, so its totals
    # are written again.
    if (
        changed
        or not todo
        or run.replay is None
        or not run.replay.items_have_ended(key, (one.scope_path for one in todo))
    ):
        _note_totals(run, scope, key, len(todo), 0)
    if run.kept and run.replay is None:
        _uncount_earlier_attempts(run, scope, key, todo)
    results: list[Any] = [None] * len(todo)
    pending = iter(todo)
    failures: list[BaseException] = []

    async def work(thread: FlowThread | None) -> None:
        """One of `concurrency` branches: item after item, until there are none or one has failed."""
        for item in pending:
            if failures:
                return
            try:
                results[item.index] = await _one(run, scope, key, item, each, codec, thread)
            except BaseException as error:  # noqa: BLE001 - raised below, once the other branches have ended
                failures.append(error)
                if isinstance(error, Exception):  # not Unwind, and not a cancellation
                    _note_totals(run, scope, key, len(todo), sum(isinstance(one, Exception) for one in failures))
                return

    if concurrency == 1 or len(todo) <= 1:
        await work(scope.thread)  # type: ignore[arg-type]  # a FlowThread, seen through its protocol
    else:
        await _branches(run, scope, [work] * min(concurrency, len(todo)))
    if failures:
        # Items under way could finish, so that the journal has them. An Unwind is raised in preference to an item's
        # error.
        raise next((error for error in failures if isinstance(error, Unwind)), failures[0])
    return results


def _note_totals(run: LiveRun, scope: Scope, key: str, total: int, failed: int) -> None:
    """Write for users how many items there are, and how many have failed, with the next commit. If a crash loses it,
    replay executes this again."""
    totals = totals_row(run.run_id(scope.run_key), key, total, failed)
    run.when_live(lambda: run.writer.note_totals(totals))


def _digests(key: str, items: list[Any], each: Any) -> Iterator[tuple[Any, str]]:
    """Each item with the digest of its content, which is made as that of a step's or flow's argument."""
    codec = ValueCodec(Any, f"item of {key}")
    for item in items:
        if isinstance(each, Definition):
            yield item, each.arguments.digest((item,), {})
        else:
            yield item, text_digest(codec.outline(item))


def _forget_changed(run: LiveRun, scope: Scope, key: str, todo: list[_Item], sequential: bool) -> bool:
    """On replay: what is recorded of an item counts only if the item is still there, at the same position and with the
    same content. In a sequential foreach, what was done after a changed or missing item does not count either, because
    it was done after the old item. Returns whether anything was forgotten."""
    replay = run.replay
    if replay is None:
        return False
    replay.foreachs.add(key)
    known = replay.items_of(key)
    if not known:
        return False
    today = {item.scope_path for item in todo}
    gone = [path for path in known if path not in today]
    cut = None
    if sequential:
        done = itertools.takewhile(lambda item: known.get(item.scope_path), todo)
        first = sum(1 for _ in done)  # the index of the item that goes on, or begins
        behind = [index for path in known if (index := item_index(key, path) or 0) > first or path in gone]
        cut = min(behind, default=None)
    if cut is not None:
        gone = [path for path in known if (item_index(key, path) or 0) >= cut]
        log(
            logging.WARNING,
            Token.FOREACH_CUT,
            f"run {run.id}: items of {key!r} have changed; it goes on from item {cut}, what followed is done again",
        )
    if gone:
        replaying.change_foreach(run, replay, key, sys.maxsize if cut is None else cut)
        run_id = run.run_id(scope.run_key)
        listed = len(todo) if cut is None else cut
        run.when_live(lambda: run.writer.cut_items(run_id, key, listed))
        replay.forget_items(gone)
    return bool(gone)


def _uncount_earlier_attempts(run: LiveRun, scope: Scope, key: str, todo: list[_Item]) -> None:
    """A retry calls the foreach again, with other items perhaps: then `progress` must not count the ended items of the
    earlier attempts that are not among them. Rows can be dropped from one index on only, so the kept items behind it get
    theirs again. The new totals are in the same commit."""
    kept = {
        path: outcome
        for path, outcome in run.kept.items()
        if outcome.kind == "item" and item_path(key, path) == path  # not an item of a foreach inside an item
    }
    today = {item.scope_path for item in todo}
    gone = [item_index(key, path) or 0 for path in kept if path not in today]
    if not gone:
        return
    first = min(gone)
    run.writer.cut_items(run.run_id(scope.run_key), key, first)
    for item in todo[first:]:
        outcome = kept.get(item.scope_path)
        if outcome is not None:
            data = bytes(outcome.output)  # of a blob that has been read: it is stored already, and only named again
            run.writer.item(_row(run, scope, key, item, data, outcome.blob or run.payload(data)[1]))
    run.writer.flush()


async def _one(
    run: LiveRun,
    scope: Scope,
    key: str,
    item: _Item,
    each: Callable[..., Any],
    codec: ValueCodec,
    thread: FlowThread | None,
) -> Any:
    """Do one item, in its own scope. Its end is durable when this returns."""
    path = item.scope_path
    ended = _ended(run, path)
    if ended is not None:
        return await run.asked(Finished(run, scope, path, ended, lambda outcome: (run.open(codec, outcome), None)))
    cancel.raise_if_told(run, scope)
    own_thread = None if inspect.iscoroutinefunction(each) else thread
    inner = Scope(run, path, scope.run_key, scope, own_thread, ends_branches=True)
    if isinstance(each, Step):
        return await _step_item(run, scope, inner, key, item, each, codec)
    result = await call_in(run, inner, each, item.value)
    data, value = codec.seal(result, run.services.config.payload.max_bytes)
    await run.asked(_End(run, scope, path, lambda end: _record(run, scope, key, item, data, end)))
    return value


async def _step_item(
    run: LiveRun, scope: Scope, inner: Scope, key: str, item: _Item, step: Step[..., Any], codec: ValueCodec
) -> Any:
    """Do an item that is a step. The step's entry is in the item's commit: one commit per item, not two."""
    operation = StepOperation(run, inner, inner.begin(step.name), step, (item.value,), {})

    def on_result(data: bytes, value: Any) -> None:
        sealed, _ = codec.seal(value, run.services.config.payload.max_bytes)
        _record(run, scope, key, item, sealed, operation)

    operation.item, operation.on_result = item.scope_path, on_result
    return await run.asked(operation)


class _End(Recorded):
    """The end of an item."""

    kind = "item"


def _ended(run: LiveRun, path: str) -> Outcome | None:
    replay = run.replay
    if replay is not None and path in replay.boxes and path in replay.recorded:
        return replay.recorded[path]
    kept = run.kept.get(path)
    return kept if kept is not None and kept.kind == "item" else None


def _record(run: LiveRun, scope: Scope, key: str, item: _Item, data: bytes, end: Operation) -> None:
    output, blob = run.payload(data)
    run.record(ItemCompleted(item.scope_path, key, item.index, item.digest, output, blob, run.now()), end)
    run.writer.item(_row(run, scope, key, item, data, blob))


def _row(run: LiveRun, scope: Scope, key: str, item: _Item, data: bytes, blob: str) -> ItemResult:
    return ItemResult(
        run_id=run.run_id(scope.run_key),
        key=key,
        index=item.index,
        digest=item.digest,
        output=b"" if blob else data,
        output_blob=blob,
    )


async def call_in(run: LiveRun, scope: Scope, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function in `scope`, whatever it is: sync code in the scope's thread, async code here."""
    thread: Any = scope.thread
    if thread is not None:
        return await thread.call(lambda: fn(*args), scope)
    token = CURRENT.set(scope)
    try:
        result = fn(*args)
        return await result if inspect.isawaitable(result) else result
    finally:
        CURRENT.reset(token)
        if scope.branches and run.stopping is None:
            await run.loop.end_branches(scope)


async def parallel(run: LiveRun, scope: Scope, branches: list[Callable[[], Any]]) -> list[Any]:
    """Run each branch of a sync flow in a thread and scope of its own. Returns the results in order. Raises the first
    error, once all have ended."""
    scope = here(scope)
    scope.begin("$parallel")
    results: list[Any] = [None] * len(branches)

    def branch(index: int, fn: Callable[[], Any]) -> Callable[[FlowThread | None], Any]:
        path = scope.child_path(f"~{getattr(fn, '__name__', 'branch').strip('<>')}")

        async def work(thread: FlowThread | None) -> None:
            assert thread is not None
            inner = Scope(run, path, scope.run_key, scope, thread)
            results[index] = await thread.start(fn, inner)

        return work

    await _branches(run, scope, [branch(index, fn) for index, fn in enumerate(branches)])
    return results


async def _branches(run: LiveRun, scope: Scope, works: list[Callable[[FlowThread | None], Any]]) -> None:
    """Run branches at once: tasks in async flows, threads in sync ones. Raises the first error, once all have ended."""
    tasks: list[FlowTask[Any]] = []
    for work in works:
        thread = None if scope.thread is None else FlowThread(run.services.threads, run.own_turns(), bounded=False)
        tasks.append(run.loop.start(work(thread), scope, "relight-branch"))
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    errors: Iterator[BaseException] = (end for end in ended if isinstance(end, BaseException))
    for error in sorted(errors, key=lambda error: not isinstance(error, Unwind)):
        raise error
