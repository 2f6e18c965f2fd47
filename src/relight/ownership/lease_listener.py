"""Who is told by the heartbeat thread what became of the lease, and of others'."""

from __future__ import annotations

from typing import Protocol

from relight.model.lease import Orphaned


class LeaseListener(Protocol):
    """Who is told by the heartbeat thread, on the engine's loop."""

    def lease_lost(self) -> None:
        """It could not be renewed and lapses soon: let go of every run, and take none."""
        ...

    def lease_regained(self, lapsed: bool) -> None:
        """It is renewed after it was lost, or (`lapsed`) after it had lapsed, so that others may have claimed runs."""
        ...

    def orphans(self, orphaned: Orphaned) -> None:
        """Somebody's session has ended."""
        ...


class Nobody:
    """Before it is started."""

    def lease_lost(self) -> None: ...

    def lease_regained(self, lapsed: bool) -> None: ...

    def orphans(self, orphaned: Orphaned) -> None: ...
