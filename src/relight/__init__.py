"""Relight: durable workflows for Python. Kill anything at any time; nothing accepted is lost, nothing finished runs twice.

A map of the package, in the order in which a run meets it:

    flow/        what users write: @flow, @step, sleep, wait_for, foreach, …
    engine.py    Relight: opens the store, starts and stops everything; handle.py, blocking.py: what callers hold
    lifecycle/   a run's life: start, execute, record, checkpoint, hold, recover
    recovery/    who notices what died
    ports/       what a store must do; backends/ does it: memory, sqlite
    model/       pure data and rules: runs, journal events, replay, decisions
    testing/     public: conformance suites, crash points, a clock to advance
    cli/         the `relight` command
"""

from relight.engine import Relight
from relight.errors import (
    ConfigError,
    ConflictError,
    ContinueAs,
    DefinitionError,
    DurationError,
    FlowCodeError,
    NonDeterminismError,
    OutsideRunError,
    PayloadError,
    RelightError,
    RunCancelled,
    RunCancelledError,
    RunFailedError,
    RunNotFoundError,
    RunStateError,
    StepError,
    StepInterruptedError,
    StepTimeoutError,
    StoreError,
    StoreUnavailableError,
    UnknownFlowError,
    VersionMismatchError,
)
from relight.flow.definitions import Flow, Step, flow, step
from relight.flow.operations import (
    SpawnedRun,
    continue_as,
    current_step,
    foreach,
    now,
    parallel,
    random,
    sleep,
    spawn,
    uuid,
    wait_for,
)
from relight.flow.retry import Retry
from relight.flow.run_logger import RunLogger, logger
from relight.handle import Handle
from relight.model.run import Run, Status

__all__ = [
    "ConfigError",
    "ConflictError",
    "ContinueAs",
    "DefinitionError",
    "DurationError",
    "Flow",
    "FlowCodeError",
    "Handle",
    "NonDeterminismError",
    "OutsideRunError",
    "PayloadError",
    "Relight",
    "RelightError",
    "Retry",
    "Run",
    "RunCancelled",
    "RunCancelledError",
    "RunFailedError",
    "RunLogger",
    "RunNotFoundError",
    "RunStateError",
    "SpawnedRun",
    "Status",
    "Step",
    "StepError",
    "StepInterruptedError",
    "StepTimeoutError",
    "StoreError",
    "StoreUnavailableError",
    "UnknownFlowError",
    "VersionMismatchError",
    "continue_as",
    "current_step",
    "flow",
    "foreach",
    "logger",
    "now",
    "parallel",
    "random",
    "sleep",
    "spawn",
    "step",
    "uuid",
    "wait_for",
]
