"""Facts: what is known of a run, for `model.decisions`. Recovery, plan and explain all gather their facts here."""

from __future__ import annotations

from typing import Any

from relight.errors import PayloadError
from relight.flow.definitions import Flow
from relight.model.crashes import NO_CRASHES
from relight.model.decisions import Facts, Policy
from relight.model.lease import Session
from relight.model.replay import Ending, TreeState
from relight.model.run import RESUMED_BY_HAND, Run, Status
from relight.run.arguments import input_refusal
from relight.run.services import Services

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
    resumed: bool = False,
    ours: bool = True,
) -> Facts:
    """What is known of a run, for `decide`. Without `state`, facts from the journal decide nothing yet. `session` is
    that of its owner. `alive`: the owner is alive, or not known to be dead (see ownership/liveness.py). `resumed`: a
    person has resumed the run. `ours`: decide as if this process may go on with the run. The plan and explain pass
    False for a run whose inbox has no request to resume or cancel it: they show what happens without further action."""
    config = services.config.recovery
    now = services.clock.now()
    crashes = NO_CRASHES if state is None else state.crashes
    flow = services.registry.find(row.flow)
    ended = state.outcomes.get("") if state is not None else None
    judged = state is not None and config.version_mismatch == "fail"
    return Facts(
        status=row.status,
        flow=row.flow,
        owner=row.owner,
        hold=row.hold,
        reason=row.reason,
        newer=row.newer,
        wake_at=row.wake_at,
        started_at=row.created_at,
        now=now,
        owner_alive=alive,
        last_heartbeat=None if session is None else session.heartbeat_at,
        flow_registered=flow is not None,
        why_unknown=services.registry.why_unknown(row.flow) if flow is None else "",
        resumable=flow is None or flow.resumable,
        ended=None if ended is None else ENDINGS[ended.ending],
        crashes_without_progress=crashes.count + (crashed and state is not None),
        crashes_alone=crashes.alone + (crashed and crashes.tried_with == 1),
        lived_seconds=max(0.0, _died_at(session, now, config.lease_ttl_seconds) - crashes.at) if crashes.at else 0.0,
        trial_seconds=crashes.trial_seconds,
        changed_steps=changed_steps(services, state) if judged and state is not None else (),
        refused_input=refused_input(flow, state) if flow is not None and state is not None else "",
        by_hand=ours or row.reason == RESUMED_BY_HAND,
        crashed=crashed,
        woken=woken,
        resumed=resumed,
        policy=Policy(
            enabled=config.enabled,
            auto_resume=config.auto_resume,
            stale_timeout_seconds=config.stale_timeout_seconds,
            max_resume_age_seconds=config.max_resume_age_seconds,
            max_attempts=config.max_attempts,
            version_mismatch=config.version_mismatch,
        ),
    )


def _died_at(session: Session | None, now: float, ttl_seconds: float) -> float:
    """The latest time at which the owner may have died: its next heartbeat did not come."""
    return now if session is None else min(now, session.heartbeat_at + ttl_seconds / 3)


def changed_steps(services: Services, state: TreeState) -> tuple[str, ...]:
    """Recorded steps whose code or options have changed since."""
    steps = (
        (key, outcome.fingerprint)
        for key, outcome in state.outcomes.items()
        if outcome.kind == "step" and outcome.ending is not Ending.UNSEEN  # the flow is never told it
    )
    return services.registry.changed(steps)


def refused_input(flow: Flow[..., Any], state: TreeState) -> str:
    """Why the flow does not accept the arguments of the run's generation; empty if it does. Arguments in a blob are not
    read here: they are checked when the flow is called."""
    if state.created is None or state.created.input_blob:
        return ""
    try:
        flow.arguments.open(state.created.input)
    except PayloadError as error:
        return input_refusal(error, state.generation)
    except Exception:  # noqa: BLE001 - from the annotations' own code: it is reported when the flow is called
        return ""
    return ""


def open_children(state: TreeState) -> list[str]:
    """The keys of child runs that have begun and not ended."""
    return [key for key, open_ in state.open.items() if key and open_.kind == "run"]
