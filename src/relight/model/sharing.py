"""Sharing: how many of the runs that fall due together one orchestrator claims, to have as many as the others.

The first orchestrator claims no more than its share, and leaves the rest to the others for a moment. After that any
orchestrator may claim the rest. The PostgreSQL store computes the same in SQL (migrations/0010_claim_due.sql).
"""

from __future__ import annotations

# A single due run is claimed by the first orchestrator that sees it, unless that has so many runs more than average.
SLACK = 4


def share(recent: int, living: int, active: int, mine: int) -> int:
    """How many of the `recent` runs that have just fallen due one orchestrator claims. `active` runs are in the memory
    of all `living` orchestrators together, `mine` in the memory of this one."""
    if living <= 1:
        return recent
    fair = -(-(active + recent) // living) - mine
    some = min(recent, 1) if mine * living <= active + SLACK * living else 0
    return max(min(fair, recent), some)
