"""One life of a crash test: what the child process does. Begin with `crashpoints`."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from relight.backend_choice import make_leases, make_store
from relight.clock import SYSTEM_CLOCK
from relight.config import load_config
from relight.engine import Relight
from relight.errors import RelightError, RunCancelledError, RunFailedError, RunNotFoundError, StoreUnavailableError
from relight.flow.definitions import Flow
from relight.flow.registry import REGISTRY
from relight.handle import Handle
from relight.model.run import Status
from relight.ports.store import Store
from relight.testing.crashing_leases import CrashingLeases
from relight.testing.crashing_store import CrashingStore, CrashPlan, CrashPoints, patiently
from relight.testing.forkserver import find
from relight.testing.ledger import Line, note, open_ledger, read_ledger
from relight.testing.trials import Outcome

POLL_SECONDS = 0.002
RUN_ID = "crash-test"

logger = logging.getLogger("relight.testing")


class Life(msgspec.Struct):
    """What a scenario knows of its process."""

    number: int  # 1 is the first; later lives resume what earlier ones left; 0 is the witness (see `Explorer`)
    directory: Path  # the same in every life of a trial
    arguments: list[Any]
    store: Store  # the real store: its operations are not counted and never crash
    points: CrashPoints  # of this process
    unfinished: bool = False  # set by `again`
    later: bool = False  # set by `begins`: operations are those since then

    def facts(self, what: str, label: str = "") -> list[Line]:
        """The lines of this kind in the ledger so far, of all lives."""
        return [line for line in self.lines() if line.what == what and (not label or line.label == label)]

    def lines(self) -> list[Line]:
        return read_ledger(self.directory / "ledger")

    def again(self) -> None:
        """This life ends without a result: the next one goes on."""
        self.unfinished = True

    def begins(self) -> None:
        """From here on operations are numbered: the next is the first. How many came before depends on timing, and none
        of them is a crash point."""
        self.later = True
        self.points.begin()

    def die(self) -> NoReturn:
        """End this life, as if it had been killed. The trial is about what it leaves."""
        note("killed", "by its scenario")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed processes do not go on")

    async def reached(self, run_id: str, *statuses: Status) -> None:
        """Wait until the run has one of these statuses, or has ended."""

        async def has() -> bool:
            row = await self.store.get_run(run_id)
            return row is not None and (row.status in statuses or row.status.terminal)

        await self.until(has)

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Check again and again until the condition is true. The life's deadline limits this."""
        while not await condition():
            over = asyncio.get_running_loop().create_future()
            SYSTEM_CLOCK.call_later(POLL_SECONDS, lambda over=over: over.done() or over.set_result(None))  # type: ignore[misc]
            await over

    async def start(
        self,
        rl: Relight,
        flow: Flow[..., Any],
        *args: Any,
        id: str = RUN_ID,  # noqa: A002 - as Relight.start
        **kwargs: Any,
    ) -> Handle[Any]:
        """Start a run, in the first life or again in a later one. A run that was accepted before must still exist."""
        if self.facts("accepted", id):
            try:
                await patiently(lambda: rl.get(id))
            except RunNotFoundError:
                raise AssertionError(f"run {id!r} was accepted in an earlier life, and is lost") from None
        handle = await patiently(lambda: rl.start(flow.with_id(id), *args, **kwargs))
        note("accepted", id)
        return handle

    async def end(self, handle: Handle[Any]) -> dict[str, Any]:
        """Wait for a run's end: its status, and its result or error as data."""
        try:
            value = await patiently(handle.result)
        except RunFailedError as error:
            cause = error.__cause__
            found = {"status": "failed", "error": f"{type(cause).__name__}: {cause}"}
        except RunCancelledError as error:
            found = {"status": "cancelled", "reason": error.reason}
        except StoreUnavailableError:
            raise
        except RelightError as error:
            found = {"status": "held", "error": f"{type(error).__name__}: {error}"}
        else:
            found = {"status": "completed", "result": msgspec.to_builtins(value)}
        status = await patiently(handle.status)
        if status.terminal != (found["status"] != "held"):
            raise AssertionError(f"result() says {found}, but the store says {status}")
        return found


def prepare() -> None:
    """In the fork server, once: the work that every life would repeat, which is half of the work of a short life."""
    importlib.import_module("relight.backends.sqlite")
    for name in REGISTRY.names():
        _ = REGISTRY.get(name).fingerprint


def live(order: dict[str, Any]) -> None:
    """The child's main function."""
    outcome = asyncio.run(_live(order))
    Path(order["outcome"]).write_bytes(msgspec.json.encode(outcome))


def _arguments(flow: Flow[..., Any], order: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the flow: see `crashpoints`."""
    sealed = order["sealed"]
    return (tuple(order["arguments"]), {}) if sealed is None else flow.arguments.open(sealed.encode())


async def _live(order: dict[str, Any]) -> Outcome:
    directory = Path(order["directory"])
    settings = order["config"]
    url = settings.pop("store")
    config = load_config(url, settings, {})
    inner = make_store(config, SYSTEM_CLOCK)
    plan = msgspec.convert(order["plan"], CrashPlan)
    ledger = open_ledger(directory / "ledger", order["number"])
    store = CrashingStore(inner, plan, ledger, later=order["later"])
    life = Life(order["number"], directory, order["arguments"], inner, store.points)
    logger.info("life %d, plan %s", life.number, plan)
    ledger.on_effect = store.points.effect_begun
    scenario = find(order["scenario"])

    async def opened() -> Relight:
        leases = make_leases(config, inner, given=False)  # a new one for each try: failed heartbeats close theirs
        if config.leases != "none":
            leases = CrashingLeases(leases, store.points)
        rl = Relight(store=store, lease_manager=leases, **settings)
        await rl.open()
        return rl

    rl = await patiently(opened)
    try:
        if isinstance(scenario, Flow):
            args, kwargs = _arguments(scenario, order)
            value = await life.end(await life.start(rl, scenario, *args, **kwargs))
        else:
            value = await scenario(rl, life)
    finally:
        try:
            await rl.close()
        except StoreUnavailableError as error:
            logger.info("closing: %s", error)  # all was durable before: a lost answer loses nothing here
    logger.info("life %d ends with %r after %s", life.number, value, store.operations)
    return Outcome(
        value=value,
        unfinished=life.unfinished,
        operations=store.operations,
        fired=store.fired,
        later=life.later,
    )
