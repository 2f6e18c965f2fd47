"""What a run is started with: an id that a user chose, arguments that its flow takes, and its first row and event."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from relight.errors import DefinitionError, PayloadError
from relight.flow.definitions import Flow
from relight.model.blob import blob_digest
from relight.model.journal import NULL, RunCreated
from relight.model.run import RESUME_IT, Run, Status

MAX_RUN_ID = 255


def check_run_id(run_id: str) -> str:
    """Check a run id that a user chose."""
    if not isinstance(run_id, str) or not 1 <= len(run_id) <= MAX_RUN_ID or "/" in run_id or not run_id.isprintable():
        raise DefinitionError(
            f"{run_id!r} cannot be a run id: give 1 to {MAX_RUN_ID} printable characters without '/', which separates child runs"
        )
    return run_id


def new_root(
    flow: Flow[..., Any], run_id: str, data: bytes, blob: str, at: float, parent_id: str | None = None
) -> tuple[Run, RunCreated]:
    """The row and the first event of a new root, which is pending: any orchestrator may take it up. `data` is its sealed
    arguments, or what the blob of that digest holds."""
    row = Run(
        id=run_id,
        root_id=run_id,
        parent_id=parent_id,
        flow=flow.name,
        flow_hash=flow.fingerprint,
        status=Status.PENDING,
        created_at=at,
        updated_at=at,
        wake_at=at,
        input=b"" if blob else data,
        input_blob=blob,
    )
    return row, RunCreated("", flow.name, flow.fingerprint, NULL if blob else Raw(data), blob, at, parent=parent_id)


def same_input(row: Run, data: bytes) -> bool:
    """Whether a run was started with exactly this input."""
    return row.input == data if not row.input_blob else row.input_blob == blob_digest(data)


def why_misread(error: PayloadError) -> str:
    """Why a recorded value is not what an annotation says, as a clause to which what to do is added."""
    return str(error).removesuffix("; was it changed?")


def input_refusal(error: PayloadError, generation: int) -> str:
    """The reason when a flow no longer takes the arguments of its run, with what to do."""
    began = "this run was started with" if generation == 1 else f"generation {generation} of this run began with"
    return (
        f"its flow does not take the arguments that {began}: {why_misread(error)}; let the flow take them again (a new "
        f"parameter needs a default), {RESUME_IT}"
    )
