"""MemoryLeases: sessions and leases in the MemoryStore itself, for several engines that share one.

An unfinished root has a lease if it has an owner, and that owner's session is fresh. Times are the given clock's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from relight.backends.memory.data import SessionWatcher, StoredSession
from relight.backends.memory.store import MemoryStore
from relight.clock import Clock
from relight.errors import LeasesUnavailableError
from relight.model.lease import Acquired, Lease, NotOwner, Orphaned, OwnedBy, Process, Released, Session, ended_sessions
from relight.model.run import RESUMED_BY_HAND, MessageKind, Run, Status
from relight.supervisor import Supervisor


class MemoryLeases:
    """Several engines share `store`; each has a lease manager of its own."""

    name = "store"
    in_store = True

    def __init__(self, store: MemoryStore, clock: Clock) -> None:
        self._data = store.data
        self._clock = clock
        self._owner = ""
        self._process = Process()
        self._ttl_seconds = 0.0
        self._closed = True
        self._watchers: list[SessionWatcher] = []  # those of this manager, so that close() can end them

    async def open(self, owner: str, process: Process, ttl_seconds: float) -> None:
        self._owner, self._process, self._ttl_seconds = owner, process, ttl_seconds
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        for watcher in self._watchers:
            watcher.hear()

    # ---- the session

    def report(self, trouble: str) -> None:
        self._process = msgspec.structs.replace(self._process, trouble=trouble)

    async def heartbeat(self) -> bool:
        self._check()
        with self._data.lock:
            now = self._clock.now()
            session = self._fresh(self._owner)
            begun = session is None
            if session is None:
                session = StoredSession(self._process, now, now, now)
                self._data.sessions[self._owner] = session
            session.process = self._process
            session.heartbeat_at, session.expires_at = now, now + self._ttl_seconds
        if begun:
            self._data.notify_watchers()  # they must wait for the lapse of one more session
        return begun

    async def end_session(self, owner: str) -> None:
        self._check()
        with self._data.lock:
            session = self._data.sessions.get(owner)
            if session is not None:
                session.expires_at = min(session.expires_at, self._clock.now())
        self._data.notify_watchers(owner)

    async def forget_session(self, owner: str) -> None:
        self._check()
        with self._data.lock:
            if self._fresh(owner) is None:
                self._data.sessions.pop(owner, None)

    async def listed_since(self) -> float:
        return 0.0

    async def list_orchestrators(self) -> list[Session]:
        self._check()
        return self._sessions()

    def _sessions(self) -> list[Session]:
        return self._data.list_sessions(self._clock.now())

    def _fresh(self, owner: str | None) -> StoredSession | None:
        session = None if owner is None else self._data.sessions.get(owner)
        return session if session is not None and session.expires_at > self._clock.now() else None

    # ---- runs

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        self._check()
        answers: dict[str, Acquired | OwnedBy] = {}
        with self._data.lock:
            for run_id in run_ids:
                run = self._data.unfinished.get(run_id)
                if run is None:
                    continue
                session = self._fresh(run.owner)
                if run.owner is not None and run.owner != self._owner and session is not None:
                    answers[run_id] = OwnedBy(run.owner, session.expires_at)
                else:
                    run.owner = self._owner
                    answers[run_id] = Acquired()
        return answers

    async def release_lease(self, run_id: str) -> Released | NotOwner:
        self._check()
        with self._data.writing():
            run = self._data.unfinished.get(run_id)
            if run is None or run.owner != self._owner:
                owner = None if run is None or self._fresh(run.owner) is None else run.owner
                return NotOwner(owner)
            self._release(run)
            return Released()

    async def release_all(self) -> None:
        self._check()
        with self._data.writing():
            self._data.sessions.pop(self._owner, None)
            for run in self._data.unfinished.values():
                if run.owner == self._owner:
                    self._release(run)
        self._data.notify_watchers(self._owner)

    def _release(self, run: Run) -> None:
        """The run has no owner now, and is due: at its time if it waits for one, else at once (at a time that has
        passed by any clock). A run with a message is due at once: its owner may not have received the message."""
        resumed = run.status is Status.PENDING and run.reason == RESUMED_BY_HAND
        run.owner, run.status, run.hold, run.reason = None, Status.PENDING, None, RESUMED_BY_HAND if resumed else ""
        has_message = any(message.kind is not MessageKind.JOIN for message in self._data.trees[run.id].inbox)
        if run.wake_at is None or (has_message and run.wake_at > run.updated_at):
            run.wake_at = run.updated_at

    async def get_lease(self, run_id: str) -> Lease | None:
        self._check()
        with self._data.lock:
            run = self._data.unfinished.get(run_id)
            session = None if run is None else self._fresh(run.owner)
            if run is None or run.owner is None or session is None:
                return None
            return Lease(run_id, run.owner, session.expires_at)

    # ---- watching other sessions

    async def watch_orphans(self, supervisor: Supervisor | None = None) -> AsyncIterator[Orphaned]:
        self._check()
        watcher = SessionWatcher()
        self._watchers.append(watcher)
        self._data.session_watchers.append(watcher)
        try:
            before = self._sessions()
            while True:
                await self._news(watcher, before)
                if self._closed:
                    return
                ended, watcher.ended = watcher.ended, []
                after = self._sessions()
                lapsed, before = ended_sessions(before, after), after
                for owner in sorted(lapsed.union(ended) - {self._owner}):
                    yield Orphaned(owner)
        finally:
            self._watchers.remove(watcher)
            self._data.session_watchers.remove(watcher)

    async def _news(self, watcher: SessionWatcher, sessions: list[Session]) -> None:
        """Wait until another owner's session begins, ends or may have lapsed."""
        ends = [session.expires_at for session in sessions if session.fresh and session.owner != self._owner]
        timer = self._clock.call_later(min(ends) - self._clock.now(), watcher.hear) if ends else None
        try:
            await watcher.news.wait()
            watcher.news.clear()
        finally:
            if timer is not None:
                timer.cancel()

    def _check(self) -> None:
        if self._closed:
            raise LeasesUnavailableError("the leases are not open")
