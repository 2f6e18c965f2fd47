"""Checkpoint: fold a long journal into one snapshot and delete the entries that it replaces.

The snapshot is made from the store, not from memory: a run keeps no copy of its own past. The next one is due when the tail
has grown by `checkpoint.every` entries and by a quarter of what the snapshot holds, so that a run of n steps writes O(n)
bytes of snapshots and not O(n²).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from relight.errors import StoreError
from relight.model.journal import Journal
from relight.model.replay import encode_state, restore
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun


def begin(run: LiveRun) -> None:
    """Called when a commit has brought the journal to `checkpoint_at`."""
    run.writer.checkpoint_at = None  # one at a time
    run.services.background.start(checkpoint(run), "checkpoint")


async def checkpoint(run: LiveRun) -> None:
    """Make one snapshot. A failure does no harm: the journal is complete without it."""
    every = run.services.config.checkpoint.every
    size, known = 0, run.writer.sequence
    try:
        (journal,) = await run.services.store.read([run.id])
        if isinstance(journal, Exception):
            raise journal
        # Fold only what this process knows to be written: a commit whose answer was lost is recognised by its entries.
        folded = Journal(run.id, journal.checkpoint, [entry for entry in journal.entries if entry.sequence <= known])
        # In a thread: folding a hundred thousand entries must not block the loop that drives everything else.
        sequence, size, state = await run.services.threads.call(lambda: _fold(folded), None)
        await run.services.store.checkpoint(run.id, run.writer.epoch, sequence, state)
    except StoreError as error:
        log(logging.WARNING, Token.CHECKPOINT_FAILED, f"run {run.id}: {error}")
    run.writer.checkpoint_at = run.writer.sequence + max(every, size // 4)


def _fold(journal: Journal) -> tuple[int, int, bytes]:
    state = restore(journal)
    return state.sequence, len(state.outcomes), encode_state(state)
