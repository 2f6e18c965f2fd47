"""LiveRun: one root run's tree while it is in memory, from being taken up to its end (or to leaving memory again).

Its heart is `advance`, which decides in which order the flow's code goes on, live and on replay alike:

    pump the run's loop until the flow is at rest
    nothing to tell?  at rest, and if nothing is being done for it either: blocked, so that it may be parked
    tell it the next outcome of the journal; again

Where that next outcome comes from is the only difference: on replay from the journal as it was read, then from the commits of
this process, in the order of their entries. What the flow asks for meanwhile begins when it is at rest.

The operations themselves are in their own files:

    steps.py     steps, their attempts, retries and timeouts
    waits.py     sleep, signals, timers: everything that waits for a time or a message
    fanout.py    foreach and parallel
    children.py  child runs;  spawned.py  runs of their own
    values.py    now, random, uuid
    hold.py      taking a run out of memory: parking, pausing, shutdown;  cancel.py  cancelling it
    execute.py   the flow function from first call to final commit
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec

from relight.errors import (
    OutsideRunError,
    PayloadError,
    RelightError,
    RunCancelled,
    StoreError,
    StoreUnavailableError,
    Unwind,
    VersionMismatchError,
)
from relight.flow.call import Call
from relight.flow.definitions import Flow, Step
from relight.flow.payloads import ValueCodec
from relight.flow.scope import Scope
from relight.lifecycle import cancel, checkpoint, children, execute, fanout, hold, spawned, steps, values, waits
from relight.lifecycle.loop import FlowTask, Ready, RunLoop, TimerHandle
from relight.lifecycle.operation import GIVEN_UP, Operation
from relight.lifecycle.patience import Patience
from relight.lifecycle.replayer import CANCELLED, DEADLOCKED, MARKS, Replay, expected, expected_kind
from relight.lifecycle.services import Host, Services
from relight.lifecycle.threads import Turns
from relight.lifecycle.writer import Writer
from relight.model.blob import blob_digest
from relight.model.journal import NULL, Deadlocked, Event, ForeachCut, ValueRecorded
from relight.model.replay import Ending, Open, Outcome, TreeState
from relight.model.run import Hold, LogLine, Message, MessageKind, Run, RunChange, Status
from relight.ports.store import Store
from relight.telemetry import Token, log

T = TypeVar("T")

# So many outcomes in one go; then other runs have their turn.
MOST_TOLD = 500


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
        self.writer = Writer(services.recorder, row.id, epoch, state.sequence, self)
        self.writer.checkpoint_at = state.sequence + services.config.checkpoint.every
        self.begun_again = state.open.get("")  # its flow was called again by its retry
        self.restored = len(state.outcomes)
        self.recovered = False  # its last owner died: what was in flight then is repeated
        self.keeper = services.keeper
        self.generation = services.keeper.generation  # of the lease under which the run is known to be ours
        self.time = services.loop.time

        # The flow's code, and what it waits for.
        self.loop = RunLoop(row.id, self, self._on_trouble, self._woken_from_outside)
        self.main: FlowTask[Any] | None = None
        self.turns = Turns(self)  # of the threads of sync code
        self.pending: dict[str, Operation] = {}  # asked for and not told, in the order of asking
        self.busy = 0  # how many of them do more than wait for a time or a message
        self.unawaited: dict[int, Call] = {}
        self._calls = itertools.count()

        # What it is told.
        known = state.outcomes or state.open or state.cancelled or state.deadlocks
        self.replay: Replay | None = Replay(state) if known else None
        self.kept: dict[str, Outcome] = self.replay.kept if self.replay is not None else {}
        self._retried = TreeState(retried=state.retried)
        self.children = self.replay.children if self.replay is not None else {}  # how child runs were called
        self._when_live: list[Callable[[], None]] = []
        self._asked: list[Operation] = []  # since it was last at rest
        self._told: deque[Operation | str] = deque()  # durable, to be told in this order
        self._advancing = False
        self._woken = False
        self._fetching = False  # the next outcome is being read from the store
        self._redone: Operation | None = None  # or made anew: its code has changed
        # A foreach whose items have changed does new ones in the midst of replay: which, and what is under way of them.
        self.foreachs: set[str] = set()  # that the flow has come to
        self._changed: set[str] = set()
        self._anew: set[Operation] = set()
        self._drawn: list[str] = []  # values that the flow has asked for on replay and its journal does not hold
        self._open: dict[str, Open] = {}  # once live: what had begun, and was not asked for until now

        self.deadlocked = False  # it waits, or waited, for something that nothing in the run can bring about
        self._saying_so = False

        # Messages and times.
        self.cancel_reason = state.cancelled.reason if state.cancelled is not None else None
        self.cancelled = False  # and the flow has been told so
        self.mailbox: list[Message] = [waits.returned(self.id, one) for one in state.unclaimed]
        self.early: list[Message] = []  # came before the flow could hear: it was being called, or replayed
        self.missed = False  # a message came when the run could no longer hear it
        self.joined = False  # another run waits for this one's end
        self.heard: set[int] = set()  # ids of all messages delivered to this object
        self.due: dict[str, float] = {}  # when what waits for a time is due, by key
        self.unsettled = 0  # what the flow has seen that is perhaps not durable yet: values, and ends that it gave up on

        # Leaving memory.
        self.stopping: str | None = None  # why nothing begins and nothing is told any more
        self.departing = False  # somebody is taking it out of memory
        self.held: tuple[Hold, str] | None = None  # it cannot go on, and why
        self.ended = False  # it is terminal, durably
        self.over = False  # nothing of this object may act any more
        self.outcome: Run | None = None  # the final row, once it is committed
        self.park_armed = False
        self.inflight: dict[str, Operation] = {}  # steps whose bodies are under way
        self.calm: asyncio.Future[None] | None = None  # whoever takes it out of memory waits for the last body to end

    def let_go(self) -> None:
        """Nobody needs this object any more: break its reference cycles, which would cost the garbage collector as much as a
        tenth of a short run."""
        self.writer.run = _GONE
        self.main = None
        self.pending.clear()
        self.loop.let_go()

    # ---- in which order the flow goes on

    def start(self, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the flow's function."""
        scope = Scope(self, "", "", None)
        with self.loop.driving():
            self.main = self.loop.start(execute.root(self, flow, args, kwargs, scope), scope, "relight-run")
        if self.replay is None:
            self._listen()
        self.wake()

    def wake(self) -> None:
        """Something has happened that may let the flow go on: look, in the program loop's next turn."""
        if not self._woken:
            self._woken = True
            self.services.loop.call_soon(self.advance)

    def tell(self, what: Operation | str | list[Operation | str]) -> Callable[[], None]:
        """The entries of these operations are durable, in this order. Call what this returns to let the flow go on."""
        if isinstance(what, list):
            self._told.extend(what)
        else:
            self._told.append(what)
        return self.advance

    def advance(self) -> None:
        """See the module's docstring. Only ever called by the program's loop itself, never from inside one of its tasks."""
        self._woken = False
        if self._advancing:
            return
        self._advancing = self.loop.driven = True
        self.services.watch.begin(self)
        try:
            for _ in range(MOST_TOLD):
                if self.stopping is not None or self.over:
                    return
                self.loop.pump()
                if self._asked:
                    self._begin_asked()
                if self.loop.ready:  # it spins: what it is told comes between, and others have their turn
                    if self._tell_next():
                        continue
                    break
                if self.turns.next():
                    return  # a thread has the turn, and says when it is at rest
                if self.cancelled and cancel.reach_the_rest(self):
                    continue
                if self.main is None or self.main.done():
                    execute.ended(self)
                    return
                if not self._tell_next():
                    self._at_rest()
                    return
            self.wake()
        except Exception as error:  # noqa: BLE001 - a bug of ours: this run is held, the others go on
            log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {self.id} broke: {error!r}", error)
            self.stuck(Hold.CORRUPT, RelightError(f"the engine broke while it drove this run: {error!r}; report it"))
        finally:
            self.services.watch.end()
            self._advancing = self.loop.driven = False
            if self.held is not None and not self.departing:
                hold.depart_by_itself(self)

    def _tell_next(self) -> bool:
        """Tell the flow one outcome; False if there is none."""
        if self.replay is not None:
            return self._tell_recorded(self.replay)
        if not self._told:
            return False
        what = self._told.popleft()
        if isinstance(what, str):
            self._tell_mark(what)
        else:
            self._tell(what)
        return True

    def _tell_mark(self, mark: str) -> None:
        """Something else than an operation's end that has its place in the order."""
        if mark == CANCELLED:
            cancel.tell(self)
        elif self.main is not None:
            self.deadlocked = True
            self._saying_so = False
            self.main.cancel()
            self.loop.let_in()

    def _tell(self, operation: Operation) -> None:
        if operation.done():
            return  # the flow gave up on it before it was told
        if operation.unheard:
            return  # the cancellation is told instead, in a moment
        self.forget(operation)
        if operation.interrupted:
            operation.set_exception(RunCancelled(self.cancel_reason or "cancelled"))
        elif operation.given_up and operation.error is GIVEN_UP:
            operation.tell_given_up()
        else:
            operation.tell()

    def _tell_recorded(self, replay: Replay) -> bool:
        if self._fetching:
            return False
        if self._told:  # something was done in the midst of replay
            done = self._told.popleft()
            assert isinstance(done, Operation)
            if done is self._redone:
                self._redone = None
            self._anew.discard(done)
            self._tell(done)
            return True
        if self._redone is not None:
            return False
        key = replay.next()
        if key is None:
            return self._go_live(replay)
        if key in MARKS:
            self._tell_mark(key)
            return True
        operation = self.pending.get(key)
        outcome = replay.recorded[key]
        if operation is None or (outcome.ending is Ending.GIVEN_UP and not operation.cut_short()):
            if outcome.ending in (Ending.GIVEN_UP, Ending.UNSEEN) and operation is None:
                replay.drop(key)
                return True
            if operation is None and self._goes_another_way(replay, key):
                replay.put_back(key)
                return not self._anew
            replay.drop(key)
            self.stuck(Hold.NONDETERMINISM, expected(key, self._asked_instead(replay)))
            return True
        if key in replay.unheard:
            replay.drop(key)
            operation.unheard = True
            return True
        if outcome.blob:
            self._fetching = True
            replay.put_back(key)
            self.services.background.start(self._fetch(outcome), "fetch")
            return False
        replay.drop(key)
        if outcome.ending is Ending.CANCELLED:
            operation.interrupted = True
        elif outcome.ending is Ending.GIVEN_UP:
            operation.error = GIVEN_UP
        elif outcome.ending is Ending.UNSEEN:
            self.stuck(Hold.NONDETERMINISM, expected(key, ()))
        elif self.stopping is None and not operation.accept(outcome):
            self._redone = operation  # in its place: what is recorded behind it is told after it
            operation.begin()
            return False
        if self.stopping is None:
            self._tell(operation)
        return True

    def _goes_another_way(self, replay: Replay, key: str) -> bool:
        """The journal holds `key` next and nobody asks for it. In a foreach that may be: its items have changed, or how many of
        them are done at once. Then what it asks for now is done now, or found; what is recorded behind it comes after that."""
        if self._anew:
            return True
        foreach = next((one for one in self.foreachs if key.startswith(one + "[")), None)
        if foreach is not None and foreach not in self._changed:
            self.change_foreach(foreach)
            replay.loosen(foreach)
            for operation in [one for one in self.pending.values() if one.key.startswith(foreach + "[")]:
                self._find_kept(operation)
            return True
        inside = self._inside_changed()
        self._anew.update(
            one for one in self.pending.values() if one.key.startswith(inside) and one.key not in replay.recorded
        )
        if self._anew:
            self._do_when_live()
        for operation in self._anew:
            self._begin(operation)
        return bool(self._anew)

    def _inside_changed(self) -> tuple[str, ...]:
        """How the keys of operations begin that lie in a foreach which has changed."""
        return tuple(one + "[" for one in self._changed)

    def _asked_instead(self, replay: Replay) -> list[str]:
        """What the flow asks for and its journal does not hold; or just what it asks for."""
        new = [*self._drawn, *(key for key in self.pending if key not in replay.recorded)]
        return new or list(self.pending)

    def change_foreach(self, key: str, cut: int | None = None) -> None:
        """This foreach has other items than before. `cut`: nothing recorded from that index on counts."""
        self._changed.add(key)
        self.when_live(lambda: self.record(ForeachCut(key, sys.maxsize if cut is None else cut)))

    async def _fetch_kept(self, operation: Operation, outcome: Outcome) -> None:
        await self._fetch(outcome)
        if self.stopping is None and operation.accept(outcome):
            self.tell(operation)
            self.wake()

    async def _fetch(self, outcome: Outcome) -> None:
        try:
            outcome.output, outcome.blob = msgspec.Raw(await self.load(NULL, outcome.blob)), ""
        except StoreError as error:
            self.stuck(Hold.CORRUPT, error)
        self._fetching = False
        self.wake()

    def _go_live(self, replay: Replay) -> bool:
        """All that is recorded has been told. What the flow has asked for and not been told begins now."""
        unasked = replay.unasked or [key for key in replay.values if not key.startswith(self._inside_changed())]
        if unasked:
            key = min(unasked)
            if self._goes_another_way(replay, key):
                return not self._anew
            self.stuck(Hold.NONDETERMINISM, expected(key, self._asked_instead(replay)))
            return True
        self.replay = None
        self._open = replay.open
        self._do_when_live()
        self._listen()
        in_flight, self._asked = [*self.pending.values()], []
        for operation in in_flight:
            if operation not in self._anew:
                self._begin(operation)
        self._anew.clear()
        self.recovered = False
        return True

    def _do_when_live(self) -> None:
        actions, self._when_live = self._when_live, []
        for action in actions:
            action()

    def _begin_asked(self) -> None:
        asked, self._asked = self._asked, []
        for operation in asked:
            if not operation.done():
                self._begin(operation)

    def _begin(self, operation: Operation) -> None:
        if self.stopping is not None:
            return
        if self.cancel_reason is not None and not self.cancelled and operation.interruptible:
            return  # it will be told so before it begins
        if operation.cut_short():
            cancel.end(operation)  # what it had begun died with the process that began it
        else:
            operation.begin()

    def _at_rest(self) -> None:
        if self.busy > 0 or self._fetching or self.replay is not None or self.turns.busy:
            return
        if not self.pending and not self.turns.threads:
            self._say_deadlocked()  # nothing in the journal can ever wake it
        waits.blocked(self)

    def _say_deadlocked(self) -> None:
        """The flow is told so as of an outcome, in its turn: it may clean up, and then fails."""
        if not self._saying_so and self.stopping is None and not self.over:
            self._saying_so = True
            self.writer.add(Deadlocked("", self.services.clock.now()), DEADLOCKED)

    def _woken_from_outside(self) -> None:
        """Other code has touched an event, a queue or a future of the flow's. Nobody would do so again on replay."""
        self.when_live(self._say_deadlocked)

    @property
    def blocked(self) -> bool:
        """Whether the flow is at rest, and nothing is being done for it: only a time or a message can let it go on."""
        return (
            self.main is not None
            and self.replay is None
            and self.busy == 0
            and not (self._told or self._asked or self.loop.ready or self.main.done() or self.turns.busy)
        )

    # ---- what operations ask of the run

    def ask(self, operation: Operation) -> Iterator[Any]:
        """Flow code asks for this: what it waits for."""
        if self.cancelled:
            self.raise_if_cancelled(operation.scope)
        self.add(operation)
        return operation.__await__()

    async def asked(self, operation: Operation) -> Any:
        """The same for code of ours that is part of the flow's."""
        return await _Awaited(self.ask(operation))

    def add(self, operation: Operation) -> None:
        """The same, also where the run's cancellation is nothing to it."""
        self.pending[operation.key] = operation
        self.busy += 1
        replay = self.replay
        if replay is not None:
            operation.begun = replay.asked(operation.key)
            recorded = replay.recorded.get(operation.key)
            if recorded is not None and recorded.kind not in (operation.kind, "any"):
                key, kind = operation.key, operation.kind
                self.stuck(Hold.NONDETERMINISM, expected_kind(key, kind, recorded.kind))
                raise Unwind(self.stopping)
        elif self._open:
            operation.begun = self._open.pop(operation.key, None)
        found = bool(self.kept) and self._find_kept(operation)
        if replay is None and not found:
            self._asked.append(operation)

    def _find_kept(self, operation: Operation) -> bool:
        """What is kept is told as soon as it is asked for. Whether there is such an outcome, and it counts."""
        outcome = self.kept.get(operation.key)
        if outcome is None or outcome.kind != operation.kind:
            return False
        del self.kept[operation.key]
        if outcome.blob:  # of a foreach that has just changed: whatever else is kept was read before
            self._anew.add(operation)
            self.services.background.start(self._fetch_kept(operation, outcome), "fetch")
        elif operation.accept(outcome):
            self._tell(operation)
        else:
            return False
        return True

    def forget(self, operation: Operation) -> None:
        """It has ended, or nobody waits for it any more."""
        if self.pending.pop(operation.key, None) is not None and not operation.waiting:
            self.busy -= 1
        if self.replay is not None:
            self.replay.drop(operation.key)

    def lingers(self, operation: Operation) -> bool:
        """Whether an operation that the flow gives up on now ends later, when what it had begun has ended."""
        if self.replay is None:
            return True
        recorded = self.replay.recorded.get(operation.key)
        return (
            recorded is None
            or recorded.ending is not Ending.UNSEEN
            or (recorded.again and not operation.given_up)  # that was the second time
        )

    def record(self, event: Event, operation: Operation | None = None) -> None:
        """Add an entry to the journal; once it is durable, `operation` has ended with it. A terminal run's is closed."""
        if self.over:
            raise OutsideRunError(f"run {self.id!r} has ended; {event.key!r} finished too late to be recorded")
        if operation is not None:
            operation.recorded = True
            if self.status is not Status.RUNNING:
                self.set_running()
        self.writer.add(event, operation)

    def note(self, event: Event) -> None:
        """Add an entry that is not worth a commit of its own: it rides with the next."""
        if not self.over and self.stopping is None:
            self.writer.note(event)

    def stop_reason(self) -> BaseException | None:
        if self.stopping is not None:
            return Unwind(self.stopping)
        if self.over or (self.main is not None and self.main.done()):
            return OutsideRunError(
                f"run {self.id!r} is over: this task or thread has outlived it, and nothing it does can be recorded; "
                "await every task a flow creates before the flow returns"
            )
        return None

    def begun(self, key: str) -> Open | None:
        """What the journal knows of an operation that had begun and not ended."""
        return self._open.pop(key, None) if self.replay is None else self.replay.asked(key)

    def finish_replay(self) -> bool:
        """The flow has ended while it was replayed. Whether it did so where its journal ends, too; if not, it is held."""
        replay = self.replay
        if replay is not None:
            key = replay.left()
            if key is not None and self.cancel_reason is None:
                self.stuck(Hold.NONDETERMINISM, expected(key, ()))
                return False
            self._do_when_live()
        return True

    def when_live(self, action: Callable[[], None]) -> None:
        """Do it now, or when replay is over: a run that is held on the way there has done nothing new."""
        if self.replay is None:
            action()
        else:
            self._when_live.append(action)

    def recorded_value(self, key: str) -> Outcome | None:
        found = None if self.replay is None else self.replay.values.pop(key, None)
        return found if found is not None or not self.kept else self.kept.pop(key, None)

    def record_value(self, event: ValueRecorded) -> None:
        """One that nobody waits for: the next step does, before its body begins."""
        if self.replay is not None:
            self._drawn.append(event.key)
        self.when_live(lambda: self.writer.add(event))
        self.unsettled += 1

    def is_unsettled(self) -> bool:
        """Whether the flow has seen something that a crash would give it otherwise."""
        if self.unsettled and self.writer.idle:
            self.unsettled = 0
        return self.unsettled > 0

    def raise_if_cancelled(self, scope: Scope) -> None:
        """An operation begins in a branch that has not heard of the run's cancellation yet: it does now."""
        if self.cancelled and not scope.cancel_seen:
            cancel.mark_seen(scope)
            raise RunCancelled(self.cancel_reason or "cancelled")

    def retried_at(self, key: str) -> int:
        """The sequence at which the flow around `key` was called again last; 0 if it never was."""
        return self._retried.retried_at(key)

    async def remember(self, state: TreeState, prefix: str) -> None:
        """Before a flow is called again: what its earlier attempts finished, as the journal has it."""
        self._retried = state
        found = {k: o for k, o in state.outcomes.items() if k and k.startswith(prefix) and state.is_kept(k, o)}
        self.kept.update(found)
        self.children.update(state.children)
        await self.load_kept()

    async def load_kept(self) -> None:
        """What was kept is told whenever it is asked for, so that it must be here."""
        for outcome in self.kept.values():
            if outcome.blob:
                outcome.output, outcome.blob = msgspec.Raw(await self.load(NULL, outcome.blob)), ""

    async def settle(self) -> None:
        """Wait, on the program's loop, until everything added so far is durable. Raises Unwind when it never will be."""
        await self.writer.committed()
        if self.writer.lost or self.stopping is not None:
            raise Unwind(self.stopping or "its entries could not be written by this process")

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

    async def read(self, question: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
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
            await patience.pause()
            if self.stopping is not None:
                raise Unwind(self.stopping)

    def run_id(self, key: str) -> str:
        """The id of the (child) run with this key."""
        return f"{self.id}/{key}" if key else self.id

    def wake_at(self) -> float | None:
        """When this run is due by itself while it waits."""
        return min(self.due.values(), default=None)

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
        data = await self.read(lambda store: store.get_blob(blob))
        if data is None:
            raise StoreError(f"run {self.id!r}: blob {blob} is missing from the store")
        return data

    def open(self, codec: ValueCodec, outcome: Outcome) -> Any:
        """A recorded result as today's code wants it. One that today's annotation cannot read holds the run."""
        try:
            return codec.open(outcome.output)
        except PayloadError as error:
            why = f"{error}; restore the annotation it was recorded with, then resume() the run"
            self.stuck(Hold.VERSION, VersionMismatchError(why))
            return None

    # ---- Operations: each in its own file

    def _call(self, scope: Scope, name: str, begin: Callable[..., Any], *args: Any) -> Call:
        frame = sys._getframe(3)  # the flow's code: behind this are our caller, and sleep() or the like
        return Call(self.unawaited, next(self._calls), name, scope, frame, begin, self, scope, *args)

    def step(self, scope: Scope, step: Step[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        number, frame = next(self._calls), sys._getframe(2)
        return Call(
            self.unawaited, number, step.name, scope, frame, steps.perform, self, scope, step, args, kwargs
        )

    def child(self, scope: Scope, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        number, frame = next(self._calls), sys._getframe(2)
        return Call(
            self.unawaited, number, flow.name, scope, frame, children.call, self, scope, flow, args, kwargs
        )

    def sleep(self, scope: Scope, seconds: float) -> Call:
        return self._call(scope, "sleep", waits.sleep, seconds)

    def wait_for(self, scope: Scope, name: str, payload_type: Any, timeout_seconds: float | None, default: Any) -> Call:
        return self._call(scope, "wait_for", waits.wait_for_signal, name, payload_type, timeout_seconds, default)

    def foreach(self, scope: Scope, items: list[Any], each: Callable[..., Any], concurrency: int) -> Call:
        return self._call(scope, "foreach", fanout.foreach, items, each, concurrency)

    def parallel(self, scope: Scope, branches: list[Callable[[], Any]]) -> Call:
        return self._call(scope, "parallel", fanout.parallel, branches)

    def spawn(
        self,
        scope: Scope,
        flow: Flow[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_id: str | None,
        handle: Callable[[str], Any],
    ) -> Call:
        return self._call(scope, "spawned", spawned.spawn, flow, args, kwargs, run_id, handle)

    def join(self, scope: Scope, run_id: str, flow: Flow[..., Any]) -> Call:
        return self._call(scope, "join", spawned.join, run_id, flow)

    def value(self, scope: Scope, name: str) -> Any:
        if scope.thread is not None:
            return scope.perform(self._call(scope, name, values.take_on_loop, name))
        return values.take(self, scope, name)

    def start_timer(self, scope: Scope, when: float, seconds: float, ready: Ready) -> TimerHandle:
        return waits.start_timer(self, scope, when, seconds, ready)

    def _on_trouble(self, context: dict[str, Any]) -> None:
        """As asyncio's own loops: a task failed and nobody ever asked why, or a callback raised."""
        error = context.get("exception")
        if not isinstance(error, Unwind | RunCancelled) and self.stopping is None and not self.over:
            logging.getLogger("asyncio").error("run %s: %s", self.id, context.get("message"), exc_info=error)

    # ---- messages

    def deliver(self, message: Message) -> None:
        """A message reached the run's inbox."""
        if self.stopping is not None or self.over:
            self.missed = True  # it stays in the inbox, and is looked for there once the run has left
            return
        if message.id in self.heard:
            return  # loading the inbox and hearing of it may overlap
        self.heard.add(message.id)
        if self.replay is not None or self.main is None:
            self.early.append(message)
            if message.kind is MessageKind.PAUSE:  # it need not come back first
                hold.attend(self, message)
        else:
            self._hear(message)

    def _listen(self) -> None:
        """The flow can hear from now on: what came before is first."""
        early, self.early = self.early, []
        for message in early:
            self._hear(message)

    def _hear(self, message: Message) -> None:
        if self.stopping is not None:
            self.missed = True
        elif message.kind is MessageKind.SIGNAL or message.kind is MessageKind.ENDED:
            self.mailbox.append(message)
            waits.hand_over(self)
        elif message.kind is MessageKind.JOIN:
            self.joined = True
        elif message.kind is MessageKind.CANCEL:
            cancel.request(self, message)
        else:
            hold.attend(self, message)

    @property
    def last_heard(self) -> int:
        """The newest message up to which this object has heard everything: with a newer one in its inbox, the run is due at
        once."""
        return self.early[0].id - 1 if self.early else max(self.heard, default=0)

    # ---- leaving memory

    def body_ended(self, key: str) -> None:
        """A step's body is no longer under way. What came of it is recorded before whoever waits for the last one goes on."""
        self.inflight.pop(key, None)
        if self.calm is not None and not self.inflight and not self.calm.done():
            self.calm.set_result(None)

    def stuck(self, kind: Hold, error: RelightError) -> None:
        """The run cannot go on, and will be held with this reason: nothing begins and nothing is told any more."""
        if self.held is None and not self.departing:
            self.held = (kind, str(error))
            if kind is Hold.NONDETERMINISM:
                log(logging.ERROR, Token.NONDETERMINISM, f"run {self.id}: {error}")
        self.stopping = self.stopping or f"held: {error}"
        if not self._advancing and not self.departing:
            hold.depart_by_itself(self)

    def fenced(self, refused: bool) -> None:
        hold.fenced(self, refused)

    def failed(self) -> None:
        """The recorder gave up on what this run did last: it must not go on as if that were written."""
        self.stopping = self.stopping or "its entries could not be written by this process"
        if not self.departing:
            hold.depart_by_itself(self)

    def checkpoint(self) -> None:
        checkpoint.begin(self)


class _Awaited:
    """Lets a coroutine await an iterator."""

    __slots__ = ("_iterator",)

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __await__(self) -> Iterator[Any]:
        return self._iterator


class _Gone:
    """What the writer of a run that is over tells."""

    tell = staticmethod(lambda what: _nothing)
    fenced = failed = checkpoint = staticmethod(_nothing)


_GONE = _Gone()
