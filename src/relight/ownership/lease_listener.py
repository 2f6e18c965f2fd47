"""What the heartbeat thread reports: the loss and return of this process's lease, and the end of other sessions."""

from __future__ import annotations

from typing import Protocol

from relight.model.lease import Orphaned


class LeaseListener(Protocol):
    """The engine's part that the heartbeat thread calls, on the engine's loop."""

    def lease_lost(self) -> None:
        """The lease could not be renewed and lapses soon: let go of every run, and take up none."""
        ...

    def lease_regained(self, lapsed: bool) -> None:
        """The lease is renewed after it was lost or had lapsed. If `lapsed`, other processes may have claimed runs."""
        ...

    def orphans(self, orphaned: Orphaned) -> None:
        """The session of another owner has ended."""
        ...


class Nobody:
    """The listener before the heartbeats are started."""

    def lease_lost(self) -> None: ...

    def lease_regained(self, lapsed: bool) -> None: ...

    def orphans(self, orphaned: Orphaned) -> None: ...
