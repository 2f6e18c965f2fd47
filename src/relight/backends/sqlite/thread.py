"""A thread with its own connection, which executes whole jobs: one switch to the thread, one back.

SQLite calls block, so they must not run on the event loop. A transaction with several switches would hold the write
lock while the loop is busy with other work.

SQLite keeps the locks of a file in the process's memory as well. A child process that is forked during a transaction
would inherit locks of a thread that it does not have, and could never write to the file. So os.fork() waits for the
job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import apsw

from relight.backends.sqlite.connection import rollback
from relight.errors import StoreUnavailableError

T = TypeVar("T")

# After so many failures in a row the thread reconnects: a file handle may be dead for good (a file server was
# replaced).
FAILURES_PER_CONNECTION = 3
FORK_SECONDS = 10.0  # how long os.fork() waits at most
CLOSE_SECONDS = 2.0  # how long close() waits for earlier jobs; without it, a commit may wait much longer for its turn
LEAVE_SECONDS = 1.0  # how long close() then waits until they have given up


class _Task(NamedTuple):
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    job: Callable[[apsw.Connection], Any] | None  # None: disconnect and end


class ConnectionThread:
    """Executes jobs in order.

    The thread calls `connect` for the first job, and again after an error that may have broken the connection for good.
    Once the event that it gets is set, the connection no longer waits for other processes. `translate` turns apsw's
    errors into Relight's.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[threading.Event], apsw.Connection],
        translate: Callable[[apsw.Error], Exception],
    ) -> None:
        self._connect = connect
        self._translate = translate
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._connection: apsw.Connection | None = None
        self._failures = 0  # in a row
        self._closed = False
        self._give_up = threading.Event()
        self._idle: tuple[Callable[[apsw.Connection], None], float] | None = None
        self.at_work = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            raise StoreUnavailableError(f"{name}: the system refused a thread: {error}") from error
        _threads.add(self)

    async def call(self, job: Callable[[apsw.Connection], T]) -> T:
        if self._closed:
            raise StoreUnavailableError("the store is closed")
        result: T = await self._submit(job)
        return result

    def on_idle(self, job: Callable[[apsw.Connection], None], seconds: float) -> None:
        """Call `job` whenever no other job has come for `seconds`."""
        self._idle = (job, seconds)
        self._tasks.put(None)  # wakes the thread, which waits without a limit

    async def close(self) -> None:
        """End the thread after the earlier jobs. A job that waits for another process's transaction gives up after
        CLOSE_SECONDS, and writes nothing. A thread that does not end even then (its disk hangs) is abandoned."""
        if self._closed:
            return
        self._closed = True
        ended = self._submit(None)
        for last in (False, True):
            done, _ = await asyncio.wait([ended], timeout=LEAVE_SECONDS if last else CLOSE_SECONDS)
            if done:
                self._thread.join()
                return
            self._give_up.set()

    def _submit(self, job: Callable[[apsw.Connection], Any] | None) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._tasks.put(_Task(loop, future, job))
        return future

    # ---- on the thread

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=self._idle[1] if self._idle else None)
            except Empty:
                self._be_idle()
                continue
            if task is None:
                continue
            if task.job is None:
                with self.at_work:
                    self._disconnect()
                _answer(task, None, None)
                return
            _answer(task, *self._perform(task.job))

    def _perform(self, job: Callable[[apsw.Connection], T]) -> tuple[T | None, Exception | None]:
        with self.at_work:
            return self._try(job)

    def _try(self, job: Callable[[apsw.Connection], T]) -> tuple[T | None, Exception | None]:
        try:
            if self._connection is None:
                self._connection = self._connect(self._give_up)
            result = job(self._connection)
        except apsw.Error as failure:
            self._after_failure()
            error = self._translate(failure)
            error.__cause__ = failure
            return None, error
        except Exception as failure:  # noqa: BLE001 - raised in the caller of the job
            return None, failure
        self._failures = 0
        return result, None

    def _after_failure(self) -> None:
        """Keep the connection, because SQLite rolls a failed transaction back and overwrites it. Disconnect only if
        failures go on, or if the transaction cannot be ended: the next commit would be lost with it."""
        self._failures += 1
        if self._connection is None:
            return
        try:
            rollback(self._connection)
        except apsw.Error:
            self._disconnect()
        if self._failures >= FAILURES_PER_CONNECTION:
            self._disconnect()

    def _be_idle(self) -> None:
        assert self._idle is not None
        # A failed poll is not reported: the next job meets the same fault and reports it.
        self._perform(self._idle[0])

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(apsw.Error):
                connection.close(True)


def _answer(task: _Task, result: Any, error: Exception | None) -> None:
    # If the loop is closed, this raises: no caller waits for the answer any more.
    with contextlib.suppress(RuntimeError):
        task.loop.call_soon_threadsafe(_settle, task.future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return  # the caller was cancelled while the job ran; the job's effect stays
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


# ---- when the process is forked

_threads: weakref.WeakSet[ConnectionThread] = weakref.WeakSet()
_paused: list[threading.Lock] = []
_forking = threading.Lock()


def _pause_all() -> None:
    _forking.acquire()
    locks = [thread.at_work for thread in list(_threads)]
    _paused.extend(lock for lock in locks if lock.acquire(timeout=FORK_SECONDS))


def _go_on() -> None:
    while _paused:
        _paused.pop().release()
    _forking.release()


if hasattr(os, "register_at_fork"):  # not on Windows, where there is no fork
    os.register_at_fork(before=_pause_all, after_in_parent=_go_on, after_in_child=_go_on)
