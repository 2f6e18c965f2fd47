"""Orphans, pushed by etcd: the deletion of a session's key, together with the keys of its runs.

etcd deletes all keys of a lease as one change, with one revision. So one revision shows whether an owner has died or a
live owner has released a run: only in the first case the session's key is among the deleted keys.

    connect ──▶ watch from the revision after the last one seen ──▶ note deletions, request progress now and then
       ▲                                                                 │
       └───── a pause ◀── the stream ended, or gave no answer ◀──────────┘
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import grpc  # type: ignore[import-untyped]

from relight.backends.etcd.connection import Connection, Link, raise_if_cancelled
from relight.backends.etcd.keys import Keys, ask_progress, watch_deletions
from relight.errors import LeasesUnavailableError
from relight.model.lease import Orphaned
from relight.retry_pause import real_pause

RETRY_SECONDS = 0.2


class _EndedError(Exception):
    """The stream has ended, or can no longer be used."""


# gRPC raises InvalidStateError for a write to a stream that etcd has just ended.
_INTERRUPTIONS = (
    grpc.aio.AioRpcError,
    asyncio.InvalidStateError,
    LeasesUnavailableError,
    TimeoutError,
    _EndedError,
)


class OrphanWatch:
    """Iterates over owners that have died since that revision, one at a time, until it is closed.

    While etcd does not answer, it raises nothing: as soon as etcd is back, it goes on from the last revision it saw. It
    misses changes that were compacted meanwhile, or lost with etcd's data. It logs nothing: heartbeats fail, too.
    """

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        owner: str,
        revision: int,
        ping_seconds: float,
        ended: Callable[[str, bytes], None],
    ) -> None:
        self._connection = connection  # not shared: a stream that hangs must not block the heartbeat thread
        self._keys = keys
        self._owner = owner
        self.revision = revision  # the last one seen
        self._ping_seconds = ping_seconds
        self._ended = ended  # called with the owner of every ended session and the value of its key
        self._orphans: dict[str, set[str]] = {}  # owners and runs not yet returned; an owner is returned once
        self.interrupted = ""  # why there is no stream now
        self._news = asyncio.Event()
        self._heard = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="relight-etcd-watch")
        self._task.add_done_callback(lambda _: self._news.set())

    def __aiter__(self) -> OrphanWatch:
        return self

    async def __anext__(self) -> Orphaned:
        while not self._orphans:
            if self._task.done():
                if not self._task.cancelled():
                    self._task.result()  # raises the error (a bug) that ended the task
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        owner = next(iter(self._orphans))
        return Orphaned(owner, tuple(sorted(self._orphans.pop(owner))))

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._connection.close()

    # ---- the task

    async def _run(self) -> None:
        while True:
            link: Link | None = None
            try:
                link = self._connection.link()
                await self._follow(link)
            except _INTERRUPTIONS as error:
                raise_if_cancelled()
                self.interrupted = repr(error)
            if link is not None:
                self._connection.drop(link)
            await real_pause(RETRY_SECONDS)

    async def _follow(self, link: Link) -> None:
        """One stream, until it fails."""
        metadata = await link.metadata(self._connection.seconds)
        stream = link.stubs["Watch"].Watch(metadata=metadata)
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(self._connection.seconds):
                await stream.write(watch_deletions(self._keys.all, self.revision + 1))
                created = await _read(stream)
            if created.canceled:
                raise _EndedError(created.cancel_reason)
            self._check_data(created)
            self.interrupted = ""
            tasks = [asyncio.create_task(self._ping(stream)), asyncio.create_task(self._listen(stream))]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            stream.cancel()

    def _check_data(self, created: Any) -> None:
        if created.header.revision < self.revision:
            # etcd would stay silent until its revisions had reached the last one seen.
            self.revision = created.header.revision
            raise _EndedError("etcd's data is older than what it told before: it was restored, or is empty")

    async def _listen(self, stream: Any) -> None:
        while True:
            response = await _read(stream)
            self._heard.set()
            if response.compact_revision:
                self.revision = response.compact_revision - 1
                raise _EndedError(f"changes before revision {response.compact_revision} are compacted")
            if response.canceled:
                raise _EndedError(response.cancel_reason)
            if response.events:
                # The header's revision is not used, nor that of a progress answer: before etcd 3.4.25 and 3.5.8 it may
                # be ahead of deletions that are still to come.
                self.revision = response.events[-1].kv.mod_revision
                self._note(response.events)

    async def _ping(self, stream: Any) -> None:
        """Check that etcd still answers: a partition drops packets without an error, as if there were no news."""
        while True:
            await real_pause(self._ping_seconds)
            self._heard.clear()
            async with asyncio.timeout(self._connection.seconds):
                await stream.write(ask_progress())
                await self._heard.wait()

    def _note(self, events: Iterable[Any]) -> None:
        for _, changed in itertools.groupby(events, key=lambda event: event.kv.mod_revision):
            ended: dict[str, bytes] = {}
            runs: defaultdict[str, list[str]] = defaultdict(list)
            for event in changed:
                if (owner := self._keys.owner_of(event.kv.key)) is not None:
                    ended[owner] = event.prev_kv.value
                elif (run_id := self._keys.run_of(event.kv.key)) is not None:
                    runs[event.prev_kv.value.decode()].append(run_id)
            for owner, value in ended.items():
                if owner != self._owner:
                    self._ended(owner, value)
                    self._orphans.setdefault(owner, set()).update(runs[owner])
        if self._orphans:
            self._news.set()


async def _read(stream: Any) -> Any:
    response = await stream.read()
    if response is grpc.aio.EOF:
        raise _EndedError("etcd ended the stream")
    return response
