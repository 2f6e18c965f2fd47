"""Continuing: a run ends its generation and begins the next under the same id, with new arguments (`continue_as`).

One commit does both: it says that the generation has ended, and replaces the journal by a checkpoint of the one that
begins (`Commit.next`). A crash before the commit leaves the old generation, which comes to the same end again on replay;
after it, a crash leaves the new generation, whose code has not been called yet.

Messages that no wait has received yet are for the next generation: they stay in the inbox, in the store as in memory.
If a wait had received a signal and the flow gave up on the wait, the signal is no longer in the store's inbox. Such
signals are part of the checkpoint, as of any other.

What a generation leaves to the next:

- Keys. The path of the flow's code is empty in the first generation and `@2`, `@3`, … in later ones
  (`tree.generation_path`). So keys, ids of children and spawned runs, and idempotency keys are unique over generations.
  The ids of a generation's children are a range of the index, and the store deletes that range.
- The row keeps its input, which `start` compares, and its creation time, from which the timeout counts.
- Ends of spawned runs are consumed: a flow that waits for one of them later looks at its row first. Consumed messages
  are kept for `dedup`, but every hundredth generation drops all but the newest thousand.
- Room. A run that never waits would keep its room for ever. If others wait for room, it is released between two
  generations.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from relight.errors import ContinueAs, FlowCodeError
from relight.model import journal as j
from relight.model.replay import TreeState, Unclaimed, encode_state
from relight.model.run import Message, MessageKind
from relight.model.text import shown
from relight.ports.store import NextGeneration
from relight.run import leaving
from relight.run.phase import ENDING
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.flow.scope import Scope
    from relight.run.live_run import LiveRun

_SWALLOWED = (
    "an `except:` or `except BaseException:` around it, or a `return` in a `finally`, has swallowed what it raises"
)
TRIM_EVERY = 100  # generations: how often the inbox forgets what it keeps of consumed messages


def request(run: LiveRun, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """See flow.operations.continue_as. A wrong call raises here, live and on replay."""
    stop = run.stop_reason()
    if stop is not None:
        raise stop
    if scope.run_key:
        raise FlowCodeError(
            f"continue_as() was called in the child run {scope.run_key!r}, and only a root run can continue: call it "
            "in the flow that was started, or spawn() this one"
        )
    if scope.path != run.path:
        raise FlowCodeError(
            "continue_as() was called in a task, a branch or an item of the flow, and ends the whole run: call it in the code of "
            "the flow itself"
        )
    assert run.flow is not None
    if run.asked_to_continue is not None and run.asked_to_continue[0] is scope:
        raise FlowCodeError(f"continue_as() was called before, and the flow went on: {_SWALLOWED}")
    asked = ContinueAs(args, kwargs, run.flow.arguments.seal(args, kwargs, run.max_bytes))
    run.asked_to_continue = scope, asked
    raise asked


def found_in(error: BaseException) -> ContinueAs:
    """The flow has ended with this error. Returns the ContinueAs in it: asyncio.TaskGroup wraps what is raised in its
    body. Raises the error, or the failures in the group, if there are any."""
    if isinstance(error, ContinueAs):
        return error
    if isinstance(error, BaseExceptionGroup):
        wanted, failures = error.split(ContinueAs)
        if failures is not None:
            raise failures
        if wanted is not None:
            return found_in(wanted.exceptions[0])
    raise error


def check_return(run: LiveRun, scope: Scope, value: Any) -> None:
    """The flow has ended without an error. It must end with a ContinueAs if it called continue_as(), and only then."""
    asked = None
    if run.asked_to_continue is not None and run.asked_to_continue[0] is scope:
        asked = run.asked_to_continue[1]
    if type(value) is ContinueAs and value is not asked:
        raise FlowCodeError(
            "the flow ended with a ContinueAs of its own making: call continue_as() instead, which checks it"
        )
    if asked is not None and value is not asked:
        raise FlowCodeError(f"continue_as() was called, and the flow returned something else: {_SWALLOWED}")


def begin(run: LiveRun, data: bytes) -> None:
    """The flow is over: `data` is the input of its next generation. Nothing may be told, begun or recorded after it."""
    assert run.flow is not None
    children = run.run_id(run.path) + "/"
    raw, blob = run.payload(data)
    continued = j.RunContinued("", run.flow.fingerprint, raw, blob, run.now())
    state = TreeState(created=run.created, generation=run.generation, unclaimed=_unclaimed(run))
    state.apply(0, continued)  # its place is that of the checkpoint
    run.set_running()
    run.writer.add(continued)
    trim = state.generation % TRIM_EVERY == 0
    run.writer.begin_generation(NextGeneration(state=encode_state(state), children=children, trim_inbox=trim))
    _forget_ends(run)
    run.next = state
    run.enter(ENDING)
    run.writer.committed().add_done_callback(lambda _: _is_durable(run))


def _unclaimed(run: LiveRun) -> list[Unclaimed]:
    """Signals that are no longer in the store's inbox, and that no wait has received."""
    return [
        Unclaimed(one.id, one.name, j.NULL if one.payload_blob else msgspec.Raw(one.payload), one.payload_blob)
        for one in run.inbox.mailbox
        if one.id in run.inbox.taken_back
    ]


def _forget_ends(run: LiveRun) -> None:
    """Consume the messages about ends of spawned runs that this generation did not wait for. The next generation does
    not need them: a wait for such a run looks at its row first. A run that spawns for ever would collect them for
    ever."""
    ends = [one.id for one in run.inbox.mailbox if one.kind is MessageKind.ENDED]
    if ends:
        run.writer.consume(ends)
        run.inbox.mailbox = [one for one in run.inbox.mailbox if one.kind is not MessageKind.ENDED]


def deliver(run: LiveRun, message: Message) -> None:
    """A message reached the run while its next generation is being committed: it is for that generation."""
    if message.id > run.inbox.heard:
        run.inbox.heard = message.id
        run.inbox.early = [*run.inbox.early, message]


def _is_durable(run: LiveRun) -> None:
    if run.writer.lost:
        return  # the run leaves memory, and this object does no more for it
    try:
        leaving.stop_bodies(run)
        run.host.continued(run)
    except Exception as error:  # noqa: BLE001 - a bug in Relight: this is a callback, nothing else would log it
        log(logging.CRITICAL, Token.INTERNAL_ERROR, f"the next generation of run {run.id} broke: {shown(error)}", error)
        run.next = None
        run.broke(error)


def inherit(run: LiveRun, last: LiveRun) -> None:
    """Give the new generation's object what outlives the old generation."""
    last.let_go()
    run.writer, run.status, run.lapses = last.writer, last.status, last.lapses
    run.writer.run = run
    if run.writer.checkpoint_at is not None:  # None: one is being made, which sets when the next is due
        run.writer.checkpoint_at = run.writer.sequence + run.services.config.checkpoint.every
    run.inbox.mailbox, run.inbox.taken_back = last.inbox.mailbox, last.inbox.taken_back
    run.inbox.early, run.inbox.heard = last.inbox.early, last.inbox.heard
    run.departure.tells_others = last.departure.tells_others
