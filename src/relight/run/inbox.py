"""A run in memory hears its messages: signals, the ends of runs it awaits, and requests to cancel, pause or go on."""

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
    """What a run in memory has been told."""

    __slots__ = ("early", "heard", "joined", "mailbox", "missed", "taken_back")

    def __init__(self, returned: list[Message]) -> None:
        self.mailbox = returned  # signals and ends that nobody has taken yet
        self.taken_back = {one.id for one in returned}  # those of the mailbox that are in the store's inbox no more
        self.early: Sequence[Message] = ()  # came before the flow could hear: it was being called, or replayed
        self.missed = False  # a message came when the run could no longer hear it
        self.joined = False  # another run waits for this one's end
        self.heard = 0  # the newest message that this object has heard: they come in the order of their ids


def deliver(run: LiveRun, message: Message) -> None:
    """A message reached the run's inbox."""
    if run.next is not None and run.stopping is None:
        next_generation.deliver(run, message)
        return
    if run.phase is not DRIVEN:
        run.inbox.missed = True  # it stays in the inbox, and is looked for there once the run has left
        return
    if message.id <= run.inbox.heard:
        return  # loading the inbox and hearing of it may overlap
    run.inbox.heard = message.id
    if run.replay is not None or run.main is None:
        run.inbox.early = [*run.inbox.early, message]
        if message.kind is MessageKind.PAUSE:  # it need not come back first
            leaving.handle_request(run, message)
    else:
        _hear(run, message)


def hear_early(run: LiveRun) -> None:
    """The flow can hear from now on: what came before is first."""
    early, run.inbox.early = run.inbox.early, ()
    for message in early:
        _hear(run, message)


def _hear(run: LiveRun, message: Message) -> None:
    if run.stopping is not None:  # since what came before it: it stays in the inbox
        run.inbox.missed, run.inbox.heard = True, min(run.inbox.heard, message.id - 1)
    elif message.kind is MessageKind.SIGNAL or message.kind is MessageKind.ENDED:
        bisect.insort(run.inbox.mailbox, message, key=lambda one: one.id)  # what was taken back may be younger
        waits.hand_over(run)
    elif message.kind is MessageKind.JOIN:
        run.inbox.joined = True
    elif message.kind is MessageKind.NEWER:
        what = not_understood(f"message {message.id} of run {message.run_id!r}, a", message.name)
        run.stuck(Hold.UPGRADE, UpgradeRequiredError(what))
    elif message.kind is MessageKind.CANCEL:
        cancel.request(run, message)
    else:
        leaving.handle_request(run, message)
