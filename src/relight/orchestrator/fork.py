"""Fork: a new run that begins with another run's past, up to a step.

Its first commit has a checkpoint of the outcomes that it inherits, and the rows that show them: the items and totals of
their foreachs, and the child runs that had ended. Replay writes none of these again. The rows hold what the checkpoint
holds, so the commit is at most twice as large as the checkpoint.
"""

from __future__ import annotations

import msgspec

from relight.errors import ConflictError, DefinitionError, RunNotFoundError, RunStateError
from relight.model import journal as j
from relight.model.blob import check_blob
from relight.model.replay import Ending, Outcome, TreeState, encode_state, restore
from relight.model.run import ItemResult, Run, totals_row
from relight.orchestrator.orchestrator import Orchestrator
from relight.orchestrator.start import creation
from relight.ports.store import Exists, Store
from relight.run.arguments import check_run_id


async def fork(orchestrator: Orchestrator, run_id: str, from_step: str | None, new_id: str | None) -> str:
    """One commit: the new run, with a checkpoint of what it inherits. The old run, in any status, is only read."""
    services = orchestrator.services
    row = await services.store.get_run(run_id)
    if row is None:
        raise RunNotFoundError(f"no run has the id {run_id!r}")
    if not row.is_root:
        raise RunStateError(f"{run_id!r} is a child run; fork its root {row.root_id!r} from a step inside it")
    flow = services.registry.get(row.flow)
    (journal,) = await services.store.read([run_id])
    if isinstance(journal, Exception):
        raise journal
    state = restore(journal)
    assert state.created is not None
    outcomes = state.before(_sequence_of(state, run_id, from_step))
    forked_id = services.entropy.run_id() if new_id is None else check_run_id(new_id)
    # The input of this generation: the row has the input of the first one.
    data, blob = bytes(state.created.input), state.created.input_blob
    if blob:
        data = check_blob(await services.store.get_blob(blob), blob, run_id)
    commit, created = creation(services.config.payload.blob_threshold, flow, forked_id, data, services.clock.now())
    created = msgspec.structs.replace(created, forked_from=run_id)
    commit.entries = [j.encode_event(created)]
    # The flow gets what its earlier attempts finished whenever it asks for that, as in the old run.
    retried = dict.fromkeys(state.retried, 1)
    inherited = TreeState(sequence=1, created=created, outcomes=outcomes, retried=retried, cuts=state.cuts)
    inherited.unclaimed = state.unclaimed
    inherited.generation, inherited.format = state.generation, state.format  # its keys begin with the generation
    inherited.children = {key: child for key, child in state.children.items() if key in outcomes}
    commit.state = encode_state(inherited)
    runs = await _child_rows(services.store, run_id, forked_id, inherited)
    items = await _item_rows(services.store, run_id, forked_id, state, outcomes)
    if runs or items:
        commit.extras = msgspec.structs.replace(commit.extras, runs=runs, items=items)
    result = await services.recorder.create(commit)
    if isinstance(result, Exists):
        raise ConflictError(f"run id {forked_id!r} is taken; give the fork another id")
    orchestrator.offer(forked_id)
    return forked_id


def _sequence_of(state: TreeState, run_id: str, from_step: str | None) -> int:
    """The sequence before which everything is inherited: that of this step's outcome."""
    if from_step is None:
        return 0
    outcome = state.outcomes.get(from_step)
    if outcome is None:
        names = [key for key, found in state.outcomes.items() if key and found.kind in ("step", "run")]
        shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
        raise DefinitionError(f"run {run_id!r} has no recorded step {from_step!r}; it has: {shown or 'none'}")
    return outcome.sequence


def _id_of(root_id: str, run_key: str) -> str:
    return f"{root_id}/{run_key}" if run_key else root_id


async def _child_rows(store: Store, run_id: str, forked_id: str, inherited: TreeState) -> list[Run]:
    """The rows of the inherited child runs, as rows of the fork's children."""
    ids = [_id_of(run_id, key) for key in inherited.children]
    rows = await store.get_runs(ids) if ids else []

    def id_in_fork(of: str | None) -> str:
        return forked_id + (of or "").removeprefix(run_id)

    return [
        msgspec.structs.replace(
            row,
            id=id_in_fork(row.id),
            root_id=forked_id,
            parent_id=id_in_fork(row.parent_id),
            owner=None,
            epoch=0,
            wake_at=None,
        )
        for row in rows
        if row.status.terminal  # or else its parent was called again after the journal was read
    ]


async def _item_rows(
    store: Store, run_id: str, forked_id: str, state: TreeState, outcomes: dict[str, Outcome]
) -> list[ItemResult]:
    """The inherited items of every foreach, and its totals. If there are more items to do, replay writes the totals
    anew."""
    items: list[ItemResult] = []
    foreachs: dict[str, str] = {}  # by key: the key of the run that it belongs to
    for outcome in outcomes.values():
        if outcome.kind != "item" or outcome.ending is not Ending.OK:
            continue
        run_key = foreachs.get(outcome.foreach)
        if run_key is None:
            run_key = foreachs[outcome.foreach] = _run_around(state, outcome.foreach)
        items.append(
            ItemResult(
                run_id=_id_of(forked_id, run_key),
                key=outcome.foreach,
                index=outcome.index,
                digest=outcome.digest,
                output=b"" if outcome.blob else bytes(outcome.output),
                output_blob=outcome.blob,
            )
        )
    for run_key in dict.fromkeys(foreachs.values()):
        known = await store.foreach_progress(_id_of(run_id, run_key), run_key + "/" if run_key else "")
        items += [
            totals_row(_id_of(forked_id, run_key), one.key, one.total, 0)
            for one in known
            if one.key in foreachs and one.total is not None
        ]
    return items


def _run_around(state: TreeState, key: str) -> str:
    """The key of the innermost child run in which this operation is; "": it is in the root."""
    while key:
        key = key.rpartition("/")[0]
        if key in state.children:
            return key
    return ""
