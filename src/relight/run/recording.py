"""What a run's operations do with its journal and its store: add entries, wait for them, read what is recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from relight.clock import SYSTEM_CLOCK
from relight.errors import (
    CorruptionError,
    OutsideRunError,
    PayloadError,
    RelightError,
    StoreUnavailableError,
    Unwind,
    VersionMismatchError,
)
from relight.flow.payloads import ValueCodec
from relight.model.blob import blob_digest, check_blob
from relight.model.journal import NULL, Event, StepStarted
from relight.model.replay import Outcome, TreeState
from relight.model.run import RESUME_IT, Hold, LogLine, Run, RunChange, Status
from relight.ports.store import Store
from relight.record.writer import Told, Writer
from relight.retry_pause import RetryPause
from relight.run.arguments import why_misread
from relight.run.operation import Operation
from relight.run.phase import ALLOWED, CLOSING, DRIVEN, LEAVING, LEFT, Phase
from relight.run.replay_order import Replay
from relight.run.services import Services
from relight.telemetry import Token, log

T = TypeVar("T")
RUNNING = Status.RUNNING  # looking up a member of an enum takes longer than the rest of record()


class RunRecord:
    """The part of a LiveRun that writes and reads."""

    __slots__ = (
        "announced",
        "blob_threshold",
        "generation",
        "heartbeats",
        "id",
        "lapses",
        "max_bytes",
        "next",
        "now",
        "over",
        "path",
        "phase",
        "row",
        "seen_not_durable",
        "services",
        "status",
        "stopping",
        "writer",
    )

    replay: Replay | None  # None: the run is live

    def __init__(self, services: Services, row: Run, epoch: int, state: TreeState, told: Told) -> None:
        sequence = state.sequence
        self.services = services
        self.now = services.clock.now  # for the times of entries
        self.id = row.id
        self.row = row
        self.generation = state.generation
        self.path = state.path  # the scope path of the flow's own code
        self.status = row.status  # as the store has it
        self.writer = Writer(services.recorder, row.id, epoch, sequence, told)
        self.writer.checkpoint_at = sequence + services.config.checkpoint.every
        self.announced = 0  # how many of this object's entries announce an attempt, which is no progress
        self.heartbeats = services.heartbeats
        self.lapses = services.heartbeats.lapses  # of the lease, when this process was last known to own the run
        self.max_bytes = services.config.payload.max_bytes
        self.blob_threshold = services.config.payload.blob_threshold
        # How much the flow has seen that may not be durable yet: values, and ends that it gave up on.
        self.seen_not_durable = 0
        self.next: TreeState | None = None  # its next generation, which is being committed
        self.phase = DRIVEN
        self.over = False  # whether the phase is CLOSING or later: nothing of this object may act any more
        self.stopping: str | None = None  # why nothing begins and nothing is told any more

    def enter(self, phase: Phase) -> None:
        """Change the phase."""
        assert phase in ALLOWED[self.phase], f"run {self.id}: {self.phase.name} to {phase.name}"
        self.phase = phase
        self.over = phase >= CLOSING

    @property
    def departing(self) -> bool:
        """Whether the run is being taken out of memory, or has been."""
        return LEAVING <= self.phase <= LEFT

    def stuck(self, kind: Hold, error: RelightError) -> None:
        """The run cannot go on, and will be held with this reason."""
        raise NotImplementedError

    def record(self, event: Event, operation: Operation | None = None) -> None:
        """Add an entry to the journal. Once it is durable, the flow is told that `operation` has ended. The journal of
        a run that has ended is closed: OutsideRunError."""
        if self.over:
            raise OutsideRunError(f"run {self.id!r} has ended; {event.key!r} finished too late to be recorded")
        if operation is not None:
            operation.recorded = True
            if self.status is not RUNNING:
                self.set_running()
        self.writer.add(event, operation)

    def announce(self, event: StepStarted) -> None:
        """Add an entry that says that an attempt has begun."""
        self.record(event)
        self.announced += 1

    def note(self, event: Event) -> None:
        """Add an entry that is not worth a commit of its own: it is written with the next commit."""
        if self.phase is DRIVEN:
            self.writer.note(event)

    def has_seen_not_durable(self) -> bool:
        """Whether the flow has seen something that is not durable: after a crash it could be different."""
        # Not during replay: values are added only at its end.
        if self.seen_not_durable and self.writer.idle and self.replay is None:
            self.seen_not_durable = 0
        return self.seen_not_durable > 0

    async def wait_until_durable(self) -> None:
        """Wait, on the program's loop, until everything added so far is durable. Raises Unwind when it never will be."""
        await self.writer.committed()
        if self.writer.lost or self.stopping is not None:
            raise Unwind(self.stopping or "its entries could not be written by this process")

    async def confirm(self) -> None:
        """The lease of this process has lapsed (the process was frozen, perhaps). Check with the store that it still
        owns the run, before the run's code takes effect again. Raises Unwind if it does not."""
        lapses = self.heartbeats.lapses
        self.writer.confirm_ownership()
        await self.wait_until_durable()
        self.lapses = lapses

    @property
    def lease_has_lapsed(self) -> bool:
        """Whether the lease of this process has lapsed since the process was last known to own the run."""
        return self.lapses != self.heartbeats.lapses or SYSTEM_CLOCK.monotonic() >= self.heartbeats.valid_until

    async def read(self, question: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        """Read from the store for the flow. A failed read is repeated: that the store failed is no outcome."""
        pause = RetryPause()
        while True:
            try:
                return await question(self.services.store)
            except StoreUnavailableError as error:
                log(
                    logging.WARNING,
                    Token.READ_FAILED,
                    f"run {self.id}: {error}; trying again in {pause.seconds:.2g}s",
                )
            await pause.wait()
            if self.stopping is not None:
                raise Unwind(self.stopping)

    def run_id(self, key: str) -> str:
        """The id of the (child) run with this key."""
        return f"{self.id}/{key}" if key else self.id

    def change(self, status: Status, **fields: Any) -> None:
        """Put a new status of the root into the next commit."""
        self.status = status
        self.writer.change(RunChange(run_id=self.id, status=status, **fields))

    def log(self, token: Token, text: str) -> None:
        """Add a line to the run's own log, for people, with the next commit."""
        self.writer.log(LogLine(run_id=self.id, at=self.services.clock.now(), text=text, token=token.value))

    def set_running(self) -> None:
        """Operations go on: set the status in the same commit, if the store has another one."""
        if self.status is not RUNNING:
            self.change(RUNNING, owner=self.services.owner)

    def payload(self, data: bytes) -> tuple[msgspec.Raw, str]:
        """How a payload is written into an event: inline, or as a blob stored in the same commit."""
        if len(data) <= self.blob_threshold:
            return msgspec.Raw(data), ""
        digest = blob_digest(data)
        self.writer.blob(digest, data)
        return NULL, digest

    async def load(self, output: msgspec.Raw, blob: str) -> bytes:
        """The bytes of a recorded payload. If they are missing or damaged, that is no outcome of the flow: the run is
        held, and this raises Unwind."""
        if not blob:
            return bytes(output)
        try:
            return check_blob(await self.read(lambda store: store.get_blob(blob)), blob, self.id)
        except CorruptionError as error:
            why = f"{error} and resume() the run, or cancel() it"
            self.stuck(Hold.CORRUPT, CorruptionError(why, root_id=self.id, sequence=0))
            raise Unwind(why) from None

    def open(self, codec: ValueCodec, outcome: Outcome) -> Any:
        """Decode a recorded result with today's annotation. If that is not possible, the run is held."""
        try:
            return codec.open(outcome.output)
        except PayloadError as error:
            why = f"{why_misread(error)}; restore the annotation it was recorded with, {RESUME_IT}"
            self.log(Token.FINGERPRINT_MISMATCH, why)
            self.stuck(Hold.VERSION, VersionMismatchError(why))
            return None
