"""MemoryStore: the whole Store protocol in plain dicts, for tests and for flows that need not outlive the process.

No method awaits anything, so each is atomic for the event loop it is called on. Rows are copied on the way in and out:
what a caller does to a run it was given does not change the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from hashlib import sha256
from zlib import crc32

import msgspec

from relight.clock import Clock
from relight.errors import CorruptionError, StoreError
from relight.model.journal import Checkpoint, Entry, Journal
from relight.model.run import (
    TERMINAL,
    Hold,
    ItemResult,
    Message,
    MessageKind,
    Page,
    Run,
    RunChange,
    RunFilter,
    Status,
)
from relight.ports.store import Commit, CommitResult, Committed, Exists, Fenced


class StoredRow(msgspec.Struct):
    """Bytes and the checksum they were stored with."""

    data: bytes
    crc: int

    def checked(self, what: str, root_id: str, sequence: int) -> bytes:
        if crc32(self.data) != self.crc:
            raise CorruptionError(
                f"{what} {sequence} of run {root_id!r} does not match its checksum",
                root_id=root_id,
                sequence=sequence,
            )
        return self.data


class Tree(msgspec.Struct):
    """What belongs to one root: its journal (entries after the checkpoint) and its inbox."""

    base: int = 0  # sequence of the checkpoint
    state: StoredRow | None = None
    entries: list[StoredRow] = []
    inbox: list[Message] = []  # not consumed yet, oldest first
    told: dict[str, int] = {}  # dedup → message id, of consumed ones too, until the run ends

    @property
    def last(self) -> int:
        return self.base + len(self.entries)


class MemoryStore:
    """`open` and `close` keep the data, so that a test can end one engine and begin another on the same store."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self.runs: dict[str, Run] = {}
        self.trees: dict[str, Tree] = {}
        self._unfinished: dict[str, Run] = {}  # roots only, so that finished runs cost recovery and timers nothing
        self._blobs: dict[str, bytes] = {}
        self._items: dict[tuple[str, str, int], ItemResult] = {}
        self._last_message = 0
        self._watchers: list[Callable[[], None]] = []

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def watch(self, changed: Callable[[], None]) -> None:
        """Objects that share the store hear of each other; a lone one has nobody to hear of."""
        self._watchers.append(changed)

    def _wrote(self) -> None:
        if len(self._watchers) > 1:
            loop = asyncio.get_running_loop()
            for changed in self._watchers:
                loop.call_soon(changed)

    # ---- the single fenced write

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        created: set[str] = set()
        results = [self._commit(commit, created) for commit in commits]
        self._wrote()
        return results

    def _commit(self, commit: Commit, created: set[str]) -> CommitResult:
        run = self.runs.get(commit.root_id)
        if commit.create is not None:
            if run is None:
                created.add(commit.root_id)
                return self._create(commit, commit.create)
            # Two callers of one batch want the same id; only in a later batch can it be a repetition.
            again = None if commit.root_id in created else self._repeated_creation(commit, run)
            return again or Exists(copy(run))
        if run is None or not run.is_root:
            return Fenced(None, None)
        tree = self.trees[run.id]
        if run.epoch != commit.epoch:
            return Fenced(run.epoch, run.owner)
        if tree.last != commit.after:
            return self._repeated(commit, tree) or Fenced(run.epoch, run.owner)
        if run.status in TERMINAL:
            return Fenced(run.epoch, run.owner)
        tree.entries += [_row(event) for event in commit.entries]
        self._apply(commit, tree)
        return Committed(tree.last)

    def _create(self, commit: Commit, run: Run) -> Committed:
        tree = self._insert(run)
        if commit.state is None:
            tree.entries += [_row(event) for event in commit.entries]
        else:
            tree.base, tree.state = commit.after + len(commit.entries), _row(commit.state)
        self._apply(commit, tree)
        return Committed(tree.last)

    def _insert(self, run: Run) -> Tree:
        tree = Tree()
        run = self.runs[run.id] = copy(run)
        if run.is_root:
            self.trees[run.id] = tree
            if run.status not in TERMINAL:
                self._unfinished[run.id] = run
        return tree

    def _apply(self, commit: Commit, tree: Tree) -> None:
        """Everything but the entries. Messages go before the changes that may end this run, as in every backend."""
        first = dict(commit.spawned)
        for run in commit.runs:
            if run.id not in self.runs:
                spawned = self._insert(run)
                if run.id in first:
                    spawned.entries.append(_row(first[run.id]))
        self._blobs.update(commit.blobs)
        for item in commit.items:
            self._items[item.run_id, item.key, item.index] = copy(item)
        for message in commit.messages:
            self._tell(message)
        if commit.cancel_spawned is not None:
            self._cancel_spawned(commit.root_id, commit.cancel_spawned)
        if commit.consumed:
            taken = set(commit.consumed)
            tree.inbox = [message for message in tree.inbox if message.id not in taken]
        for change in commit.changes:
            row = self.runs.get(change.run_id)
            if row is not None and row.root_id == commit.root_id:
                self._change(row, change)

    def _change(self, run: Run, change: RunChange) -> None:
        if run.is_root and run.status in TERMINAL:
            return
        for field in RunChange.__struct_fields__[1:]:
            setattr(run, field, getattr(change, field))
        run.updated_at = self._clock.now()
        if run.status in TERMINAL and run.is_root:
            del self._unfinished[run.id]
            self.trees[run.id].inbox.clear()
            self.trees[run.id].told.clear()

    def _repeated(self, commit: Commit, tree: Tree) -> Committed | None:
        start = commit.after - tree.base
        end = start + len(commit.entries)
        if start < 0 or end > len(tree.entries):
            return None
        stored = [row.data for row in tree.entries[start:end]]
        return Committed(commit.after + len(commit.entries)) if stored == commit.entries else None

    def _repeated_creation(self, commit: Commit, run: Run) -> Committed | None:
        """The same creation, entry by entry and to the instant, of a run that nobody has driven since."""
        if run != commit.create or not run.is_root:
            return None
        tree = self.trees[run.id]
        if tree.last != commit.after + len(commit.entries):
            return None
        if commit.state is None:
            return self._repeated(commit, tree)
        same = tree.state is not None and tree.state.data == commit.state
        return Committed(tree.last) if same else None

    # ---- runs

    async def get_run(self, run_id: str) -> Run | None:
        run = self.runs.get(run_id)
        return None if run is None else copy(run)

    async def get_runs(self, run_ids: Sequence[str]) -> list[Run]:
        return [copy(self.runs[run_id]) for run_id in run_ids if run_id in self.runs]

    async def list_runs(self, where: RunFilter) -> Page:
        before = _parse_cursor(where.cursor)
        found = [run for run in self.runs.values() if _matches(run, where) and _age(run) < before]
        found.sort(key=_age, reverse=True)
        page = [copy(run) for run in found[: where.limit]]
        more = len(found) > len(page) > 0
        return Page(runs=page, next_cursor=f"{page[-1].created_at!r}:{page[-1].id}" if more else None)

    async def list_active_roots(self, after: str | None, limit: int) -> list[Run]:
        previous = self.runs.get(after) if after is not None else None
        start = (float("-inf"), "") if previous is None else _age(previous)
        found = [run for run in self._unfinished.values() if _is_active(run) and _age(run) > start]
        found.sort(key=_age)
        return [copy(run) for run in found[:limit]]

    def _waiting(self) -> list[tuple[float, str, Run]]:
        return sorted(
            (run.wake_at, run.id, run)
            for run in self._unfinished.values()
            if run.status in (Status.PENDING, Status.WAITING) and run.owner is None and run.wake_at is not None
        )

    async def due(self, now: float, limit: int) -> list[Run]:
        return [copy(run) for wake_at, _, run in self._waiting() if wake_at <= now][:limit]

    async def next_due(self) -> float | None:
        waiting = self._waiting()
        return waiting[0][0] if waiting else None

    async def held(self, hold: Hold, flows: Sequence[str], limit: int) -> list[Run]:
        found = [
            run
            for run in self._unfinished.values()
            if run.status is Status.PAUSED and run.hold is hold and run.flow in flows
        ]
        return [copy(run) for run in found[:limit]]

    def _still(self, epochs: dict[str, int]) -> Iterable[Run]:
        for root_id, epoch in epochs.items():
            run = self._unfinished.get(root_id)
            if run is not None and run.epoch == epoch:
                yield run

    async def claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
        claimed = {}
        for run in self._still(epochs):
            run.owner, run.updated_at = owner, self._clock.now()
            run.epoch += 1
            claimed[run.id] = run.epoch
        self._wrote()
        return claimed

    async def hold(self, epochs: dict[str, int], status: RunChange) -> None:
        for run in self._still(epochs):
            self._change(run, status)
        self._wrote()

    # ---- messages and items

    def _tell(self, message: Message) -> int | None:
        if message.run_id not in self._unfinished:
            return None
        tree = self.trees[message.run_id]
        if message.dedup is not None and message.dedup in tree.told:
            return tree.told[message.dedup]
        self._last_message += 1
        tree.inbox.append(msgspec.structs.replace(message, id=self._last_message))
        if message.dedup is not None:
            tree.told[message.dedup] = self._last_message
        return self._last_message

    def _cancel_spawned(self, root_id: str, reason: str) -> None:
        for run in list(self._unfinished.values()):
            parent = run.parent_id
            if parent is not None and (parent == root_id or parent.startswith(root_id + "/")):
                self._tell(
                    Message(
                        run_id=run.id,
                        kind=MessageKind.CANCEL,
                        payload=msgspec.json.encode(reason),
                        dedup="cancel",
                        at=self._clock.now(),
                    )
                )

    async def post(self, messages: Sequence[Message]) -> list[int | None]:
        ids = [self._tell(message) for message in messages]
        self._wrote()
        return ids

    async def inbox(self, root_ids: Sequence[str]) -> list[Message]:
        trees = (self.trees[root_id] for root_id in dict.fromkeys(root_ids) if root_id in self.trees)
        found = [copy(message) for tree in trees for message in tree.inbox]
        return sorted(found, key=lambda message: message.id)

    async def messages_after(self, message_id: int, limit: int) -> list[Message]:
        found = [
            message for root_id in self._unfinished for message in self.trees[root_id].inbox if message.id > message_id
        ]
        found.sort(key=lambda message: message.id)
        return [copy(message) for message in found[:limit]]

    async def item_results(self, run_id: str, key: str | None = None) -> list[ItemResult]:
        found = [item for (run, foreach, _), item in self._items.items() if run == run_id and key in (None, foreach)]
        return [copy(item) for item in sorted(found, key=lambda item: (item.key, item.index))]

    # ---- blobs

    async def put_blob(self, data: bytes) -> str:
        digest = sha256(data).hexdigest()
        self._blobs[digest] = data
        return digest

    async def get_blob(self, digest: str) -> bytes | None:
        return self._blobs.get(digest)

    # ---- journals

    async def read_from(self, root_id: str, sequence: int, limit: int) -> Journal:
        return Journal(root_id, None, self._entries(root_id, sequence, limit))

    async def read(self, root_ids: Sequence[str]) -> list[Journal | Exception]:
        found: list[Journal | Exception] = []
        for root_id in root_ids:
            try:
                found.append(self._journal(root_id))
            except CorruptionError as error:
                found.append(error)
        return found

    def _journal(self, root_id: str) -> Journal:
        tree = self.trees.get(root_id)
        checkpoint = None
        if tree is not None and tree.state is not None:
            checkpoint = Checkpoint(tree.base, tree.state.checked("checkpoint", root_id, tree.base))
        return Journal(root_id, checkpoint, self._entries(root_id, 0, None))

    def _entries(self, root_id: str, sequence: int, limit: int | None) -> list[Entry]:
        tree = self.trees.get(root_id)
        if tree is None:
            return []
        start = max(sequence - tree.base, 0)
        rows = tree.entries[start:] if limit is None else tree.entries[start : start + limit]
        return [
            Entry(number, row.checked("entry", root_id, number))
            for number, row in enumerate(rows, start=tree.base + start + 1)
        ]

    async def latest_sequence(self, root_id: str) -> int:
        tree = self.trees.get(root_id)
        return 0 if tree is None else tree.last

    async def checkpoint(self, root_id: str, epoch: int, sequence: int, state: bytes) -> bool:
        run, tree = self.runs.get(root_id), self.trees.get(root_id)
        if run is None or tree is None or run.epoch != epoch or not tree.base < sequence <= tree.last:
            return False
        del tree.entries[: sequence - tree.base]
        tree.base, tree.state = sequence, _row(state)
        return True

    async def get_checkpoint(self, root_id: str) -> int | None:
        tree = self.trees.get(root_id)
        return None if tree is None or tree.state is None else tree.base


def _row(data: bytes) -> StoredRow:
    return StoredRow(data, crc32(data))


def _age(run: Run) -> tuple[float, str]:
    return (run.created_at, run.id)


def _is_active(run: Run) -> bool:
    return run.owner is not None and run.status in (Status.PENDING, Status.RUNNING, Status.WAITING)


def _matches(run: Run, where: RunFilter) -> bool:
    return (
        (not where.status or run.status in where.status)
        and where.flow in (None, run.flow)
        and (where.since is None or run.created_at >= where.since)
        and where.parent_id in (None, run.parent_id)
        and (run.is_root or not where.roots_only)
    )


def _parse_cursor(cursor: str | None) -> tuple[float, str]:
    if cursor is None:
        return (float("inf"), "")
    created_at, _, run_id = cursor.partition(":")
    try:
        return (float(created_at), run_id)
    except ValueError:
        raise StoreError(f"cursor {cursor!r} is not one that a listing gave: pass next_cursor as it came") from None
