"""Every error Relight raises on purpose, drawn as one tree.

    RelightError                      catch-all for callers
    ├── ConfigError                   a setting is wrong; the message names the key
    │   └── DurationError             "3 bananas" is not a duration
    ├── DefinitionError               a flow or step is declared wrongly (name taken, bad option, bad call)
    │   └── UnknownFlowError          no flow of that name is registered
    ├── PayloadError                  a value cannot be journaled; the message names where it sits
    │   └── StepResultError           … and it is a step's result: the step has had its effect, and no retry repeats it
    ├── ConflictError                 this run id is already used for another flow or another input
    ├── RunNotFoundError              no run has that id
    ├── RunStateError                 the run's status does not allow the request
    ├── RunFailedError                result() of a run that failed; `cause` is the flow's own exception, rebuilt
    ├── RunCancelledError             result() of a run that was cancelled
    ├── StepError                     replaces an exception that cannot be raised: its class is gone, or ends programs
    │   ├── StepTimeoutError          the step ran past its timeout (also a TimeoutError)
    │   └── StepInterruptedError      on_crash="fail": the process died while the step was running
    ├── NonDeterminismError           the flow asks for other operations than its journal has
    ├── VersionMismatchError          a step's code changed under version_mismatch="fail"
    ├── FlowCodeError                 flow code does something that replay cannot repeat, or forgot an await
    ├── OutsideRunError               a durable operation was called where no run is alive
    └── StoreError                    the store did not write or return what it should
        ├── StoreUnavailableError     disk full, I/O error, server gone: nothing is known to be written
        │   └── LeasesUnavailableError  the lease manager does not answer; nothing is claimed meanwhile
        ├── StoreFormatError          the file is not Relight's, of a newer version, read-only, or a directory
        ├── CorruptionError           a stored row does not read back; carries root and sequence
        ├── UpgradeRequiredError      a newer version of Relight has stored what this one does not understand
        └── FencedError               another owner has claimed the run: this process must let go of it

Three more exceptions leave a flow. They are no RelightError, so that `except Exception` in a flow never swallows them:

    BaseException
    ├── RunCancelled                  raised in the flow at its next wait once the run is being cancelled; clean up, let it pass
    ├── ContinueAs                    raised by continue_as(): the flow's generation ends, and the next begins
    └── Unwind                        takes a run out of memory; invisible to the flow's logic, never catch it
"""

from __future__ import annotations


class RelightError(Exception):
    """Base of everything Relight raises on purpose."""


class ConfigError(RelightError, ValueError):
    """A configuration key or value is wrong."""


class DurationError(ConfigError):
    """Something that should be a duration is not one."""


class DefinitionError(RelightError):
    """A flow or step is declared or called in a way that can never work."""


class UnknownFlowError(DefinitionError, LookupError):
    """No flow of that name is registered in this process."""


class PayloadError(RelightError, TypeError):
    """A value cannot be journaled, or would not be read back as the same value."""


class StepResultError(PayloadError):
    """A step's result cannot be journaled. Its body has had its effect: neither the step's retry nor that of a flow
    around it executes the step again."""


class ConflictError(RelightError):
    """The run id is already used for another flow or another input."""


class RunNotFoundError(RelightError, LookupError):
    """No run has this id."""


class RunStateError(RelightError):
    """The run's status does not allow this."""


class RunFailedError(RelightError):
    """The run ended with an error; `__cause__` is the flow's own exception, rebuilt from the journal."""

    def __init__(self, message: str, *, run_id: str) -> None:
        super().__init__(message)
        self.run_id = run_id


class RunCancelledError(RelightError):
    """The run was cancelled; `reason` says why."""

    def __init__(self, message: str, *, run_id: str, reason: str = "") -> None:
        super().__init__(message)
        self.run_id = run_id
        self.reason = reason


class StepError(RelightError):
    """A step failed with an exception whose class cannot be found any more; `type_name` names it."""

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name


class StepTimeoutError(StepError, TimeoutError):
    """A step did not finish within its timeout."""


class StepInterruptedError(StepError):
    """The process died while a step with on_crash="fail" was running; whether it took effect is unknown."""


class NonDeterminismError(RelightError):
    """The flow's code asks for other operations than its journal has."""


class VersionMismatchError(RelightError):
    """A recorded step's code has changed and version_mismatch is "fail"."""


class FlowCodeError(RelightError, RuntimeError):
    """Flow code does something that replay cannot repeat (I/O, a thread, another loop's future), or forgot an await."""


class OutsideRunError(RelightError, RuntimeError):
    """A durable operation was called where no run is alive to record it."""


class StoreError(RelightError):
    """The store did not write or return what it should."""


class StoreUnavailableError(StoreError):
    """The store failed for a reason that may pass: nothing of this commit is known to be written."""

    damaged = False  # what is stored cannot be read any more; that does not pass


class LeasesUnavailableError(StoreUnavailableError):
    """The lease manager does not answer. That may pass; meanwhile nothing is claimed."""


class StoreFormatError(StoreError):
    """The store's file is not one this version of Relight can use."""


class CorruptionError(StoreError):
    """A stored row does not read back as what was written."""

    def __init__(self, message: str, *, root_id: str, sequence: int) -> None:
        super().__init__(message)
        self.root_id = root_id
        self.sequence = sequence


class UpgradeRequiredError(StoreError):
    """A newer version of Relight has stored something of this run that this version does not understand. The run is
    left to the newer version."""


class FencedError(StoreError):
    """The run's epoch has moved on: another owner claimed it, and this process must drop it."""


class RunCancelled(BaseException):
    """Raised inside a flow at its next wait once its run is being cancelled.

    A BaseException, so that `except Exception` around a step cannot swallow a cancellation. Steps that the flow calls
    while it handles this exception (in `except RunCancelled` or `finally`) are durable clean-up, within `cancel_grace`.
    """


class ContinueAs(BaseException):
    """What continue_as() raises: the flow's generation ends, and the next one begins with these arguments.

    It is no failure: the engine catches it after the flow's `finally` blocks. Outside a run, in a test that calls a
    flow as a plain function, it reaches the caller, with the arguments."""

    def __init__(self, arguments: tuple[object, ...], keywords: dict[str, object], input: bytes = b"") -> None:  # noqa: A002 - as in Run
        super().__init__("continue_as()")
        self.arguments = arguments
        self.keywords = keywords
        self.input = input  # arguments and keywords, as they are stored


class Unwind(BaseException):
    """Takes a run's code out of memory: parking, pausing, shutting down, fencing.

    It is no outcome of the flow. Every durable operation that the flow calls while it unwinds raises it again, so that
    no step in a `finally` runs because of it. Replay brings the run back to where it was.
    """

    def __init__(self, *args: object, stubborn: bool = False) -> None:
        super().__init__(*args)
        self.stubborn = stubborn  # it was raised so often that the flow's code must be catching it in a loop
