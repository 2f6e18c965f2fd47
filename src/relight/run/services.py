"""What a live run is given: the services that the runs of one engine share, and the orchestrator as a run sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import msgspec

from relight.clock import Clock, Entropy
from relight.config import Config
from relight.execution.background_tasks import Background
from relight.execution.blocking_watch import BlockingWatch
from relight.execution.body_tasks import Bodies
from relight.execution.idle import Idleness
from relight.execution.running_loop import RunningLoop
from relight.execution.thread_pool import Threads
from relight.flow.registry import Registry
from relight.metrics import Metrics
from relight.ownership.heartbeats import Heartbeats
from relight.ports.store import Store
from relight.record.recorder import Recorder
from relight.run.long_steps import LongSteps
from relight.supervisor import Supervisor

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun


class Services(msgspec.Struct, frozen=True):
    """What the runs of one engine share."""

    store: Store
    heartbeats: Heartbeats
    recorder: Recorder
    clock: Clock
    entropy: Entropy
    threads: Threads
    bodies: Bodies
    running_loop: RunningLoop
    watch: BlockingWatch
    background: Background
    supervisor: Supervisor
    long_steps: LongSteps
    registry: Registry
    config: Config
    metrics: Metrics
    owner: str
    loop: asyncio.AbstractEventLoop
    idleness: Idleness
    said: set[tuple[str, str]]  # run and text: what is not logged again in the life of this process


class Host(Protocol):
    """The orchestrator, as a run sees it."""

    def ended(self, run: LiveRun) -> None:
        """The run is terminal, and that is durable."""
        ...

    def continued(self, run: LiveRun) -> None:
        """The run's next generation is durable, and begins in its place."""
        ...

    def left(self, run: LiveRun) -> None:
        """The run has left memory unfinished: parked, held, fenced or shut down."""
        ...

    def has_left(self, run: LiveRun) -> bool:
        """Whether the run is no longer in memory."""
        ...

    def offer(self, run_id: str) -> None:
        """This process has accepted or resumed a root run: it may be taken up here even while recovery is off."""
        ...

    def wake_at(self, when: float) -> None:
        """A parked run is due at this time."""
        ...

    def look_for_messages(self) -> None:
        """A commit has put something into other runs' inboxes."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether other runs wait for room in memory: then a blocked run should be parked at once."""
        ...

    def notify_watchers(self, run_id: str) -> None:
        """Notify the watchers of this run (a child run, for example) that they should look at it."""
        ...
