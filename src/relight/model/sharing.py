"""Sharing: how many of the runs that fall due together one orchestrator takes, so that those who are alive have equally many.

Whoever comes first takes no more than its share, and leaves the rest to the others for a moment; what is still there then is
anybody's. The PostgreSQL store computes the same in its own language (migrations/0010_claim_due.sql).
"""

from __future__ import annotations

# A single run is taken at once by whoever sees it first, unless it has so many more runs than the others have on average.
SLACK = 4


def share(recent: int, living: int, active: int, mine: int) -> int:
    """Of `recent` runs that have just fallen due. `active` are those in the memory of all `living` orchestrators, `mine` those in
    this one's."""
    if living <= 1:
        return recent
    fair = -(-(active + recent) // living) - mine
    some = min(recent, 1) if mine * living <= active + SLACK * living else 0
    return max(min(fair, recent), some)
