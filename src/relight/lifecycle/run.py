"""LiveRun: one root run's tree while it is in memory, from being taken up to its end (or to leaving memory again).

It holds the state that operations share; the operations themselves are in their own files:

    steps.py     steps, their attempts, retries and timeouts
    waits.py     sleep, signals, back-off: everything that waits for a time or a message
    fanout.py    foreach and parallel
    children.py  child runs, spawned runs
    values.py    now, random, uuid
    hold.py      taking a run out of memory: parking, pausing, shutdown; cancelling it
    execute.py   the flow function from first call to final commit
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from relight.errors import (
    NonDeterminismError,
    OutsideRunError,
    PayloadError,
    RelightError,
    RunCancelled,
    StoreError,
    StoreUnavailableError,
    Unwind,
    VersionMismatchError,
)
from relight.flow.definitions import Flow, Step
from relight.flow.payloads import ValueCodec
from relight.flow.scope import Scope
from relight.lifecycle import checkpoint, children, fanout, hold, steps, values, waits
from relight.lifecycle.patience import Patience
from relight.lifecycle.replayer import Replayer
from relight.lifecycle.services import Host, Services
from relight.lifecycle.threads import FlowThread
from relight.lifecycle.writer import Writer
from relight.model.blob import blob_digest
from relight.model.journal import NULL, Event
from relight.model.replay import Ending, Open, Outcome, TreeState
from relight.model.run import Hold, LogLine, Message, MessageKind, Run, RunChange, Status
from relight.ports.store import Store
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.lifecycle.waits import Wait

T = TypeVar("T")


def _nothing(*_: object) -> None:
    """For callbacks of a run that is over."""


class LiveRun:
    """Implements `flow.scope.Operations` for one tree."""

    def __init__(self, services: Services, host: Host, row: Run, epoch: int, state: TreeState) -> None:
        self.services = services
        self.host = host
        self.id = row.id
        self.row = row
        self.status = row.status  # as the store has it
        self.created = state.created
        self.cancel_reason = state.cancel_reason
        self.writer = Writer(services.recorder, row.id, epoch, state.sequence, self._on_fenced, self._on_checkpoint)
        self.writer.checkpoint_at = state.sequence + services.config.checkpoint.every
        self.replayer: Replayer | None = None
        if state.outcomes or state.open:
            self.replayer = Replayer(services.loop)
            self.replayer.add(state, "")
        self.attempt = state.open[""].attempt if "" in state.open else 1
        self.retry_until = state.open[""].until if "" in state.open else None
        self.keeper = services.keeper
        self.generation = services.keeper.generation  # of the lease under which the run is known to be ours
        self.time = services.loop.time
        self.stopping: str | None = None  # why operations no longer begin, while the run leaves memory
        self.ended = False  # it is terminal, durably
        self.over = False  # nothing of this object may act any more
        self.held: tuple[Hold, str] | None = None  # it cannot go on, and why
        self.departing = False  # somebody is taking it out of memory,
        self.unwinding = False  # and has broken off all that it waited for
        self.restored = len(state.outcomes)
        self.recovered = False  # its last owner died: what was in flight then is repeated
        self.unsettled = False  # recorded values whose commit nobody has waited for yet
        # Step bodies under way, by key: the scope of an async one, None for one in a thread, which cannot be stopped.
        self.inflight: dict[str, Scope | None] = {}
        self.held_back: list[asyncio.Future[None]] = []  # operations that ended while the run leaves memory
        self.calm: asyncio.Future[None] | None = None  # whoever takes it out of memory waits for the last body to end
        self.waits: dict[str, Wait] = {}
        self.mailbox: list[Message] = []  # signals and endings nobody has waited for yet
        self.missed = False  # a message came when the run could no longer hear it
        self.joined = False  # another run waits for this one's end
        self.heard: set[int] = set()  # ids of all messages delivered to this object
        self.tasks: set[asyncio.Task[Any]] = set()  # every task running this run's code
        self.threads: set[FlowThread] = set()
        self.main: asyncio.Task[None] | None = None
        self.deadlines: dict[str, float] = {}  # of flows with a timeout, by key
        self.park_checks = 0  # how often in a row it was found waiting but not parkable
        self.park_armed = False
        self.outcome: Run | None = None  # the final row, once it is committed

    def let_go(self) -> None:
        """Nobody needs this object any more: break its reference cycles, which would cost the garbage collector as much as a
        tenth of a short run."""
        self.writer.on_fenced = self.writer.on_checkpoint = _nothing
        if self.ended or (self.main is not None and self.main.done()):
            self.main = None  # else it is stuck, and must not vanish while it is pending

    # ---- what operations ask of the run

    def stop_reason(self) -> BaseException | None:
        if self.stopping is not None:
            return Unwind(self.stopping)
        if self.over:
            return OutsideRunError(
                f"run {self.id!r} is over: this task or thread has outlived it, and nothing it does can be recorded; "
                "await every task a flow creates before the flow returns"
            )
        return None

    def recorded_in(self, path: str) -> list[str] | None:
        replayer = self.replayer
        return None if replayer is None else replayer.scopes.get(path, None if replayer.over else [])

    @property
    def sole(self) -> bool:
        """Whether only one branch of code is alive: then whatever it waits for blocks the whole run."""
        return not self.tasks and len(self.threads) <= 1

    async def replayed(self, scope: Scope, key: str, kind: str) -> Outcome | None:
        """The recorded outcome of an operation that begins now, in its turn; None when it has to be done. A recorded
        cancellation is raised. Only call it while `scope.recorded` is not None."""
        replayer = self.replayer
        assert replayer is not None
        outcome = self.find(replayer, scope, key, kind)
        if outcome is None:
            if not self.sole:
                await replayer.end()
            if self.stopping is not None:
                await hold.hold_back(self)
            return None
        if outcome.ending is Ending.GIVEN_UP:
            replayer.give(outcome)
            replayer.skip(f"{key}/")
            await waits.given_up(self, scope, key)
        if not self.sole:
            if outcome.blob:  # fetched before its turn comes, or what follows would overtake it
                with replayer.delayed():
                    outcome.output, outcome.blob = msgspec.Raw(await self.load(NULL, outcome.blob)), ""
            await replayer.turn(outcome.sequence)
        replayer.give(outcome)
        if outcome.ending is Ending.CANCELLED:
            hold.mark_cancel_seen(scope)
            raise RunCancelled(self.cancel_reason or "cancelled")
        return outcome

    def find(self, replayer: Replayer, scope: Scope, key: str, kind: str) -> Outcome | None:
        """What the journal holds for this operation. A flow that asks for another one is held: it did nothing wrong to fail."""
        try:
            return replayer.find(scope, key, kind)
        except NonDeterminismError as error:
            raise self.stuck(Hold.NONDETERMINISM, error) from error

    def begun(self, key: str) -> Open | None:
        """What the journal knows of an operation that had begun and not ended."""
        return None if self.replayer is None else self.replayer.open.pop(key, None)

    async def settle(self) -> None:
        """Wait until everything added so far is durable. Raises Unwind when it never will be."""
        await self.writer.committed()
        if self.writer.lost or self.stopping is not None:
            await hold.hold_back(self)

    async def confirm(self) -> None:
        """Our lease has lapsed (this process was frozen, perhaps): ask the store whether the run is still ours before its
        code takes effect again. Raises Unwind if it is not."""
        generation = self.keeper.generation
        self.writer.ask()
        await self.settle()
        self.generation = generation

    @property
    def doubtful(self) -> bool:
        """Whether our lease has lapsed since this run was known to be ours."""
        return self.generation != self.keeper.generation or self.time() >= self.keeper.valid_until

    async def ask(self, question: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        """Read from the store for the flow. One that fails is asked again: its faults are no outcomes of the flow."""
        patience = Patience()
        while True:
            try:
                return await question(self.services.store)
            except StoreUnavailableError as error:
                log(
                    logging.WARNING,
                    Token.READ_FAILED,
                    f"run {self.id}: {error}; asking again in {patience.seconds:.2g}s",
                )
            try:
                await patience.pause()
            except asyncio.CancelledError:
                if self.stopping is None:
                    raise
            if self.stopping is not None:
                raise Unwind(self.stopping)

    def run_id(self, key: str) -> str:
        """The id of the (child) run with this key."""
        return f"{self.id}/{key}" if key else self.id

    def wake_at(self, until: float | None = None) -> float | None:
        """When this run is due by itself while it waits: its earliest wait, or a flow's timeout before that."""
        times = [wait.until for wait in self.waits.values() if wait.until is not None]
        times.extend(self.deadlines.values())
        if until is not None:
            times.append(until)
        return min(times, default=None)

    def record(self, event: Event) -> None:
        """Add an outcome to the journal, unless the run is over: a terminal run's journal is closed."""
        if self.over:
            raise OutsideRunError(f"run {self.id!r} has ended; {event.key!r} finished too late to be recorded")
        self.writer.add(event)

    def change(self, status: Status, **fields: Any) -> None:
        """Put a new status of the root into the next commit."""
        self.status = status
        self.writer.change(RunChange(run_id=self.id, status=status, **fields))

    def log(self, token: Token, text: str) -> None:
        """A line in the run's own log, with the next commit: what happened to it, for people."""
        self.writer.log(LogLine(run_id=self.id, at=self.services.clock.now(), text=text, token=token.value))

    def set_running(self) -> None:
        """Operations go on: say so with the commit they are in, if the store still says otherwise."""
        if self.status is not Status.RUNNING:
            self.change(Status.RUNNING, owner=self.services.owner)

    def payload(self, data: bytes) -> tuple[msgspec.Raw, str]:
        """How a payload is written into an event: inline, or as a blob stored in the same commit."""
        if len(data) <= self.services.config.payload.blob_threshold:
            return msgspec.Raw(data), ""
        digest = blob_digest(data)
        self.writer.blob(digest, data)
        return NULL, digest

    async def load(self, output: msgspec.Raw, blob: str) -> bytes:
        """The bytes of a recorded payload."""
        if not blob:
            return bytes(output)
        data = await self.ask(lambda store: store.get_blob(blob))
        if data is None:
            raise StoreError(f"run {self.id!r}: blob {blob} is missing from the store")
        return data

    async def open(self, codec: ValueCodec, outcome: Outcome) -> Any:
        """A recorded result as today's code wants it. One that today's annotation cannot read holds the run."""
        data = await self.load(outcome.output, outcome.blob)
        try:
            return codec.open(data)
        except PayloadError as error:
            why = f"{error}; restore the annotation it was recorded with, then resume() the run"
            raise self.stuck(Hold.VERSION, VersionMismatchError(why)) from error

    # ---- Operations: each in its own file. None begins while the run leaves memory.

    def step(
        self, scope: Scope | None, step: Step[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]:
        if self.stopping is not None:
            return hold.hold_back(self)
        return steps.perform(self, scope, step, args, kwargs)

    def child(
        self, scope: Scope | None, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]:
        if self.stopping is not None:
            return hold.hold_back(self)
        return children.call(self, scope, flow, args, kwargs)

    def sleep(self, scope: Scope | None, seconds: float) -> Coroutine[Any, Any, None]:
        if self.stopping is not None:
            return hold.hold_back(self)
        return waits.sleep(self, scope, seconds)

    def wait_for(
        self, scope: Scope | None, name: str, payload_type: Any, timeout_seconds: float | None, default: Any
    ) -> Coroutine[Any, Any, Any]:
        if self.stopping is not None:
            return hold.hold_back(self)
        return waits.wait_for_signal(self, scope, name, payload_type, timeout_seconds, default)

    def foreach(
        self, scope: Scope | None, items: list[Any], each: Callable[..., Any], concurrency: int
    ) -> Coroutine[Any, Any, list[Any]]:
        if self.stopping is not None:
            return hold.hold_back(self)
        return fanout.foreach(self, scope, items, each, concurrency)

    def parallel(self, scope: Scope | None, branches: list[Callable[[], Any]]) -> Coroutine[Any, Any, list[Any]]:
        return fanout.parallel(self, scope, branches)

    def spawn(
        self,
        scope: Scope | None,
        flow: Flow[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_id: str | None,
    ) -> Coroutine[Any, Any, str]:
        if self.stopping is not None:
            return hold.hold_back(self)
        return children.spawn(self, scope, flow, args, kwargs, run_id)

    def join(self, scope: Scope | None, run_id: str, flow: Flow[..., Any]) -> Coroutine[Any, Any, Any]:
        if self.stopping is not None:
            return hold.hold_back(self)
        return children.join(self, scope, run_id, flow)

    def value(self, scope: Scope, name: str) -> Any:
        return values.take(self, scope, name)

    # ---- tasks, messages, fencing

    def adopt(self, scope: Scope, task: asyncio.Task[Any]) -> None:
        self.tasks.add(task)
        self.writer.branch(asyncio.current_task())
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if (self.stopping is not None or self.over) and not task.cancelled():
            task.exception()  # retrieved: an Unwind nobody awaited is no news

    def deliver(self, message: Message) -> None:
        """A message reached the run's inbox."""
        if self.stopping is not None or self.over:
            self.missed = True  # it stays in the inbox, and is looked for there once the run has left
            return
        if message.id in self.heard:
            return  # loading the inbox and hearing of it may overlap
        self.heard.add(message.id)
        if message.kind is MessageKind.SIGNAL or message.kind is MessageKind.ENDED:
            self.mailbox.append(message)
            waits.hand_over(self)
        elif message.kind is MessageKind.JOIN:
            self.joined = True
        else:
            hold.attend(self, message)

    @property
    def last_heard(self) -> int:
        """The newest message that was delivered to this object: with a newer one in its inbox, the run is due at once."""
        return max(self.heard, default=0)

    def body_ended(self, key: str) -> None:
        """A step's body is no longer under way. What came of it is recorded before whoever waits for the last one goes on."""
        del self.inflight[key]
        if self.calm is not None and not self.inflight and not self.calm.done():
            self.calm.set_result(None)

    def main_ended(self) -> bool:
        """Whether the flow has reached its end, durably."""
        return self.ended

    def adrift(self) -> Unwind:
        """Nothing of this run is written by this process any more: its code must not go on. Raise what this returns."""
        self.stopping = self.stopping or "its entries could not be written by this process"
        return Unwind(self.stopping)

    def stuck(self, kind: Hold, error: RelightError) -> Unwind:
        """The run cannot go on: it will be held with this reason. Raise what this returns."""
        if self.held is None:
            self.held = (kind, str(error))
            if kind is Hold.NONDETERMINISM:
                log(logging.ERROR, Token.NONDETERMINISM, f"run {self.id}: {error}")
        self.stopping = self.stopping or f"held: {error}"
        return Unwind(self.stopping)

    def _on_checkpoint(self) -> None:
        checkpoint.begin(self)

    def _on_fenced(self, refused: bool) -> None:
        hold.fenced(self, refused)
