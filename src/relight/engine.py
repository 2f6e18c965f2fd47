"""Relight: configuration → backends → services, start and stop. The only place that knows every part."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import importlib
import os
import socket
from collections.abc import Sequence
from typing import Any, Self

from relight.backends.memory import MemoryStore
from relight.blocking import BlockingRelight
from relight.clock import SYSTEM_CLOCK, SYSTEM_ENTROPY, Clock, Entropy
from relight.config import Config, load_config
from relight.errors import ConfigError, DefinitionError, RelightError, RunNotFoundError, RunStateError
from relight.flow.definitions import Flow
from relight.flow.registry import REGISTRY
from relight.flow.scope import install_task_factory, remove_task_factory
from relight.handle import Handle
from relight.lifecycle.background import Background
from relight.lifecycle.fork import fork
from relight.lifecycle.orchestrator import Orchestrator
from relight.lifecycle.record import Recorder
from relight.lifecycle.services import Services
from relight.lifecycle.start import start
from relight.lifecycle.threads import Threads
from relight.model.run import ItemResult, Message, Page, Run, RunFilter, Status
from relight.ports.store import Store
from relight.recovery.startup import StartupRecovery


class Relight:
    """A durable workflow engine on one store.

        async with Relight("app.db") as rl:
            run = await rl.start(checkout, order, id="order-42")
            print(await run.result())

    `url` is a path or sqlite:///path, or memory: for tests; every other setting of `relight.config` may be given by keyword.
    `with Relight(...)` (without async) gives the same engine with blocking methods, on a loop of its own.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        store: Store | None = None,
        clock: Clock = SYSTEM_CLOCK,
        entropy: Entropy = SYSTEM_ENTROPY,
        **config: Any,
    ) -> None:
        self.config: Config = load_config(None if url is None else os.fspath(url), config, os.environ)
        self._store = store
        self._clock = clock
        self._entropy = entropy
        self._services: Services | None = None
        self._orchestrator: Orchestrator | None = None
        self._blocking: BlockingRelight | None = None

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
        if self._services is not None:
            raise RelightError("this Relight is open already")
        for module in self.config.modules:
            importlib.import_module(module)
        loop = asyncio.get_running_loop()
        store = self._store if self._store is not None else make_store(self.config.store, self._clock)
        await store.open()
        recorder = Recorder(store, loop)
        name = self.config.orchestrator_id or socket.gethostname()
        self._services = Services(
            store=store,
            recorder=recorder,
            clock=self._clock,
            entropy=self._entropy,
            threads=Threads(loop, self.config.max_threads),
            background=Background(loop),
            registry=REGISTRY,
            config=self.config,
            owner=f"{name}#{self._entropy.uuid().hex[:12]}",
            loop=loop,
        )
        install_task_factory(loop)
        recorder.start()
        self._orchestrator = Orchestrator(self._services)
        self._orchestrator.start()
        if self.config.recovery.enabled:
            REGISTRY.listen(self._orchestrator.flow_registered)
            self._services.background.start(self._orchestrator.free(REGISTRY.names()), "free")
            self._services.background.start(StartupRecovery(self._orchestrator).run(), "startup")

    async def close(self) -> None:
        """Let steps in flight finish, within shutdown_grace; take every run out of memory; close the store."""
        if self._services is None or self._orchestrator is None:
            return
        services, orchestrator = self._services, self._orchestrator
        if self.config.recovery.enabled:
            with contextlib.suppress(ValueError):
                REGISTRY.unlisten(orchestrator.flow_registered)
        try:
            services.recorder.hurry(self.config.shutdown_grace_seconds)
            await orchestrator.stop(self.config.shutdown_grace_seconds)
            await services.background.stop()
            await services.recorder.stop()
            await services.store.close()
        finally:
            remove_task_factory(services.loop)
            self._services = self._orchestrator = None

    @property
    def services(self) -> Services:
        if self._services is None:
            raise RelightError(
                "this Relight is not open: use it inside `async with Relight(...)` or `with Relight(...)`"
            )
        return self._services

    @property
    def orchestrator(self) -> Orchestrator:
        _ = self.services
        assert self._orchestrator is not None
        return self._orchestrator

    @property
    def fault(self) -> str | None:
        """Why nothing is being committed right now (disk full, I/O error); None while all is well."""
        return self.services.recorder.fault

    # ---- runs

    async def start(self, flow: Flow[..., Any] | str, *args: Any, id: str | None = None, **kwargs: Any) -> Handle:  # noqa: A002 - the run's id
        """Accept a run: it is durable when this returns. The same id, flow and input again give the same run."""
        if isinstance(flow, str):
            flow = REGISTRY.get(flow)
        if not isinstance(flow, Flow):
            raise DefinitionError(f"start() takes a flow or its name, not {flow!r}; decorate the function with @flow")
        known = REGISTRY.get(flow.name)
        if known is not flow:
            raise DefinitionError(f"{flow!r} is not the flow registered as {flow.name!r}: {known!r} is")
        _ = self.services
        return Handle(self, await start(self.orchestrator, flow, args, kwargs, id))

    async def run(self, flow: Flow[..., Any] | str, *args: Any, id: str | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Start a run and wait for its result."""
        return await (await self.start(flow, *args, id=id, **kwargs)).result()

    async def get(self, id: str) -> Handle:  # noqa: A002
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
                since=since.timestamp() if isinstance(since, dt.datetime) else since,
                parent_id=parent,
                roots_only=roots_only and parent is None,
                limit=limit,
                cursor=cursor,
            )
        )

    async def fork(self, id: str, from_step: str | None = None, new_id: str | None = None) -> Handle:  # noqa: A002
        """A new run with the same input that keeps everything the old one finished before `from_step`."""
        return Handle(self, await fork(self.orchestrator, id, from_step, new_id))

    async def items(self, id: str) -> Sequence[ItemResult]:  # noqa: A002
        """The finished foreach items of a run."""
        return await self.services.store.item_results(id)

    # ---- for handles

    async def row(self, run_id: str) -> Run:
        found = await self.services.store.get_run(run_id)
        if found is None:
            raise RunNotFoundError(f"no run has the id {run_id!r}")
        return found

    async def tell(self, message: Message) -> None:
        """Put a message into a run's inbox: durable when this returns."""
        services = self.services
        message.at = services.clock.now()
        (message_id,) = await services.store.post([message])
        if message_id is None:
            row = await self.row(message.run_id)
            raise RunStateError(f"run {row.id!r} is {row.status}: it can no longer be told to {message.kind}")
        message.id = message_id
        await self.orchestrator.told(message)


def _status(status: Status | str) -> Status:
    try:
        return Status(status)
    except ValueError:
        known = ", ".join(one.value for one in Status)
        raise ConfigError(f"list(status={status!r}): there is no such status; there are {known}") from None


def make_store(url: str, clock: Clock) -> Store:
    """The store a url names."""
    if url == "memory:":
        return MemoryStore(clock=clock)
    if url.startswith("sqlite:///"):
        path = url.removeprefix("sqlite:///")
    elif "://" in url:
        raise ConfigError(f"store {url!r}: this version knows memory:, sqlite:///path and plain paths")
    else:
        path = url
    from relight.backends.sqlite.store import SqliteStore  # noqa: PLC0415 - apsw is loaded only when SQLite is used

    return SqliteStore(path, clock=clock)
