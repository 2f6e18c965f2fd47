"""Fork: a new run that begins with another run's past, up to a step."""

from __future__ import annotations

import msgspec

from relight.errors import ConflictError, DefinitionError, RunNotFoundError, RunStateError
from relight.model import journal as j
from relight.model.blob import check_blob
from relight.model.replay import TreeState, encode_state, restore
from relight.orchestrator.orchestrator import Orchestrator
from relight.orchestrator.start import creation
from relight.ports.store import Exists
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
    commit.state = encode_state(inherited)
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
