"""How a run in memory receives its messages: signals, ends of runs it awaits, requests to cancel, pause or resume."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relight.errors import UpgradeRequiredError
from relight.model.formats import not_understood
from relight.model.run import Hold, Message, MessageKind
from relight.run import cancel, leaving, next_generation, waits
from relight.run.phase import DRIVEN

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun


class Inbox:
    """The messages of a run in memory."""

    __slots__ = ("early", "heard", "mailbox", "missed", "taken_back")

    def __init__(self, returned: list[Message]) -> None:
        self.mailbox = returned  # signals and ends of runs that no wait has received yet
        self.taken_back = {one.id for one in returned}  # those of the mailbox that are no longer in the store's inbox
        self.early: Sequence[Message] = ()  # came when the flow had not been called yet, or was being replayed
        self.missed = False  # a message came when the run could no longer receive it
        self.heard = 0  # the newest message that this object has received: they come in the order of their ids


def deliver(run: LiveRun, message: Message) -> None:
    """A message reached the run's inbox."""
    if message.kind is MessageKind.JOIN:  # in any phase: even the end that is being committed tells that run
        run.departure.tells_others = True
    if run.next is not None and run.stopping is None:
        next_generation.deliver(run, message)
        return
    if run.phase is not DRIVEN:
        run.inbox.missed = True  # it stays in the inbox, where the orchestrator looks once the run has left memory
        return
    if message.id <= run.inbox.heard:
        return  # it was received before: loading the inbox and delivering new messages may overlap
    run.inbox.heard = message.id
    if run.replay is not None or run.main is None:
        run.inbox.early = [*run.inbox.early, message]
        if message.kind is MessageKind.PAUSE:  # the run need not be replayed for that
            leaving.handle_request(run, message)
    else:
        _hear(run, message)


def hear_early(run: LiveRun) -> None:
    """The flow can receive messages from now on. Those that came before are the first."""
    early, run.inbox.early = run.inbox.early, ()
    for message in early:
        _hear(run, message)


def _hear(run: LiveRun, message: Message) -> None:
    if run.stopping is not None:  # an earlier message has stopped the run: this one stays in the inbox
        run.inbox.missed, run.inbox.heard = True, min(run.inbox.heard, message.id - 1)
    elif message.kind is MessageKind.SIGNAL or message.kind is MessageKind.ENDED:
        bisect.insort(run.inbox.mailbox, message, key=lambda one: one.id)  # one that was taken back may be newer
        waits.hand_over(run)
    elif message.kind is MessageKind.JOIN:
        pass  # noted when it came
    elif message.kind is MessageKind.NEWER:
        what = not_understood(f"message {message.id} of run {message.run_id!r}, a", message.name)
        run.stuck(Hold.UPGRADE, UpgradeRequiredError(what))
    elif message.kind is MessageKind.CANCEL:
        cancel.request(run, message)
    else:
        leaving.handle_request(run, message)
