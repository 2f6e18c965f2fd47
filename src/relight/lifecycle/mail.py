"""Mail: how messages reach runs, wherever these are.

A run in memory is handed its messages. One that is being taken up has read its inbox perhaps a moment too early, so they are
kept for it. One that is parked or paused may have to be taken up for them. And one that was just leaving memory did not hear
them: its inbox is looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relight.lifecycle.run import LiveRun
from relight.model.run import ENDS_PAUSE, Message, MessageKind, Run, Status

if TYPE_CHECKING:
    from relight.lifecycle.orchestrator import Orchestrator

MESSAGE_LIMIT = 1000  # per pass; a full pass is followed at once by the next


class Mail:
    """One per orchestrator."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._last = 0  # the newest message that was routed
        self._early: dict[str, list[Message]] = {}  # for runs that are in memory only in a moment
        self._unheard: dict[
            str, set[int]
        ] = {}  # runs that left memory while they were told something: what they did hear

    async def hear(self) -> None:
        """Route what any process has posted since we last looked."""
        store = self._orchestrator.services.store
        while True:
            messages = await store.messages_after(self._last, MESSAGE_LIMIT)
            if not messages:
                return
            await self._route(messages)
            self._last = messages[-1].id  # not before: what fails on the way is heard again
            if len(messages) < MESSAGE_LIMIT:
                return

    def told(self, message: Message) -> bool:
        """Pass a message on that this process has just posted, if that is all there is to do. Not if others were posted
        before it and not heard yet: messages are heard in their order, or a later signal would overtake an earlier one. Nor if it
        may be one that was posted before, and taken in by an earlier life of its run: only the store knows that."""
        if message.dedup is not None or message.id != self._last + 1 or not self._deliver(message):
            return False
        self._last = message.id
        return True

    def missed_by(self, run: LiveRun) -> None:
        """A run has left memory and was told something that it was no longer able to hear."""
        self._unheard[run.id] = run.heard

    async def recheck(self) -> None:
        """Look again at the inboxes of runs that did not hear everything: perhaps it wakes them."""
        unheard = dict(self._unheard)
        if not unheard:
            return
        waiting = await self._orchestrator.services.store.inbox(list(unheard))
        await self._route([message for message in waiting if message.id not in unheard[message.run_id]])
        for run_id, heard in unheard.items():
            if self._unheard.get(run_id) is heard:  # else it has come and gone once more
                del self._unheard[run_id]

    def opened_for(self, run: LiveRun, inbox: Sequence[Message]) -> list[Message]:
        """What a run that is put into motion has to hear: its inbox, and what came since that was read (or was heard of just
        before, and is in both). Of pauses and resumes only the last counts, and only if it is a pause.
        """
        told = {message.id: message for message in (*inbox, *self._early.pop(run.id, ()))}
        messages = [told[message_id] for message_id in sorted(told)]
        switches = [message for message in messages if message.kind in (MessageKind.PAUSE, MessageKind.RESUME)]
        if switches and switches[-1].kind is MessageKind.PAUSE:
            switches.pop()
        over = {message.id for message in switches}
        if over:
            run.writer.consume(over)
        return [message for message in messages if message.id not in over]

    def not_opened_for(self, run_id: str) -> bool:
        """Taking a run up is over. True if messages came that nobody has heard, because it was not driven after all."""
        if not self._early.pop(run_id, None):
            return False
        self._unheard.setdefault(run_id, set())
        return True

    async def _route(self, messages: Sequence[Message]) -> None:
        parked: dict[str, list[Message]] = {}
        for message in messages:
            if not self._deliver(message):
                parked.setdefault(message.run_id, []).append(message)
        if not parked:
            return
        rows = await self._orchestrator.services.store.get_runs(list(parked))
        for row in rows:
            if row.owner == self._orchestrator.services.owner:
                late = [message for message in parked[row.id] if not self._deliver(message)]
                self._early.setdefault(row.id, []).extend(late)
        self._orchestrator.lookout.wake([row for row in rows if _wakes(row, parked[row.id])])

    def _deliver(self, message: Message) -> bool:
        """To a run in memory, or one about to be: its inbox may have been read just before this message came."""
        run = self._orchestrator.live.get(message.run_id)
        if run is not None:
            run.deliver(message)
        elif message.run_id in self._orchestrator.taking:
            self._early.setdefault(message.run_id, []).append(message)
        return run is not None or message.run_id in self._orchestrator.taking


def _wakes(row: Run, messages: Sequence[Message]) -> bool:
    """Whether a run that is not in memory is taken up for these messages."""
    if row.owner is not None or all(message.kind is MessageKind.JOIN for message in messages):
        return False  # it is in memory there, or about to be; if its owner has died, that is for recovery
    if row.status is Status.PAUSED:
        return any(message.kind in ENDS_PAUSE for message in messages)
    return row.status is Status.WAITING
