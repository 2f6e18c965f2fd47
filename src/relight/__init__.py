"""Relight: durable workflows for Python. Kill anything at any time; nothing accepted is lost, nothing finished runs twice.

A map of the package, in the order in which a run meets it:

    flow/         what users write: @flow, @step, sleep, wait_for, foreach, …
    sync.py       the same names with the types that they have in sync code
    engine.py     Relight: opens the store, starts and stops everything; handle.py, blocking.py: what callers hold
    orchestrator/ which runs are in memory: how they come in, how they are woken, which watchers are notified
    run/          one run in memory: its loop, steps, waits, replay, its end
    record/       group commit: how what a run does becomes durable
    recovery/     which processes died, what is done about their runs, and why
    ownership/    the session of this process, and which other processes are alive
    execution/    the loops, tasks and threads in which code runs
    ports/        what a store and a lease manager must do; backends/ does it: memory, sqlite, postgres, etcd
    model/        pure data and rules: runs, journal events, replay, decisions
    testing/      public: conformance suites, crash points, a clock to advance
    cli/          the `relight` command
"""

from relight.description import RunDescription
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
    StepResultError,
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
from relight.model.run import ForeachProgress, Run, Status

__version__: str  # see __getattr__

__all__ = [
    "ConfigError",
    "ConflictError",
    "ContinueAs",
    "DefinitionError",
    "DurationError",
    "Flow",
    "FlowCodeError",
    "ForeachProgress",
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
    "RunDescription",
    "RunFailedError",
    "RunLogger",
    "RunNotFoundError",
    "RunStateError",
    "SpawnedRun",
    "Status",
    "Step",
    "StepError",
    "StepInterruptedError",
    "StepResultError",
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


def __getattr__(name: str) -> str:
    """`__version__` of the installed package, looked up on first use: that takes longer than most imports."""
    if name != "__version__":
        raise AttributeError(f"module 'relight' has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - see above

    try:
        return version("relight")
    except PackageNotFoundError:
        return "unknown"  # a source tree that was never installed
