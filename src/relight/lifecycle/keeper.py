"""The keeper: keeps this orchestrator's session alive, in a thread and on an event loop of its own.

A step that blocks the engine's loop for a minute must not cost the lease, so nothing here waits for that loop. One heartbeat
every third of the ttl keeps all runs. When heartbeats fail, the engine is told while a third of the ttl is left (`lost`), so
that it stops driving before anybody else begins; and told again when one succeeds (`regained`).

    sent          lost_at = sent + 2/3 ttl        valid_until = sent + ttl
      ├──────────────────┼─────────────────────────────┤
       heartbeats succeed  the engine lets its runs go   others may claim them

Time is real here, also under a test's clock: what it measures is the life of a process, not a schedule.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from relight.clock import SYSTEM_CLOCK
from relight.errors import LeasesUnavailableError, RelightError
from relight.lifecycle.patience import Patience
from relight.model.lease import Orphaned, Process
from relight.ports.leases import LeaseManager
from relight.telemetry import Token, log

T = TypeVar("T")

ATTACH_BATCH = 1000  # run leases acquired or released in one go
RELEASES_AT_ONCE = 50
# What each part of stopping may take, whatever the manager's server does.
RELEASE_SECONDS = 3.0
STOP_SECONDS = 3.0
CANCEL_SECONDS = 0.1  # between two cancellations of one task


class Heir(Protocol):
    """Who is told by the keeper, on the engine's loop."""

    def lease_lost(self) -> None:
        """It could not be renewed and lapses soon: let go of every run, and take none."""
        ...

    def lease_regained(self, lapsed: bool) -> None:
        """It is renewed after it was lost, or (`lapsed`) after it had lapsed, so that others may have claimed runs."""
        ...

    def orphans(self, orphaned: Orphaned) -> None:
        """Somebody's session has ended."""
        ...


class Keeper:
    """One per engine. `held` tells, at any time and from any thread, whether the lease is ours for sure."""

    def __init__(
        self, leases: LeaseManager, owner: str, process: Process, ttl_seconds: float, *, drives: bool = True
    ) -> None:
        self.leases = leases
        self._drives = drives  # False: no session, only questions
        self.owner = owner
        self._process = process
        self._ttl = ttl_seconds
        self._monotonic = SYSTEM_CLOCK.monotonic
        # Raised, before valid_until is moved, whenever the lease is renewed after it had lapsed: what was claimed under an
        # earlier one may be another's by now.
        self.generation = 0
        self.valid_until = 0.0  # by the monotonic clock: until then nobody else may claim our runs
        self._lost = False
        self._heir: Heir | None = None
        self._engine: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready: asyncio.Future[None] | None = None
        self._silent = False  # it shall stop, said also before its loop is there to hear it
        self._stop = asyncio.Event()
        self._attach: dict[str, bool] = {}  # run ids to acquire (True) or release (False), not done yet,
        self._attach_lock = threading.Lock()  # shared by the two threads
        self._attach_wanted = asyncio.Event()

    # ---- from the engine's loop

    @property
    def held(self) -> bool:
        """Whether runs may be driven and claimed."""
        return not self._lost and self._monotonic() < self.valid_until

    async def start(self, heir: Heir) -> None:
        """Begin the session. Raises what its first heartbeat raises."""
        self._heir = heir
        self._engine = asyncio.get_running_loop()
        self._ready = self._engine.create_future()
        self._thread = threading.Thread(target=self._run, name="relight-keeper", daemon=True)
        self._thread.start()
        await self._ready

    async def ask(
        self, question: Callable[[LeaseManager], Coroutine[Any, Any, T]], within_seconds: float | None = None
    ) -> T:
        """Ask the manager, on its own loop. Raises LeasesUnavailableError when it does not answer in time.

        It is this loop that counts the time: the other one may be at its end, and forget a question that comes too late.
        """
        if self._loop is None:
            raise LeasesUnavailableError("the lease keeper is not running")
        asked = self._answer(question)
        try:
            answer = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError:  # it is closed
            asked.close()
            raise LeasesUnavailableError("the lease keeper is not running") from None
        try:
            async with asyncio.timeout(max(self._ttl, 5.0) if within_seconds is None else within_seconds):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            if answer.done() and not answer.cancelled():
                return answer.result()  # it came in time: it was this loop that did not, blocked by a step
            raise LeasesUnavailableError("the lease manager did not answer in time") from None
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if asker is None or asker.cancelling():
                raise
            # The keeper has ended, and the question with it: nobody cancelled us.
            raise LeasesUnavailableError("the lease keeper has stopped") from None

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
                await self.ask(lambda leases: leases.release_all(), RELEASE_SECONDS)
            except RelightError as error:
                log(logging.WARNING, Token.LEASE_LOST, f"the leases could not be released and will lapse: {error}")
        self.fall_silent()
        thread = self._thread
        await asyncio.get_running_loop().run_in_executor(None, thread.join, STOP_SECONDS)
        self._thread = None

    def fall_silent(self) -> None:
        """No more heartbeats, and nothing is released: as when the process is killed."""
        self._silent = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stop.set)

    # ---- in the keeper's thread

    def _run(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._silent:
            self._stop.set()
        try:
            await self._begin()
        except BaseException as error:  # noqa: BLE001 - whoever opens the engine must hear of it, whatever it is
            self._tell(self._not_ready, error)
            await self._end()
            return
        self._tell(self._is_ready)
        works = (self._beat(), self._watch(), self._attach_all()) if self._drives else ()
        tasks = [asyncio.create_task(work) for work in works]
        await self._stop.wait()
        await asyncio.gather(*(end(task) for task in tasks))
        await self._end()

    async def _begin(self) -> None:
        async with asyncio.timeout(max(self._ttl, 10.0)):
            await self.leases.open(self.owner, self._process, self._ttl)
            if not self._drives:
                return
            sent = self._monotonic()
            await self.leases.heartbeat()
        self.valid_until = sent + self._ttl

    async def _end(self) -> None:
        try:
            await self.leases.close()
        except Exception as error:  # noqa: BLE001 - nothing depends on it any more
            log(logging.DEBUG, Token.LEASE_LOST, f"closing the lease manager: {error!r}")

    async def _beat(self) -> None:
        """Heartbeat after heartbeat; quicker ones while they fail."""
        period = self._ttl / 3
        pause = period
        while True:
            await self._sleep(pause)
            if self._stop.is_set():  # nothing below need ever give the loop back, and `_live` has to hear of it, too
                return
            sent = self._monotonic()
            lapsed = sent >= self.valid_until
            try:
                async with asyncio.timeout(self._patience(sent)):
                    lapsed |= await self.leases.heartbeat()
            except Exception as error:  # noqa: BLE001 - without heartbeats this engine would be idle for ever, in silence
                self._failed(error)
                pause = min(period / 4, 1.0)
            else:
                self.generation += lapsed
                self.valid_until = sent + self._ttl
                if self._lost or lapsed:
                    self._lost = False
                    log(logging.WARNING, Token.LEASE_REGAINED, f"{self.owner}: the lease is renewed again")
                    self._tell(self._regained, lapsed)
                pause = period

    def _patience(self, now: float) -> float:
        """How long one heartbeat may take: not beyond the moment the lease counts as lost."""
        left = self.valid_until - self._ttl / 3 - now
        return min(self._ttl / 3, left) if left > 0.01 else self._ttl / 3

    def _failed(self, error: Exception) -> None:
        why = str(error) or "no answer in time"
        log(logging.WARNING, Token.HEARTBEAT_FAILED, f"{self.owner}: {why}; trying again", _unexpected(error))
        if not self._lost and self._monotonic() >= self.valid_until - self._ttl / 3 - 0.01:
            self._lost = True
            log(
                logging.ERROR,
                Token.LEASE_LOST,
                f"{self.owner}: no heartbeat got through for two thirds of lease_ttl ({self._ttl:g}s); "
                "this process lets go of its runs until one does",
            )
            self._tell(self._lost_it)

    async def _watch(self) -> None:
        """Pass on whose session has ended."""
        patience = Patience()
        while True:
            try:
                async for orphaned in self.leases.watch_orphans():
                    patience.again()
                    self._tell(self._orphans, orphaned)
            except Exception as error:  # noqa: BLE001 - pushes only wake: without them recovery is slower, not wrong
                level = logging.DEBUG if _unexpected(error) is None else logging.WARNING
                log(
                    level,
                    Token.WATCH_FAILED,
                    f"{self.owner}: {error}; orphans are found by looking",
                    _unexpected(error),
                )
            await patience.pause()

    async def _attach_all(self) -> None:
        """Keep the manager's run keys up with what this engine drives. What fails is tried again with the next batch."""
        patience = Patience()
        while True:
            await self._attach_wanted.wait()
            self._attach_wanted.clear()
            while self._attach:
                with self._attach_lock:
                    batch = dict(itertools.islice(self._attach.items(), ATTACH_BATCH))
                try:
                    await self._bring_up(batch)
                except Exception as error:  # noqa: BLE001 - as in _beat
                    level = logging.DEBUG if _unexpected(error) is None else logging.WARNING
                    log(level, Token.WATCH_FAILED, f"{self.owner}: attaching runs: {error}", _unexpected(error))
                    await patience.pause()
                    continue
                patience.again()
                with self._attach_lock:
                    for run_id, wanted in batch.items():
                        if self._attach.get(run_id) is wanted:
                            del self._attach[run_id]

    async def _bring_up(self, batch: dict[str, bool]) -> None:
        """Acquire and release. A run that ended before it was attached costs nothing but a NotOwner."""
        attached = [run_id for run_id, wanted in batch.items() if wanted]
        if attached:
            await self.leases.acquire_lease(attached)
        detached = [run_id for run_id, wanted in batch.items() if not wanted]
        for start in range(0, len(detached), RELEASES_AT_ONCE):
            some = detached[start : start + RELEASES_AT_ONCE]
            await asyncio.gather(*(self.leases.release_lease(run_id) for run_id in some))

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    # ---- telling the engine

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
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

    def _lost_it(self) -> None:
        if self._heir is not None:
            self._heir.lease_lost()

    def _regained(self, lapsed: bool) -> None:
        if self._heir is not None:
            self._heir.lease_regained(lapsed)

    def _orphans(self, orphaned: Orphaned) -> None:
        if self._heir is not None:
            self._heir.orphans(orphaned)


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it has ended. Once need not do: a driver may swallow a cancellation that comes together with an
    answer or an error (gRPC does), and a loop that tries again goes on then."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_SECONDS)


def _unexpected(error: Exception) -> Exception | None:
    """For its traceback: anything but a server that does not answer is a bug in a manager."""
    return None if isinstance(error, LeasesUnavailableError | TimeoutError) else error
