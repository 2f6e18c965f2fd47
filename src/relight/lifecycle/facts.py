"""Facts: what is known of a run, gathered for `model.decisions`. Whoever recovers, plans or explains gathers them here."""

from __future__ import annotations

from relight.lifecycle.services import Services
from relight.model.decisions import Facts, Policy
from relight.model.lease import Session
from relight.model.replay import Ending, TreeState
from relight.model.run import RESUMED_BY_HAND, Run, Status
from relight.process import is_dead

ENDINGS = {Ending.OK: Status.COMPLETED, Ending.ERROR: Status.FAILED, Ending.CANCELLED: Status.CANCELLED}


def facts_of(
    services: Services,
    row: Run,
    *,
    crashed: bool,
    woken: bool = False,
    state: TreeState | None = None,
    session: Session | None = None,
    alive: bool = False,
    ours: bool = True,
) -> Facts:
    """What is known of a run, for `decide`. Without its `state` the journal decides nothing yet; `session` is its owner's,
    `alive` tells that the owner is known to live whatever its session says: it is this process. `ours`: this process
    may go on with it, or is asked only what it would do if it were to; not for people, who are told what happens by itself."""
    config = services.config.recovery
    flow = services.registry.find(row.flow)
    ended = state.outcomes.get("") if state is not None else None
    judged = state is not None and config.version_mismatch == "fail"
    return Facts(
        status=row.status,
        flow=row.flow,
        owner=row.owner,
        hold=row.hold,
        reason=row.reason,
        wake_at=row.wake_at,
        started_at=row.created_at,
        now=services.clock.now(),
        owner_alive=alive or (session is not None and is_alive(session)),
        last_heartbeat=None if session is None else session.heartbeat_at,
        flow_registered=flow is not None,
        resumable=flow is None or flow.resumable,
        ended=None if ended is None else ENDINGS[ended.ending],
        crashes_without_progress=0 if state is None else state.recoveries,
        changed_steps=changed_steps(services, state) if judged and state is not None else (),
        by_hand=ours or row.reason == RESUMED_BY_HAND,
        crashed=crashed,
        woken=woken,
        policy=Policy(
            enabled=config.enabled,
            auto_resume=config.auto_resume,
            stale_timeout_seconds=config.stale_timeout_seconds,
            max_resume_age_seconds=config.max_resume_age_seconds,
            max_attempts=config.max_attempts,
            version_mismatch=config.version_mismatch,
        ),
    )


def is_alive(session: Session) -> bool:
    """Whether the owner of this session lives, as far as can be known: it has not lapsed, nor is its process gone."""
    return session.fresh and not is_dead(session.process)


def changed_steps(services: Services, state: TreeState) -> tuple[str, ...]:
    """Recorded steps whose code or options are others today."""
    steps = (
        (key, outcome.fingerprint)
        for key, outcome in state.outcomes.items()
        if outcome.kind == "step" and outcome.ending is not Ending.UNSEEN  # nobody is given that
    )
    return services.registry.changed(steps)


def open_children(state: TreeState) -> list[str]:
    """The keys of child runs that have begun and not ended."""
    return [key for key, open_ in state.open.items() if key and open_.kind == "run"]
