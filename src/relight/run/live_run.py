"""LiveRun: one root run's tree while it is in memory, from being taken up until it ends or leaves memory.

Its central method is `advance`, which decides in which order the flow's code goes on, live and on replay alike:

    pump the run's loop until the flow is at rest
    if there is nothing to tell: wait; if nothing is being done for it either, the run is blocked and may be parked
    tell the flow the next outcome of the journal, and repeat

Only the source of that outcome differs: on replay, it is the journal as it was read; later, it is the commits of this
process, in the order of their entries. What the flow asks for meanwhile begins when the flow is at rest. The operations
themselves are in their own files, see `requests.py`.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from relight.errors import ContinueAs, OutsideRunError, RelightError, RunCancelled, Unwind
from relight.execution.run_loop import FlowTask, Ready, RunLoop, TimerHandle
from relight.flow.call import Call
from relight.flow.definitions import Flow
from relight.flow.scope import Scope
from relight.model.replay import Open, Outcome, TreeState, retried_at
from relight.model.run import Hold, Message, Run
from relight.model.text import shown
from relight.record.writer import GONE
from relight.run import at_rest, cancel, checkpoint, execute, inbox, leaving, replaying, waits
from relight.run.alarms import Timers
from relight.run.operation import GIVEN_UP, Operation
from relight.run.phase import DRIVEN, STOPPING
from relight.run.recording import RunRecord
from relight.run.replay_order import Replay
from relight.run.requests import Asking
from relight.run.services import Host, Services
from relight.run.steps import StepCall, StepOperation
from relight.run.sync_flows import NO_TURNS, Turns
from relight.telemetry import Token, log

MOST_TOLD = 500  # outcomes that are told in one go; then other runs have their turn
MOST_REFUSALS = 1000  # how often Unwind is raised: code that catches it in a loop would hang the whole process


class LiveRun(RunRecord, Asking):
    """One root run's tree; implements `flow.scope.Operations`."""

    # fmt: off
    __slots__ = (
        "__weakref__", "_advancing", "_asked", "_when_live", "_woken", "asked_to_continue", "begun_again", "busy",
        "cancel_reason", "cancelled", "children", "created", "deadlocked", "departure", "flow", "host", "inbox", "inflight",
        "kept", "left_open", "loop", "main", "main_done", "numbers", "pending", "recovered", "replay", "restored", "retried",
        "saying_so", "spun", "step_call", "timers", "told", "turns", "unawaited",
    )
    # fmt: on

    def __init__(self, services: Services, host: Host, row: Run, epoch: int, state: TreeState) -> None:
        RunRecord.__init__(self, services, row, epoch, state, self)
        self.unawaited: dict[int, Call] = {}  # operations that the flow has called and not awaited
        self.numbers: Iterator[int] = itertools.count()  # the keys of `unawaited`
        self.step_call: type[Call] = StepCall
        self.host = host
        self.created = state.created
        self.begun_again = state.open.get("")  # set if the flow was called again by its retry
        self.restored = len(state.outcomes)
        self.recovered = 0  # above 0: its last owner died; steps that were in flight are repeated, and counted here

        # The flow's code, and what it waits for.
        self.loop: RunLoop = RunLoop(row.id, services.running_loop, self)  # type: ignore[abstract]  # refuses the rest
        self.flow: Flow[..., Any] | None = None  # the flow that is driven; None: its code has not been called
        self.main: FlowTask[Any] | None = None  # the task of the flow's function
        self.main_done = True  # whether that task has ended; also before it is made
        self.turns = NO_TURNS  # which thread of sync code executes: see `own_turns`
        self.pending: dict[str, Operation] = {}  # asked for and not told yet, in the order of asking
        self.busy = 0  # how many of `pending` do more than wait for a time or a message

        # What the flow is told.
        known = state.outcomes or state.open or state.cancelled or state.deadlocks
        self.replay: Replay | None = Replay(state) if known else None
        self.kept: dict[str, Outcome] = self.replay.kept if self.replay is not None else {}
        self.retried = state.retried
        self.children = self.replay.children if self.replay is not None else {}  # how child runs were called
        self._when_live: list[Callable[[], None]] | None = None
        self._asked: list[Operation] = []  # asked for since the flow was last at rest
        self.told: deque[Operation | str] = deque()  # durable outcomes, to be told in this order
        self._advancing = self._woken = False
        self.spun = 0  # callbacks since the flow was last at rest
        self.left_open: dict[str, Open] = {}  # once live: what had begun, and the flow has not asked for again yet
        self.deadlocked = self.saying_so = False  # the flow was told that nothing can wake it; that is being recorded
        self.asked_to_continue: tuple[Scope, ContinueAs] | None = None  # which call of the flow did, and what it raised

        # Messages and times.
        self.cancel_reason = state.cancelled.reason if state.cancelled is not None else None
        self.cancelled = False  # whether the flow has been told the cancellation
        self.inbox: inbox.Inbox = inbox.Inbox([waits.returned(self.id, one) for one in state.unclaimed])
        self.timers: Timers = Timers()

        self.inflight: dict[str, Operation] = {}  # steps whose bodies are under way
        self.departure: leaving.Departure = leaving.Departure(state.cancelled.sequence if state.cancelled else 0)

    def let_go(self) -> None:
        """Break the reference cycles of this object, which is not needed any more: the garbage collector would spend a
        tenth of a short run on them."""
        self.writer.run = GONE
        self.main = None
        self.pending.clear()
        self.loop.let_go()
        self.turns = NO_TURNS
        if self.departure.park_timer is not None:
            self.departure.park_timer.cancel()  # otherwise the timer would keep this object until it goes off

    # ---- in which order the flow goes on

    def start(self, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the flow's function."""
        self.flow = flow
        scope = Scope(self, self.path, "", None)
        root = execute.root(self, flow, args, kwargs, scope)
        self.main_done = False
        self.loop.driven = True
        self.main = self.loop.main = self.loop.start(root, scope, "relight-run", contextvars.Context())
        self.loop.driven = False
        if self.replay is None:
            inbox.hear_early(self)
        self.wake()

    def wake(self) -> None:
        """Something has happened that may let the flow go on: call `advance` in the program loop's next turn."""
        if not self._woken:
            self._woken = True
            self.services.loop.call_soon(self.advance, context=contextvars.Context())

    def advance(self) -> None:
        """See the module's docstring. Only ever called by the program's loop itself, never from inside one of its tasks."""
        self._woken = False
        if self._advancing:
            return
        loop, told, running_loop = self.loop, self.told, self.services.running_loop
        self._advancing = loop.driven = True
        ready, left = loop.ready, MOST_TOLD
        try:
            while left and self.phase is DRIVEN:
                left -= 1
                if ready:
                    loop.pump()
                if self._asked or ready or self.turns.threads or self.cancelled or self.main_done:
                    goes_on = self._go_on()
                elif self.replay is not None:
                    goes_on = replaying.tell_next(self, self.replay)
                elif told:  # nearly always: a step has ended
                    self.tell(told.popleft())
                    goes_on = True
                else:  # nearly always, a step is under way
                    goes_on = self.busy == 0 and self._go_on()
                if not goes_on:
                    return
                self.spun = 0
            if not left:
                self.wake()
        except Exception as error:  # noqa: BLE001 - a bug in Relight: this run is held, the others go on
            what = shown(error)
            log(logging.CRITICAL, Token.INTERNAL_ERROR, f"run {self.id} broke: {what}", error)
            self.stuck(Hold.CORRUPT, RelightError(f"the engine broke while it drove this run: {what}; report it"))
        finally:
            self._advancing = loop.driven = False
            if not running_loop.batch:
                running_loop.give_back()
            if self.departure.held is not None and not self.departing:
                leaving.depart_by_itself(self)

    def _go_on(self) -> bool:
        """Begin what the flow has asked for, and tell it one outcome when it is at rest. False: it waits or is over."""
        self.services.running_loop.give_back()
        if self._asked:
            self._begin_asked()
        if self.loop.ready:  # the flow is not at rest yet; other runs have their turn first
            if at_rest.spins(self):
                return True
            self.wake()
            return False
        if self.turns.threads and self.turns.next():
            return False  # a thread has the turn, and reports when it is at rest
        if self.cancelled and cancel.reach_the_rest(self):
            return True
        if self.main_done:
            execute.ended(self)
            return False
        if self.replay is not None:
            return replaying.tell_next(self, self.replay)
        if self.told:
            self.tell(self.told.popleft())
            return True
        at_rest.reached(self)
        return False

    def tell(self, operation: Operation | str) -> None:
        """Tell the flow how an operation has ended; or a mark, which is the run's cancellation or a deadlock."""
        if isinstance(operation, str):
            at_rest.tell_mark(self, operation)
            return
        if operation.done() or operation.unheard:
            return  # the flow gave up on it before it was told; or it is told the cancellation instead, in a moment
        pending, key = self.pending, operation.key  # as forget() does
        if pending.get(key) is operation:
            del pending[key]
            if not operation.waiting:
                self.busy -= 1
        if self.replay is not None:
            self.replay.drop(*operation.entries)
        else:
            self.recovered = 0  # steps that follow from a new outcome were not in flight at the crash
        if operation.interrupted:
            operation.set_exception(RunCancelled(self.cancel_reason or "cancelled"))
        elif operation.given_up and operation.error is GIVEN_UP:
            operation.tell_given_up()
        elif type(operation) is StepOperation and operation.error is None:
            operation.set_result(operation.value)  # as tell() does
        else:
            operation.tell()

    def go_live(self, replay: Replay) -> None:
        """Replay is over: begin what the flow has asked for and has not been told."""
        self.services.running_loop.give_back()
        self.replay = None
        self.left_open = replay.open
        self.do_when_live()
        inbox.hear_early(self)
        in_flight, self._asked = [*self.pending.values()], []
        self.timers.overdue = []
        for operation in in_flight:
            if operation not in replay.anew:
                self.begin(operation)
        waits.catch_up(self)

    def do_when_live(self) -> None:
        """Do what `when_live` has postponed."""
        actions, self._when_live = self._when_live, None
        for action in actions or ():
            action()

    def _begin_asked(self) -> None:
        asked, self._asked = self._asked, []
        for operation in asked:
            if operation.done():
                continue
            if self.cancel_reason is None and self.stopping is None and not operation.given_up:
                operation.begin()
            else:
                self.begin(operation)

    def begin(self, operation: Operation) -> None:
        """Do what the flow has asked for."""
        if self.stopping is not None:
            return
        if self.cancel_reason is not None and not self.cancelled and operation.interruptible:
            return  # the flow is told the cancellation first, and this never begins
        if operation.cut_short() and not operation.was_interrupted:
            cancel.end(operation)  # its work died with the process that had begun it
        else:
            operation.begin()

    @property
    def blocked(self) -> bool:
        """Whether the flow is at rest, and nothing is being done for it: only a time or a message can let it go on."""
        return (
            self.main is not None
            and self.replay is None
            and self.busy == 0
            and not (
                self.told or self._asked or self.loop.ready or self.main_done or self.turns.busy or self.writer.telling
            )
        )

    # ---- what operations need from the run

    def ask(self, operation: Operation) -> Iterator[Any]:
        """Flow code asks for this operation. Returns what the flow's task waits for."""
        if self.cancelled:
            cancel.raise_if_told(self, operation.scope)
        self.pending[operation.key] = operation  # as add() does
        self.busy += 1
        if not replaying.look_up(self, operation):
            self._asked.append(operation)
        return operation.__await__()

    async def asked(self, operation: Operation) -> Any:
        """The same, for Relight's own code that runs as part of the flow."""
        if self.cancelled:
            cancel.raise_if_told(self, operation.scope)
        self.add(operation)
        return await operation

    def add(self, operation: Operation) -> None:
        """The same, without waiting, and also when the run has been cancelled."""
        self.pending[operation.key] = operation
        self.busy += 1
        if not replaying.look_up(self, operation):
            self._asked.append(operation)

    def forget(self, operation: Operation) -> None:
        """Remove an operation that has ended, or that the flow no longer waits for."""
        if self.pending.get(operation.key) is operation:
            del self.pending[operation.key]
            if not operation.waiting:
                self.busy -= 1
        if self.replay is not None:
            self.replay.drop(*operation.entries)

    def stop_reason(self) -> BaseException | None:
        if self.stopping is not None:
            self.departure.refusals += 1
            return Unwind(self.stopping, stubborn=self.departure.refusals > MOST_REFUSALS)
        if self.over or self.main_done:
            return OutsideRunError(
                f"run {self.id!r} is over: this task or thread has outlived it, and nothing it does can be recorded; "
                "await every task a flow creates before the flow returns"
            )
        return None

    def begun(self, key: str) -> Open | None:
        """What the journal has of an operation that had begun and not ended."""
        return self.left_open.pop(key, None) if self.replay is None else self.replay.take_begun(key)

    def when_live(self, action: Callable[[], None]) -> None:
        """Do it now, or when replay is over, so that a run that is held during replay has done nothing new."""
        if self.replay is None:
            action()
        else:
            self._when_live = self._when_live or []
            self._when_live.append(action)

    def own_turns(self) -> Turns:
        """The turns of its threads. They are made when needed, since most runs have no threads."""
        if self.turns is NO_TURNS:
            self.turns = Turns(self)
        return self.turns

    def retried_at(self, key: str) -> int:
        """The sequence at which the flow around `key` was called again last; 0 if it never was."""
        return retried_at(self.retried, key)

    def touched_from_outside(self) -> None:
        at_rest.woken_from_outside(self)

    def start_timer(self, scope: Scope, when: float, seconds: float, ready: Ready) -> TimerHandle:
        return waits.start_timer(self, scope, when, seconds, ready)

    def on_trouble(self, context: dict[str, Any]) -> None:
        """Log, as asyncio's own loops do, that a callback raised or that the error of a task was never retrieved."""
        error = context.get("exception")
        if not isinstance(error, Unwind | RunCancelled) and self.phase is DRIVEN:
            logging.getLogger("asyncio").error("run %s: %s", self.id, context.get("message"), exc_info=error)

    # ---- messages

    def deliver(self, message: Message) -> None:
        inbox.deliver(self, message)

    @property
    def last_heard(self) -> int:
        """This object has received all messages up to this one. With a newer one in its inbox, the run is due now."""
        return self.inbox.early[0].id - 1 if self.inbox.early else self.inbox.heard

    # ---- leaving memory

    def stuck(self, kind: Hold, error: RelightError) -> None:
        """The run cannot go on, and will be held with this reason: nothing begins and nothing is told any more."""
        if self.over:
            return  # it has ended, or its next generation begins in a moment: this error no longer matters
        if self.departure.held is None and not self.departing:
            self.departure.held = (kind, str(error))
        self.stopping = self.stopping or f"held: {error}"
        if self.phase is DRIVEN:
            self.enter(STOPPING)
        if not self._advancing and not self.departing:
            leaving.depart_by_itself(self)

    def fenced(self, refused: bool) -> None:
        leaving.fenced(self, refused)

    def failed(self) -> None:
        leaving.failed(self)

    def broke(self, error: BaseException) -> None:
        """A task that did something for this run has failed because of a bug in Relight."""
        leaving.broke(self, error)

    def checkpoint(self) -> None:
        checkpoint.begin(self)
