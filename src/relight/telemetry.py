"""Log lines of recovery begin with a token in brackets, so that they can be found and alerted on with grep.

This is the one list of them; docs/reference/log-tokens.md has the same, and a test keeps the two equal.
"""

from __future__ import annotations

import enum
import logging

logger = logging.getLogger("relight")


class Token(enum.StrEnum):
    """What a log line is about. The value is the word in the brackets; `MEANING` has what it means."""

    RUN_RESUMED = "RUN_RESUMED"
    RUN_GIVEN_UP = "RUN_GIVEN_UP"
    RUN_FINISHED = "RUN_FINISHED"
    RUN_RELEASED = "RUN_RELEASED"
    OWNER_DEAD = "OWNER_DEAD"
    OWNER_CORRECTED = "OWNER_CORRECTED"
    ORCHESTRATOR_ID_SHARED = "ORCHESTRATOR_ID_SHARED"
    HEARTBEAT_FAILED = "HEARTBEAT_FAILED"
    WATCH_FAILED = "WATCH_FAILED"
    LEASE_LOST = "LEASE_LOST"
    LEASE_REGAINED = "LEASE_REGAINED"
    STEP_REPEATED = "STEP_REPEATED"
    STEP_INTERRUPTED = "STEP_INTERRUPTED"
    STEP_RETRYING = "STEP_RETRYING"
    RUN_RETRYING = "RUN_RETRYING"
    FINGERPRINT_MISMATCH = "FINGERPRINT_MISMATCH"
    INPUT_MISMATCH = "INPUT_MISMATCH"
    FOREACH_CUT = "FOREACH_CUT"
    DEFINITION_MISSING = "DEFINITION_MISSING"
    DEFINITION_FOUND = "DEFINITION_FOUND"
    FLOW_NAME_SHARED = "FLOW_NAME_SHARED"
    UPGRADE_FOUND = "UPGRADE_FOUND"
    NONDETERMINISM = "NONDETERMINISM"
    JOURNAL_CORRUPT = "JOURNAL_CORRUPT"
    RUN_SUSPECTED = "RUN_SUSPECTED"
    RUN_POISONED = "RUN_POISONED"
    RUN_NOT_RESUMABLE = "RUN_NOT_RESUMABLE"
    RUN_HELD = "RUN_HELD"
    RUN_FENCED = "RUN_FENCED"
    COMMIT_FAILED = "COMMIT_FAILED"
    COMMIT_RECOVERED = "COMMIT_RECOVERED"
    READ_FAILED = "READ_FAILED"
    CHECKPOINT_FAILED = "CHECKPOINT_FAILED"
    RECOVERY_FAILED = "RECOVERY_FAILED"
    FLOW_BLOCKS = "FLOW_BLOCKS"
    UNWIND_STUCK = "UNWIND_STUCK"
    THREAD_ABANDONED = "THREAD_ABANDONED"
    THREAD_REFUSED = "THREAD_REFUSED"
    CANCEL_FORCED = "CANCEL_FORCED"
    INTERNAL_ERROR = "INTERNAL_ERROR"


MEANING: dict[Token, str] = {
    Token.RUN_RESUMED: "an unfinished run was claimed, restored and goes on",
    Token.RUN_GIVEN_UP: "an orphan was cancelled by policy (max_resume_age, auto_resume) instead of resumed",
    Token.RUN_FINISHED: "a run's end was journaled but its row did not say so; the row was corrected",
    Token.RUN_RELEASED: "an orchestrator that stops or has lost its lease let go of a run, for any other to take up",
    Token.OWNER_DEAD: "an orchestrator's session has lapsed or its process is gone; its runs are being recovered",
    Token.OWNER_CORRECTED: "another session has a run's lease than its row says; the row was corrected",
    Token.ORCHESTRATOR_ID_SHARED: "an orchestrator that lives on another machine has the same orchestrator_id",
    Token.HEARTBEAT_FAILED: "a heartbeat did not get through, and is tried again; logged once, then counted",
    Token.WATCH_FAILED: "pushes about other orchestrators, or run keys, do not get through; recovery is slower, not wrong",
    Token.LEASE_LOST: "the lease could not be renewed; this process lets go of its runs until it can",
    Token.LEASE_REGAINED: "the lease is renewed again; this process takes up runs again",
    Token.STEP_REPEATED: "a step was in flight when its process died and is executed again",
    Token.STEP_INTERRUPTED: 'a step with on_crash="fail" was in flight when its process died and is failed instead',
    Token.STEP_RETRYING: "an attempt of a step failed and another follows",
    Token.RUN_RETRYING: "an attempt of a flow failed and another follows",
    Token.FINGERPRINT_MISMATCH: "a recorded step's code or options have changed since; version_mismatch decides. Or what is "
    "recorded no longer fits the signature; the run is held",
    Token.INPUT_MISMATCH: "a recorded step is asked for with other arguments than before; the run is held (rerun: executes it)",
    Token.FOREACH_CUT: "an item of a sequential foreach has changed; the foreach goes on from that item",
    Token.DEFINITION_MISSING: "a run's flow is not registered; the run is held until it is",
    Token.DEFINITION_FOUND: "a flow was registered and the runs held for it go on",
    Token.FLOW_NAME_SHARED: "several flows have one name, and the engine that was opened uses none of them",
    Token.UPGRADE_FOUND: "runs that an older version of Relight did not understand, and held, go on here",
    Token.NONDETERMINISM: "a flow asks for other operations than its journal has; the run is held",
    Token.JOURNAL_CORRUPT: "a journal entry or checkpoint does not read back; the run is held",
    Token.RUN_SUSPECTED: "the process of a run died several times without progress of it; other suspects are tried before it",
    Token.RUN_POISONED: "the process of a run died too often without progress of the run; the run is held",
    Token.RUN_NOT_RESUMABLE: "a flow marked resumable=False was interrupted; the run is failed",
    Token.RUN_HELD: "a run was paused for a reason that has no token of its own; the line names what frees it",
    Token.RUN_FENCED: "another owner has claimed a run that this process was driving; this process lets go of it",
    Token.COMMIT_FAILED: "a commit failed; it is tried again, and nothing goes on until it is written",
    Token.COMMIT_RECOVERED: "the store accepts commits again",
    Token.READ_FAILED: "a read that a flow needs to go on failed; it is tried again",
    Token.CHECKPOINT_FAILED: "a checkpoint could not be written; the journal stays whole, and it is tried again later",
    Token.RECOVERY_FAILED: "taking up a run failed for a passing reason; it is tried again",
    Token.FLOW_BLOCKS: "flow code runs for longer than a second without awaiting anything; the line names its place",
    Token.UNWIND_STUCK: "a flow, or a step that swallows its cancellation, did not let itself be taken out of memory in time "
    "and was abandoned",
    Token.THREAD_ABANDONED: "sync code whose result is not needed any more goes on in its thread; its slot is free again",
    Token.THREAD_REFUSED: "the system has no thread for sync code, which waits for one; no attempt or timeout counts meanwhile",
    Token.CANCEL_FORCED: "a cancelled run did not finish its clean-up within cancel_grace",
    Token.INTERNAL_ERROR: "a task of the engine itself broke; this is a bug worth reporting, with the traceback",
}


def log(level: int, token: Token, message: str, error: BaseException | None = None) -> None:
    """Log one line: the token, then a sentence that names the run. With `error`, its traceback follows."""
    logger.log(level, "[%s] %s", token.value, message, exc_info=error)
