"""Replaying: the flow is told the outcomes of its journal, in the journal's order. Then the run goes on live.

The next outcome is known (`Replay.next`), and the flow must have asked for that operation. If it has not, its code does
not do the same as before, and the run is held. There are two exceptions. In both, a user has changed something while
the run was not in memory, and wants the run to go on:

- A step whose code has changed may be executed once more (`version_mismatch="rerun"`), in its place.
- A foreach may have other items than before, or do another number of them at once. What is recorded of its items is
  then told whenever the flow asks for it, and new items are done during replay.

What a reader may look for here:

- A flow at rest that has not asked for what the journal holds next, or has asked for another kind of operation, has
  changed: NonDeterminismError, and the run is held. So is a flow that returns too early.
- A flow that stops waiting for an async step (`task.cancel()`, `asyncio.timeout`) cancels the body and waits for it,
  and the step's end has a place in the order. If an end was recorded before, OperationCancelled says that the flow was
  never told of it.
- A signal that was recorded for a wait which the flow gave up on goes to the next wait for it (`taken_back`).
- A flow at rest that waits for no operation is told so by a Deadlocked entry, and fails with FlowCodeError.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import msgspec

from relight.errors import Unwind
from relight.model.journal import NULL, ForeachCut
from relight.model.replay import Ending, Outcome, TreeState
from relight.model.run import Hold
from relight.run.operation import GIVEN_UP, Operation
from relight.run.replay_order import Replay, expected, expected_kind

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun

# To look up a member of an enum takes as long as the rest of a short function.
_OK, _CANCELLED, _GIVEN_UP, _UNSEEN = Ending.OK, Ending.CANCELLED, Ending.GIVEN_UP, Ending.UNSEEN


def look_up(run: LiveRun, operation: Operation) -> bool:
    """The flow asks for this operation. Returns whether it must not begin now: on replay its outcome comes later, or it
    begins when replay is over; or its outcome is kept, and is told at once."""
    replay, key = run.replay, operation.key
    if replay is not None:
        if key in replay.open:
            operation.begun = replay.take_begun(key)
        recorded = replay.recorded.get(key)
        if recorded is not None and recorded.kind != operation.kind and recorded.kind != "any":  # noqa: PLR1714 - a tuple would have to be made
            run.stuck(Hold.NONDETERMINISM, expected_kind(key, operation.kind, recorded.kind))
            raise Unwind(run.stopping)
    elif run.left_open:
        operation.begun = run.left_open.pop(key, None)
    return (bool(run.kept) and find_kept(run, operation)) or replay is not None


def tell_next(run: LiveRun, replay: Replay) -> bool:
    """Tell the flow the next outcome of its journal. False: nothing can be told yet."""
    if replay.fetching:
        return False
    if run.told:  # an operation was done during replay
        _tell_done(run, replay)
        return True
    if replay.redone is not None:
        return False
    key = replay.next()
    if key is None:
        return _end(run, replay)
    outcome = replay.recorded.get(key)
    if outcome is None:  # a mark
        run.tell(key)
        return True
    operation = run.pending.get(key)
    if operation is None:
        return _nobody_asks(run, replay, key, outcome)
    if outcome.ending is _OK and not outcome.blob and not replay.unheard:  # nearly always; the same as _tell() does
        del replay.recorded[key]
        if not operation.accept(outcome):
            return _redo(run, replay, operation)
        if run.stopping is None:
            run.tell(operation)
        return True
    if outcome.ending is _GIVEN_UP and not operation.cut_short():
        _hold(run, replay, key)
        return True
    return _tell(run, replay, operation, outcome)


def _tell_done(run: LiveRun, replay: Replay) -> None:
    done = run.told.popleft()
    assert isinstance(done, Operation)
    if done is replay.redone:
        replay.redone = None
    replay.anew.pop(done, None)
    run.tell(done)


def _nobody_asks(run: LiveRun, replay: Replay, key: str, outcome: Outcome) -> bool:
    if outcome.ending in (Ending.GIVEN_UP, Ending.UNSEEN):
        replay.drop(key)  # the flow has given up on it already
        return True
    if _follow_changed_foreach(run, replay, key):
        replay.put_back(key)
        return not replay.anew
    _hold(run, replay, key)
    return True


def _hold(run: LiveRun, replay: Replay, key: str) -> None:
    """Hold the run: the journal has `key` next, and the flow does something else. The reason names what the flow asks
    for and the journal does not have, or, if there is nothing new, what the flow asks for."""
    replay.drop(key)
    new = [*replay.drawn, *(other for other in run.pending if other not in replay.recorded)]
    run.stuck(Hold.NONDETERMINISM, expected(key, new or list(run.pending)))


def _tell(run: LiveRun, replay: Replay, operation: Operation, outcome: Outcome) -> bool:
    key = operation.key
    if outcome.blob and key not in replay.unheard:
        replay.fetching = True
        replay.put_back(key)
        run.services.background.start(_fetch(run, replay, outcome), "fetch", run.broke)
        return False
    replay.drop(*operation.entries)
    if key in replay.unheard:
        operation.unheard = True
        return True
    if outcome.ending is _CANCELLED:
        operation.interrupted = True
    elif outcome.ending is _GIVEN_UP:
        operation.error = GIVEN_UP
    elif outcome.ending is _UNSEEN:  # the flow should have given up on it by now
        _hold(run, replay, key)
    elif not operation.accept(outcome):
        return _redo(run, replay, operation)
    if run.stopping is None:
        run.tell(operation)
    return True


def _redo(run: LiveRun, replay: Replay, operation: Operation) -> bool:
    """Do an operation again, in its place: what is recorded after it is told after it."""
    replay.redone = operation
    run.do_when_live()  # among others, this records the values that the operation may act on
    operation.begin()
    return False


async def _fetch(run: LiveRun, replay: Replay, outcome: Outcome) -> None:
    await _load(run, outcome)
    replay.fetching = False
    run.wake()


async def _load(run: LiveRun, outcome: Outcome) -> None:
    with contextlib.suppress(Unwind):  # the run leaves memory, or is held because the blob cannot be read
        outcome.output, outcome.blob = msgspec.Raw(await run.load(NULL, outcome.blob)), ""


def _end(run: LiveRun, replay: Replay) -> bool:
    """All that is recorded has been told: the run goes on live, unless the flow should have asked for more by now."""
    unasked = replay.unasked or [key for key in replay.values if not key.startswith(_inside(replay))]
    if unasked:
        key = min(unasked)
        if _follow_changed_foreach(run, replay, key):
            return not replay.anew
        _hold(run, replay, key)
    else:
        run.go_live(replay)
    return True


def finished(run: LiveRun) -> bool:
    """The flow has ended. Returns whether its journal ends there, too; if not, the run is held."""
    replay = run.replay
    if replay is not None:
        key = replay.left() or min(replay.unasked, default=None)
        if key is not None and run.cancel_reason is None:
            run.stuck(Hold.NONDETERMINISM, expected(key, ()))
            return False
        run.do_when_live()
    return True


# ---- what is kept


async def load_kept(run: LiveRun) -> None:
    """Read the blobs of kept outcomes: these are told as soon as the flow asks for them, so they must be in memory."""
    for outcome in run.kept.values():
        if outcome.blob:
            outcome.output, outcome.blob = msgspec.Raw(await run.load(NULL, outcome.blob)), ""


async def remember(run: LiveRun, state: TreeState, prefix: str) -> None:
    """Before a flow is called again: keep what its earlier attempts finished, as the journal has it."""
    run.retried = state.retried
    found = {k: o for k, o in state.outcomes.items() if k and k.startswith(prefix) and state.is_kept(k, o)}
    run.kept.update(found)
    run.children.update(state.children)
    await load_kept(run)


# ---- a foreach that has changed


def _follow_changed_foreach(run: LiveRun, replay: Replay, key: str) -> bool:
    """The journal has `key` next and the flow has not asked for it. Returns whether a changed foreach explains that:
    its items or its concurrency have changed. What the flow asks for in the foreach is then done now, or found among
    what is kept. What is recorded after that is told after it."""
    if replay.anew:
        return True
    run.services.running_loop.give_back()
    foreach = next((one for one in replay.foreachs if key.startswith(one + "[")), None)
    if foreach is not None and foreach not in replay.changed:
        change_foreach(run, replay, foreach)
        for operation in [one for one in run.pending.values() if one.key.startswith(foreach + "[")]:
            find_kept(run, operation)
        return True
    inside = _inside(replay)
    new = [one for one in run.pending.values() if one.key.startswith(inside) and one.key not in replay.recorded]
    if new:
        replay.anew.update(dict.fromkeys(new))
        run.do_when_live()
    for operation in new:
        run.begin(operation)
    return bool(new)


def _inside(replay: Replay) -> tuple[str, ...]:
    """The prefixes of the keys of operations in a foreach that has changed."""
    return tuple(one + "[" for one in replay.changed)


def change_foreach(run: LiveRun, replay: Replay, key: str, cut: int = sys.maxsize) -> None:
    """The items or the concurrency of this foreach have changed: nothing recorded from index `cut` on counts, and the rest
    is kept."""
    replay.changed.add(key)
    run.when_live(lambda: run.record(ForeachCut(key, cut, run.now())))
    replay.stop_ordering(key)


def find_kept(run: LiveRun, operation: Operation) -> bool:
    """Tell the kept outcome of an operation that the flow asks for. Returns whether there is one, and it counts."""
    outcome = run.kept.get(operation.key)
    if outcome is None or outcome.kind != operation.kind:
        return False
    del run.kept[operation.key]
    if outcome.blob:  # only in a foreach that has just changed: all other kept blobs have been read
        if run.replay is not None:
            run.replay.anew[operation] = None
        run.services.background.start(_fetch_kept(run, operation, outcome), "fetch", run.broke)
    elif operation.accept(outcome):
        run.tell(operation)
    else:
        return False
    return True


async def _fetch_kept(run: LiveRun, operation: Operation, outcome: Outcome) -> None:
    await _load(run, outcome)
    if run.stopping is None and not operation.done():
        if operation.accept(outcome):
            run.told.append(operation)
        else:
            run.begin(operation)
        run.wake()
