"""Heartbeats: keep this orchestrator's session alive, in a thread and on an event loop of its own.

A step that blocks the engine's loop for a minute must not cost the lease, so nothing here waits for that loop. One heartbeat
every third of the ttl keeps all runs. When heartbeats fail, the engine is told while a third of the ttl is left (`lost`), so
that it stops driving before anybody else begins; and told again when one succeeds (`regained`).

    sent          lost_at = sent + 2/3 ttl        valid_until = sent + ttl
      ├──────────────────┼─────────────────────────────┤
       heartbeats succeed  the engine lets its runs go   others may claim them

A process that cannot do its work (`Supervisor`: a part that cannot be kept alive) gives its lease away: `withhold` has every
run let go, then ends the session, until `go_on`.

Time is real here, also under a test's clock: what it measures is the life of a process, not a schedule.
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
# What each part of stopping may take, whatever the manager's server does.
RELEASE_SECONDS = 3.0
STOP_SECONDS = 3.0
WATCH_AGAIN_SECONDS = 0.1  # after the manager has ended a watch


class Heartbeats:
    """One per engine. `may_drive` tells, at any time and from any thread, whether the lease is ours for sure."""

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
        self._drives = drives  # False: no session, only questions
        self.owner = owner
        self._process = process
        self._supervisor = supervisor or Supervisor()
        self._part = self._supervisor.part("heartbeats", essential=False)
        self.ttl_seconds = ttl_seconds
        self._monotonic = SYSTEM_CLOCK.monotonic
        # How often the lease has lapsed. Raised, before valid_until is moved, when it is renewed after that: what was claimed
        # before may be another's by now.
        self.lapses = 0
        self.valid_until = 0.0  # by the monotonic clock: until then nobody else may claim our runs
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
        self._began = False  # the session has begun, once
        self._silent = False  # it shall stop, said also before its loop is there to hear it
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._attach: dict[str, bool] = {}  # run ids to acquire (True) or release (False), not done yet,
        self._attach_lock = threading.Lock()  # shared by the two threads
        self._attach_wanted = asyncio.Event()

    # ---- from the engine's loop

    @property
    def may_drive(self) -> bool:
        """Whether runs may be driven and claimed."""
        return not self._lost and self._monotonic() < self.valid_until

    async def start(self, heir: LeaseListener) -> None:
        """Begin the session. Raises what its first heartbeat raises."""
        self._listener = heir
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
        """Ask the manager, on its own loop. Raises LeasesUnavailableError when it does not answer in time.

        It is this loop that counts the time: the other one may be at its end, and forget a question that comes too late.
        """
        if self._loop is None:
            raise LeasesUnavailableError("the lease heartbeats is not running")
        asked = self._answer(question)
        try:
            answer = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError:  # it is closed
            asked.close()
            raise LeasesUnavailableError("the lease heartbeats is not running") from None
        try:
            async with asyncio.timeout(max(self.ttl_seconds, 5.0) if within_seconds is None else within_seconds):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            if answer.done() and not answer.cancelled():
                return answer.result()  # it came in time: it was this loop that did not, blocked by a step
            raise LeasesUnavailableError("the lease manager did not answer in time") from None
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if asker is None or asker.cancelling():
                raise
            # The heartbeat thread has ended, and the question with it: nobody cancelled us.
            raise LeasesUnavailableError("the lease heartbeats has stopped") from None

    async def _answer(self, question: Callable[[LeaseManager], Coroutine[Any, Any, T]]) -> T:
        return await question(self.leases)

    def attach(self, run_id: str) -> None:
        """This engine drives the run from now on. Where leases are kept apart from the store, its key follows in a moment:
        nobody waits for it, since the session itself tells that we are alive."""
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
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._attach_wanted.set)

    async def stop(self) -> None:
        """End the session, at once for everybody to see."""
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
                await self._over.wait()  # and not `join` in a thread: the system may have none for that
        self._thread = None

    def stop_now(self) -> None:
        """No more heartbeats, and nothing is released: as when the process is killed."""
        self._silent = True
        self._in_thread(self._stop_beating)

    def _stop_beating(self) -> None:
        self._stop.set()
        self._hurry.set()

    def give_lease_away(self, why: str) -> None:
        """From any thread: this process cannot do its work. Its runs are let go of, and its session ends, until `go_on`."""
        self._withheld = why
        self._in_thread(self._hurry.set)

    def go_on(self) -> None:
        """From any thread: it can again."""
        self._withheld = ""
        self._in_thread(self._hurry.set)

    def _in_thread(self, callback: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(callback)

    # ---- in the heartbeat thread

    def _run(self) -> None:
        """The thread. A loop that breaks is made anew, with a new session: without one this engine would be idle for ever."""
        while not self._lived():
            threading.Event().wait(self._part.next_pause())
        self._call_engine(self._over.set)

    def _lived(self) -> bool:
        """One loop, to its end. Whether it was the last."""
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
                # None is essential in the supervisor's sense: without heartbeats the lease is lost, and that is said here.
                works = (("heartbeat", self._beat), ("orphan-watch", self._watch), ("attach", self._attach_all))
                parts = [keep(name, work, essential=False) for name, work in works]
            await self._stop.wait()
        except BaseException as error:
            if not self._began:  # whoever opens the engine must hear of it, whatever it is
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
                self._renewed(
                    sent, lapsed=self._began
                )  # again: what was claimed under the last session may be another's
        self._began = True
        self._part.well()

    async def _end(self) -> None:
        try:
            await self.leases.close()
        except Exception as error:  # noqa: BLE001 - nothing depends on it any more
            log(logging.DEBUG, Token.LEASE_LOST, f"closing the lease manager: {error!r}")

    async def _beat(self, part: Part) -> None:
        """Heartbeat after heartbeat; quicker ones while they fail."""
        while True:
            if self._monotonic() >= self.valid_until:  # also when it is this task that kept failing
                self._lose("no heartbeat got through")
            await self._wait(self._pause)
            if self._stop.is_set():  # nothing below need ever give the loop back, and `_live` has to hear of it, too
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
            except Exception as error:  # noqa: BLE001 - whatever it is, no heartbeat got through
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
        self.valid_until = sent + self.ttl_seconds
        if self._lost or lapsed:
            self._lost = False
            log(logging.WARNING, Token.LEASE_REGAINED, f"{self.owner}: the lease is renewed again")
            self._call_engine(self._listener.lease_regained, lapsed)

    def _time_for(self, now: float) -> float:
        """How long one heartbeat may take: not beyond the moment the lease counts as lost."""
        left = self.valid_until - self.ttl_seconds / 3 - now
        return min(self.ttl_seconds / 3, left) if left > 0.01 else self.ttl_seconds / 3

    def _failed(self, error: Exception, part: Part) -> None:
        if _unexpected(error):
            part.failed(error)
        why = str(error) or "no answer in time"
        self._failures += 1
        level = logging.WARNING if self._failures == 1 else logging.DEBUG  # said once, then counted
        log(level, Token.HEARTBEAT_FAILED, f"{self.owner}: {why}; trying again")
        if self._monotonic() >= self.valid_until - self.ttl_seconds / 3 - 0.01:
            self._lose(f"no heartbeat got through for two thirds of lease_ttl ({self.ttl_seconds:g}s)")

    def _lose(self, why: str) -> None:
        """Let go of every run, and take none, until a heartbeat gets through."""
        if not self._lost:
            self._lost = True
            log(
                logging.ERROR, Token.LEASE_LOST, f"{self.owner}: {why}; this process lets go of its runs until one does"
            )
            self._call_engine(self._listener.lease_lost)

    async def _give_away(self) -> None:
        """Let go of every run; after that, end the session, so that others need not wait for it to lapse."""
        self._lose(f"this process cannot do its work ({self._withheld})")
        await self._wait(self.ttl_seconds / 3)
        if self._withheld and not self._stop.is_set():
            try:
                async with asyncio.timeout(self.ttl_seconds / 3):
                    await self.leases.release_all()
            except Exception as error:  # noqa: BLE001 - it lapses by itself
                log(logging.WARNING, Token.LEASE_LOST, f"{self.owner}: the session could not be ended: {error}")
        while self._withheld and not self._stop.is_set():
            await self._wait(None)
        self._pause = 0.0

    async def _watch(self, part: Part) -> None:
        """Pass on whose session has ended. Pushes only wake: without them recovery is slower, not wrong."""
        while True:
            async for orphaned in self.leases.watch_orphans():
                part.well()
                self._call_engine(self._listener.orphans, orphaned)
            await self._wait(WATCH_AGAIN_SECONDS)
            if self._stop.is_set():
                return

    async def _attach_all(self, part: Part) -> None:
        """Keep the manager's run keys up with what this engine drives. What fails is tried again with the next batch."""
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
        """Acquire and release. A run that ended before it was attached costs nothing but a NotOwner."""
        attached = [run_id for run_id, wanted in batch.items() if wanted]
        if attached:
            await self.leases.acquire_lease(attached)
        detached = [run_id for run_id, wanted in batch.items() if not wanted]
        for start in range(0, len(detached), RELEASES_AT_ONCE):
            some = detached[start : start + RELEASES_AT_ONCE]
            await asyncio.gather(*(self.leases.release_lease(run_id) for run_id in some))

    async def _wait(self, seconds: float | None) -> None:
        """So long, or until it is told to stop, or that it is withheld or goes on."""
        if not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._hurry.wait()
        self._hurry.clear()

    # ---- telling the engine

    def _call_engine(self, callback: Callable[..., None], *args: object) -> None:
        assert self._engine is not None
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody listens
            self._engine.call_soon_threadsafe(callback, *args)

    def _is_ready(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _not_ready(self, error: BaseException) -> None:
        if self._ready is not None and not self._ready.done():
            if isinstance(error, TimeoutError):
                error = LeasesUnavailableError("the lease manager did not answer in time")
            self._ready.set_exception(error)


def _unexpected(error: Exception) -> bool:
    """Anything but a server that does not answer is a bug in a manager."""
    return not isinstance(error, LeasesUnavailableError | TimeoutError)
