"""At rest: what a run does when its flow is at rest, and what it does with a flow that never comes to rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relight.execution.run_loop import MOST_CALLBACKS
from relight.model.journal import Deadlocked
from relight.run import cancel, execute, replaying, waits
from relight.run.phase import DRIVEN
from relight.run.replay_order import CANCELLED, DEADLOCKED

if TYPE_CHECKING:
    from relight.run.live_run import LiveRun

# A flow that has run this many callbacks without coming to rest spins, perhaps on asyncio.sleep(0), and never rests.
SPINNING = 1_000_000


def reached(run: LiveRun) -> None:
    """The flow is at rest, and there is nothing to tell it."""
    if run.busy > 0 or run.replay is not None or run.turns.busy:
        return
    if not run.pending:  # nothing in the journal can ever wake it
        if run.deadlocked:  # the flow was told so, and goes on waiting
            execute.end(run, None, execute.deadlock())
            return
        say_deadlocked(run)
    waits.blocked(run)


def say_deadlocked(run: LiveRun) -> None:
    """Record the deadlock. The flow is told in its turn, like an outcome: it may clean up, and then fails."""
    if not run.saying_so and run.phase is DRIVEN:
        run.saying_so = True
        run.writer.add(Deadlocked("", run.services.clock.now()), DEADLOCKED)


def tell_mark(run: LiveRun, mark: str) -> None:
    """Tell the flow a mark: the run's cancellation or a deadlock, which have a place in the order of outcomes."""
    run.services.running_loop.give_back()
    if mark == CANCELLED:
        cancel.tell_cancelled(run)
    elif run.main is not None:
        run.deadlocked = True
        run.saying_so = False
        cancel.give_up(run)
        run.loop.let_in()


def woken_from_outside(run: LiveRun) -> None:
    """Other code has touched an event, a queue or a future of the flow. That would not happen again on replay."""
    run.when_live(lambda: say_deadlocked(run))


def spins(run: LiveRun) -> bool:
    """The flow has not come to rest. After SPINNING callbacks it is told the next outcome all the same, live and on
    replay alike. Returns whether the flow was told an outcome or a mark."""
    run.spun += MOST_CALLBACKS
    if run.spun < SPINNING:
        return False
    run.spun = 0
    if run.replay is not None:
        return run.replay.is_next_of(run.pending) and replaying.tell_next(run, run.replay)
    if not run.told:
        return False
    run.tell(run.told.popleft())
    return True
