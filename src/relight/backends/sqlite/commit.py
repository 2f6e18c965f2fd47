"""The group commit: many roots' commits in one transaction, in a handful of statements.

    BEGIN IMMEDIATE
      has another connection written since our last transaction?   no → the remembered roots are still right
      fence: one query for all roots that are not remembered
      decide each commit, in order, in memory, and gather its rows
      one multi-row statement per table
    COMMIT

Every statement releases the interpreter lock and acquires it again, and may wait milliseconds for it while the event
loop is busy. So the number of statements depends on the kinds of rows written, not on their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import apsw
import msgspec

from relight.backends.sqlite import read
from relight.backends.sqlite.connection import data_version, rollback
from relight.backends.sqlite.rows import json_array
from relight.backends.sqlite.writes import Writes
from relight.model.run import TERMINAL, Hold, Status
from relight.ports.store import NO_EXTRAS, Commit, CommitResult, Committed, Exists, Extras, Fenced

# Roots are forgotten when they end or are parked. This bounds the rest: runs that this process lost without either.
MAX_KNOWN_ROOTS = 50_000

_fences = msgspec.json.Decoder(list[tuple[str, int, int, int, int, int, int]])


class Root(msgspec.Struct, gc=False):
    """What the fence compares: the epoch and the journal's last sequence. `key` is runs.key."""

    key: int
    epoch: int
    last: int
    ended: bool = False  # it is terminal: no entry is added, unless it is resumable and the commit reopens it
    resumable: bool = False  # recovery gave up on it


class Committer:
    """Applies batches on one connection and remembers its roots between them.

    What it remembers is used only inside a transaction in which `PRAGMA data_version` shows that no other connection
    has written since. That is as safe as reading the rows, without reading them.
    """

    def __init__(self) -> None:
        self._connection: apsw.Connection | None = None
        self.version = 0  # the file's data_version at the last transaction
        self._roots: dict[str, Root] = {}

    def forget(self, root_ids: Iterable[str]) -> None:
        """Something else on the same connection has written to these roots."""
        for root_id in root_ids:
            self._roots.pop(root_id, None)

    def commit(self, connection: apsw.Connection, commits: Sequence[Commit], now: float) -> list[CommitResult]:
        """One transaction. If it fails, its outcome is unknown, and the caller may give the same batch again."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._refresh(connection)
            batch = _Batch(connection, self._roots, now)
            results = batch.apply(commits)
            connection.execute("COMMIT")
        except BaseException:
            # Nothing of the batch is known to be written, so what it changed in `_roots` must not be used again.
            self._connection = None
            rollback(connection)
            raise
        self.forget(batch.left)
        return results

    def _refresh(self, connection: apsw.Connection) -> None:
        version = data_version(connection)
        known = connection is self._connection and version == self.version
        if not known or len(self._roots) > MAX_KNOWN_ROOTS:
            self._connection, self.version = connection, version
            self._roots.clear()


class _Batch:
    """One transaction's commits: decided one by one, written table by table."""

    def __init__(self, connection: apsw.Connection, roots: dict[str, Root], now: float) -> None:
        self._connection = connection
        self._roots = roots
        self._children: set[str] = set()  # ids of existing runs that are no roots
        self._created: set[str] = set()  # ids of roots that this batch has created
        self._continued: set[str] = set()  # roots of which this batch has begun the next generation
        self._writes = Writes(connection, now)
        self.left: list[str] = []  # roots without an owner: no more commits are expected for them

    def apply(self, commits: Sequence[Commit]) -> list[CommitResult]:
        self._load(commits)
        decided = [self._decide(commit) for commit in commits]
        self._writes.flush()
        return [
            result if result is not None else self._refusal(commit)
            for commit, result in zip(commits, decided, strict=True)
        ]

    def _load(self, commits: Sequence[Commit]) -> None:
        """Read the fences of all roots that are not remembered, and which of the new runs' ids exist already."""
        roots = self._roots
        wanted = {commit.root_id for commit in commits if commit.root_id not in roots}
        for commit in commits:
            if commit.extras.runs:
                wanted.update(run.id for run in commit.extras.runs if run.id not in roots)
        if not wanted:
            return
        found = read.value(self._connection, "fence", (json_array(wanted),))
        for run_id, key, is_root, ended, resumable, epoch, last in _fences.decode(found):
            if is_root:
                roots[run_id] = Root(key, epoch, last, bool(ended), bool(resumable))
            else:
                self._children.add(run_id)

    def _decide(self, commit: Commit) -> Committed | None:
        """None: refused, see `_refusal`."""
        root = self._roots.get(commit.root_id)
        if commit.create is not None:
            if root is None and commit.root_id not in self._children:
                return self._create(commit)
            return self._repeated_creation(commit, root)
        if root is None or root.epoch != commit.epoch:
            return None
        if root.last != commit.after:
            return self._repeated(commit, root)
        if root.ended and not (commit.reopen and root.resumable):
            return None
        return self._append(commit, root)

    def _append(self, commit: Commit, root: Root) -> Committed:
        if commit.root_id in self._continued:  # delete the old generation first, or this commit would go with it
            self._writes.flush()
        if commit.next is None:
            root.last = self._writes.entries(root.key, commit.after, commit.entries)
        else:
            root.last = commit.after + len(commit.entries)
            self._writes.generation(root.key, commit.root_id, root.last, commit.next)
            self._continued.add(commit.root_id)
        self._extras(commit, root)
        return Committed(root.last)

    def _create(self, commit: Commit) -> Committed:
        assert commit.create is not None
        root = Root(self._writes.run(commit.create), commit.create.epoch, commit.after + len(commit.entries))
        self._roots[commit.root_id] = root
        self._created.add(commit.root_id)
        if commit.create.owner is None:
            self.left.append(commit.root_id)
        if commit.state is None:
            self._writes.entries(root.key, commit.after, commit.entries)
        else:
            self._writes.checkpoint(root.key, root.last, commit.state)
        self._extras(commit, root)
        return Committed(root.last)

    def _extras(self, commit: Commit, root: Root) -> None:
        """Everything but the entries."""
        extras, writes = commit.extras, self._writes
        if extras is NO_EXTRAS:
            return
        if extras.runs:
            self._new_runs(extras)
        if extras.changes:
            self._changes(commit, root)
        if extras.blobs:
            writes.blobs(extras.blobs)
        if extras.cut_items:
            writes.cut_items(extras.cut_items)
        if extras.items:
            writes.items(extras.items)
        if extras.log:
            writes.log(extras.log)
        if extras.messages:
            writes.messages(extras.messages)
        if extras.cancel_spawned is not None:
            writes.cancel_spawned(commit.root_id, extras.cancel_spawned)
        if extras.consumed:
            writes.consume(root.key, extras.consumed)

    def _changes(self, commit: Commit, root: Root) -> None:
        for change in commit.extras.changes:
            if change.run_id != commit.root_id:
                self._writes.change(change, commit.root_id)
            elif not root.ended or (commit.reopen and root.resumable):
                self._writes.change(change, commit.root_id, reopen=commit.reopen)
                root.ended = change.status in TERMINAL
                root.resumable = change.status is Status.CANCELLED and change.hold is Hold.RECOVERY
                if root.ended:
                    self._writes.end(root.key, for_good=change.hold is None)
                if change.owner is None:
                    self.left.append(commit.root_id)

    def _new_runs(self, extras: Extras) -> None:
        first = dict(extras.spawned)
        for run in extras.runs:
            if run.id in self._roots or run.id in self._children:
                continue
            key = self._writes.run(run)
            if run.is_root:
                events = [first[run.id]] if run.id in first else []
                self._roots[run.id] = Root(key, run.epoch, self._writes.entries(key, 0, events))
                self.left.append(run.id)
            else:
                self._children.add(run.id)

    # ---- answers that were lost, and refusals

    def _repeated(self, commit: Commit, root: Root) -> Committed | None:
        """The commit begins before the journal's end. If the journal has exactly its entries, it was written before,
        and the answer was lost. Then it must not be applied again: later commits may have changed the same rows.
        """
        end = commit.after + len(commit.entries)
        if end > root.last:
            return None
        self._writes.flush()
        if commit.next is not None:
            return Committed(end) if self._stands_for_all(root, end, commit.next.state) else None
        stored = read.rows(self._connection, "entries_between", (root.key, commit.after, end))
        return Committed(end) if [row[0] for row in stored] == commit.entries else None

    def _stands_for_all(self, root: Root, sequence: int, state: bytes) -> bool:
        """Whether the root's checkpoint has this sequence and this state."""
        stored = read.rows(self._connection, "read_checkpoint", (root.key,))
        return [row[:2] for row in stored] == [(sequence, state)]

    def _repeated_creation(self, commit: Commit, root: Root | None) -> Committed | None:
        """Committed if this commit has already created this run: the row and all entries are the same, times included,
        and no process has driven the run since."""
        run = commit.create
        assert run is not None
        if root is None or root.last != commit.after + len(commit.entries) or run.id in self._created:
            return None  # in the same batch it is no repeated commit: two callers want the same id
        self._writes.flush()
        stored = read.runs(self._connection, "get_runs", (json_array([run.id]),))[0]
        if stored != run:
            return None
        if commit.state is None:
            return self._repeated(commit, root)
        return Committed(root.last) if self._stands_for_all(root, root.last, commit.state) else None

    def _refusal(self, commit: Commit) -> CommitResult:
        found = read.runs(self._connection, "get_runs", (json_array([commit.root_id]),))
        run = found[0] if found else None
        if commit.create is not None:
            assert run is not None, "a creation is refused only if the id exists"
            return Exists(run)
        if run is None or not run.is_root:
            return Fenced(None, None)
        return Fenced(run.epoch, run.owner)
