"""The plan: what recovery would do with every unfinished run, and why, without doing it.

It gathers the same facts and asks the same function as recovery itself, so a plan is a promise as far as the facts stay
what they are. Nothing is claimed and nothing is written.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from relight.errors import ConfigError, RunNotFoundError
from relight.model.decisions import Action, Decision, decide
from relight.model.lease import Session
from relight.model.replay import TreeState, restore
from relight.model.run import ENDS_PAUSE, UNFINISHED, Hold, Message, Run, RunFilter, Status
from relight.ownership.liveness import presence_of
from relight.recovery.facts import changed_steps, facts_of
from relight.run.services import Services

PAGE = 100  # runs whose journals are read together


class Planned(msgspec.Struct, kw_only=True):
    """One unfinished run, what recovery would do with it now, and what that would repeat."""

    run_id: str
    flow: str
    status: Status
    owner: str | None
    action: Action
    reason: str
    until: float | None = None  # left alone until then
    verdict: Action  # what recovery would do if its owner stopped now, or it became due
    verdict_reason: str
    resumes_at: str = ""  # where it would go on, or waits
    repeats: list[str] = []  # steps known to be in flight that would be executed again
    changed_steps: list[str] = []  # recorded steps whose code is another today; version_mismatch decides
    trouble: str = ""  # its journal cannot be read

    @property
    def stuck(self) -> bool:
        """It would not go on with the code of this process: a deployment should not roll over it. One that a person has
        paused is not meant to."""
        return bool(self.trouble) or self.verdict not in (Action.RESUME, Action.FINISH)


class Known(msgspec.Struct):
    """A run with everything that can be known about it from outside."""

    row: Run
    session: Session | None  # its owner's,
    alive: bool  # and whether that one lives
    state: TreeState | None  # None: its journal cannot be read,
    trouble: str  # and why
    decision: Decision
    verdict: Decision  # as if its owner were gone, or its time had come
    unread: list[Message]  # what it was told and has not taken in

    @property
    def trouble_of_owner(self) -> str:
        """What the owner says is wrong with it, while it lives."""
        return self.session.process.trouble if self.alive and self.session is not None else ""


async def incomplete(services: Services, limit: int | None = None) -> AsyncIterator[Run]:
    """Every unfinished root run, newest first; at most `limit` of them."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(f"limit={limit!r}: give a whole number, 1 or more, or None for all")
    cursor: str | None = None
    left = float("inf") if limit is None else limit
    while left > 0:
        where = RunFilter(status=UNFINISHED, roots_only=True, limit=int(min(PAGE, left)), cursor=cursor)
        page = await services.store.list_runs(where)
        for row in page.runs:
            yield row
        left -= len(page.runs)
        cursor = page.next_cursor
        if cursor is None:
            return


async def plan(services: Services, limit: int | None = None) -> AsyncIterator[Planned]:
    """Every unfinished root run with its decision, newest first; at most `limit` of them."""
    rows: list[Run] = []
    async for row in incomplete(services, limit):
        rows.append(row)
        if len(rows) == PAGE:
            for known in await know(services, rows):
                yield planned(services, known)
            rows = []
    for known in await know(services, rows):
        yield planned(services, known)


async def know_one(services: Services, run_id: str) -> Known:
    """One root run. Raises RunNotFoundError."""
    row = await services.store.get_run(run_id)
    if row is None:
        raise RunNotFoundError(f"no run has the id {run_id!r}")
    if not row.is_root:
        root = await services.store.get_run(row.root_id)
        assert root is not None, "a child run's root exists"
        row = root
    (known,) = await know(services, [row])
    return known


async def know(services: Services, rows: list[Run]) -> list[Known]:
    """Facts and decisions of these roots, as of now."""
    if not rows:
        return []
    presence = await presence_of(services.heartbeats, services.store, services.clock)
    journals = await services.store.read([row.id for row in rows])
    unread: dict[str, list[Message]] = {row.id: [] for row in rows}
    for message in await services.store.inbox(list(unread)):
        unread[message.run_id].append(message)
    found = []
    for row, journal in zip(rows, journals, strict=True):
        session = presence.session(row.owner)
        state, trouble = None, ""
        try:
            if isinstance(journal, Exception):
                raise journal
            state = restore(journal)
        except Exception as error:  # noqa: BLE001 - the plan tells what recovery would find, and goes on
            trouble = str(error)
        alive = row.owner is not None and (row.owner == services.owner or presence.is_alive(row.owner))
        told = any(message.kind in ENDS_PAUSE for message in unread[row.id])
        try:
            decision, verdict = _decisions(services, row, state, session, alive=alive, told=told)
        except Exception as error:  # noqa: BLE001 - as above
            trouble = f"deciding on it broke: {error!r}"
            decision = verdict = Decision(Action.LEAVE, f"{trouble}; report it")
        found.append(Known(row, session, alive, state, trouble, decision, verdict, unread[row.id]))
    return found


def _decisions(
    services: Services, row: Run, state: TreeState | None, session: Session | None, *, alive: bool, told: bool
) -> tuple[Decision, Decision]:
    """What is done with it now, and what would be if its owner were gone, or its time had come."""
    facts = facts_of(services, row, crashed=row.owner is not None, state=state, session=session, alive=alive, ours=told)
    decision = decide(facts)
    if row.status is Status.PAUSED and row.hold is not Hold.USER:
        return decision, decision  # held: it stays so
    return decision, decide(msgspec.structs.replace(facts, owner_alive=False, woken=True))


def planned(services: Services, known: Known) -> Planned:
    """What a person should know of it."""
    row, state, decision = known.row, known.state, known.decision
    result = Planned(
        run_id=row.id,
        flow=row.flow,
        status=row.status,
        owner=row.owner,
        action=decision.action,
        reason=decision.reason,
        until=decision.until,
        verdict=known.verdict.action,
        verdict_reason=known.verdict.reason,
        trouble=known.trouble,
    )
    if known.trouble and decision.action is not Action.LEAVE:
        result.reason = f"its journal cannot be read ({known.trouble}); it would be held"
    if state is not None:
        result.resumes_at = resumes_at(state)
        result.repeats = repeated(state) if row.owner is not None else []
        result.changed_steps = list(changed_steps(services, state))
    return result


def in_flight(state: TreeState) -> list[str]:
    """Steps that had begun and not ended, as far as that is journaled: plain steps do not journal their start."""
    return [key for key, begun in state.open.items() if begun.kind == "step" and begun.until is None]


def repeated(state: TreeState) -> list[str]:
    """Those of them that would be executed again; on_crash="fail" forbids it."""
    return [key for key in in_flight(state) if not state.open[key].fatal]


def resumes_at(state: TreeState) -> str:
    """Where the run stands, as its journal tells it."""
    begun = in_flight(state)
    if begun:
        return f"step {begun[0]}" + (f" and {len(begun) - 1} more" if len(begun) > 1 else "")
    waits = [key for key, open_ in state.open.items() if key and open_.kind == "wait"]
    if waits:
        return f"wait {waits[0]}" + (f" and {len(waits) - 1} more" if len(waits) > 1 else "")
    retrying = [key for key, open_ in state.open.items() if open_.until is not None]
    if retrying:
        return f"the next attempt of {retrying[0] or 'the flow'}"
    ended = [key for key in state.outcomes if key]
    return f"what follows {ended[-1]}" if ended else "its first step"
