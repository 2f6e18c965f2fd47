"""The store: three views on one database and the single fenced commit that writes across them.

What a backend must not know: flows, steps, scopes, recovery policy. It sees run rows, opaque entries, blobs and messages.

The commit protocol
-------------------
Every write of a run's owner is a `Commit` for one root run. A batch of them is ONE transaction, but each stands alone:

    for each commit, inside the transaction:
        the root's epoch in the store == commit.epoch ?   no → Fenced, this commit writes nothing
        the journal's last sequence  == commit.after ?    no → the same entries already there? Committed (an answer was lost)
                                                               otherwise Fenced: the writer's view is not the journal's
        the root is terminal ?                            yes → Fenced: nothing is ever added behind the end, but for `reopen`
        all parts of it are applied                            → Committed

A root that ends, by a commit or by `hold`, tells whoever has joined it: for each JOIN message in its inbox, an ENDED message
with its id goes to the run that asked (`Message.end_of`). A JOIN posted to a run that has ended already is not taken, so
none is missed. One that has ended with a hold keeps them, and tells again when it has been brought back and ends again.

A message makes its run due, in the transaction that puts it into the inbox: a waiting or pending root that nobody holds has its
`wake_at` moved to the message's time (JOIN does not), a paused one that nobody holds is pending if the message is one that
ends a pause. So that a run has something to hear is written down, and no process has to remember it. A run that somebody holds
is told by its owner, and compared with the inbox when that lets go of it (`RunChange.heard`).

A run that lives for ever would grow for ever. With `Commit.next` it begins anew: a checkpoint replaces its journal in the same
transaction, and the rows of its child runs go. Its own row, its inbox and its log stay.

A fenced or refused commit never fails the others in its batch. If the transaction itself fails, `commit` raises
StoreUnavailableError and the caller knows nothing about the outcome; committing the same batch again resolves it, because
of the comparison with `after`.

Ids, flow names and the names and dedups of messages have neither NUL nor half of a surrogate pair: a row or message with one
is refused (PayloadError), and so is a listing that asks for one; nothing is found under such an id (`model.text`). In texts for
people, reasons and log lines, the character is replaced.

Payloads, entries and checkpoints are bytes the store returns as they were given; it keeps a checksum beside entries and
checkpoints and raises CorruptionError with root and sequence when one does not match.
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


KEPT_DEDUPS = 1000  # of consumed signals, in the inbox of a run that goes on for long: see NextGeneration


class NextGeneration(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """A run begins anew under its id: nothing of its past is needed any more, and nothing of it stays. The commit has an entry,
    as every one that is to be recognised when its answer was lost."""

    state: (
        bytes  # a checkpoint that stands for the whole journal, this commit's entries included: all of them are dropped
    )
    # How the ids of its child runs begin, with a slash at the end: their rows, items and logs are dropped, and the root's items.
    children: str
    # Drop what is kept of consumed messages, too, as `checkpoint` does. Not worth it every time.
    prune_inbox: bool


class Extras(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """What a commit writes beside its entries. Most commits write nothing of it, and there is one per step."""

    runs: Sequence[Run] = ()  # child runs of the tree, and spawned roots: inserted unless their id exists
    spawned: Sequence[tuple[str, bytes]] = ()  # first entry of each spawned root in `runs` that was really inserted
    changes: Sequence[
        RunChange
    ] = ()  # rows of this tree. A child's may leave a terminal status: its parent was retried
    blobs: Mapping[str, bytes] = _NO_BLOBS
    # Run, foreach key, index: drop its items from there on, then put `items`.
    cut_items: Sequence[tuple[str, str, int]] = ()
    items: Sequence[ItemResult] = ()
    log: Sequence[LogLine] = ()  # lines for the logs of this tree's runs
    messages: Sequence[Message] = ()  # to other runs; dropped when that run is terminal or unknown
    # Tell every unfinished root that descends from this one, by parentage: cancel, for this reason.
    cancel_spawned: str | None = None
    consumed: Sequence[int] = ()  # ids of this root's messages that the entries have taken in

    @property
    def size(self) -> int:
        """About how many bytes of payload."""
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
    """Everything one root run's owner wants written at once."""

    root_id: str
    epoch: int
    after: int = 0  # the journal's last sequence as the writer knows it
    entries: list[bytes]  # encoded events; they become after+1, after+2, …
    create: Run | None = None  # the root itself: then epoch is its first epoch and after is 0
    state: bytes | None = None  # only with create (a fork): a checkpoint that stands for this commit's entries too
    next: NextGeneration | None = None  # what the root begins with this commit: not with `create`
    reopen: bool = False  # the root may be one that recovery gave up on (cancelled, hold=recovery): this brings it back
    extras: Extras = NO_EXTRAS

    @property
    def bare(self) -> bool:
        """Whether there is nothing but entries to write, as nearly always."""
        return self.extras is NO_EXTRAS and self.next is None and self.create is None and not self.reopen

    @property
    def size(self) -> int:
        """About how many bytes of payload it carries: what a server's limit on a message is about."""
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
    """`create` found the id taken: nothing of this commit was written. `run` is the one that is there."""

    run: Run


CommitResult = Committed | Fenced | Exists


class MetadataStore(Protocol):
    """Runs, their statuses and owners, their inboxes, item results."""

    async def get_run(self, run_id: str) -> Run | None: ...

    async def get_runs(self, run_ids: Sequence[str]) -> list[Run]:
        """Those that exist, in no particular order. Any number of ids."""
        ...

    async def list_runs(self, where: RunFilter) -> Page:
        """Newest first (created_at, then id), stable while new runs arrive. Raises as `model.text.check_filter` does."""
        ...

    async def claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
        """Make `owner` the owner of each unfinished root run whose epoch is still the given one.

        Raises the epoch by one and returns the new epochs; runs that are terminal, unknown or have moved on are left out.
        The comparison makes two claimers of one run safe: exactly one succeeds.
        """
        ...

    async def correct_owner(self, run_id: str, epoch: int, owner: str) -> bool:
        """The lease of an unfinished root turned out to be this owner's: write that back into its row, if its epoch is still
        this one and it has an owner. Touches neither epoch nor journal."""
        ...

    async def owners(self) -> list[str]:
        """Everybody in whose name there are active roots (see `list_active_roots`). Costs by the number of owners, not of
        runs."""
        ...

    async def note_session(self, owner: str, process: Process, ttl_seconds: float) -> None:
        """Remember that this session is alive now: for lease managers that are not this store, and may lose their data. One
        row per session, by the server's clock."""
        ...

    async def sessions(self) -> list[Session]:
        """Every session that was noted here, or is kept here by the store's own lease manager; lapsed ones until they are
        forgotten."""
        ...

    async def forget_session(self, owner: str) -> None:
        """Drop a lapsed session. One that is fresh stays."""
        ...

    async def lease_manager(self) -> str | None:
        """Who keeps the leases of this store (`LeaseManager.name`), as it was set last; None: nobody has said so yet."""
        ...

    async def set_lease_manager(self, name: str, before: str | None) -> bool:
        """Remember it, if what is remembered is still `before`."""
        ...

    async def now(self) -> float | None:
        """The time of the database server, which decides where several machines compare times. None: there is no server,
        and the machine's own clock is everybody's."""
        ...

    async def hold(self, epochs: dict[str, int], status: RunChange) -> None:
        """Apply `status` (its run_id is ignored) to each unfinished root whose epoch still matches: for runs whose journal
        cannot be written to because it cannot be read. Touches no journal."""
        ...

    async def due(self, now: float, limit: int) -> list[Run]:
        """Waiting and pending roots nobody holds in memory whose wake_at has come, earliest first.

        Runs that were accepted but not taken up yet (spawned, or over the limit) are pending with wake_at set, so this is
        also how they are found.
        """
        ...

    async def claim_due(self, owner: str, now: float, since: float, limit: int, but: Sequence[str]) -> list[Run]:
        """Make `owner` the owner of up to `limit` of the roots that `due` gives, earliest first, but not of those named in `but`:
        in one transaction, in which each gets a raised epoch, so that no two callers get the same run. As they are now.

        Of those that fell due after `since` it takes only the owner's share (`model.sharing.share`), by the sessions that the
        store knows to be alive and what they hold: those who come a moment later find theirs.
        """
        ...

    async def next_due(self) -> float | None:
        """The earliest wake_at of any waiting or pending root nobody holds in memory."""
        ...

    async def list_held(self, hold: Hold, flows: Sequence[str], limit: int) -> list[Run]:
        """Paused roots of this hold and one of these flows that nobody is about to take up."""
        ...

    async def post(self, messages: Sequence[Message]) -> list[int | None]:
        """Put messages into inboxes, in one transaction; their ids, or None where the run is terminal or unknown.

        A message whose (run, dedup) is there already is not added again; its first id is returned.
        """
        ...

    async def inbox(self, root_ids: Sequence[str]) -> list[Message]:
        """The unconsumed messages of these roots, oldest first."""
        ...

    async def newest_message(self) -> int:
        """The greatest id of any message there is; 0 without one. Whoever takes a run up reads its inbox, so that a process
        that has none in memory yet need not hear what was posted before."""
        ...

    async def messages_after(self, message_id: int, limit: int) -> list[Message]:
        """Unconsumed messages of any root with a greater id, oldest first: how a process hears what others posted."""
        ...

    async def append_log(self, lines: Sequence[LogLine]) -> None:
        """Add lines to the logs of runs, whoever owns these: what somebody saw happen to a run. Lines for unknown runs are
        dropped. One that is among the log's last 1,000 already (same time, token and text) is not added again, here and in
        a commit: whoever was not answered may give it once more."""
        ...

    async def read_log(
        self, run_id: str, stream: str, after: int, limit: int, *, newest: bool = False
    ) -> list[LogLine]:
        """Lines of one run's log with a greater id, oldest first. Of more than `limit` the oldest, or the `newest`."""
        ...

    async def item_results(self, run_id: str, key: str | None = None) -> list[ItemResult]:
        """Finished foreach items of a run, by foreach key and index."""
        ...

    async def foreach_progress(self, run_id: str, prefix: str = "") -> list[ForeachProgress]:
        """How far each foreach of a run has come, by foreach key; not those inside an item of another, whose keys have a bracket
        behind `prefix`, with which all keys of the run begin. Items are counted, and their results are not read: it takes
        milliseconds for tens of thousands of items."""
        ...


class BlobStore(Protocol):
    """Content-addressed bytes: the key is the SHA-256 of the content, so storing twice stores once."""

    async def put_blob(self, data: bytes) -> str: ...

    async def get_blob(self, digest: str) -> bytes | None: ...


class ExecutionJournal(Protocol):
    """One append-only journal per root run. Appending is part of `Store.commit`, nowhere else."""

    async def read_from(self, root_id: str, sequence: int, limit: int) -> Journal:
        """Up to `limit` entries with a sequence greater than `sequence`; the checkpoint is left out."""
        ...

    async def read(self, root_ids: Sequence[str]) -> list[Journal | Exception]:
        """Checkpoint and tail of each root, in the order asked; a CorruptionError in place of one that cannot be read, so
        that one bad row does not hide the others."""
        ...

    async def latest_sequence(self, root_id: str) -> int:
        """0 for an empty or unknown journal. Compaction does not lower it."""
        ...

    async def checkpoint(self, root_id: str, epoch: int, sequence: int, state: bytes) -> bool:
        """Store `state` as standing for all entries up to `sequence` and drop those entries, in one transaction. Also drop what
        is kept of consumed messages, but for the newest KEPT_DEDUPS signals that have a dedup; and joins of runs that have ended.

        False, and nothing written, when fenced or when `sequence` is not newer than the last checkpoint or lies beyond
        the journal.
        """
        ...

    async def get_checkpoint(self, root_id: str) -> int | None:
        """The sequence of the latest checkpoint."""
        ...

    async def journal_bytes(self, root_id: str) -> int:
        """How many bytes `read` would read of this root: its checkpoint and the entries after it. They are not read for that."""
        ...

    async def list_active_roots(self, owner: str, after: str | None, limit: int) -> list[Run]:
        """Unfinished roots that this owner holds, or held until it died, in the order they were created; a paused one was about
        to go on. `after` is the last id of the previous page. Costs by what it returns, whatever others hold."""
        ...


class Store(MetadataStore, BlobStore, ExecutionJournal, Protocol):
    """One database. All methods may be called from one event loop; `open` comes first, `close` last."""

    lanes: int
    """How many commits may be under way at once and gain by it. Those under way are always of different roots."""

    async def open(self) -> None:
        """Create or upgrade the schema. StoreFormatError for something that is not ours or newer than us."""
        ...

    async def close(self) -> None: ...

    async def schema_version(self) -> tuple[int, int]:
        """How many migrations have been applied to the database, and how many this version has. Asked before `open`; writes
        nothing. More than it has were applied by a newer version, and can be gone on with. Raises what `open` would."""
        ...

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        """The single fenced write: see the module's docstring. Results in the order of `commits`."""
        ...

    def watch(self, changed: Callable[[News], None], supervisor: Supervisor | None = None) -> None:
        """Call `changed` on the event loop when another process (or object) may have written, with what it may have been.
        It may be called for nothing, and calls may be lost: it only wakes, the store decides. A task that listens is kept alive
        by the `supervisor`."""
        ...
