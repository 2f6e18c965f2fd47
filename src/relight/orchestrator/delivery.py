"""Delivery: how messages reach the runs that are in memory here.

A run in memory is handed its messages. One that is being created or taken up has read its inbox perhaps a moment too early, so
they are kept for it. Everybody else's are none of our business: a run that nobody holds was made due by the message itself (see
ports/store.py), and one that another process holds hears it there.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence

from relight.model.run import Message, MessageKind
from relight.ports.store import Store
from relight.run.live_run import LiveRun
from relight.telemetry import Token, log

MESSAGE_LIMIT = 1000  # per pass; a full pass is followed at once by the next


class Delivery:
    """One per orchestrator. `arriving` are the runs that are in memory only in a moment."""

    def __init__(self, store: Store, live: Mapping[str, LiveRun], *arriving: Container[str]) -> None:
        self._store = store
        self._live = live
        self._arriving = arriving
        self._last = 0  # the newest message that was passed on
        self._early: dict[str, list[Message]] = {}  # for runs that are in memory only in a moment

    async def begin(self) -> None:
        """Before any run is in memory: what was posted until now is read by whoever takes up the runs it is for."""
        self._last = await self._store.newest_message()

    async def deliver_new(self) -> None:
        """Pass on what any process has posted since we last looked."""
        while True:
            messages = await self._store.messages_after(self._last, MESSAGE_LIMIT)
            for message in messages:
                self._deliver(message)
                self._last = message.id
            if len(messages) < MESSAGE_LIMIT:
                return

    def deliver_posted(self, message: Message) -> bool:
        """Pass a message on that this process has just posted, if that is all there is to do. Not if others were posted
        before it and not heard yet: messages are heard in their order, or a later signal would overtake an earlier one. Nor if it
        may be one that was posted before, and taken in by an earlier life of its run: only the store knows that."""
        if message.dedup is not None or message.id != self._last + 1 or not self._deliver(message):
            return False
        self._last = message.id
        return True

    def opened_for(self, run: LiveRun, inbox: Sequence[Message]) -> tuple[list[Message], int]:
        """What a run that is put into motion has to hear: its inbox, and what came since that was read (or was heard of just
        before, and is in both). Of pauses and resumes only the last counts, and only if it is a pause. Also the newest of all.
        """
        told = {message.id: message for message in (*inbox, *self._early.pop(run.id, ()))}
        messages = [told[message_id] for message_id in sorted(told)]
        switches = [message for message in messages if message.kind in (MessageKind.PAUSE, MessageKind.RESUME)]
        if switches and switches[-1].kind is MessageKind.PAUSE:
            switches.pop()
        over = {message.id for message in switches}
        if over:
            run.writer.consume(over)
        return [message for message in messages if message.id not in over], max(told, default=0)

    def forget(self, run_id: str) -> bool:
        """It is not in memory after all: whether something was kept for it. The store has made it due, or its owner hears it."""
        return self._early.pop(run_id, None) is not None

    def _deliver(self, message: Message) -> bool:
        run = self._live.get(message.run_id)
        if run is not None:
            try:
                run.deliver(message)
            except Exception as error:  # noqa: BLE001 - a bug of ours: that run hears it when it is back, the others hear theirs now
                log(
                    logging.CRITICAL,
                    Token.INTERNAL_ERROR,
                    f"run {run.id}: message {message.id} broke: {error!r}",
                    error,
                )
                run.broke(error)
            return True
        if any(message.run_id in runs for runs in self._arriving):
            self._early.setdefault(message.run_id, []).append(message)
            return True
        return False
