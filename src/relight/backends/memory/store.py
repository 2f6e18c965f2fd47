"""MemoryStore: the whole Store protocol in plain dicts, for tests and for flows that need not outlive the process.

No method awaits anything, so each is atomic for the event loop it is called on. Rows are copied on the way in and out,
so that a caller that changes a run does not change the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from hashlib import sha256
from itertools import islice

from relight.backends.memory.data import Data, StoredSession
from relight.clock import SYSTEM_CLOCK, Clock
from relight.errors import CorruptionError
from relight.model.journal import Journal
from relight.model.lease import Process, Session
from relight.model.run import (
    TOTALS_INDEX,
    ForeachProgress,
    Hold,
    ItemResult,
    LogLine,
    Message,
    News,
    Page,
    Run,
    RunChange,
    RunFilter,
    Status,
    cursor_from,
    parse_cursor,
    progress_of,
)
from relight.model.sharing import share
from relight.model.text import check_filter
from relight.ports.store import Commit, CommitResult
from relight.supervisor import Supervisor


class MemoryStore:
    """`open` and `close` keep the data, so that a test can end one engine and begin another on the same store."""

    lanes = 1

    def __init__(self, *, clock: Clock) -> None:
        self.data = Data(clock)
        self.runs, self.trees = self.data.runs, self.data.trees
        self._clock = clock
        self._blobs = self.data.blobs

    async def open(self) -> None:
        pass

    async def schema_version(self) -> tuple[int, int]:
        return 0, 0

    async def close(self) -> None:
        pass

    def watch(self, changed: Callable[[News], None], supervisor: Supervisor | None = None) -> None:
        """Engines that share this store are notified of each other's writes."""
        self.data.watch(changed)

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        created: set[str] = set()
        with self.data.writing():
            return [self.data.commit(commit, created) for commit in commits]

    # ---- runs

    async def get_run(self, run_id: str) -> Run | None:
        run = self.runs.get(run_id)
        return None if run is None else copy(run)

    async def get_runs(self, run_ids: Sequence[str]) -> list[Run]:
        return [copy(self.runs[run_id]) for run_id in run_ids if run_id in self.runs]

    async def list_runs(self, where: RunFilter) -> Page:
        before = parse_cursor(check_filter(where).cursor)
        found = [run for run in self.runs.values() if _matches(run, where) and _age(run) < before]
        found.sort(key=_age, reverse=True)
        page = [copy(run) for run in found[: where.limit]]
        more = len(found) > len(page) > 0
        return Page(runs=page, next_cursor=cursor_from(page[-1]) if more else None)

    def _active(self) -> list[Run]:
        return [run for run in self.data.unfinished.values() if run.owner is not None]

    async def list_active_roots(self, owner: str, after: str | None, limit: int) -> list[Run]:
        previous = self.runs.get(after) if after is not None else None
        start = (float("-inf"), "") if previous is None else _age(previous)
        found = [run for run in self._active() if run.owner == owner and _age(run) > start]
        found.sort(key=_age)
        return [copy(run) for run in found[:limit]]

    async def owners(self) -> list[str]:
        return sorted({run.owner for run in self._active() if run.owner is not None})

    async def note_session(self, owner: str, process: Process, ttl_seconds: float) -> None:
        now = SYSTEM_CLOCK.now()  # the same clock as in MemoryLeases: a session measures the life of a process
        with self.data.lock:
            before = self.data.sessions.get(owner)
            begun = before.started_at if before is not None and before.expires_at > now else now
            self.data.sessions[owner] = StoredSession(process, begun, now, now + ttl_seconds)

    async def sessions(self) -> list[Session]:
        return self.data.list_sessions(SYSTEM_CLOCK.now())

    async def forget_session(self, owner: str) -> None:
        with self.data.lock:
            session = self.data.sessions.get(owner)
            if session is not None and session.expires_at <= SYSTEM_CLOCK.now():
                del self.data.sessions[owner]

    async def lease_manager(self) -> str | None:
        return self.data.lease_manager

    async def set_lease_manager(self, name: str, before: str | None) -> bool:
        with self.data.lock:
            if self.data.lease_manager != before:
                return False
            self.data.lease_manager = name
            return True

    async def now(self) -> float | None:
        return None

    def _waiting(self) -> list[tuple[float, str, Run]]:
        return sorted(
            (run.wake_at, run.id, run)
            for run in self.data.unfinished.values()
            if run.status in (Status.PENDING, Status.WAITING) and run.owner is None and run.wake_at is not None
        )

    async def due(self, now: float, limit: int, *, freed: bool = False) -> list[Run]:
        due = (run for wake_at, _, run in self._waiting() if wake_at <= now and (not freed or self.data.is_freed(run)))
        return [copy(run) for run in islice(due, limit)]

    async def claim_due(self, owner: str, now: float, since: float, limit: int, but: Sequence[str]) -> list[Run]:
        with self.data.writing():
            alive = {session.owner for session in self.data.list_sessions(SYSTEM_CLOCK.now()) if session.fresh}
            due = [run for wake_at, _, run in self._waiting() if wake_at <= now and run.id not in but]
            recent = [run for run in due if run.wake_at is not None and run.wake_at > since]
            owned = [run.owner for run in self._active() if run.owner in alive]
            most = len(due) - len(recent) + share(len(recent), len(alive), len(owned), owned.count(owner))
            claimed = due[: min(most, limit)]
            for run in claimed:
                run.owner, run.updated_at = owner, self._clock.now()
                run.epoch += 1
            return [copy(run) for run in claimed]

    async def next_due(self) -> float | None:
        waiting = self._waiting()
        return waiting[0][0] if waiting else None

    async def list_held(self, hold: Hold, flows: Sequence[str], limit: int) -> list[Run]:
        found = [
            run
            for run in self.data.unfinished.values()
            if run.status is Status.PAUSED and run.owner is None and run.hold is hold and run.flow in flows
        ]
        return [copy(run) for run in found[:limit]]

    async def claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
        claimed = {}
        with self.data.writing():
            for run in self.data.still(epochs):
                run.owner, run.updated_at = owner, self._clock.now()
                run.epoch += 1
                claimed[run.id] = run.epoch
        return claimed

    async def correct_owner(self, run_id: str, epoch: int, owner: str) -> bool:
        with self.data.writing():
            for run in self.data.still({run_id: epoch}):
                if run.owner is not None:
                    run.owner = owner
                    return True
        return False

    async def hold(self, epochs: dict[str, int], status: RunChange) -> None:
        with self.data.writing():
            for run in self.data.still(epochs):
                self.data.change(run, status)

    # ---- messages, logs and items

    async def post(self, messages: Sequence[Message]) -> list[int | None]:
        with self.data.writing():
            return [self.data.post(message) for message in messages]

    async def inbox(self, root_ids: Sequence[str]) -> list[Message]:
        trees = (self.trees[root_id] for root_id in dict.fromkeys(root_ids) if root_id in self.trees)
        found = [copy(message) for tree in trees for message in tree.inbox]
        return sorted(found, key=lambda message: message.id)

    async def newest_message(self) -> int:
        return self.data.newest_message

    async def messages_after(self, message_id: int, limit: int) -> list[Message]:
        roots = [*self.data.unfinished, *self.data.resumable]
        found = [message for root_id in roots for message in self.trees[root_id].inbox if message.id > message_id]
        found.sort(key=lambda message: message.id)
        return [copy(message) for message in found[:limit]]

    async def append_log(self, lines: Sequence[LogLine]) -> None:
        with self.data.writing():
            for line in lines:
                self.data.log(line)

    async def read_log(
        self, run_id: str, stream: str, after: int, limit: int, *, newest: bool = False
    ) -> list[LogLine]:
        found = [line for line in self.data.logs.get((run_id, stream), []) if line.id > after]
        return [copy(line) for line in (found[max(0, len(found) - limit) :] if newest else found[:limit])]

    async def item_results(self, run_id: str, key: str | None = None) -> list[ItemResult]:
        items = self.data.items.items()
        found = [item for (run, foreach, n), item in items if run == run_id and key in (None, foreach) and n >= 0]
        return [copy(item) for item in sorted(found, key=lambda item: (item.key, item.index))]

    async def foreach_progress(self, run_id: str, prefix: str = "") -> list[ForeachProgress]:
        done: dict[str, int] = {}
        totals: dict[str, bytes] = {}
        for (run, key, index), item in self.data.items.items():
            if run == run_id and "[" not in key[len(prefix) :]:  # a bracket: a foreach inside an item of another
                done[key] = done.get(key, 0) + (index >= 0)
                if index == TOTALS_INDEX:
                    totals[key] = item.output
        return [progress_of(key, done[key], totals.get(key)) for key in sorted(done)]

    # ---- blobs

    async def put_blob(self, data: bytes) -> str:
        digest = sha256(data).hexdigest()
        self._blobs[digest] = data
        return digest

    async def get_blob(self, digest: str) -> bytes | None:
        return self._blobs.get(digest)

    # ---- journals

    async def read_from(self, root_id: str, sequence: int, limit: int) -> Journal:
        tree = self.trees.get(root_id)
        return Journal(root_id, None, [] if tree is None else tree.read(sequence, limit))

    async def read(self, root_ids: Sequence[str]) -> list[Journal | Exception]:
        return [self._journal(root_id) for root_id in root_ids]

    def _journal(self, root_id: str) -> Journal | Exception:
        tree = self.trees.get(root_id)
        try:
            return Journal(root_id, None, []) if tree is None else tree.journal()
        except CorruptionError as error:
            return error

    async def latest_sequence(self, root_id: str) -> int:
        tree = self.trees.get(root_id)
        return 0 if tree is None else tree.last

    async def checkpoint(self, root_id: str, epoch: int, sequence: int, state: bytes) -> bool:
        run, tree = self.runs.get(root_id), self.trees.get(root_id)
        if run is None or tree is None or run.epoch != epoch or not tree.base < sequence <= tree.last:
            return False
        tree.compact(sequence, state)
        tree.trim(self.data.unfinished)
        return True

    async def get_checkpoint(self, root_id: str) -> int | None:
        tree = self.trees.get(root_id)
        return None if tree is None or tree.state is None else tree.base

    async def journal_bytes(self, root_id: str) -> int:
        journal = self._journal(root_id)
        if isinstance(journal, Exception):
            return 0
        state = b"" if journal.checkpoint is None else journal.checkpoint.state
        return len(state) + sum(len(entry.event) for entry in journal.entries)


def _age(run: Run) -> tuple[float, str]:
    return (run.created_at, run.id)


def _matches(run: Run, where: RunFilter) -> bool:
    return (
        (not where.status or run.status in where.status)
        and where.flow in (None, run.flow)
        and (where.since is None or run.created_at >= where.since)
        and where.parent_id in (None, run.parent_id)
        and (run.is_root or not where.roots_only)
    )
