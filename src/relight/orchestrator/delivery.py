"""Delivery: how messages reach the runs that are in memory here.

A run in memory receives its messages at once. For a run that is being created or taken up, messages are kept back until
it is in memory: its inbox may have been read before they were posted. Messages to other runs are not this process's
task. The message itself has made a run without an owner due (see ports/store.py), and another process delivers to the
runs it owns.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence

from relight.model.run import Message, MessageKind
from relight.model.text import shown
from relight.ports.store import Store
from relight.run.live_run import LiveRun
from relight.telemetry import Token, log

MESSAGE_LIMIT = 1000  # per pass; a full pass is followed at once by the next


class Delivery:
    """One per orchestrator. `arriving` are the runs that are about to be in memory."""

    def __init__(self, store: Store, live: Mapping[str, LiveRun], *arriving: Container[str]) -> None:
        self._store = store
        self._live = live
        self._arriving = arriving
        self._last = 0  # the newest message that was delivered
        self._early: dict[str, list[Message]] = {}  # kept back for runs that are about to be in memory

    async def begin(self) -> None:
        """Called before any run is in memory: a process that takes a run up reads the messages posted until now."""
        self._last = await self._store.newest_message()

    async def deliver_new(self) -> None:
        """Deliver what any process has posted since the last call."""
        while True:
            messages = await self._store.messages_after(self._last, MESSAGE_LIMIT)
            for message in messages:
                self._deliver(message)
                self._last = message.id
            if len(messages) < MESSAGE_LIMIT:
                return

    def deliver_posted(self, message: Message) -> bool:
        """Deliver a message that this process has just posted. Returns False if the store must be read instead.

        It must be read if other messages were posted before this one and are not delivered yet: a later signal would
        overtake an earlier one. It must also be read for a message with a dedup: the run may have consumed the same
        message before this process took it up, and only the store knows that."""
        if message.dedup is not None or message.id != self._last + 1 or not self._deliver(message):
            return False
        self._last = message.id
        return True

    def opened_for(self, run: LiveRun, inbox: Sequence[Message]) -> tuple[list[Message], int]:
        """What to deliver to a run that begins to be driven: its inbox, and the messages kept back for it (a message
        may be in both). Of pauses and resumes only the last counts, and only if it is a pause. Also returns the id of
        the newest message.
        """
        by_id = {message.id: message for message in (*inbox, *self._early.pop(run.id, ()))}
        messages = [by_id[message_id] for message_id in sorted(by_id)]
        switches = [message for message in messages if message.kind in (MessageKind.PAUSE, MessageKind.RESUME)]
        if switches and switches[-1].kind is MessageKind.PAUSE:
            switches.pop()
        over = {message.id for message in switches}
        if over:
            run.writer.consume(over)
        return [message for message in messages if message.id not in over], max(by_id, default=0)

    def forget(self, run_id: str) -> bool:
        """The run did not come into memory: whether messages were kept back for it. Nothing is lost: the store has made
        the run due, or its owner receives them."""
        return self._early.pop(run_id, None) is not None

    def _deliver(self, message: Message) -> bool:
        run = self._live.get(message.run_id)
        if run is not None:
            try:
                run.deliver(message)
            except Exception as error:  # noqa: BLE001 - a bug of ours: that run receives it when it is taken up again
                log(
                    logging.CRITICAL,
                    Token.INTERNAL_ERROR,
                    f"run {run.id}: delivering message {message.id} broke: {shown(error)}",
                    error,
                )
                run.broke(error)
            return True
        if any(message.run_id in runs for runs in self._arriving):
            self._early.setdefault(message.run_id, []).append(message)
            return True
        return False
