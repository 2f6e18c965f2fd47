"""Handle: one run, seen from outside."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from relight.description import RunDescription, describe
from relight.durations import Duration, parse_duration
from relight.errors import (
    ConfigError,
    CorruptionError,
    NonDeterminismError,
    RelightError,
    RunCancelledError,
    RunFailedError,
    RunStateError,
    UnknownFlowError,
    VersionMismatchError,
)
from relight.flow.payloads import ValueCodec, rebuild_error
from relight.model.blob import check_blob
from relight.model.journal import ErrorRecord
from relight.model.operations import OperationReport, StepPage, error_text, operations, page
from relight.model.replay import TreeState, restore
from relight.model.run import ForeachProgress, Hold, Message, MessageKind, Run, Status
from relight.model.text import check_name, prose
from relight.recovery.resume import by_hand

if TYPE_CHECKING:
    from relight.engine import Relight

R_co = TypeVar("R_co", covariant=True)

MOST_STEPS = 10_000  # in one page
MOST_SECONDS_FOR_A_REASON = 5.0
SMALL_JOURNAL_BYTES = 1_000_000  # folded in some ten milliseconds


class Handle(Generic[R_co]):
    """What `start` and `get` return. It has no state of the run: every method reads the store. R_co is the type of the
    run's result, as far as it is known: `start(flow)` knows it, `get(id)` does not."""

    __slots__ = ("_relight", "id")

    def __init__(self, relight: Relight, run_id: str) -> None:
        self._relight = relight
        self.id = run_id

    def __repr__(self) -> str:
        return f"<run {self.id!r}>"

    async def status(self) -> Status:
        return (await self._relight.row(self.id)).status

    async def describe(self) -> RunDescription:
        """All that its row says: status, hold and reason, owner, times, arguments, result, error."""
        row = await self._relight.row(self.id)
        services = self._relight.services
        return await describe(services.store, row, services.registry.find(row.flow))

    async def progress(self) -> list[ForeachProgress]:
        """How far each foreach of this run has come: done, failed and total. This counts items and reads no results. A
        foreach of a child run is counted in the child run. Left out: a foreach of which nothing is recorded yet, and a
        foreach inside an item of another foreach."""
        row = await self._relight.row(self.id)
        return await self._relight.services.store.foreach_progress(row.id, row.key_prefix)

    async def steps(
        self, *, limit: int = 100, cursor: str | None = None, failed: bool = False, newest: bool = False
    ) -> StepPage:
        """One page of the run's steps, child runs included: first the ended steps, in the order of their ends, then the
        steps that are running or backing off; or the `newest` first. Each has its start, end, attempt and last error.
        `failed`: only steps that have failed, or are tried again after a failure. Its next_cursor gets the next page.

        Every page reads the run's whole journal: about 0.1 s for 40,000 operations. Results are not decoded."""
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_STEPS:
            raise ConfigError(f"steps(limit={limit!r}): give a whole number from 1 to {MOST_STEPS}")
        row = await self._relight.row(self.id)
        state, now = await read_state(self._relight, row), self._relight.services.clock.now()
        return page(state, row, now, limit=limit, cursor=cursor, failed=failed, newest=newest)

    async def operations(self) -> list[OperationReport]:
        """Every operation in the run's journal, waits and child runs included. CorruptionError if it is unreadable."""
        row = await self._relight.row(self.id)
        return operations(await read_state(self._relight, row), row, self._relight.services.clock.now())

    async def result(self, timeout: Duration | None = None) -> R_co:
        """Wait for the end: the flow's result, typed by its annotation.

        Raises RunFailedError (with the flow's own exception as its cause), RunCancelledError, TimeoutError, or, for a
        held run that cannot go on by itself, the error of its hold.
        """
        seconds = None if timeout is None else parse_duration(timeout, "result(timeout=)")
        try:
            if seconds is None:
                row = await self._ended()
            else:
                async with asyncio.timeout(seconds):
                    row = await self._ended()
        except TimeoutError:
            fault = self._relight.fault
            why = f"; nothing is being committed: {fault}" if fault else await self._why_not_ended()
            raise TimeoutError(f"run {self.id!r} has not ended within {seconds}s{why}") from None
        return await self._outcome(row)  # type: ignore[no-any-return]  # decoded by the flow's annotation

    async def _why_not_ended(self) -> str:
        """For the message of a timeout: what explain says of the run. A caller may wait again and again, so a large
        journal is not read for that, and a server that does not answer is not waited for."""
        try:
            async with asyncio.timeout(MOST_SECONDS_FOR_A_REASON):
                row = await self._relight.row(self.id)
                if await self._relight.services.store.journal_bytes(row.root_id) > SMALL_JOURNAL_BYTES:
                    return f": it is {row.status}" + (f" ({row.reason})" if row.reason else "")
                found = await self._relight.explain(self.id)
        except (RelightError, TimeoutError):
            return ""
        which = "it" if found.run_id == self.id else f"its root {found.run_id!r}"
        return f": {which} {found.sentence.removeprefix(f'Run {found.run_id} ').removesuffix('.')}"

    async def _ended(self) -> Run:
        """The final row. The watch begins before the row is read, so that an end between the two is not missed."""
        orchestrator = self._relight.orchestrator
        loop = asyncio.get_running_loop()
        while True:
            news: asyncio.Future[Run | None] = loop.create_future()
            unwatch = orchestrator.watch(self.id, lambda row, news=news: news.done() or news.set_result(row))  # type: ignore[misc]
            try:
                if self.id not in orchestrator.live or orchestrator.stopped:
                    row: Run | None = await self._relight.row(self.id)
                    assert row is not None
                    if row.status.terminal:
                        return row
                    if not self._being_freed(row):
                        _raise_if_held(row)
                    if orchestrator.stopping:  # it will not notify this watcher any more
                        raise RelightError(
                            f"run {self.id!r} is {row.status}, and this Relight is closed: get the result from another"
                        )
                row = await news  # None: read the row again; something happened, or nothing did for a while
                if row is not None:
                    return row
            finally:
                unwatch()

    def _being_freed(self, row: Run) -> bool:
        """Whether a run that is held because its flow was unknown is about to be taken up. This process takes it up if
        it knows the flow and drives runs. A client cannot know which orchestrators exist. Those that know the flow look
        for such runs at least every check_interval. So after two intervals there is none."""
        config = self._relight.config
        if row.hold is not Hold.DEFINITION or self._relight.registry.find(row.flow) is None:
            return False
        if config.drive:
            return config.recovery.enabled
        return self._relight.services.clock.now() < row.updated_at + 2 * config.recovery.check_interval_seconds

    async def _outcome(self, row: Run) -> Any:
        if row.status is Status.CANCELLED:
            raise RunCancelledError(f"run {row.id!r} was cancelled: {row.reason}", run_id=row.id, reason=row.reason)
        if row.status is Status.FAILED:
            record = msgspec.json.decode(row.error or b"{}", type=ErrorRecord)
            raise RunFailedError(f"run {row.id!r} failed: {error_text(record)}", run_id=row.id) from rebuild_error(
                record
            )
        data = row.output if row.output is not None else b"null"
        if row.output_blob:
            data = check_blob(
                await self._relight.services.store.get_blob(row.output_blob), row.output_blob, row.root_id
            )
        flow = self._relight.registry.find(row.flow)
        codec = flow.result if flow is not None else ValueCodec(Any, f"result of run {row.id!r}")
        return codec.open(data)

    async def signal(self, name: str, payload: Any = None, *, id: str | None = None) -> None:  # noqa: A002
        """Send a signal; durable when this returns. With an `id`, it may be sent again, after a lost answer."""
        check_name(name, "signal name")
        if id is not None:
            check_name(id, "signal id")
        codec = ValueCodec(type(payload), f"signal {name!r}")
        data, _ = codec.seal(payload, self._relight.config.payload.max_bytes)
        blob = ""
        if len(data) > self._relight.config.payload.blob_threshold:
            blob = await self._relight.services.store.put_blob(data)
        await self._post(
            MessageKind.SIGNAL, name, b"null" if blob else data, blob=blob, dedup=None if id is None else f"signal:{id}"
        )

    async def cancel(self, reason: str = "cancelled by request") -> None:
        """Request that the run and everything it started be cancelled. The request is durable when this returns."""
        if await self.status() is Status.CANCELLED:
            return
        try:
            await self._post(MessageKind.CANCEL, payload=msgspec.json.encode(prose(str(reason))), dedup="cancel")
        except RunStateError:
            if await self.status() is not Status.CANCELLED:  # CANCELLED: another cancel came first
                raise

    async def pause(self) -> None:
        """Pause the run after its steps in flight, until resume()."""
        if (await self._relight.row(self.id)).status is not Status.PAUSED:
            await self._post(MessageKind.PAUSE)

    async def resume(self) -> None:
        """Free a paused or held run."""
        row = await self._relight.row(self.id)
        if row.status.terminal:
            raise RunStateError(f"run {self.id!r} is {row.status}: there is nothing to resume")
        if row.status is Status.PAUSED and row.is_root:
            services = self._relight.services
            await services.store.append_log([by_hand(row.id, services.clock.now())])
        await self._post(MessageKind.RESUME)

    async def _post(
        self, kind: MessageKind, name: str = "", payload: bytes = b"null", *, blob: str = "", dedup: str | None = None
    ) -> None:
        row = await self._relight.row(self.id)
        if not row.is_root:
            raise RunStateError(f"{self.id!r} is a child run: {kind} its root {row.root_id!r} instead")
        await self._relight.post(
            Message(run_id=self.id, kind=kind, name=name, payload=payload, payload_blob=blob, dedup=dedup)
        )


async def read_state(relight: Relight, row: Run) -> TreeState:
    """The replayed state of the run's tree, from its journal. CorruptionError if the journal cannot be read."""
    (journal,) = await relight.services.store.read([row.root_id])
    if isinstance(journal, Exception):
        raise journal
    size = sum(len(entry.event) for entry in journal.entries)
    size += 0 if journal.checkpoint is None else len(journal.checkpoint.state)
    if size <= SMALL_JOURNAL_BYTES:
        return restore(journal)
    return await asyncio.to_thread(restore, journal)  # on the loop it would delay the runs that the loop drives


_HELD: dict[Hold, type[RelightError]] = {
    Hold.DEFINITION: UnknownFlowError,
    Hold.VERSION: VersionMismatchError,
    Hold.NONDETERMINISM: NonDeterminismError,
    Hold.POISON: RunStateError,
    Hold.REFUSED: RunStateError,
}


def _raise_if_held(row: Run) -> None:
    """Raise the error of a hold that only an action can lift, so that the caller does not wait for ever. A caller does
    wait for a run that was paused on request."""
    if row.status is not Status.PAUSED or row.hold is None or row.hold in (Hold.USER, Hold.UPGRADE):
        return  # a run with the hold `upgrade` goes on by itself, once an orchestrator of the newer version is there
    if row.hold is Hold.CORRUPT:
        raise CorruptionError(f"run {row.id!r} is held: {row.reason}", root_id=row.root_id, sequence=0)
    raise _HELD[row.hold](f"run {row.id!r} is held: {row.reason}")
