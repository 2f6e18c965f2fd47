"""The plan: what recovery would do with every unfinished run, and why, without doing it.

It gathers the same facts and calls the same function as recovery itself. So recovery does what the plan says, as long
as the facts do not change. Nothing is claimed and nothing is written.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from relight.errors import ConfigError, RunNotFoundError
from relight.model.decisions import Action, Decision, decide
from relight.model.lease import Session
from relight.model.replay import TreeState, restore
from relight.model.run import ENDS_PAUSE, UNFINISHED, Hold, Message, Run, RunFilter, Status
from relight.model.text import shown
from relight.ownership.liveness import Presence, is_alive, presence_of
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
    until: float | None = None  # the run is left alone until then
    verdict: Action  # what recovery would do if its owner stopped now, or it became due
    verdict_reason: str
    resumes_at: str = ""  # where it would go on, or what it waits for
    repeats: list[str] = []  # steps known to be in flight that would be executed again
    changed_steps: list[str] = []  # recorded steps whose code has changed since; version_mismatch decides
    trouble: str = ""  # why its journal cannot be read

    @property
    def stuck(self) -> bool:
        """Whether the run would not go on with the code of this process: then this code should not be deployed. A run
        that a person has paused does not count as stuck."""
        return bool(self.trouble) or self.verdict not in (Action.RESUME, Action.FINISH)


class Known(msgspec.Struct):
    """A run with everything that can be known about it from outside."""

    row: Run
    session: Session | None  # of its owner
    alive: bool  # whether its owner is alive
    state: TreeState | None  # None: its journal cannot be read
    trouble: str  # why its journal cannot be read, or why no decision could be made
    decision: Decision
    verdict: Decision  # as if its owner were gone, or the run were due
    unread: list[Message]  # the messages that it has not consumed
    orchestrators: dict[str, str]  # the owners that are alive and could take it up, with what is wrong with each

    @property
    def trouble_of_owner(self) -> str:
        """What the owner reports to be wrong with itself, while it is alive."""
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
    """One run; for a child run, its root. Raises RunNotFoundError."""
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
    orchestrators = _orchestrators(services, presence)
    found = []
    for row, journal in zip(rows, journals, strict=True):
        session = presence.session(row.owner)
        state, trouble = None, ""
        try:
            if isinstance(journal, Exception):
                raise journal
            state = restore(journal)
        except Exception as error:  # noqa: BLE001 - the plan shows the error that recovery would meet, and goes on
            trouble = str(error)
        alive = row.owner is not None and (row.owner == services.owner or presence.is_alive(row.owner))
        free = any(message.kind in ENDS_PAUSE for message in unread[row.id])
        try:
            decision, verdict = _decisions(services, row, state, session, alive=alive, free=free)
        except Exception as error:  # noqa: BLE001 - the plan shows the error that recovery would meet, and goes on
            trouble = f"deciding on it broke: {shown(error)}"
            decision = verdict = Decision(Action.LEAVE, f"{trouble}; report it")
        found.append(Known(row, session, alive, state, trouble, decision, verdict, unread[row.id], orchestrators))
    return found


def _orchestrators(services: Services, presence: Presence) -> dict[str, str]:
    """The owners that are alive, and what each says is wrong with it; "": nothing. This process knows it of itself as
    of now, and others by their last heartbeats."""
    sessions = presence.noted | presence.listed
    alive = {owner: session.process.trouble for owner, session in sessions.items() if is_alive(session)}
    if services.config.drive:
        alive[services.owner] = services.supervisor.failing
    return alive


def _decisions(
    services: Services, row: Run, state: TreeState | None, session: Session | None, *, alive: bool, free: bool
) -> tuple[Decision, Decision]:
    """What recovery does with the run now, and what it would do if the owner were gone, or the run were due."""
    facts = facts_of(services, row, crashed=row.owner is not None, state=state, session=session, alive=alive, ours=free)
    decision = decide(facts)
    if row.status is Status.PAUSED and row.hold is not Hold.USER:
        return decision, decision  # a held run stays held
    return decision, decide(msgspec.structs.replace(facts, owner_alive=False, woken=True))


def planned(services: Services, known: Known) -> Planned:
    """What a person should know of the run."""
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
        goes_on = known.verdict.action in (Action.RESUME, Action.WAIT)
        result.repeats = repeated(state) if row.owner is not None and goes_on else []
        result.changed_steps = list(changed_steps(services, state))
    return result


def in_flight(state: TreeState) -> list[str]:
    """Steps that had begun and not ended, as far as the journal knows: plain steps do not journal their start."""
    return [key for key, begun in state.open.items() if begun.kind == "step" and begun.until is None]


def repeated(state: TreeState) -> list[str]:
    """The steps in flight that would be executed again; on_crash="fail" forbids that."""
    return [key for key in in_flight(state) if not state.open[key].fatal]


def resumes_at(state: TreeState) -> str:
    """Where the run is, according to its journal."""
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
