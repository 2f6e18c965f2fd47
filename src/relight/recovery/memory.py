"""What recovery needs of the orchestrator: to know which runs are in memory here, and to put others there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from relight.flow.definitions import Flow
from relight.model.run import Message
from relight.recovery.trials import Trials
from relight.run.live_run import LiveRun
from relight.run.services import Host, Services


class RunsInMemory(Host, Protocol):
    """The orchestrator, as recovery sees it."""

    services: Services
    live: dict[str, LiveRun]
    taking: set[str]  # being claimed and restored right now
    trials: Trials

    @property
    def stopping(self) -> bool:
        """Whether nothing may be taken up any more."""
        ...

    @property
    def room(self) -> int:
        """How many more runs may be in memory."""
        ...

    async def wait_for_room(self) -> None:
        """Until a run can be taken up."""
        ...

    def taken_up(self, run_ids: Sequence[str]) -> None:
        """Taking these up is over, whether they are in memory now or not."""
        ...

    def enter(self, run: LiveRun) -> None:
        """The run is in memory from now on."""
        ...

    def drive(self, run: LiveRun, flow: Flow[..., object], messages: Sequence[Message]) -> None:
        """Put a run into motion, which has been told these messages."""
        ...

    def check_ownership(self, run_ids: Sequence[str], *, crashed: bool) -> None:
        """These may be ours in the store: it is to be asked again."""
        ...

    def look_for_held(self) -> None:
        """Runs that were held because nobody knew their flow may go on now."""
        ...

    def look_for_lost(self) -> None:
        """Runs may be ours in the store and not in memory."""
        ...

    def let_go_of_all(self) -> None:
        """The lease is lost: stop driving."""
        ...

    def lease_regained(self, lapsed: bool) -> None:
        """The lease is ours again. It may have lapsed meanwhile."""
        ...

    def claim_as_own(self, run_id: str) -> None:
        """Take this run up also while recovery is off."""
        ...

    async def message_posted(self, message: Message) -> None:
        """This process has posted a message."""
        ...
