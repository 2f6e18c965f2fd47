"""Everything a MemoryStore keeps, and the fenced write across it.

Each method is one step for the event loop of the store's engines. But the heartbeat thread of their leases calls
methods too. So everything that writes to runs or sessions holds `lock`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from copy import copy

import msgspec

from relight.backends.memory.rows import Tree
from relight.clock import Clock
from relight.model.lease import Process, Session
from relight.model.run import (
    ENDS_PAUSE,
    RESUMED_BY_HAND,
    TERMINAL,
    Hold,
    ItemResult,
    LogLine,
    Message,
    MessageKind,
    News,
    Run,
    RunChange,
    Status,
)
from relight.model.text import SAME_LINES, check_message, check_rows, prose
from relight.ports.store import Commit, CommitResult, Committed, Exists, Extras, Fenced, NextGeneration

_RUNNING = Status.RUNNING  # kept here for speed: to look up a member of an enum, or its hash, is Python code
_CHANGED = [field for field in RunChange.__struct_fields__ if field not in ("run_id", "heard")]


class StoredSession(msgspec.Struct):
    """An orchestrator's session, by the clock of the lease manager that wrote it."""

    process: Process
    started_at: float
    heartbeat_at: float
    expires_at: float


class SessionWatcher:
    """Collects the owners whose sessions have ended. Only the loop's thread may use anything here but `loop`."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: list[str] = []
        self.news = asyncio.Event()

    def hear(self, ended: str | None = None) -> None:
        if ended is not None:
            self.ended.append(ended)
        self.news.set()


class Data:
    """The tables, as dicts."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.runs: dict[str, Run] = {}
        self.trees: dict[str, Tree] = {}
        self.unfinished: dict[str, Run] = {}  # roots only, so that finished runs cost recovery and timers nothing
        self.resumable: dict[str, Run] = {}  # roots that recovery gave up on: they keep their inbox
        self.blobs: dict[str, bytes] = {}
        self.items: dict[tuple[str, str, int], ItemResult] = {}
        self.logs: dict[tuple[str, str], list[LogLine]] = {}  # by run and stream, oldest first
        self.sessions: dict[str, StoredSession] = {}  # by owner
        self.session_watchers: list[SessionWatcher] = []
        self.lease_manager: str | None = None
        self._last_line = 0
        self._last_message = 0
        self._watchers: list[tuple[asyncio.AbstractEventLoop, Callable[[News], None]]] = []

    def list_sessions(self, now: float) -> list[Session]:
        with self.lock:
            return [
                Session(
                    owner=owner,
                    process=session.process,
                    started_at=session.started_at,
                    heartbeat_at=session.heartbeat_at,
                    expires_at=session.expires_at,
                    fresh=session.expires_at > now,
                )
                for owner, session in sorted(self.sessions.items())
            ]

    # ---- notifying each other

    def watch(self, changed: Callable[[News], None]) -> None:
        self._watchers.append((asyncio.get_running_loop(), changed))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """No other thread writes meanwhile. All watchers are notified afterwards, unless there is only one."""
        with self.lock:
            yield
        if len(self._watchers) > 1:
            self.wake_stores()

    def wake_stores(self) -> None:
        """Notify the watchers, from any thread. They are called later, when the caller no longer writes."""
        for loop, changed in self._watchers:
            with contextlib.suppress(RuntimeError):  # the watcher's loop is closed
                loop.call_soon_threadsafe(changed, News.ANYTHING)

    def notify_watchers(self, ended: str | None = None) -> None:
        """A session has begun, or this owner's has ended. May be called in any thread."""
        for watcher in list(self.session_watchers):
            with contextlib.suppress(RuntimeError):  # the watcher's loop is closed
                watcher.loop.call_soon_threadsafe(watcher.hear, ended)

    # ---- the single fenced write

    def commit(self, commit: Commit, created: set[str]) -> CommitResult:
        """`created` are the ids of the runs that this batch has created."""
        run = self.runs.get(commit.root_id)
        if commit.create is not None or commit.extras.runs or commit.extras.messages:
            check_rows(commit.create, commit.extras.runs, commit.extras.messages)
        if commit.create is not None:
            if run is None:
                created.add(commit.root_id)
                return self._create(commit, commit.create)
            # In the same batch, two callers want the same id. Only in a later batch can it be a repeated commit.
            again = None if commit.root_id in created else self._repeated_creation(commit, run)
            return again or Exists(copy(run))
        if run is None or run.id != run.root_id:
            return Fenced(None, None)
        tree = self.trees[run.id]
        if run.epoch != commit.epoch:
            return Fenced(run.epoch, run.owner)
        if tree.base + len(tree.entries) != commit.after:
            if tree.holds(commit.after, commit.entries) if commit.next is None else tree.continued(commit):
                return Committed(commit.after + len(commit.entries))
            return Fenced(run.epoch, run.owner)
        if run.status is not _RUNNING and run.status in TERMINAL and not (commit.reopen and _gave_up(run)):
            return Fenced(run.epoch, run.owner)
        tree.append(commit.entries)
        if not commit.bare:  # nearly every commit is bare: there is one for every step
            self._apply(commit, tree)
        return Committed(tree.base + len(tree.entries))

    def _create(self, commit: Commit, run: Run) -> Committed:
        tree = self._insert(run)
        tree.append(commit.entries)
        if commit.state is not None:
            tree.compact(tree.last, commit.state)
        self._apply(commit, tree)
        return Committed(tree.last)

    def _insert(self, run: Run) -> Tree:
        tree = Tree(run.id)
        run = self.runs[run.id] = copy(run)
        run.reason = prose(run.reason)
        if run.is_root:
            self.trees[run.id] = tree
            if run.status not in TERMINAL:
                self.unfinished[run.id] = run
        return tree

    def _apply(self, commit: Commit, tree: Tree) -> None:
        """Everything but the entries. Messages go before the changes that may end this run, as in every backend."""
        extras = commit.extras
        self._new_runs(extras)
        self.blobs.update(extras.blobs)
        for run_id, key, index in extras.cut_items:
            self._cut_items(run_id, key, index)
        for item in extras.items:
            self.items[item.run_id, item.key, item.index] = copy(item)
        for line in extras.log:
            self.log(line)
        for message in extras.messages:
            self.post(message)
        if extras.cancel_spawned is not None:
            self._cancel_spawned(commit.root_id, extras.cancel_spawned)
        if extras.consumed:
            consumed = set(extras.consumed)
            tree.inbox = [message for message in tree.inbox if message.id not in consumed]
        for change in extras.changes:
            row = self.runs.get(change.run_id)
            if row is not None and row.root_id == commit.root_id:
                self.change(row, change, reopen=commit.reopen)
        if commit.next is not None:
            self._begin_generation(commit.root_id, tree, commit.next)

    def _begin_generation(self, root_id: str, tree: Tree, begun: NextGeneration) -> None:
        """Delete what belongs to the generation that has ended."""
        tree.compact(tree.last, begun.state)
        gone = {run.id for run in self.runs.values() if run.root_id == root_id and run.id.startswith(begun.children)}
        for run_id in gone:
            del self.runs[run_id]
        for logged in [logged for logged in self.logs if logged[0] in gone]:
            del self.logs[logged]
        for place in [place for place in self.items if place[0] in gone or place[0] == root_id]:
            del self.items[place]
        if begun.trim_inbox:
            tree.trim(self.unfinished)

    def _new_runs(self, extras: Extras) -> None:
        first = dict(extras.spawned)
        for run in extras.runs:
            if run.id not in self.runs:
                spawned = self._insert(run)
                if run.id in first:
                    spawned.append([first[run.id]])

    def _cut_items(self, run_id: str, key: str, index: int) -> None:
        for place in [place for place in self.items if place[:2] == (run_id, key) and place[2] >= index]:
            del self.items[place]

    def change(self, run: Run, change: RunChange, *, reopen: bool = False) -> None:
        """Give a row new values. A root that has ended is changed only with `reopen`, and if recovery gave up on it."""
        if run.is_root and run.status in TERMINAL and not (reopen and _gave_up(run)):
            return
        for field in _CHANGED:
            setattr(run, field, getattr(change, field))
        run.reason = prose(run.reason)
        run.updated_at = self.clock.now()
        if change.heard is not None and self._wakes(run, change.heard):
            run.status = Status.PENDING if run.status is Status.PAUSED else run.status
            run.wake_at, run.hold, run.reason = run.updated_at, None, ""
        if run.is_root:
            self._sort_in(run)

    def _wakes(self, run: Run, heard: int) -> bool:
        """Whether a run that leaves memory has a message that it has not received. Only some kinds end a pause."""
        unheard = (message for message in self.trees[run.id].inbox if message.id > heard)
        return any(run.status is not Status.PAUSED or message.kind in ENDS_PAUSE for message in unheard)

    def is_freed(self, run: Run) -> bool:
        """Whether a person has resumed or cancelled the run."""
        return run.reason == RESUMED_BY_HAND or any(one.kind in ENDS_PAUSE for one in self.trees[run.id].inbox)

    def _sort_in(self, run: Run) -> None:
        self.unfinished.pop(run.id, None)
        self.resumable.pop(run.id, None)
        if run.status in TERMINAL:
            self._post_end_to_joined(run)
        if run.status not in TERMINAL:
            self.unfinished[run.id] = run
        elif run.hold is not None:
            self.resumable[run.id] = run
        else:
            self.trees[run.id].inbox.clear()
            self.trees[run.id].by_dedup.clear()
            self.trees[run.id].signals.clear()

    def _post_end_to_joined(self, run: Run) -> None:
        """Post this run's end to the runs that have joined it."""
        for message in self.trees[run.id].inbox:
            if message.kind is MessageKind.JOIN:
                self.post(Message.end_of(run.id, run.epoch, self.clock.now(), to=message.name))

    def _repeated_creation(self, commit: Commit, run: Run) -> Committed | None:
        """Committed if this commit has already created this run: the row and all entries are the same, times included,
        and no process has driven the run since."""
        if run != commit.create or not run.is_root:
            return None
        tree = self.trees[run.id]
        if tree.last != commit.after + len(commit.entries):
            return None
        if commit.state is None:
            same = tree.holds(commit.after, commit.entries)
        else:
            same = tree.state is not None and tree.state.data == commit.state
        return Committed(tree.last) if same else None

    # ---- other writes

    def still(self, epochs: Mapping[str, int]) -> Iterator[Run]:
        """The unfinished roots among these that still have the given epochs."""
        for root_id, epoch in epochs.items():
            run = self.unfinished.get(root_id)
            if run is not None and run.epoch == epoch:
                yield run

    def log(self, line: LogLine) -> None:
        if line.run_id in self.runs:
            lines = self.logs.setdefault((line.run_id, line.stream), [])
            text = prose(line.text)
            if any((there.at, there.token, there.text) == (line.at, line.token, text) for there in lines[-SAME_LINES:]):
                return  # a commit may be repeated, and its lines must not be logged twice
            self._last_line += 1
            lines.append(msgspec.structs.replace(line, text=text, id=self._last_line))

    def post(self, message: Message) -> int | None:
        """The message's id, or None if there is no unfinished run of that id."""
        check_message(message)
        if message.run_id not in self.unfinished:
            return None
        tree = self.trees[message.run_id]
        if message.dedup is not None and message.dedup in tree.by_dedup:
            return tree.by_dedup[message.dedup]
        self._last_message += 1
        tree.inbox.append(msgspec.structs.replace(message, id=self._last_message))
        if message.dedup is not None:
            tree.by_dedup[message.dedup] = self._last_message
            if message.kind is MessageKind.SIGNAL:
                tree.signals.add(message.dedup)
        self._wake(self.unfinished[message.run_id], message)
        return self._last_message

    def _wake(self, run: Run, message: Message) -> None:
        """A message makes a run without an owner due: see ports/store.py."""
        if run.owner is not None or message.kind is MessageKind.JOIN:
            return
        if run.status is Status.PAUSED and message.kind in ENDS_PAUSE:
            run.status, run.hold, run.reason = Status.PENDING, None, ""
        elif run.status not in (Status.WAITING, Status.PENDING):
            return
        run.wake_at = message.at if run.wake_at is None else min(run.wake_at, message.at)
        run.updated_at = max(run.updated_at, message.at)

    @property
    def newest_message(self) -> int:
        return self._last_message

    def _cancel_spawned(self, root_id: str, reason: str) -> None:
        """Post a cancellation to all unfinished descendants. They are found by `parent_id`, also through ended runs."""
        children: dict[str, list[str]] = {}
        for run in self.runs.values():
            if run.parent_id is not None:
                children.setdefault(run.parent_id, []).append(run.id)
        family = [root_id]
        for member in family:  # the list grows during the loop
            family += children.get(member, ())
        for run_id in family[1:]:
            if run_id in self.unfinished:
                payload = msgspec.json.encode(reason)
                at = self.clock.now()
                self.post(Message(run_id=run_id, kind=MessageKind.CANCEL, payload=payload, dedup="cancel", at=at))


def _gave_up(run: Run) -> bool:
    return run.status is Status.CANCELLED and run.hold is Hold.RECOVERY
