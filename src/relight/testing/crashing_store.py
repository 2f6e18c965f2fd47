"""A store that crashes at a planned operation. Begin with `crashpoints`; `crashing_leases` has the lease manager."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from relight.clock import SYSTEM_CLOCK
from relight.errors import StoreUnavailableError
from relight.model import journal as j
from relight.model.lease import Process, Session
from relight.model.run import (
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
)
from relight.ports.store import Commit, CommitResult, Committed, Store
from relight.supervisor import Supervisor
from relight.testing.ledger import Ledger, Line

T = TypeVar("T")

AGAIN_SECONDS = 0.005  # before a store that was unavailable is tried again
Mode = Literal["before", "after", "raise", "refuse", "during", "stall", "count"]


# Operations that change nothing: a death after one of them leaves the same as a death before it.
READS = frozenset({
    "get_run", "get_runs", "list_runs", "item_results", "foreach_progress", "owners", "now", "due", "next_due", "list_held",
    "inbox", "messages_after", "newest_message", "read_log", "get_blob", "read", "read_from", "latest_sequence", "get_checkpoint",
    "journal_bytes", "list_active_roots",
    "leases.get_lease", "leases.list_orchestrators", "leases.listed_since", "sessions", "lease_manager",
})  # fmt: skip


class CrashPlan(msgspec.Struct, frozen=True):
    """What happens at which operation."""

    mode: Mode = "count"
    operation: int = 0

    @classmethod
    def parse(cls, text: str) -> CrashPlan:
        """From "before:7"."""
        mode, _, number = text.partition(":")
        return msgspec.convert({"mode": mode, "operation": int(number or 0)}, cls)

    def __str__(self) -> str:
        return self.mode if self.mode == "count" else f"{self.mode}:{self.operation}"


class CrashPoints:
    """Numbers the operations of a store and of a lease manager, each on its own thread, and crashes at the planned one.

    With `later`, only operations after `begin` have numbers."""

    def __init__(self, plan: CrashPlan, ledger: Ledger | None = None, *, later: bool = False) -> None:
        self.plan = plan
        self.ledger = ledger
        self.operations: list[str] = []  # their names, in the order of their numbers
        self.fired = False  # a planned raise, refusal or stall has happened
        self._begun = not later
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The next operation gets the number 1."""
        with self._lock:
            self.operations.clear()
            self._begun = True

    def arrive(self, name: str, unavailable: type[StoreUnavailableError] = StoreUnavailableError) -> Mode | None:
        """The next operation is about to begin. Returns the planned mode, unless that mode acts before it: here."""
        with self._lock:
            self.operations.append(name)
            planned = self._begun and self.plan.operation == len(self.operations)
            mode = self.plan.mode if planned else None
        if mode == "before":
            self.die(name)
        if mode == "refuse":
            self.fired = True
            raise unavailable(f"crash point {self.plan}: {name}() was refused")
        return mode

    def leave(
        self, mode: Mode | None, name: str, unavailable: type[StoreUnavailableError] = StoreUnavailableError
    ) -> None:
        """The operation has been applied, and its caller has no answer yet."""
        if mode == "after":
            self.die(name)
        if mode == "raise":
            self.fired = True
            raise unavailable(f"crash point {self.plan}: the answer of {name}() was lost")

    def effect_begun(self, number: int) -> None:
        """The ledger calls this when the effect of this number has begun."""
        if self.plan == CrashPlan("during", number):
            self.die("effect")

    def die(self, name: str) -> None:
        if self.ledger is not None:
            self.ledger.write(Line(what="killed", label=f"{self.plan} {name}"))
        os.kill(os.getpid(), signal.SIGKILL)


class CrashingStore:
    """A Store that numbers the operations on another store and crashes at the planned one. Give it to
    `Relight(store=...)`, with a `CrashingLeases` on the same `points` to number the lease manager's, too."""

    def __init__(self, inner: Store, plan: CrashPlan, ledger: Ledger | None = None, *, later: bool = False) -> None:
        self._inner = inner
        self.lanes = inner.lanes
        self.points = CrashPoints(plan, ledger, later=later)
        self._ledger = ledger
        self._running = 0  # operations under way
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def operations(self) -> list[str]:
        return self.points.operations

    @property
    def fired(self) -> bool:
        return self.points.fired

    async def _do(self, name: str, operation: Coroutine[Any, Any, T]) -> T:
        try:
            mode = self.points.arrive(name)
        except BaseException:
            operation.close()
            raise
        if mode == "stall":
            await self._stall()
        self._running += 1
        self._quiet.clear()
        try:
            result = await operation
        finally:
            self._running -= 1
            if not self._running:
                self._quiet.set()
        self.points.leave(mode, name)
        return result

    async def _stall(self) -> None:
        """Stop the whole process, as a suspended machine does, until the reader of the ledger's line sends SIGCONT.

        It waits for other operations first: a process that is stopped while it holds the lock of a database file locks
        every other process out, and none could take up its runs.
        """
        while self._running:
            await self._quiet.wait()
        self.points.fired = True
        if self._ledger is not None:
            self._ledger.write(Line(what="stalled", label=str(os.getpid())))
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._ledger is not None:
            self._ledger.write(Line(what="continued"))

    def _note(self, lines: Iterable[Line]) -> None:
        if self._ledger is not None:
            for line in lines:
                self._ledger.write(line)

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        return await self._do("commit", self._commit(commits))

    async def _commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        """Commit, and record which steps are durable now: from here on they must not run again."""
        results = await self._inner.commit(commits)
        for commit, result in zip(commits, results, strict=True):
            if self._ledger is not None and type(result) is Committed:
                for entry in commit.entries:
                    line = _durable(commit.root_id, j.decode_event(entry))
                    if line is not None:
                        self._ledger.write(line)
        return results

    # ---- the port, method by method: a new method must show up here as a type error, not stay unnumbered

    async def open(self) -> None:
        await self._do("open", self._inner.open())

    async def close(self) -> None:
        await self._do("close", self._inner.close())

    def watch(self, changed: Callable[[News], None], supervisor: Supervisor | None = None) -> None:
        self._inner.watch(changed, supervisor)

    async def get_run(self, run_id: str) -> Run | None:
        return await self._do("get_run", self._inner.get_run(run_id))

    async def get_runs(self, run_ids: Sequence[str]) -> list[Run]:
        return await self._do("get_runs", self._inner.get_runs(run_ids))

    async def list_runs(self, where: RunFilter) -> Page:
        return await self._do("list_runs", self._inner.list_runs(where))

    async def claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
        return await self._do("claim", self._claim(epochs, owner))

    async def _claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
        """Claim, and record the epochs: those of one run must only grow."""
        claimed = await self._inner.claim(epochs, owner)
        self._note(Line(what="claimed", run=run_id, index=epoch) for run_id, epoch in claimed.items())
        return claimed

    async def correct_owner(self, run_id: str, epoch: int, owner: str) -> bool:
        return await self._do("correct_owner", self._inner.correct_owner(run_id, epoch, owner))

    async def owners(self) -> list[str]:
        return await self._do("owners", self._inner.owners())

    async def note_session(self, owner: str, process: Process, ttl_seconds: float) -> None:
        await self._do("note_session", self._inner.note_session(owner, process, ttl_seconds))

    async def sessions(self) -> list[Session]:
        return await self._do("sessions", self._inner.sessions())

    async def forget_session(self, owner: str) -> None:
        await self._do("forget_session", self._inner.forget_session(owner))

    async def lease_manager(self) -> str | None:
        return await self._do("lease_manager", self._inner.lease_manager())

    async def set_lease_manager(self, name: str, before: str | None) -> bool:
        return await self._do("set_lease_manager", self._inner.set_lease_manager(name, before))

    async def schema_version(self) -> tuple[int, int]:
        return await self._inner.schema_version()

    async def now(self) -> float | None:
        return await self._do("now", self._inner.now())

    async def hold(self, epochs: dict[str, int], status: RunChange) -> None:
        await self._do("hold", self._inner.hold(epochs, status))

    async def due(self, now: float, limit: int, *, freed: bool = False) -> list[Run]:
        return await self._do("due", self._inner.due(now, limit, freed=freed))

    async def claim_due(self, owner: str, now: float, since: float, limit: int, but: Sequence[str]) -> list[Run]:
        return await self._do("claim_due", self._inner.claim_due(owner, now, since, limit, but))

    async def next_due(self) -> float | None:
        return await self._do("next_due", self._inner.next_due())

    async def list_held(self, hold: Hold, flows: Sequence[str], limit: int) -> list[Run]:
        return await self._do("list_held", self._inner.list_held(hold, flows, limit))

    async def post(self, messages: Sequence[Message]) -> list[int | None]:
        return await self._do("post", self._post(messages))

    async def _post(self, messages: Sequence[Message]) -> list[int | None]:
        """Post, and record which messages were posted, also if the caller gets no answer."""
        ids = await self._inner.post(messages)
        posted = [message for message, message_id in zip(messages, ids, strict=True) if message_id is not None]
        self._note(Line(what="posted", run=message.run_id, label=message.kind.value) for message in posted)
        return ids

    async def inbox(self, root_ids: Sequence[str]) -> list[Message]:
        return await self._do("inbox", self._inner.inbox(root_ids))

    async def newest_message(self) -> int:
        return await self._do("newest_message", self._inner.newest_message())

    async def messages_after(self, message_id: int, limit: int) -> list[Message]:
        return await self._do("messages_after", self._inner.messages_after(message_id, limit))

    async def append_log(self, lines: Sequence[LogLine]) -> None:
        await self._do("append_log", self._inner.append_log(lines))

    async def read_log(
        self, run_id: str, stream: str, after: int, limit: int, *, newest: bool = False
    ) -> list[LogLine]:
        return await self._do("read_log", self._inner.read_log(run_id, stream, after, limit, newest=newest))

    async def item_results(self, run_id: str, key: str | None = None) -> list[ItemResult]:
        return await self._do("item_results", self._inner.item_results(run_id, key))

    async def foreach_progress(self, run_id: str, prefix: str = "") -> list[ForeachProgress]:
        return await self._do("foreach_progress", self._inner.foreach_progress(run_id, prefix))

    async def put_blob(self, data: bytes) -> str:
        return await self._do("put_blob", self._inner.put_blob(data))

    async def get_blob(self, digest: str) -> bytes | None:
        return await self._do("get_blob", self._inner.get_blob(digest))

    async def read_from(self, root_id: str, sequence: int, limit: int) -> j.Journal:
        return await self._do("read_from", self._inner.read_from(root_id, sequence, limit))

    async def read(self, root_ids: Sequence[str]) -> list[j.Journal | Exception]:
        return await self._do("read", self._inner.read(root_ids))

    async def latest_sequence(self, root_id: str) -> int:
        return await self._do("latest_sequence", self._inner.latest_sequence(root_id))

    async def checkpoint(self, root_id: str, epoch: int, sequence: int, state: bytes) -> bool:
        return await self._do("checkpoint", self._inner.checkpoint(root_id, epoch, sequence, state))

    async def get_checkpoint(self, root_id: str) -> int | None:
        return await self._do("get_checkpoint", self._inner.get_checkpoint(root_id))

    async def journal_bytes(self, root_id: str) -> int:
        return await self._do("journal_bytes", self._inner.journal_bytes(root_id))

    async def list_active_roots(self, owner: str, after: str | None, limit: int) -> list[Run]:
        return await self._do("list_active_roots", self._inner.list_active_roots(owner, after, limit))


def _durable(root_id: str, event: j.AnyEvent) -> Line | None:
    """The ledger line for a committed entry, if the audit needs one."""
    if isinstance(event, j.StepCompleted | j.StepFailed | j.StepRetrying):
        ok = isinstance(event, j.StepCompleted)
        return Line(what="committed", run=root_id, key=event.key, attempt=event.attempt, ok=ok)
    if isinstance(event, j.ForeachCut):
        return Line(what="cut", run=root_id, key=event.key, index=event.index)
    if isinstance(event, j.RunRetrying):
        return Line(what="retrying", run=root_id, key=event.key)
    if isinstance(event, j.RunResumed):
        return Line(what="resumed", run=root_id)
    return None


async def patiently(operation: Callable[[], Awaitable[T]]) -> T:
    """What a careful caller does: after StoreUnavailableError the outcome is unknown, so it tries again a moment later,
    for as long as the process lives.

    Only for what may be repeated: to start with an id, to signal with an id, to wait for a result.
    """
    while True:
        try:
            return await operation()
        except StoreUnavailableError:
            await _moment()


async def _moment() -> None:
    over = asyncio.Event()
    SYSTEM_CLOCK.call_later(AGAIN_SECONDS, over.set)
    await over.wait()
