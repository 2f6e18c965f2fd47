"""Spawned runs: roots of their own, linked to the run that spawned them, which may wait for their end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from relight.errors import ConflictError, RunCancelledError, RunNotFoundError, Unwind
from relight.flow.definitions import Flow
from relight.flow.payloads import rebuild_error, record_error
from relight.flow.scope import Scope, here
from relight.model import journal as j
from relight.model.replay import Ending, Outcome
from relight.model.run import Message, MessageKind, Status
from relight.run import arguments, waits
from relight.run.operation import Operation

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun


async def _guarded(operation: _Spawn | _Join, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do the work of an operation on the program's loop. An error is its outcome, and is recorded as any other."""
    try:
        await work()
    except Unwind:
        pass  # the run leaves memory, and this begins again when the run is back
    except Exception as error:  # noqa: BLE001 - the flow may react to it, and replay must see it again
        if not operation.done() and operation.run.stopping is None:
            operation.fail(error)


class _Spawn(Operation):
    """Spawn a run, in one commit: this run's entry, the spawned run's row and its first entry."""

    kind = "spawn"

    def __init__(
        self, run: LiveRun, scope: Scope, key: str, flow: Flow[..., Any], data: bytes, given_id: str | None, handle: Any
    ) -> None:
        super().__init__(run, scope, key)
        self._flow = flow
        self._data = data
        self._given_id = given_id
        self._id = run.run_id(key) if given_id is None else given_id
        self._handle = handle

    def begin(self) -> None:
        if self._given_id is None:
            self._record()
        else:
            self.do(_guarded(self, self._check_and_record))

    async def _check_and_record(self) -> None:
        known = await self.run.read(lambda store: store.get_run(self._id))
        if self.done():
            return
        if known is not None and (known.flow != self._flow.name or not arguments.same_input(known, self._data)):
            raise ConflictError(f"run id {self._id!r} is taken by flow {known.flow!r} with another input")
        self._record()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.run.record(j.RunSpawned(self.key, self._id, record_error(error), self.run.now()), self)

    def _record(self) -> None:
        run, flow = self.run, self._flow
        at = run.services.clock.now()
        _, blob = run.payload(self._data)
        row, first = arguments.new_root(flow, self._id, self._data, blob, at, parent_id=run.id)
        run.record(j.RunSpawned(self.key, self._id, None, at), self)
        run.writer.insert(row, j.encode_event(first))
        self.value = self._handle(self._id)
        run.services.background.start(self._offer(), "offer")

    async def _offer(self) -> None:
        """Once the spawned run is durable, an orchestrator should take it up, even if this run leaves memory then."""
        await self.run.writer.committed()
        self.run.host.offer(self._id)

    def accept(self, outcome: Outcome) -> bool:
        if outcome.error is not None:
            self.error = rebuild_error(outcome.error)
        else:
            self.value = self._handle(str(msgspec.json.decode(bytes(outcome.output))))
        return True


def spawn(
    run: LiveRun,
    scope: Scope,
    flow: Flow[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run_id: str | None,
    handle: Callable[[str], Any],
) -> Iterator[Any]:
    """See flow.operations.spawn. A wrong call raises here, live and on replay, and leaves no entry."""
    scope = here(scope)
    key = scope.begin(f"$spawn.{flow.name}")
    data = flow.arguments.seal(args, kwargs, run.services.config.payload.max_bytes)
    run.services.registry.check(flow)
    given_id = None if run_id is None else arguments.check_run_id(run_id)
    return run.ask(_Spawn(run, scope, key, flow, data, given_id, handle))


class _Join(waits.Receive):
    """Wait for the end of another run. Its last commit puts a message into this run's inbox, so no wake-up is lost."""

    what = "run"
    takes = MessageKind.ENDED
    needs_room = True

    def __init__(self, run: LiveRun, scope: Scope, key: str, run_id: str, flow: Flow[..., Any]) -> None:
        super().__init__(run, scope, key, run_id, None)
        self._flow = flow
        self._wait_begun = False

    def begin(self) -> None:
        self.do(_guarded(self, self._begin_waiting))

    async def _begin_waiting(self) -> None:
        """Begin to wait if the other run has not ended and will post its end here. Otherwise read how it ended."""
        if not await _will_tell(self.run, self.name):
            await self._look(None)
        elif not self.done():
            if self._wait_begun:
                self.only_waits()
            else:
                self._wait_begun = True
                waits.Wait.begin(self)
            waits.hand_over(self.run)
            self.run.wake()

    def receive(self, message: Message) -> None:
        self.waits_no_more()
        self.do(_guarded(self, lambda: self._look(message)))

    async def _look(self, message: Message | None) -> None:
        """Record how the awaited run has ended, from its final row. `message`: the message about its end, if any."""
        run = self.run
        row = await run.read(lambda store: store.get_run(self.name))
        if row is None:
            raise RunNotFoundError(f"run {self.name!r} is not there; was it deleted?")
        if not row.status.terminal:
            # Recovery gave up on the other run, and a person has resumed it since: it posts its next end, too.
            if message is not None:
                waits.forget(run, message)
            await self._begin_waiting()
            return
        error = None
        if row.status is Status.CANCELLED:
            text = f"run {self.name!r} was cancelled: {row.reason}"
            error = record_error(RunCancelledError(text, run_id=self.name, reason=row.reason))
        elif row.error is not None:
            error = msgspec.json.decode(row.error, type=j.ErrorRecord)
        output = j.NULL if row.output is None or row.output_blob else msgspec.Raw(row.output)
        data = await run.load(output, row.output_blob)
        if self.done() or run.stopping is not None:
            return
        if error is not None:
            self.error = rebuild_error(error)
        else:
            self.value = run.open(self._flow.result, Outcome(0, "wait", Ending.OK, msgspec.Raw(data)))
        message_id = 0 if message is None else message.id
        run.record(j.RunJoined(self.key, output, row.output_blob, error, message_id, run.now()), self)
        if message is not None:
            run.writer.consume([message.id])

    def fail(self, error: Exception) -> None:
        self.error = error
        self.run.record(j.RunJoined(self.key, j.NULL, "", record_error(error), 0, self.run.now()), self)

    def accept(self, outcome: Outcome) -> bool:
        if outcome.error is not None:
            self.error = rebuild_error(outcome.error)
        else:
            self.value = self.run.open(self._flow.result, outcome)
        return True


def join(run: LiveRun, scope: Scope, run_id: str, flow: Flow[..., Any]) -> Iterator[Any]:
    """Wait for the end of a spawned run: what awaiting its handle does."""
    scope = here(scope)
    return run.ask(_Join(run, scope, scope.begin("$join"), run_id, flow))


async def _will_tell(run: LiveRun, run_id: str) -> bool:
    """Whether the awaited run has not ended, and will post its end to this one. A run posts its end to the run that
    spawned it. A run that already existed under the id that this run gave needs a JOIN message. If that is posted again
    after a crash, the other run still posts its end only once."""
    row = await run.read(lambda store: store.get_run(run_id))
    if row is None or row.status.terminal or row.parent_id == run.id:
        return row is not None and not row.status.terminal
    message = Message(
        run_id=run_id, kind=MessageKind.JOIN, name=run.id, dedup=f"join:{run.id}", at=run.services.clock.now()
    )
    (posted,) = await run.read(lambda store: store.post([message]))
    run.host.look_for_messages()
    return posted is not None  # None: it has ended in this moment
