"""What recovery needs of the orchestrator: to know which runs are in memory here, and to bring others into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from relight.flow.definitions import Flow
from relight.model.run import Message
from relight.recovery.trials import Trials
from relight.run.live_run import LiveRun
from relight.run.services import Host, Services


class SeeksRoom(Protocol):
    """A part of the engine that takes up runs of the store, as far as there is room in memory: recovery, the waker."""

    @property
    def wants_room(self) -> bool:
        """Whether runs may be waiting until this part has room for them."""
        ...

    def wake_up(self) -> None:
        """Look for runs again, as soon as the look that is under way is over."""
        ...


class RunsInMemory(Host, Protocol):
    """The orchestrator, as recovery sees it."""

    services: Services
    live: dict[str, LiveRun]
    taking: set[str]  # runs that are being claimed and restored right now
    trials: Trials

    @property
    def stopping(self) -> bool:
        """Whether no run may be taken up any more."""
        ...

    @property
    def room(self) -> int:
        """How many more runs may be in memory."""
        ...

    def seeks_room(self, seeker: SeeksRoom) -> None:
        """From now on this seeker is woken when it wants room and there is some."""
        ...

    def room_for(self, seeker: SeeksRoom) -> int:
        """How many runs this seeker may take up now."""
        ...

    def no_room(self) -> None:
        """Runs were found, and there is no room for them any more: look for them again."""
        ...

    def looked(self, seeker: SeeksRoom, *, had_room: bool) -> None:
        """This seeker has looked for runs to take up: it is the others' turn, if it had room for any."""
        ...

    def taken_up(self, run_ids: Sequence[str]) -> None:
        """These runs are in memory now, or could not be taken up."""
        ...

    def enter(self, run: LiveRun) -> None:
        """The run is in memory from now on."""
        ...

    def drive(self, run: LiveRun, flow: Flow[..., object], messages: Sequence[Message]) -> None:
        """Begin to drive a run, with these messages in its inbox."""
        ...

    def check_ownership(self, run_ids: Sequence[str], *, crashed: bool) -> None:
        """This process may own these runs: read the store again."""
        ...

    def look_for_held(self) -> None:
        """Runs that were held because their flow was unknown may go on now."""
        ...

    def look_for_lost(self) -> None:
        """This process may own runs in the store that it does not have in memory."""
        ...

    def let_go_of_all(self) -> None:
        """The lease is lost: stop driving."""
        ...

    def lease_regained(self, lapsed: bool) -> None:
        """This process has its lease again. It may have lapsed meanwhile."""
        ...

    async def message_posted(self, message: Message) -> None:
        """This process has posted a message."""
        ...
