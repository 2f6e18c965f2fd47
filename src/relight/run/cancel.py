"""Cancelling a run: visible to its flow, unlike leaving memory.

The request is an entry of the journal, and the flow is told the cancellation in its turn, like an outcome. Then
RunCancelled is raised at every operation that the flow waits for. An operation that only waits raises it at once. A
step raises it when its body has ended (an async body is cancelled; a thread cannot be). Tasks that wait for something
of asyncio's own are cancelled as asyncio does it. From then on, the branch and those that the exception propagates to
are in clean-up (`Scope.cancel_seen`), and their operations are ordinary ones, within cancel_grace. A branch that has
not heard of the cancellation yet gets RunCancelled from the next operation that it begins.

The end of an operation may be recorded before the request, without the flow having been told. The flow gets
RunCancelled all the same (`CancelRequested.unheard`). If the flow were told the end first, it would go on, perhaps into
its own clean-up. Then the cancellation would interrupt that clean-up.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from relight.errors import RunCancelled
from relight.flow.scope import Scope
from relight.model import journal as j
from relight.model.run import Message
from relight.run import leaving
from relight.run.operation import GIVEN_UP, Operation
from relight.run.phase import DRIVEN
from relight.run.replay_order import CANCELLED
from relight.telemetry import Token, log

if TYPE_CHECKING:
    from relight.execution.run_loop import FlowTask
    from relight.run.live_run import LiveRun


def request(run: LiveRun, message: Message) -> None:
    """A request in the run's inbox: record it. The flow is told when the entry is durable."""
    if run.cancel_reason is not None:
        run.writer.consume([message.id])
        return
    reason = run.cancel_reason = leaving.cancel_reason(message)
    unheard = [one for one in run.pending.values() if one.recorded and one.interruptible and not one.done()]
    for operation in unheard:
        operation.unheard = True
    run.set_running()
    run.departure.cancelled_at = run.writer.sequence
    run.writer.add(
        j.CancelRequested("", reason, run.services.clock.now(), [key for one in unheard for key in one.entries]),
        CANCELLED,
    )
    run.writer.consume([message.id])
    run.writer.cancel_spawned(reason)
    begin_grace(run)
    run.services.background.start(_pass_on(run), "cancel")


async def _pass_on(run: LiveRun) -> None:
    """Once the cancellation is durable, the spawned runs have it in their inboxes: let the orchestrator look there."""
    await run.writer.committed()
    run.host.look_for_messages()


def tell_cancelled(run: LiveRun) -> None:
    """Tell the flow that its run is cancelled."""
    run.cancelled = run.loop.run_cancelled = True
    tasks = _task_of_each_branch(run)
    for operation in [one for one in run.pending.values() if one.interruptible]:
        operation.scope.hear()
        operation.scope.branch.heard = True
        _count(operation, tasks.get(operation.scope.branch))
        _interrupt(run, operation)
    run.loop.pump()
    run.services.running_loop.give_back()
    # Innermost first: their CancelledError reaches the tasks that wait for them.
    for task, (scope, _) in reversed(list(run.loop.tasks.items())):
        if not scope.in_clean_up and not scope.informed:
            scope.hear()
            scope.branch.heard = True
            task.cancel_for_good()
    run.loop.let_in()


def _task_of_each_branch(run: LiveRun) -> dict[Scope, FlowTask[Any] | None]:
    """The task of each branch; None where tasks of Relight are between a branch and its operations."""
    found: dict[Scope, FlowTask[Any] | None] = {}
    for task, (scope, _) in run.loop.tasks.items():
        found[scope.branch] = None if scope.branch in found else task
    return found


def _count(operation: Operation, task: FlowTask[Any] | None) -> None:
    """Count this in the task that waits for the operation, like any other cancellation: asyncio.timeout() and TaskGroup
    look at that count. The operation itself decides what is raised in the task, and when."""
    if task is not None:
        before, operation.interrupted = operation.interrupted, True
        task.cancel_for_good()
        operation.interrupted = before


def give_up(run: LiveRun) -> None:
    """Nothing in the run can wake its flow: cancel its code. This is the only place that cancels tasks of a cancelled run
    a second time."""
    if run.main is not None and not run.cancelled:
        run.main.cancel()
    elif run.cancelled:
        for task in reversed(list(run.loop.tasks)):
            task.cancel_for_good()


def reach_the_rest(run: LiveRun) -> bool:
    """The run is cancelled, and its flow is at rest and waits for no operation. Tasks that wait for an event or a
    queue, which nothing will serve any more, and that have not heard of the cancellation, are cancelled now. Returns
    whether there were any."""
    if any(operation.interruptible for operation in run.pending.values()):
        return False
    tasks = [(task, scope) for task, (scope, _) in run.loop.tasks.items() if not scope.branch.heard]
    for task, scope in reversed(tasks):
        scope.branch.heard = True
        task.cancel_for_good()
    return bool(tasks)


def _interrupt(run: LiveRun, operation: Operation) -> None:
    if operation.unheard or not operation.ends_later:
        if operation.recorded:  # its signal is given to the next wait for it, perhaps in clean-up
            if not operation.unheard:
                run.record(j.OperationCancelled(operation.key, by_flow=True, at=run.now()))
            operation.take_back()
        operation.stop()
        run.forget(operation)
        operation.break_off(RunCancelled(run.cancel_reason or "cancelled"))
        return
    operation.interrupted = True
    if operation.recorded or run.replay is not None:
        return  # its end comes after the cancellation in the journal
    if operation.at_work is None:
        end(operation)
    else:
        operation.stop()


def end(operation: Operation) -> None:
    """Record the end of an operation whose work was cancelled, or never began."""
    operation.error = GIVEN_UP
    run = operation.run
    run.record(j.OperationCancelled(operation.key, by_flow=not operation.interrupted, at=run.now()), operation)


def begin_grace(run: LiveRun) -> None:
    """Limit the time of the flow's clean-up. It begins anew when the run is back in memory."""
    run.departure.grace_began_at = run.writer.sequence
    run.services.clock.call_later(run.services.config.cancel_grace_seconds, lambda: _force(run))


def _force(run: LiveRun) -> None:
    if run.phase is not DRIVEN:
        return
    log(
        logging.WARNING,
        Token.CANCEL_FORCED,
        f"run {run.id}: its clean-up took longer than cancel_grace; cancelled all the same",
    )

    def write() -> None:
        assert run.cancel_reason is not None
        leaving.conclude(run, j.RunCancelled("", run.cancel_reason, run.services.clock.now()), reason=run.cancel_reason)

    run.services.background.start(leaving.depart(run, "cancelled", 0.0, write), "cancel", run.broke)


def raise_if_told(run: LiveRun, scope: Scope) -> None:
    """An operation begins after the run's cancellation: raise RunCancelled, unless its branch is in clean-up."""
    if run.cancelled:
        told = scope.in_clean_up
        scope.branch.heard = True
        if not told:
            scope.hear()
            raise RunCancelled(run.cancel_reason or "cancelled")
