"""Assembly: the services of one engine, made from its configuration, its store and its lease manager."""

from __future__ import annotations

import asyncio

from relight.clock import Clock, Entropy, StoreClock
from relight.config import Config
from relight.execution.background_tasks import Background
from relight.execution.blocking_watch import BlockingWatch
from relight.execution.body_tasks import Bodies
from relight.execution.idle import Idleness
from relight.execution.run_loop import close_generator
from relight.execution.running_loop import RunningLoop
from relight.execution.thread_pool import Threads
from relight.flow.registry import Registry
from relight.metrics import Metrics
from relight.model.lease import Process
from relight.orchestrator.health import let_go_when_broken, report_failure
from relight.ownership.heartbeats import Heartbeats
from relight.ports.leases import LeaseManager
from relight.ports.store import Store
from relight.record.recorder import Recorder
from relight.run.long_steps import LongSteps
from relight.run.services import Services
from relight.supervisor import Supervisor


def assemble(
    config: Config,
    store: Store,
    leases: LeaseManager,
    clock: Clock | StoreClock,
    entropy: Entropy,
    registry: Registry,
    owner: str,
    process: Process,
) -> Services:
    """Make the services, for the running loop. This starts none of them."""
    loop = asyncio.get_running_loop()
    watch, bodies = BlockingWatch(), Bodies(loop)
    running_loop = RunningLoop(loop, close_generator, watch, bodies)
    supervisor, idleness = Supervisor(report_failure), Idleness()
    ttl_seconds = config.recovery.lease_ttl_seconds
    heartbeats = Heartbeats(leases, owner, process, ttl_seconds, drives=config.drive, supervisor=supervisor)
    let_go_when_broken(supervisor, heartbeats)
    return Services(
        store=store,
        heartbeats=heartbeats,
        recorder=Recorder(store, loop, running_loop, supervisor, idleness),
        clock=clock,
        entropy=entropy,
        threads=Threads(loop, config.max_threads),
        bodies=bodies,
        running_loop=running_loop,
        watch=watch,
        background=Background(loop, idleness),
        supervisor=supervisor,
        long_steps=LongSteps(clock),
        registry=registry,
        config=config,
        metrics=Metrics(),
        owner=owner,
        loop=loop,
        idleness=idleness,
        said=set(),
    )
