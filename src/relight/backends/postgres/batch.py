"""The rows of one group commit, collected as the arguments of `commit_batch` or, for simple commits, `append_batch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import msgspec

from relight.backends.postgres.rows import change_row, ended, item_row, line_row, message_row, run_row
from relight.backends.rows import checksum
from relight.model.run import TERMINAL, Hold, News, Run, RunChange, Status
from relight.ports.store import NO_EXTRAS, Commit, Extras

_DUE = (Status.PENDING, Status.WAITING)


def simple(commits: Sequence[Commit], keys: Mapping[str, int]) -> tuple[list[Any], ...] | None:
    """The arguments of `append_batch`, if every commit is one entry of a known root and nothing else; otherwise None.
    Most batches are simple."""
    roots: list[int] = []
    epochs: list[int] = []
    sequences: list[int] = []
    events: list[bytes] = []
    crcs: list[int] = []
    for commit in commits:
        key = keys.get(commit.root_id)
        if key is None or len(commit.entries) != 1 or not commit.bare:
            return None
        event = commit.entries[0]
        sequence = commit.after + 1
        roots.append(key)
        epochs.append(commit.epoch)
        sequences.append(sequence)
        events.append(event)
        crcs.append(crc32(event, sequence))
    if len(set(roots)) < len(roots):
        return None
    return roots, epochs, sequences, events, crcs


def generations(commits: Mapping[int, Commit]) -> list[list[Any]] | None:
    """The arguments of `begin_generations`, from the commits (by root key) that begin one; None if none does."""
    rows = []
    for key, commit in commits.items():
        begun, last = commit.next, commit.after + len(commit.entries)
        if begun is not None:
            crc = checksum(last, begun.state)
            rows.append((key, commit.root_id, begun.children, last, begun.state, crc, begun.trim_inbox))
    return [list(column) for column in zip(*rows, strict=True)] if rows else None


class Batch:
    """At most one commit per root. `next_key` returns a key for a new run."""

    def __init__(self, next_key: Callable[[], int], now: float) -> None:
        self._next_key = next_key
        self._now = now
        self._news = News(0)
        self._heads: tuple[list[Any], ...] = ([], [], [], [], [], [])
        self._entries: tuple[list[Any], ...] = ([], [], [], [])
        self._created: list[Any] = []
        self._states: list[Any] = []
        self._runs: list[Any] = []
        self._spawned: list[Any] = []
        self._changes: list[Any] = []
        self._blobs: list[Any] = []
        self._cuts: list[Any] = []
        self._items: dict[tuple[str, str, int], Any] = {}
        self._log: list[Any] = []
        self._messages: list[Any] = []
        self._cancels: list[Any] = []
        self._taken: list[Any] = []

    def arguments(self, sender: str) -> list[Any]:
        """The arguments of `commit_batch`."""
        return [
            sender,
            self._news.value,
            self._now,
            *self._heads,
            *self._entries,
            self._created,
            self._states,
            self._runs,
            self._spawned,
            self._changes,
            self._blobs,
            self._cuts,
            list(self._items.values()),
            self._log,
            self._messages,
            self._cancels,
            self._taken,
        ]

    def append(self, commit: Commit, root: int) -> None:
        """Add a commit to an existing root, which is given by its key."""
        last = commit.after + len(commit.entries)
        change = _root_change(commit)
        values = (
            root,
            commit.epoch,
            commit.after,
            last,
            None if change is None else ended(change.status, change.hold),
            commit.reopen,
        )
        for column, value in zip(self._heads, values, strict=True):
            column.append(value)
        if commit.next is None:  # otherwise a checkpoint replaces the entries: see `generations`
            self._add_entries(root, commit)
        if not commit.bare:
            self._extras(commit, root)

    def create(self, commit: Commit, run: Run) -> int:
        """Add a commit that creates its root. Returns the root's key."""
        root = self._next_key()
        last = commit.after + len(commit.entries)
        row = run_row(root, root, run, last)
        change = _root_change(commit)
        if change is not None:
            row = (*row[:2], ended(change.status, change.hold), *row[3:])
        self._created.append(row)
        self._notify_of(run)
        if commit.state is None:
            self._add_entries(root, commit)
        else:
            self._states.append((root, last, commit.state, checksum(last, commit.state)))
        self._extras(commit, root)
        return root

    def _add_entries(self, root: int, commit: Commit) -> None:
        keys, sequences, events, crcs = self._entries
        sequence = commit.after
        for event in commit.entries:
            sequence += 1
            keys.append(root)
            sequences.append(sequence)
            events.append(event)
            crcs.append(crc32(event, sequence))

    def _extras(self, commit: Commit, root: int) -> None:
        """Everything but the entries."""
        extras = commit.extras
        if extras is NO_EXTRAS:
            return
        if extras.runs:
            self._new_runs(extras, root)
        if extras.changes:
            self._changed(commit, root)
        self._blobs += [(root, digest, data) for digest, data in extras.blobs.items()]
        self._cuts += [(root, *cut) for cut in extras.cut_items]
        for item in extras.items:
            self._items[item.run_id, item.key, item.index] = item_row(root, item)
        self._log += [line_row(root, line) for line in extras.log]
        self._messages += [message_row(root, message) for message in extras.messages]
        if extras.cancel_spawned is not None:
            self._cancels.append((root, commit.root_id, msgspec.json.encode(extras.cancel_spawned), self._now))
        self._taken += [(root, message_id) for message_id in extras.consumed]

    def _new_runs(self, extras: Extras, root: int) -> None:
        first = dict(extras.spawned)
        for run in extras.runs:
            key = self._next_key()
            event = first.get(run.id) if run.is_root else None
            self._runs.append(run_row(root, key, run, 0 if event is None else 1))
            if event is not None:
                self._spawned.append((root, key, 1, event, crc32(event, 1)))
            self._notify_of(run)

    def _changed(self, commit: Commit, root: int) -> None:
        """Of several changes of a row the last counts, but no root leaves a terminal status."""
        changes = {change.run_id: change for change in commit.extras.changes}
        at_root = _root_change(commit)
        if at_root is not None:
            changes[commit.root_id] = at_root
            self._notify_of(at_root)
        self._changes += [change_row(root, commit.root_id, change) for change in changes.values()]

    def _notify_of(self, row: Run | RunChange) -> None:
        """Other processes are notified of this new row, or of this change of a root."""
        self._news |= news_of(row)


def news_of(row: Run | RunChange) -> News:
    """The news for other processes in a root's new status. If a paused run goes on, the server adds that news itself,
    because it knows the old status."""
    news = News(0)
    if row.owner is None and row.wake_at is not None and row.status in _DUE:
        news |= News.DUE
    if isinstance(row, RunChange) and (row.status in TERMINAL or row.status is Status.PAUSED):
        news |= News.RUNS
    if row.hold in (Hold.DEFINITION, Hold.UPGRADE):
        news |= News.HELD
    return news


def _root_change(commit: Commit) -> RunChange | None:
    found = None
    for change in commit.extras.changes:
        if change.run_id == commit.root_id and (found is None or found.status not in TERMINAL):
            found = change
    return found
