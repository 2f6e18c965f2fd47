"""Relight: configuration → backends → services, start and stop. The only place that knows every part."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import importlib
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar, overload

from relight.assembly import assemble
from relight.backend_choice import check_given, make_leases, make_store
from relight.blocking import BlockingRelight
from relight.clock import SYSTEM_CLOCK, SYSTEM_ENTROPY, Clock, Entropy, StoreClock
from relight.config import Config, load_config
from relight.errors import ConfigError, RelightError, RunNotFoundError, RunStateError
from relight.flow import garbage
from relight.flow.definitions import Flow, FlowWithId
from relight.flow.registry import REGISTRY, Registry
from relight.flow.scope import refuse_engine_in_flow_code
from relight.flow.user_threads import hand_down_context, leave_threads_alone
from relight.handle import Handle
from relight.metrics import Metrics
from relight.model.run import ItemResult, Message, Page, Run, RunFilter, Status
from relight.orchestrator.fork import fork
from relight.orchestrator.health import Health, health_of
from relight.orchestrator.orchestrator import Orchestrator
from relight.orchestrator.start import flow_to_start, start
from relight.ownership.liveness import appear, check_manager
from relight.ports.leases import LeaseManager
from relight.ports.store import Store
from relight.process import mark_dead, this_process
from relight.recovery.explain import Explanation, explain
from relight.recovery.orphans import OrphanRecovery
from relight.recovery.plan import Planned, incomplete, plan
from relight.recovery.resume import resume
from relight.run.services import Services
from relight.stop_signal import stop_signal
from relight.store_url import printable_url
from relight.telemetry import Token, log
from relight.ticker import Ticker

P = ParamSpec("P")
R = TypeVar("R")

CLOCK_SECONDS = 60.0  # between two readings of the server's clock


class Relight:
    """A durable workflow engine on one store.

        async with Relight("app.db") as rl:
            run = await rl.start(checkout.with_id("order-42"), order)
            print(await run.result())

    `url` is a path or sqlite:///path, postgresql://…, or memory: for tests; every other setting of `relight.config` may be
    given by keyword. A `store` given as an object needs its `lease_manager` beside it. Without a lease manager, only
    one process at a time may use the store. `flows` are those that this engine knows; by default all that the process
    has defined. `with Relight(...)` (without async) gives the same engine with blocking methods, on its own loop.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        store: Store | None = None,
        lease_manager: LeaseManager | None = None,
        clock: Clock = SYSTEM_CLOCK,
        entropy: Entropy = SYSTEM_ENTROPY,
        flows: Iterable[Flow[..., Any]] | None = None,
        **config: Any,
    ) -> None:
        check_given(url, store, lease_manager)
        self.config: Config = load_config(None if url is None else os.fspath(url), config, os.environ)
        self._store = store
        self._leases = lease_manager
        self._clock = clock
        self._entropy = entropy
        self.registry = REGISTRY if flows is None else _registry(flows)
        self._services: Services | None = None
        self._orchestrator: Orchestrator | None = None
        self._recovery: OrphanRecovery | None = None
        self._blocking: BlockingRelight | None = None
        self._pid = 0  # of the process that opened this engine

    # ---- life

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> BlockingRelight:
        if self._blocking is not None:
            raise RelightError("this Relight is open already")
        blocking = BlockingRelight(self).open()
        self._blocking = blocking
        return blocking

    def __exit__(self, *_: object) -> None:
        blocking, self._blocking = self._blocking, None
        if blocking is not None:
            blocking.close()

    async def open(self) -> None:
        """Open the store and begin to recover what is unfinished in it."""
        refuse_engine_in_flow_code()
        if self._services is not None:
            raise RelightError("this Relight is open already")
        for module in self.config.modules:
            importlib.import_module(module)
        store = self._store
        if store is None:
            store = make_store(self.config, self._clock, create=self.config.drive)
        clock = StoreClock(self._clock)  # it follows the server's clock once the store is open
        leases = (
            self._leases
            if self._leases is not None
            else make_leases(self.config, store, given=self._store is not None, clock=clock)
        )
        await store.open()
        try:
            await self._open_on(store, leases, clock)
        except BaseException:
            await store.close()
            raise

    async def _open_on(self, store: Store, leases: LeaseManager, clock: StoreClock) -> None:
        await check_manager(store, leases, drives=self.config.drive)
        owner = f"{self.config.orchestrator_id or socket.gethostname()}#{self._entropy.uuid().hex[:12]}"
        process = this_process(owner, leases.name)
        clock_here = await self._clock_of(store, clock)
        services = assemble(self.config, store, leases, clock_here, self._entropy, self.registry, owner, process)
        orchestrator = Orchestrator(services)
        recovery = OrphanRecovery(orchestrator)
        try:
            await services.heartbeats.start(recovery)
            await orchestrator.delivery.begin()
            await appear(services.heartbeats, store, services.supervisor, process, drives=self.config.drive)
        except BaseException:
            services.heartbeats.stop_now()  # otherwise its thread would keep a session alive that drives no runs
            mark_dead(owner)
            raise
        self._services, self._orchestrator, self._recovery, self._pid = services, orchestrator, recovery, os.getpid()
        for why in self.registry.shared_names():
            log(logging.WARNING, Token.FLOW_NAME_SHARED, why)
        hand_down_context()
        garbage.watch()
        services.recorder.start()
        orchestrator.start()
        if isinstance(services.clock, StoreClock):
            # Clocks drift and are set. While the server does not answer, the clock keeps its last offset.
            follow = Ticker(partial(services.clock.follow, store.now), CLOCK_SECONDS)
            services.supervisor.keep("clock", follow.run, essential=False)
        if self._recovers:
            self.registry.listen(orchestrator.waker.flow_registered)
            recovery.start()

    async def signalled(self) -> None:
        """Until SIGTERM or SIGINT: `async with Relight(...) as rl: await rl.signalled()` is a whole orchestrator, which then
        closes gracefully. A second signal ends the process at once, which is as safe as any crash. Main thread only."""
        await stop_signal()

    @property
    def store_name(self) -> str:
        """The store as it may be shown: without a password."""
        return printable_url(self.config.store)

    @property
    def _recovers(self) -> bool:
        return self.config.recovery.enabled and self.config.drive

    async def _clock_of(self, store: Store, clock: StoreClock) -> Clock:
        """This engine's clock. It follows the clock of the store's server, if there is one."""
        return clock if await clock.follow(store.now) else self._clock

    async def close(self) -> None:
        """Let steps in flight finish, within shutdown_grace. Take every run out of memory, so that other orchestrators
        can take it up at once. End the session. Close the store."""
        if self._services is None or self._orchestrator is None or self._recovery is None:
            return
        if self._pid != os.getpid():  # a copy in a forked process: only the parent closes the engine
            return
        services, orchestrator, recovery = self._services, self._orchestrator, self._recovery
        if self._recovers:
            with contextlib.suppress(ValueError):
                self.registry.unlisten(orchestrator.waker.flow_registered)
        try:
            services.recorder.hurry(self.config.shutdown_grace_seconds)
            await orchestrator.stop(self.config.shutdown_grace_seconds, recovery.stop)
            await services.background.stop()
            await services.bodies.stop()
            services.long_steps.stop()
            await services.recorder.stop()
            await services.supervisor.stop()
            await services.heartbeats.stop()
            await services.store.close()
        finally:
            leave_threads_alone()
            services.watch.stop()
            services.heartbeats.stop_now()  # also after an error above: nothing drives its runs any more
            mark_dead(services.owner)
            self._services = self._orchestrator = self._recovery = None
            services.idleness.close()

    @property
    def services(self) -> Services:
        refuse_engine_in_flow_code()
        if self._pid not in (0, os.getpid()):
            raise RelightError(
                "this Relight was opened before this process was forked, and its threads and connections stayed with the "
                "parent: open one in each process, after the fork"
            )
        if self._services is None:
            raise RelightError(
                "this Relight is not open: use it inside `async with Relight(...)` or `with Relight(...)`"
            )
        if asyncio._get_running_loop() not in (None, self._services.loop):  # noqa: SLF001 - the documented twin raises
            raise RelightError(
                "this Relight was opened on another event loop, which alone can use it: open one for each, or a blocking one"
            )
        return self._services

    @property
    def orchestrator(self) -> Orchestrator:
        _ = self.services
        assert self._orchestrator is not None
        return self._orchestrator

    def health(self) -> Health:
        """The health of this process: its lease, its commits, its long-lived tasks. It never waits for the store."""
        return health_of(self.services, self.orchestrator.live)

    @property
    def fault(self) -> str | None:
        """Why nothing is being committed right now (disk full, I/O error); None while all is well."""
        return self.services.recorder.fault

    async def idle(self) -> None:
        """Wait until this engine has nothing to do before its clock moves or a request arrives. For tests. RelightError
        if the engine is closed meanwhile."""
        await self.services.idleness.wait()

    # ---- runs

    @overload
    async def start(self, flow: Flow[P, R] | FlowWithId[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]: ...
    @overload
    async def start(self, flow: str, /, *args: Any, id: str | None = None, **kwargs: Any) -> Handle[Any]: ...
    async def start(self, flow: Any, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Accept a run: it is durable when this returns. The same id, flow and input again give the same run.

        `start(checkout.with_id("order-42"), order)` gives the run an id. `start("checkout", order, id="order-42")`
        starts a flow by its name. `id=` beside a flow object works too, but type checkers refuse such a call.
        """
        found, run_id = flow_to_start(self.registry, flow, kwargs.pop("id", None))
        _ = self.services
        return Handle(self, await start(self.orchestrator, found, args, kwargs, run_id))

    @overload
    async def run(self, flow: Flow[P, R] | FlowWithId[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def run(self, flow: str, /, *args: Any, id: str | None = None, **kwargs: Any) -> Any: ...
    async def run(self, flow: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start a run and wait for its result."""
        return await (await self.start(flow, *args, **kwargs)).result()

    async def get(self, id: str) -> Handle[Any]:  # noqa: A002
        """The handle of a run, root or child."""
        if await self.services.store.get_run(id) is None:
            raise RunNotFoundError(f"no run has the id {id!r}")
        return Handle(self, id)

    async def list(
        self,
        *,
        status: Status | str | tuple[Status | str, ...] = (),
        flow: str | None = None,
        since: dt.datetime | float | None = None,
        parent: str | None = None,
        roots_only: bool = True,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """One page of runs, newest first; pass its next_cursor to get the next. Child runs only with roots_only=False."""
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 10_000:
            raise ConfigError(f"list(limit={limit!r}): give a whole number from 1 to 10000")
        statuses = (status,) if isinstance(status, str) else tuple(status)
        return await self.services.store.list_runs(
            RunFilter(
                status=tuple(_status(one) for one in statuses),
                flow=flow,
                since=since.timestamp() if isinstance(since, dt.datetime) else since,  # the store refuses other types
                parent_id=parent,
                roots_only=roots_only and parent is None,
                limit=limit,
                cursor=cursor,
            )
        )

    async def fork(self, id: str, from_step: str | None = None, new_id: str | None = None) -> Handle[Any]:  # noqa: A002
        """A new run with the same input, which keeps everything that the old run finished before `from_step`."""
        return Handle(self, await fork(self.orchestrator, id, from_step, new_id))

    async def items(self, id: str) -> Sequence[ItemResult]:  # noqa: A002
        """The finished foreach items of a run."""
        return await self.services.store.item_results(id)

    # ---- recovery

    @property
    def metrics(self) -> Metrics:
        """What recovery has counted in this process."""
        return self.services.metrics

    async def incomplete(self, limit: int | None = None) -> Sequence[Run]:
        """Every unfinished root run, newest first; at most `limit` of them."""
        return [row async for row in incomplete(self.services, limit)]

    async def plan(self, limit: int | None = None) -> Sequence[Planned]:
        """What recovery would do with every unfinished run, and why: newest first, at most `limit` of them. Nothing is done."""
        return [planned async for planned in plan(self.services, limit)]

    async def explain(self, id: str) -> Explanation:  # noqa: A002
        """Why a run is where it is: a sentence, and the facts behind it."""
        return await explain(self.services, id)

    async def resume(self, id: str) -> Handle[Any]:  # noqa: A002
        """Bring a run back by hand: an orphan, a held run, or a run that recovery has given up on."""
        await resume(self.orchestrator, id)
        return Handle(self, id)

    # ---- for handles

    async def row(self, run_id: str) -> Run:
        found = await self.orchestrator.rows.get(run_id)
        if found is None:
            raise RunNotFoundError(f"no run has the id {run_id!r}")
        return found

    async def post(self, message: Message) -> None:
        """Put a message into a run's inbox: durable when this returns."""
        services = self.services
        message.at = services.clock.now()
        with services.idleness.busy():
            (message_id,) = await services.store.post([message])
            if message_id is None:
                row = await self.row(message.run_id)
                raise RunStateError(f"run {row.id!r} is {row.status}: it can no longer receive {message.kind}")
            message.id = message_id
            await self.orchestrator.message_posted(message)


def _registry(flows: Any) -> Registry:
    given = list(flows) if isinstance(flows, Iterable) and not isinstance(flows, str) else None
    if given is None or not all(isinstance(one, Flow) for one in given):
        raise ConfigError(
            f"Relight(flows={flows!r}): give a list of flows, which are functions decorated with @flow; or leave it out for "
            "all that this process has defined"
        )
    return Registry(given)


def _status(status: Status | str) -> Status:
    try:
        return Status(status)
    except ValueError:
        known = ", ".join(one.value for one in Status)
        raise ConfigError(f"list(status={status!r}): there is no such status; there are {known}") from None
