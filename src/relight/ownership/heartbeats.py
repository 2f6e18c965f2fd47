"""Heartbeats: keep this orchestrator's session alive, in a thread and on an event loop of its own.

A step that blocks the engine's loop for a minute must not cost the lease, so nothing here waits for that loop. One
heartbeat every third of the ttl keeps all runs. When heartbeats fail, the engine is notified while a third of the ttl
is left (`lease_lost`), so that it stops driving before another process begins. When one succeeds again, the engine is
notified of that (`lease_regained`).

    sent          lost_at = sent + 2/3 ttl        valid_until = sent + ttl
      ├──────────────────┼─────────────────────────────┤
       heartbeats succeed  the engine lets its runs go   others may claim them

A process that cannot do its work (`Supervisor`: a part that cannot be kept alive) gives its lease away:
`give_lease_away` makes the engine let go of every run, then ends the session, until `go_on`.

This module uses real time, also under a test's clock: it measures the life of a process, not a schedule.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from relight.clock import SYSTEM_CLOCK
from relight.errors import LeasesUnavailableError, RelightError
from relight.model.lease import Process
from relight.ownership.lease_listener import LeaseListener, Nobody
from relight.ports.leases import LeaseManager
from relight.supervisor import Part, Supervisor
from relight.telemetry import Token, log

T = TypeVar("T")

ATTACH_BATCH = 1000  # run leases acquired or released in one go
RELEASES_AT_ONCE = 50
# How long each part of stopping may take, even if the manager's server does not answer.
RELEASE_SECONDS = 3.0
STOP_SECONDS = 3.0
WATCH_AGAIN_SECONDS = 0.1  # after the manager has ended a watch


class Heartbeats:
    """One per engine. `may_drive` says, at any time and from any thread, whether this process surely has its lease."""

    def __init__(
        self,
        leases: LeaseManager,
        owner: str,
        process: Process,
        ttl_seconds: float,
        *,
        drives: bool = True,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.leases = leases
        self._drives = drives  # False: a client, which has no session and only queries the manager
        self.owner = owner
        self._process = process
        self._supervisor = supervisor or Supervisor()
        self._part = self._supervisor.part("heartbeats", essential=False)
        self.ttl_seconds = ttl_seconds
        self._monotonic = SYSTEM_CLOCK.monotonic
        # How often the lease has lapsed. Raised when the lease is renewed, before valid_until is moved: another
        # process may have claimed what this one claimed before the lapse.
        self.lapses = 0
        self.valid_until = 0.0  # by the monotonic clock: until then no other process may claim our runs
        self._back_at = float("-inf")  # by the monotonic clock: when a lease that had lapsed was renewed
        self._lost = False
        self._failures = 0  # heartbeats in a row that did not get through
        self._withheld = ""  # why this process gives its lease away; "" while it keeps it
        self._pause = ttl_seconds / 3  # before the next heartbeat
        self._listener: LeaseListener = Nobody()
        self._engine: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready: asyncio.Future[None] | None = None
        self._over = asyncio.Event()  # on the engine's loop: the thread has nothing more to do
        self._began = False  # the session has begun at least once
        self._silent = False  # the thread must stop; set even before its loop runs
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._attach: dict[str, bool] = {}  # run ids whose leases are still to be acquired (True) or released (False)
        self._attach_lock = threading.Lock()  # the engine's thread and the heartbeat thread share `_attach`
        self._attach_wanted = asyncio.Event()

    # ---- from the engine's loop

    @property
    def may_drive(self) -> bool:
        """Whether runs may be driven and claimed."""
        return not self._lost and self._monotonic() < self.valid_until

    @property
    def others_need_seconds(self) -> float:
        """For how long other living processes may not have renewed their leases yet, because the lease manager did not
        answer anybody until a moment ago. It has not answered this process either."""
        return max(0.0, self._back_at + self.ttl_seconds / 3 - self._monotonic())

    async def start(self, listener: LeaseListener) -> None:
        """Begin the session. Raises what its first heartbeat raises."""
        self._listener = listener
        self._engine = asyncio.get_running_loop()
        self._ready = self._engine.create_future()
        thread = threading.Thread(target=self._run, name="relight-heartbeats", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            raise LeasesUnavailableError(f"the system refused a thread for the lease heartbeats: {error}") from error
        self._thread = thread
        await self._ready

    async def call(
        self, question: Callable[[LeaseManager], Coroutine[Any, Any, T]], within_seconds: float | None = None
    ) -> T:
        """Query the manager, on its own loop. Raises LeasesUnavailableError when it does not answer in time.

        The calling loop measures the time: the other loop may be ending, and forget a query that comes too late.
        """
        if self._loop is None:
            raise LeasesUnavailableError("the heartbeat thread is not running")
        query = self._answer(question)
        try:
            answer = asyncio.run_coroutine_threadsafe(query, self._loop)
        except RuntimeError:  # that loop is closed
            query.close()
            raise LeasesUnavailableError("the heartbeat thread is not running") from None
        try:
            async with asyncio.timeout(max(self.ttl_seconds, 5.0) if within_seconds is None else within_seconds):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            if answer.done() and not answer.cancelled():
                return answer.result()  # the answer came in time, and a step blocked this loop
            raise LeasesUnavailableError("the lease manager did not answer in time") from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            # The heartbeat thread has ended and cancelled the query; the calling task itself was not cancelled.
            raise LeasesUnavailableError("the heartbeat thread has stopped") from None

    async def _answer(self, question: Callable[[LeaseManager], Coroutine[Any, Any, T]]) -> T:
        return await question(self.leases)

    def attach(self, run_id: str) -> None:
        """This engine drives the run from now on. If leases are not kept in the store, the manager gets the run's key a
        moment later. Nothing waits for that: the session already shows that this process is alive."""
        self._want(run_id, True)

    def detach(self, run_id: str) -> None:
        """This engine no longer drives the run."""
        self._want(run_id, False)

    def _want(self, run_id: str, attached: bool) -> None:
        if self.leases.in_store or self._loop is None:
            return
        with self._attach_lock:
            first = not self._attach
            self._attach[run_id] = attached
        if first:
            with contextlib.suppress(RuntimeError):  # the thread's loop is closed
                self._loop.call_soon_threadsafe(self._attach_wanted.set)

    async def stop(self) -> None:
        """End the session, so that other processes see it at once."""
        if self._thread is None or self._loop is None:
            return
        if self._drives:
            try:
                await self.call(lambda leases: leases.release_all(), RELEASE_SECONDS)
            except RelightError as error:
                log(logging.WARNING, Token.LEASE_LOST, f"the leases could not be released and will lapse: {error}")
        self.stop_now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._over.wait()  # not `join`: that would need another thread, and the system may have none
        self._thread = None

    def stop_now(self) -> None:
        """Send no more heartbeats and release nothing, as if the process were killed."""
        self._silent = True
        self._in_thread(self._stop_beating)

    def _stop_beating(self) -> None:
        self._stop.set()
        self._hurry.set()

    def give_lease_away(self, why: str) -> None:
        """From any thread: this process cannot do its work. It lets go of its runs and its session, until `go_on`."""
        self._withheld = why
        self._in_thread(self._hurry.set)

    def go_on(self) -> None:
        """From any thread: this process can do its work again."""
        self._withheld = ""
        self._in_thread(self._hurry.set)

    def _in_thread(self, callback: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the thread's loop is closed
                self._loop.call_soon_threadsafe(callback)

    # ---- in the heartbeat thread

    def _run(self) -> None:
        """The thread. If its loop breaks, a new one begins a new session: without one the engine would stay idle."""
        while not self._lived():
            threading.Event().wait(self._part.next_pause())
        self._call_engine(self._over.set)

    def _lived(self) -> bool:
        """Run one loop to its end. Returns whether it was the last one."""
        try:
            asyncio.run(self._live())
        except Exception as error:  # noqa: BLE001 - see `_run`
            self._part.failed(error)
            return self._silent
        return True

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop, self._hurry, self._attach_wanted = asyncio.Event(), asyncio.Event(), asyncio.Event()
        if self._silent:
            self._stop.set()
        parts: list[Part] = []
        try:
            await self._begin()
            self._call_engine(self._is_ready)
            keep = self._supervisor.keep
            if self._drives:
                # None is essential in the supervisor's sense: without heartbeats the lease is lost, as `_lose` logs.
                works = (("heartbeat", self._beat), ("orphan-watch", self._watch), ("attach", self._attach_all))
                parts = [keep(name, work, essential=False) for name, work in works]
            await self._stop.wait()
        except BaseException as error:
            if not self._began:  # any error must reach the caller that opens the engine
                self._call_engine(self._not_ready, error)
                return
            self._lose(f"its heartbeats broke: {error!r}")
            raise
        finally:
            await asyncio.gather(*(part.stop() for part in parts))
            await self._end()

    async def _begin(self) -> None:
        async with asyncio.timeout(max(self.ttl_seconds, 10.0)):
            await self.leases.open(self.owner, self._process, self.ttl_seconds)
            sent = self._monotonic()
            if self._drives:
                await self.leases.heartbeat()
                # If this is not the first session, other processes may have claimed the runs of the last one.
                self._renewed(sent, lapsed=self._began)
        self._began = True
        self._part.well()

    async def _end(self) -> None:
        try:
            await self.leases.close()
        except Exception as error:  # noqa: BLE001 - nothing depends on it any more
            log(logging.DEBUG, Token.LEASE_LOST, f"closing the lease manager: {error!r}")

    async def _beat(self, part: Part) -> None:
        """Send one heartbeat after the other, more often while they fail."""
        while True:
            if self._monotonic() >= self.valid_until:  # also when this task itself kept failing
                self._lose("no heartbeat got through")
            await self._wait(self._pause)
            if self._stop.is_set():  # nothing below is sure to yield to the loop, and `_live` must see the stop
                return
            if self._withheld:
                await self._give_away()
                continue
            sent = self._monotonic()
            lapsed = sent >= self.valid_until
            self._pause = min(self.ttl_seconds / 12, 1.0)
            try:
                self.leases.report(self._supervisor.failing)
                async with asyncio.timeout(self._time_for(sent)):
                    lapsed |= await self.leases.heartbeat()
            except Exception as error:  # noqa: BLE001 - any error means that no heartbeat got through
                self._failed(error, part)
            else:
                self._renewed(sent, lapsed=lapsed)
                self._pause = self.ttl_seconds / 3
                part.well()
                if self._failures:
                    why = f"{self.owner}: heartbeats get through again, after {self._failures} that did not"
                    log(logging.WARNING, Token.HEARTBEAT_FAILED, why)
                    self._failures = 0

    def _renewed(self, sent: float, *, lapsed: bool) -> None:
        self.lapses += lapsed
        if lapsed:
            self._back_at = self._monotonic()
        self.valid_until = sent + self.ttl_seconds
        if self._lost or lapsed:
            self._lost = False
            log(logging.WARNING, Token.LEASE_REGAINED, f"{self.owner}: the lease is renewed again")
            self._call_engine(self._listener.lease_regained, lapsed)

    def _time_for(self, now: float) -> float:
        """How long one heartbeat may take: at most until the lease counts as lost."""
        left = self.valid_until - self.ttl_seconds / 3 - now
        return min(self.ttl_seconds / 3, left) if left > 0.01 else self.ttl_seconds / 3

    def _failed(self, error: Exception, part: Part) -> None:
        if not isinstance(error, LeasesUnavailableError | TimeoutError):  # a bug in a manager
            part.failed(error)
        why = str(error) or "no answer in time"
        self._failures += 1
        level = logging.WARNING if self._failures == 1 else logging.DEBUG  # the others are counted
        log(level, Token.HEARTBEAT_FAILED, f"{self.owner}: {why}; trying again")
        if self._monotonic() >= self.valid_until - self.ttl_seconds / 3 - 0.01:
            self._lose(f"no heartbeat got through for two thirds of lease_ttl ({self.ttl_seconds:g}s)")

    def _lose(self, why: str) -> None:
        """Let go of every run, and take up none, until a heartbeat gets through."""
        if not self._lost:
            self._lost = True
            log(
                logging.ERROR, Token.LEASE_LOST, f"{self.owner}: {why}; this process lets go of its runs until one does"
            )
            self._call_engine(self._listener.lease_lost)

    async def _give_away(self) -> None:
        """Let go of every run, then end the session, so that other processes need not wait for it to lapse."""
        self._lose(f"this process cannot do its work ({self._withheld})")
        await self._wait(self.ttl_seconds / 3)
        if self._withheld and not self._stop.is_set():
            try:
                async with asyncio.timeout(self.ttl_seconds / 3):
                    await self.leases.release_all()
            except Exception as error:  # noqa: BLE001 - the session lapses by itself
                log(logging.WARNING, Token.LEASE_LOST, f"{self.owner}: the session could not be ended: {error}")
        while self._withheld and not self._stop.is_set():
            await self._wait(None)
        self._pause = 0.0

    async def _watch(self, part: Part) -> None:
        """Report which sessions have ended. These reports only wake recovery: without them it is slower, not wrong."""
        while True:
            async for orphaned in self.leases.watch_orphans(self._supervisor):
                part.well()
                self._call_engine(self._listener.orphans, orphaned)
            await self._wait(WATCH_AGAIN_SECONDS)
            if self._stop.is_set():
                return

    async def _attach_all(self, part: Part) -> None:
        """Write the runs that this engine drives into the manager's keys. The next batch repeats what has failed."""
        while True:
            while self._attach:
                with self._attach_lock:
                    batch = dict(itertools.islice(self._attach.items(), ATTACH_BATCH))
                await self._bring_up(batch)
                part.well()
                with self._attach_lock:
                    for run_id, wanted in batch.items():
                        if self._attach.get(run_id) is wanted:
                            del self._attach[run_id]
            self._attach_wanted.clear()
            if not self._attach:
                await self._attach_wanted.wait()

    async def _bring_up(self, batch: dict[str, bool]) -> None:
        """Acquire and release run leases. A run that ended before it was attached costs nothing but a NotOwner."""
        attached = [run_id for run_id, wanted in batch.items() if wanted]
        if attached:
            await self.leases.acquire_lease(attached)
        detached = [run_id for run_id, wanted in batch.items() if not wanted]
        for start in range(0, len(detached), RELEASES_AT_ONCE):
            some = detached[start : start + RELEASES_AT_ONCE]
            await asyncio.gather(*(self.leases.release_lease(run_id) for run_id in some))

    async def _wait(self, seconds: float | None) -> None:
        """Wait so long, or until `stop_now`, `give_lease_away` or `go_on` is called."""
        if not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._hurry.wait()
        self._hurry.clear()

    # ---- calling the engine

    def _call_engine(self, callback: Callable[..., None], *args: object) -> None:
        assert self._engine is not None
        with contextlib.suppress(RuntimeError):  # the engine's loop is closed
            self._engine.call_soon_threadsafe(callback, *args)

    def _is_ready(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _not_ready(self, error: BaseException) -> None:
        if self._ready is not None and not self._ready.done():
            if isinstance(error, TimeoutError):
                error = LeasesUnavailableError("the lease manager did not answer in time")
            self._ready.set_exception(error)
