"""A store that crashes at a planned operation: see `crashpoints` for the whole."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from relight.errors import StoreUnavailableError
from relight.model import journal as j
from relight.model.run import Hold, ItemResult, LogLine, Message, News, Page, Run, RunChange, RunFilter
from relight.ports.store import Commit, CommitResult, Committed, Store
from relight.testing.ledger import Ledger, Line

T = TypeVar("T")
Mode = Literal["before", "after", "raise", "refuse", "during", "stall", "count"]


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


class CrashingStore:
    """A Store that numbers the operations on another one and crashes at the planned one. Give it to `Relight(store=...)`."""

    def __init__(self, inner: Store, plan: CrashPlan, ledger: Ledger | None = None) -> None:
        self._inner = inner
        self.lanes = inner.lanes
        self._plan = plan
        self._ledger = ledger
        self.operations: list[str] = []  # their names, in the order of their numbers
        self.fired = False  # a planned raise, refusal or stall has happened
        self._running = 0  # operations under way
        self._quiet = asyncio.Event()
        self._quiet.set()

    async def _do(self, name: str, operation: Coroutine[Any, Any, T]) -> T:
        self.operations.append(name)
        mode = self._plan.mode if self._plan.operation == len(self.operations) else None
        if mode == "before":
            self._die(name)
        if mode == "stall":
            await self._stall()
        if mode == "refuse":
            operation.close()
            self.fired = True
            raise StoreUnavailableError(f"crash point {self._plan}: {name}() was refused")
        self._running += 1
        self._quiet.clear()
        try:
            result = await operation
        finally:
            self._running -= 1
            if not self._running:
                self._quiet.set()
        if mode == "after":
            self._die(name)
        if mode == "raise":
            self.fired = True
            raise StoreUnavailableError(f"crash point {self._plan}: the answer of {name}() was lost")
        return result

    def effect_begun(self, number: int) -> None:
        """The ledger's word that the so-and-so-manieth effect has begun."""
        if self._plan == CrashPlan("during", number):
            self._die("effect")

    async def _stall(self) -> None:
        """Stop as a whole, as a suspended machine does, until whoever reads the ledger's line sends SIGCONT.

        Not in the middle of another operation, though: a process that is stopped while it holds the lock of a database
        file keeps everybody out, as long as it is there, and nobody could take over.
        """
        while self._running:
            await self._quiet.wait()
        self.fired = True
        if self._ledger is not None:
            self._ledger.write(Line(what="stalled", label=str(os.getpid())))
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._ledger is not None:
            self._ledger.write(Line(what="continued"))

    def _die(self, name: str) -> None:
        if self._ledger is not None:
            self._ledger.write(Line(what="killed", label=f"{self._plan} {name}"))
        os.kill(os.getpid(), signal.SIGKILL)

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        return await self._do("commit", self._commit(commits))

    async def _commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        """Commit, and write down which steps are durable now: from here on they may not run again."""
        results = await self._inner.commit(commits)
        for commit, result in zip(commits, results, strict=True):
            if self._ledger is not None and type(result) is Committed:
                for entry in commit.entries:
                    line = _durable(commit.root_id, j.decode_event(entry))
                    if line is not None:
                        self._ledger.write(line)
        return results

    # ---- the port, one by one: a new method of it must show up here as a type error, not slip through unnumbered

    async def open(self) -> None:
        await self._do("open", self._inner.open())

    async def close(self) -> None:
        await self._do("close", self._inner.close())

    def watch(self, changed: Callable[[News], None]) -> None:
        self._inner.watch(changed)

    async def get_run(self, run_id: str) -> Run | None:
        return await self._do("get_run", self._inner.get_run(run_id))

    async def get_runs(self, run_ids: Sequence[str]) -> list[Run]:
        return await self._do("get_runs", self._inner.get_runs(run_ids))

    async def list_runs(self, where: RunFilter) -> Page:
        return await self._do("list_runs", self._inner.list_runs(where))

    async def claim(self, epochs: dict[str, int], owner: str) -> dict[str, int]:
        return await self._do("claim", self._inner.claim(epochs, owner))

    async def correct_owner(self, run_id: str, epoch: int, owner: str) -> bool:
        return await self._do("correct_owner", self._inner.correct_owner(run_id, epoch, owner))

    async def owners(self) -> list[str]:
        return await self._do("owners", self._inner.owners())

    async def now(self) -> float | None:
        return await self._do("now", self._inner.now())

    async def hold(self, epochs: dict[str, int], status: RunChange) -> None:
        await self._do("hold", self._inner.hold(epochs, status))

    async def due(self, now: float, limit: int) -> list[Run]:
        return await self._do("due", self._inner.due(now, limit))

    async def next_due(self) -> float | None:
        return await self._do("next_due", self._inner.next_due())

    async def held(self, hold: Hold, flows: Sequence[str], limit: int) -> list[Run]:
        return await self._do("held", self._inner.held(hold, flows, limit))

    async def post(self, messages: Sequence[Message]) -> list[int | None]:
        return await self._do("post", self._inner.post(messages))

    async def inbox(self, root_ids: Sequence[str]) -> list[Message]:
        return await self._do("inbox", self._inner.inbox(root_ids))

    async def messages_after(self, message_id: int, limit: int) -> list[Message]:
        return await self._do("messages_after", self._inner.messages_after(message_id, limit))

    async def append_log(self, lines: Sequence[LogLine]) -> None:
        await self._do("append_log", self._inner.append_log(lines))

    async def read_log(self, run_id: str, stream: str, after: int, limit: int) -> list[LogLine]:
        return await self._do("read_log", self._inner.read_log(run_id, stream, after, limit))

    async def item_results(self, run_id: str, key: str | None = None) -> list[ItemResult]:
        return await self._do("item_results", self._inner.item_results(run_id, key))

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

    async def list_active_roots(self, owner: str, after: str | None, limit: int) -> list[Run]:
        return await self._do("list_active_roots", self._inner.list_active_roots(owner, after, limit))


def _durable(root_id: str, event: j.AnyEvent) -> Line | None:
    """What a committed entry means to the audit."""
    if isinstance(event, j.StepCompleted | j.StepFailed | j.StepRetrying):
        ok = isinstance(event, j.StepCompleted)
        return Line(what="committed", run=root_id, key=event.key, attempt=event.attempt, ok=ok)
    if isinstance(event, j.ForeachCut):
        return Line(what="cut", run=root_id, key=event.key, index=event.index)
    if isinstance(event, j.RunRetrying):
        return Line(what="retrying", run=root_id, key=event.key)
    return None


async def patiently(operation: Callable[[], Awaitable[T]], tries: int = 20) -> T:
    """What a careful caller does: whoever hears StoreUnavailableError knows nothing, and asks again.

    Only for what may be asked twice: starting with an id, signalling with an id, waiting for a result.
    """
    for _ in range(tries - 1):
        try:
            return await operation()
        except StoreUnavailableError:
            pass
    return await operation()
