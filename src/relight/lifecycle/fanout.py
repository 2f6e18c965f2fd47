"""foreach and parallel: many branches, each a scope of its own, with progress kept per item."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from relight.errors import Unwind
from relight.flow.definitions import Definition, Step, return_annotation
from relight.flow.fingerprint import text_digest
from relight.flow.payloads import ValueCodec
from relight.flow.scope import CURRENT, Scope, here, start_task
from relight.lifecycle import steps
from relight.lifecycle.threads import FlowThread
from relight.model.journal import ForeachCut, ItemCompleted
from relight.model.replay import Outcome, item_index, item_path, item_scope
from relight.model.run import ItemResult
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.lifecycle.run import LiveRun


class _Item:
    __slots__ = ("digest", "index", "scope_path", "value")

    def __init__(self, foreach: str, index: int, value: Any, digest: str) -> None:
        self.index = index
        self.value = value
        self.digest = digest
        self.scope_path = item_scope(foreach, index, self.digest)


async def foreach(
    run: LiveRun, scope: Scope | None, items: list[Any], each: Callable[..., Any], concurrency: int
) -> list[Any]:
    """See flow.operations.foreach. The items' results are the foreach's only record: there is no entry for its end."""
    scope = here(scope)
    key = scope.begin("$foreach")
    todo = [_Item(key, index, value, digest) for index, (value, digest) in enumerate(_digests(key, items, each))]
    results_codec = (
        each.result if isinstance(each, Definition) else ValueCodec(return_annotation(each), f"result of {key}")
    )
    results: list[Any] = [None] * len(todo)
    kept = await _kept(run, scope, key, todo, sequential=concurrency == 1)
    for item in todo:
        outcome = kept.get(item.index)
        if outcome is not None:
            results[item.index] = results_codec.open(await run.load(outcome.output, outcome.blob))
    pending = iter([item for item in todo if item.index not in kept])
    failures: list[BaseException] = []

    async def work(thread: FlowThread | None) -> None:
        """One of `concurrency` branches: item after item, until there are none or one has failed."""
        for item in pending:
            if failures:
                return
            try:
                results[item.index] = await _one(run, scope, key, item, each, results_codec, thread)
            except BaseException as error:  # noqa: BLE001 - raised below, once the other branches have ended
                failures.append(error)
                return

    if concurrency == 1 or len(todo) - len(kept) <= 1:
        await work(scope.thread)  # type: ignore[arg-type]  # a FlowThread, seen through its protocol
    else:
        await _branches(run, scope, [work] * min(concurrency, len(todo) - len(kept)))
    if failures:
        # Items under way were left to finish, so that the journal holds them; an Unwind outweighs an item's own error.
        raise next((error for error in failures if isinstance(error, Unwind)), failures[0])
    return results


def _digests(key: str, items: list[Any], each: Any) -> Iterator[tuple[Any, str]]:
    """Each item with the fingerprint of its content, seen as the argument it will be."""
    codec = ValueCodec(Any, f"item of {key}")
    for item in items:
        if isinstance(each, Definition):
            yield item, each.arguments.digest((item,), {})
        else:
            yield item, text_digest(codec.outline(item))


async def _kept(run: LiveRun, scope: Scope, key: str, todo: list[_Item], sequential: bool) -> dict[int, Outcome]:
    """The finished items that still match, by index. A sequential foreach keeps only the longest prefix of them."""
    replayer = run.replayer
    if replayer is None:
        return {}
    found: dict[int, Outcome] = {}
    for item in todo:
        outcome = replayer.outcomes.get(item.scope_path)
        if outcome is not None:
            found[item.index] = outcome
        elif sequential:
            break
    if sequential:
        await _cut(run, scope, key, todo, len(found))
    elif any((item_index(key, recorded) or 0) >= len(todo) for recorded in replayer.outcomes):
        run.writer.cut_items(run.run_id(scope.run_key), key, len(todo))  # the list has become shorter
    # With all that happened inside them, which will not be asked for again: nobody need wait for its turn.
    kept = {todo[index].scope_path for index in found}
    for recorded in [recorded for recorded in replayer.outcomes if item_path(key, recorded) in kept]:
        replayer.give(replayer.outcomes.pop(recorded))
    return found


async def _cut(run: LiveRun, scope: Scope, key: str, todo: list[_Item], prefix: int) -> None:
    """Forget, durably, everything recorded beyond the prefix: it followed on items that have changed since.

    The item at the prefix itself is only unfinished when nothing recorded belongs to another item at its place or behind.
    """
    replayer = run.replayer
    assert replayer is not None
    current = todo[prefix].scope_path if prefix < len(todo) else None

    def stale(recorded: str) -> bool:
        index = item_index(key, recorded)
        if index is None or index < prefix:
            return False
        return current is None or not (recorded + "/").startswith(current + "/")

    if not any(stale(recorded) for recorded in (*replayer.outcomes, *replayer.open)):
        return
    log(
        logging.WARNING,
        Token.FOREACH_CUT,
        f"run {run.id}: items of {key!r} have changed; it goes on from item {prefix}, what followed is done again",
    )
    run.record(ForeachCut(key, prefix))
    run.writer.cut_items(run.run_id(scope.run_key), key, prefix)
    await run.settle()

    def beyond(recorded: str) -> bool:
        index = item_index(key, recorded)
        return index is not None and index >= prefix

    for recorded in [recorded for recorded in replayer.outcomes if beyond(recorded)]:
        replayer.give(replayer.outcomes.pop(recorded))
    for recorded in [recorded for recorded in replayer.open if beyond(recorded)]:
        del replayer.open[recorded]
    for path in [path for path in replayer.scopes if beyond(path)]:
        del replayer.scopes[path]


async def _one(
    run: LiveRun,
    scope: Scope,
    key: str,
    item: _Item,
    each: Callable[..., Any],
    codec: ValueCodec,
    thread: FlowThread | None,
) -> Any:
    """One item, in its own scope; its end is durable when this returns."""
    inner = Scope(run, item.scope_path, scope.run_key, scope, None if inspect.iscoroutinefunction(each) else thread)
    if isinstance(each, Step):
        # Its own entry rides in the item's commit: one commit per item, not two.
        result = await steps.perform(run, inner, each, (item.value,), {}, wait=False)
    else:
        result = await call_in(run, inner, each, item.value)
    data, value = codec.seal(result, run.services.config.payload.max_bytes)
    output, blob = run.payload(data)
    run.record(ItemCompleted(item.scope_path, key, item.index, item.digest, output, blob))
    run.writer.item(
        ItemResult(
            run_id=run.run_id(scope.run_key),
            key=key,
            index=item.index,
            digest=item.digest,
            output=b"" if blob else data,
            output_blob=blob,
        )
    )
    await run.settle()
    return value


async def call_in(run: LiveRun, scope: Scope, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function in `scope`, whatever it is: sync code in the scope's thread, async code here."""
    if scope.thread is not None:
        return await scope.thread.call(lambda: fn(*args), scope)
    token = CURRENT.set(scope)
    try:
        result = fn(*args)
        return await result if inspect.isawaitable(result) else result
    finally:
        CURRENT.reset(token)


async def parallel(run: LiveRun, scope: Scope | None, branches: list[Callable[[], Any]]) -> list[Any]:
    """Each branch of a sync flow in a thread and scope of its own; results in order, the first error after all have ended."""
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
    tasks: list[asyncio.Task[Any]] = []
    for work in works:
        if scope.thread is None:
            task = start_task(run.services.loop, work(None), None, "relight-branch")
        else:
            thread = FlowThread(run.services.threads, bounded=False)
            run.threads.add(thread)
            task = start_task(run.services.loop, work(thread), None, "relight-branch")
            task.add_done_callback(lambda _, thread=thread: run.threads.discard(thread))  # type: ignore[misc]
        run.adopt(scope, task)
        tasks.append(task)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    errors: Iterator[BaseException] = (end for end in ended if isinstance(end, BaseException))
    for error in sorted(errors, key=lambda error: not isinstance(error, Unwind)):
        raise error
