"""The store: three views of one database, and the single fenced commit that writes to all of them.

What a backend must not know: flows, steps, scopes, recovery policy. It sees run rows, opaque entries, blobs and messages.

The commit protocol
-------------------
Every write of a run's owner is a `Commit` for one root run. A batch of them is ONE transaction, but each is checked
alone:

    for each commit, inside the transaction:
        the root's epoch in the store == commit.epoch ?   no → Fenced, this commit writes nothing
        the journal's last sequence  == commit.after ?    no → the same entries already there? Committed (an answer was lost)
                                                               otherwise Fenced: the writer's view is not the journal's
        the root is terminal ?                            yes → Fenced: nothing follows the end, except with `reopen`
        all parts of it are applied                            → Committed

When a root ends, by a commit or by `hold`, the store notifies the runs that have joined it: for each JOIN message in
its inbox, it posts an ENDED message with the root's id to the run that joined (`Message.end_of`). A JOIN that is posted
to a run which has ended already is not accepted, so no end is missed. A root that has ended with a hold keeps its JOIN
messages. If it is brought back and ends again, the store posts ENDED messages again.

A message makes its run due, in the transaction that puts it into the inbox. A waiting or pending root without an owner
gets the message's time as its `wake_at` (not for JOIN); a paused root without an owner becomes pending if the message
ends a pause. So the store knows which runs have messages to receive, and no process has to remember it. To a run with
an owner, that owner delivers the message; when it lets go of the run, the store compares the inbox with what was
received (`RunChange.heard`).

With `Commit.next` a run begins anew: a checkpoint replaces its journal in the same transaction, and the rows of its child
runs are deleted. Its own row, its inbox and its log stay. Without it, the journal of an endless run would grow without
bound.

A fenced or refused commit never fails the others in its batch. If the transaction itself fails, `commit` raises
StoreUnavailableError and the caller does not know whether it was written. Committing the same batch again is then safe,
because of the comparison with `after`.

Ids, flow names and the names and dedups of messages contain neither NUL nor half of a surrogate pair. A row, a message
or the filter of a listing with one is refused (PayloadError), and nothing is found under such an id (`model.text`). In
texts for people, reasons and log lines, the character is replaced.

The store returns payloads, entries and checkpoints as the bytes that it was given. It keeps a checksum beside entries
and checkpoints, and raises CorruptionError with root and sequence when one does not match.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import msgspec

from relight.model.journal import Journal
from relight.model.lease import Process, Session
from relight.model.run import ForeachProgress, Hold, ItemResult, LogLine, Message, News, Page, Run, RunChange, RunFilter
from relight.supervisor import Supervisor

_NO_BLOBS: Mapping[str, bytes] = MappingProxyType({})


KEPT_DEDUPS = 1000  # consumed signals with a dedup that stay in the inbox of a long run: see `checkpoint`


class NextGeneration(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """A run begins anew under its id: nothing of its past is needed any more, and nothing of it stays. The commit has
    an entry: without one, the store could not recognise the commit when it is repeated after a lost answer."""

    state: bytes  # a checkpoint that stands for the whole journal, with this commit's entries: all entries are dropped
    # The prefix of its child runs' ids, with the slash: their rows, items and logs are dropped, and the root's items.
    children: str
    # Whether to drop what is kept of consumed messages, as `checkpoint` does. That is not worth it every time.
    trim_inbox: bool


class Extras(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """What a commit writes beside its entries. Most commits, of which there is one per step, write none of this."""

    runs: Sequence[Run] = ()  # child runs of the tree, and spawned roots: inserted unless their id exists
    spawned: Sequence[tuple[str, bytes]] = ()  # id and first entry of each spawned root whose row was inserted
    # Changes of rows of this tree. A child run may leave a terminal status, if its parent was retried.
    changes: Sequence[RunChange] = ()
    blobs: Mapping[str, bytes] = _NO_BLOBS
    # Run, foreach key, index: drop the items of that foreach from this index on, before `items` are written.
    cut_items: Sequence[tuple[str, str, int]] = ()
    items: Sequence[ItemResult] = ()
    log: Sequence[LogLine] = ()  # lines for the logs of this tree's runs
    messages: Sequence[Message] = ()  # to other runs; dropped when that run is terminal or unknown
    # Post CANCEL, with this reason, to every unfinished root that descends from this one by `parent_id`.
    cancel_spawned: str | None = None
    consumed: Sequence[int] = ()  # ids of this root's messages that the entries have consumed

    @property
    def size(self) -> int:
        """About how many bytes of payload these are."""
        size = sum(map(len, self.blobs.values()))
        for run in self.runs:
            size += len(run.input)
        for change in self.changes:
            size += len(change.output or b"") + len(change.error or b"")
        for item in self.items:
            size += len(item.output)
        return size


NO_EXTRAS = Extras()  # one for all, to be recognised by `is`


class Commit(msgspec.Struct, kw_only=True, gc=False):
    """Everything that one root run's owner writes at once."""

    root_id: str
    epoch: int
    after: int = 0  # the journal's last sequence as the writer knows it
    entries: list[bytes]  # encoded events; they become after+1, after+2, …
    create: Run | None = None  # the row of a new root: then `epoch` is its first epoch and `after` is 0
    state: bytes | None = None  # only with `create` (a fork): a checkpoint that also stands for this commit's entries
    next: NextGeneration | None = None  # the generation that the root begins with this commit; not with `create`
    reopen: bool = False  # the root may be one that recovery gave up on (cancelled, hold=recovery): this brings it back
    extras: Extras = NO_EXTRAS

    @property
    def bare(self) -> bool:
        """Whether there is nothing but entries to write, which is the usual case."""
        return self.extras is NO_EXTRAS and self.next is None and self.create is None and not self.reopen

    @property
    def size(self) -> int:
        """About how many bytes of payload it carries. Servers limit the size of a message."""
        size = sum(map(len, self.entries)) + len(self.state or b"") + (0 if self.next is None else len(self.next.state))
        if self.create is not None:
            size += len(self.create.input)
        return size if self.extras is NO_EXTRAS else size + self.extras.size


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The commit is durable; the journal now ends at `sequence`."""

    sequence: int


class Fenced(msgspec.Struct, frozen=True):
    """Another owner has the run (or it is gone): nothing of this commit was written."""

    epoch: int | None
    owner: str | None


class Exists(msgspec.Struct, frozen=True):
    """`create` found the id taken: nothing of this commit was written. `run` is the existing run."""

    run: Run


CommitResult = Committed | Fenced | Exists


class MetadataStore(Protocol):
    """Runs, their statuses and owners, their inboxes, item results."""

    async def get_run(self, run_id: str) -> Run | None: ...

    async def get_runs(self, run_ids: Sequence[str]) -> list[Run]:
        """The runs with these ids that exist, in no particular order. Any number of ids."""
        ...

    async def list_runs(self, where: RunFilter) -> Page:
        """Newest first (created_at, then id), stable while new runs arrive. Raises as `model.text.check_filter` does."""
        ...

    async def claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
        """Make `owner` the owner of each unfinished root run whose epoch is still the given one.

        Raises the epoch by one and returns the new epochs; runs that are terminal, unknown or have another epoch are
        left out. The comparison makes it safe that two processes claim one run: exactly one succeeds.
        """
        ...

    async def correct_owner(self, run_id: str, epoch: int, owner: str) -> bool:
        """This owner has the lease of an unfinished root: write that into the root's row, if its epoch is still this
        one and it has an owner. Changes neither epoch nor journal."""
        ...

    async def owners(self) -> list[str]:
        """All owners of active roots (see `list_active_roots`). The cost depends on the number of owners, not of
        runs."""
        ...

    async def note_session(self, owner: str, process: Process, ttl_seconds: float) -> None:
        """Remember that this session is alive now: for lease managers outside this store, which may lose their data.
        One row per session, by the server's clock."""
        ...

    async def sessions(self) -> list[Session]:
        """Every session that was noted here, or is kept here by the store's own lease manager. Lapsed sessions are
        included until they are forgotten."""
        ...

    async def forget_session(self, owner: str) -> None:
        """Delete a lapsed session. A fresh session stays."""
        ...

    async def lease_manager(self) -> str | None:
        """The manager that keeps the leases of this store (`LeaseManager.name`), or None: not set yet."""
        ...

    async def set_lease_manager(self, name: str, before: str | None) -> bool:
        """Set the lease manager, if the present one is `before`. Returns whether it was set."""
        ...

    async def now(self) -> float | None:
        """The time of the database server, which several machines use to compare times. None: there is no server, and
        all processes use the machine's own clock."""
        ...

    async def hold(self, epochs: dict[str, int], status: RunChange) -> None:
        """Apply `status` (its run_id is ignored) to each unfinished root whose epoch still matches: for runs whose journal
        cannot be written, because it could not be read or was not read. Changes no journal."""
        ...

    async def due(self, now: float, limit: int, *, freed: bool = False) -> list[Run]:
        """Waiting and pending roots without an owner whose wake_at has come, earliest first.

        Runs that were accepted but not taken up yet (spawned, or over the limit) are pending with wake_at set, so they
        are found here as well. `freed`: only runs that a person has resumed or cancelled. Their reason is RESUMED_BY_HAND,
        or a RESUME or CANCEL is in their inbox.
        """
        ...

    async def claim_due(self, owner: str, now: float, since: float, limit: int, but: Sequence[str]) -> list[Run]:
        """Make `owner` the owner of up to `limit` of the roots that `due` returns, earliest first, except those in
        `but`. One transaction does that and raises their epochs, so that no two callers get the same run. Returns the
        rows after that.

        Of the runs that fell due after `since` it claims only the owner's share (`model.sharing.share`), which follows
        from the living sessions that the store knows and how many runs each has. So other owners, a moment later, get
        their share.
        """
        ...

    async def next_due(self) -> float | None:
        """The earliest wake_at of any waiting or pending root without an owner."""
        ...

    async def list_held(self, hold: Hold, flows: Sequence[str], limit: int) -> list[Run]:
        """Paused roots with this hold, of one of these flows, and without an owner."""
        ...

    async def post(self, messages: Sequence[Message]) -> list[int | None]:
        """Put messages into inboxes, in one transaction. Returns their ids, or None where the run is terminal or
        unknown.

        If a message with the same run and dedup exists already, none is added, and the id of the first is returned.
        """
        ...

    async def inbox(self, root_ids: Sequence[str]) -> list[Message]:
        """The unconsumed messages of these roots, oldest first."""
        ...

    async def newest_message(self) -> int:
        """The greatest id of any message; 0 if there is none. A process that has no run in memory yet begins after this
        id: it reads the inbox of each run that it takes up."""
        ...

    async def messages_after(self, message_id: int, limit: int) -> list[Message]:
        """Unconsumed messages of any root with a greater id, oldest first: what other processes have posted since."""
        ...

    async def append_log(self, lines: Sequence[LogLine]) -> None:
        """Add lines to the logs of runs, without owning the runs. Lines for unknown runs are dropped. A line that is
        among the log's last 1,000 already (same time, token and text) is not added again, here and in a commit: after a
        lost answer the caller may send it again."""
        ...

    async def read_log(
        self, run_id: str, stream: str, after: int, limit: int, *, newest: bool = False
    ) -> list[LogLine]:
        """Lines of one run's log with an id greater than `after`, oldest first. If there are more than `limit`: the
        oldest of them, or with `newest` the newest."""
        ...

    async def item_results(self, run_id: str, key: str | None = None) -> list[ItemResult]:
        """Finished foreach items of a run, by foreach key and index."""
        ...

    async def foreach_progress(self, run_id: str, prefix: str = "") -> list[ForeachProgress]:
        """How far each foreach of a run has come, by foreach key. All keys of the run begin with `prefix`; a foreach
        inside an item of another has a bracket in its key after that, and is left out. Items are counted, and their
        results are not read: that takes milliseconds for tens of thousands of items."""
        ...


class BlobStore(Protocol):
    """Content-addressed bytes: the key is the SHA-256 of the content, so storing twice stores once."""

    async def put_blob(self, data: bytes) -> str: ...

    async def get_blob(self, digest: str) -> bytes | None: ...


class ExecutionJournal(Protocol):
    """One append-only journal per root run. Only `Store.commit` appends to it."""

    async def read_from(self, root_id: str, sequence: int, limit: int) -> Journal:
        """Up to `limit` entries with a sequence greater than `sequence`; the checkpoint is left out."""
        ...

    async def read(self, root_ids: Sequence[str]) -> list[Journal | Exception]:
        """Checkpoint and tail of each root, in the order of `root_ids`. A CorruptionError stands in place of a journal
        that cannot be read, so that one bad row does not hide the others."""
        ...

    async def latest_sequence(self, root_id: str) -> int:
        """The sequence of the journal's last entry; 0 for an empty or unknown journal. No checkpoint lowers it."""
        ...

    async def checkpoint(self, root_id: str, epoch: int, sequence: int, state: bytes) -> bool:
        """Store `state` in place of all entries up to `sequence`, and drop those entries, in one transaction. Also drop
        what is kept of consumed messages, except the newest KEPT_DEDUPS signals that have a dedup; and JOIN messages of
        runs that have ended.

        Returns False, and writes nothing, when fenced, or when `sequence` is not newer than the last checkpoint or lies
        beyond the journal.
        """
        ...

    async def get_checkpoint(self, root_id: str) -> int | None:
        """The sequence of the latest checkpoint."""
        ...

    async def journal_bytes(self, root_id: str) -> int:
        """How many bytes `read` would read of this root: its checkpoint and the later entries. Reads none of them."""
        ...

    async def list_active_roots(self, owner: str, after: str | None, limit: int) -> list[Run]:
        """Unfinished roots that have this owner, alive or dead, in the order of their creation; a paused run with an owner
        was about to be resumed. `after` is the last id of the previous page. The cost depends only on the runs
        returned."""
        ...


class Store(MetadataStore, BlobStore, ExecutionJournal, Protocol):
    """One database. All methods may be called from one event loop; `open` comes first, `close` last."""

    lanes: int
    """How many calls of `commit` may usefully be under way at once. The roots in them are always different."""

    async def open(self) -> None:
        """Create or upgrade the schema. Raises StoreFormatError for a database that is not Relight's, or too new."""
        ...

    async def close(self) -> None: ...

    async def schema_version(self) -> tuple[int, int]:
        """How many migrations have been applied to the database, and how many this version has. Called before `open`;
        writes nothing. If a newer version has applied more, this version can still use it. Raises what `open` would."""
        ...

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        """The single fenced write: see the module's docstring. Results in the order of `commits`."""
        ...

    def watch(self, changed: Callable[[News], None], supervisor: Supervisor | None = None) -> None:
        """Call `changed` on the event loop when another process (or object) may have written, with what that may have
        been. It may be called for nothing, and calls may be lost: a call only wakes, the store decides. If a task
        listens, the `supervisor` keeps it alive."""
        ...
