"""A batch on which the store breaks, not by an outage: a value that it cannot write, or a bug in a backend.

The batch is divided until the failing commit is alone. Its run is held with the error, and the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from relight.errors import StoreUnavailableError
from relight.model.run import RESUME_IT, Hold, RunChange, Status
from relight.model.text import error_message, shown
from relight.ports.store import Commit, CommitResult, Extras
from relight.record.writer import Writer
from relight.retry_pause import RetryPause
from relight.telemetry import Token, log

LONGEST_REASON = 500

Creation = tuple[Commit, asyncio.Future[CommitResult]]


class Lane(Protocol):
    """A lane of the recorder, as far as this file needs one."""

    async def commit_all(self, writers: list[Writer], commits: list[Commit], creations: list[Creation]) -> None:
        """Commit until the store has written all of these, or it is known which one it cannot write."""
        ...

    async def commit(self, commits: list[Commit], creations: list[Creation]) -> list[CommitResult]:
        """Commit one batch; try again until it is written. Raises the exception on which the store breaks."""
        ...

    def finish(
        self, writers: list[Writer], commits: list[Commit], creations: list[Creation], results: list[CommitResult]
    ) -> None:
        """The batch is durable: wake everything that waited for it."""
        ...


async def divide(
    lane: Lane, writers: list[Writer], commits: list[Commit], creations: list[Creation], error: Exception
) -> None:
    """The store broke on this batch: commit it in halves, until the failing commit is alone."""
    log(logging.ERROR, Token.COMMIT_FAILED, f"broke on {len(commits) + len(creations)} commits: {shown(error)}", error)
    if commits and creations:
        await lane.commit_all(writers, commits, [])
        await lane.commit_all([], [], creations)
    elif len(commits) > 1:
        half = len(commits) // 2
        await lane.commit_all(writers[:half], commits[:half], [])
        await lane.commit_all(writers[half:], commits[half:], [])
    elif commits:
        await _alone(lane, writers[0], commits[0])
    elif len(creations) > 1:
        half = len(creations) // 2
        await lane.commit_all([], [], creations[:half])
        await lane.commit_all([], [], creations[half:])
    elif not creations[0][1].done():
        creations[0][1].set_exception(error)  # raised in the caller of start()


async def _alone(lane: Lane, writer: Writer, commit: Commit) -> None:
    """The store broke on this commit alone. Try again; if the fault has not passed, hold the run, which leaves
    memory."""
    pause = RetryPause()
    for last in (False, False, True):
        await pause.wait()
        try:
            results = await lane.commit([commit], [])
        except StoreUnavailableError:  # given up, because the process stops; the lane has logged it
            writer.abandon()
            return
        except Exception as error:  # noqa: BLE001 - a bug in a backend, or a value that it cannot write
            if last:
                await _hold(lane, writer, commit, error)
        else:
            lane.finish([writer], [commit], [], results)
            return


async def _hold(lane: Lane, writer: Writer, commit: Commit, error: Exception) -> None:
    """Commit the reason, in place of what cannot be written."""
    run_id = commit.root_id
    what = f"{type(error).__name__}: {error_message(error)}".replace("\0", "\\0")[:LONGEST_REASON]
    reason = (
        f"the store cannot write what this run did last ({what}); "
        f"fix the cause, {RESUME_IT}: it repeats what it did last"
    )
    log(logging.CRITICAL, Token.RUN_HELD, f"run {run_id}: {reason}", error)
    heard = writer.run.last_heard
    change = RunChange(run_id=run_id, status=Status.PAUSED, hold=Hold.REFUSED, reason=reason, heard=heard)
    held = Commit(root_id=run_id, epoch=commit.epoch, after=commit.after, entries=[], extras=Extras(changes=[change]))
    try:
        await lane.commit([held], [])
    except Exception as again:  # noqa: BLE001 - the run leaves memory, and `look_for_lost` finds it
        log(logging.CRITICAL, Token.COMMIT_FAILED, f"run {run_id}: it could not be held either", again)
    writer.abandon()
