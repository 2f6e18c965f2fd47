"""Replay while the flow runs: gives recorded outcomes back, in the order of the journal, and notices a flow that changed."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Iterator

from relight.errors import NonDeterminismError
from relight.flow.scope import Scope
from relight.model.journal import RunCreated
from relight.model.replay import Open, Outcome, TreeState

# How often the loop turns, at most, until the flow has done what it does with one outcome and is given the next; and how
# often without anybody asking for the next one before the one after it is given out.
PATIENCE_TURNS = 50


class Replayer:
    """What the journal holds of one tree, being handed to the flow that asks for it again.

    Branches must see their outcomes in the order in which they happened, or `asyncio.wait(FIRST_COMPLETED)` would pick
    another winner than it did before. So while several branches live, an outcome is given only when all earlier ones have
    been, and the flow has come to rest after the last: given in one turn of the loop, two would look like a dead heat.
    Should an earlier one never be asked for (its branch was cancelled before it saw it), the rest goes on without it after
    some idle turns of the loop.

    A flow that is called again by its retry may go another way than in the attempt that failed: what failed then may
    succeed now. So what its earlier attempts finished is found by key, in whatever order it is asked for.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.outcomes: dict[str, Outcome] = {}
        self.open: dict[str, Open] = {}
        self.children: dict[str, RunCreated] = {}
        self.scopes: dict[str, list[str]] = {}
        self._retried: tuple[str, ...] = ()  # prefixes of the keys of flows that were called again
        self._order: list[int] = []  # sequences still to be given, as a heap
        self._given: set[int] = set()
        self._asking: list[tuple[int, asyncio.Future[None]]] = []
        self._behind: list[asyncio.Future[None]] = []  # for what is new, once all that is recorded has been given
        self._at_rest = True  # the flow has done what it does with the outcome that was given last
        self._delays = 0  # outcomes that are being fetched before they can be asked for
        self._turns = 0  # of the loop, since something happened last
        self._ticking = False

    def add(self, state: TreeState, prefix: str) -> None:
        """Take in what `state` holds under `prefix` (all of it for ""): at the start, and when a flow is called again."""
        at: list[tuple[int, str]] = []
        for key, outcome in state.outcomes.items():
            if key and key.startswith(prefix):
                self.outcomes[key] = outcome
                heapq.heappush(self._order, outcome.sequence)
                if outcome.kind != "item":
                    at.append((outcome.sequence, key))
        for key, begun in state.open.items():
            if key and key.startswith(prefix):
                self.open[key] = begun
                at.append((begun.sequence, key))
        for key, child in state.children.items():
            if key.startswith(prefix):
                self.children[key] = child
        again = (key + "/" if key else "" for key, run in state.open.items() if run.kind == "run" and run.attempt > 1)
        self._retried = tuple({*self._retried, *again})
        for path in [path for path in self.scopes if prefix and (path + "/").startswith(prefix)]:
            del self.scopes[path]
        for _, key in sorted(at):
            self.scopes.setdefault(key.rpartition("/")[0], []).append(key)

    def in_retry(self, scope: Scope) -> bool:
        """Whether `scope` belongs to a flow that was called again by its retry (or lies inside one)."""
        return bool(self._retried) and (scope.path + "/").startswith(self._retried)

    def find(self, scope: Scope, key: str, kind: str) -> Outcome | None:
        """The recorded outcome of what the flow asks for next in `scope`, or None when it has none yet."""
        recorded = scope.recorded
        assert recorded is not None
        outcome = self.outcomes.get(key)
        if self.in_retry(scope):
            expected = key
        elif scope.position >= len(recorded):
            scope.recorded = None
            return None
        else:
            expected = recorded[scope.position]
        if expected != key:
            raise NonDeterminismError(
                f"the flow asks for {key!r} where its journal holds {expected!r}; flow code must ask for the same operations "
                "in the same order: restore the old code, or fork the run from before this point"
            )
        if outcome is not None and outcome.kind not in (kind, "any"):
            raise NonDeterminismError(f"the flow asks for {key!r} as a {kind} where its journal holds a {outcome.kind}")
        scope.position += 1
        return self.outcomes.pop(key, None)

    def left_over(self, scope: Scope) -> str | None:
        """An operation the journal holds for `scope` that the flow ended without asking for."""
        if scope.recorded is None or scope.position >= len(scope.recorded) or self.in_retry(scope):
            return None
        return scope.recorded[scope.position]

    def ahead_of(self, scope: Scope) -> int:
        """How many recorded operations the code of `scope`, and what it called, has not come back to yet."""
        return sum(key.startswith(scope.prefix) for key in (*self.outcomes, *self.open))

    def skip(self, prefix: str) -> None:
        """What happened under these keys will not be asked for again: nobody need wait for its turn."""
        for key in [key for key in self.outcomes if key.startswith(prefix)]:
            self.give(self.outcomes.pop(key))

    def give(self, outcome: Outcome) -> None:
        """This outcome reaches the flow now: whoever waits for its turn behind it may be next."""
        self._give(outcome.sequence)

    def _give(self, sequence: int) -> None:
        self._given.add(sequence)
        while self._order and self._order[0] in self._given:
            self._given.discard(heapq.heappop(self._order))
        self._turns = 0

    @property
    def over(self) -> bool:
        """Everything recorded has been given, and the flow has come to rest after it."""
        return not self._order and self._at_rest

    async def turn(self, sequence: int) -> None:
        """Wait until every earlier outcome has been given, and the flow has come to rest after the last."""
        if self._at_rest and self._is_next(sequence):
            self._go_on()
            return
        future: asyncio.Future[None] = self._loop.create_future()
        heapq.heappush(self._asking, (sequence, future))
        self._turns = 0
        self._tick_soon()
        try:
            await future
        except asyncio.CancelledError:
            self._give(sequence)  # nobody will ask for it again
            raise

    async def end(self) -> None:
        """Wait until replay is over: what a branch does anew happens after everything that is recorded of the others."""
        if not self.over:
            future: asyncio.Future[None] = self._loop.create_future()
            self._behind.append(future)
            self._tick_soon()
            await future

    @contextlib.contextmanager
    def delayed(self) -> Iterator[None]:
        """Somebody is about to ask for its turn, only not at once."""
        self._delays += 1
        try:
            yield
        finally:
            self._delays -= 1
            self._turns = 0

    def _is_next(self, sequence: int) -> bool:
        return not self._order or self._order[0] >= sequence

    def _go_on(self) -> None:
        """An outcome is given: let the flow come to rest."""
        self._at_rest = False
        self._turns = 0
        self._tick_soon()

    def _tick_soon(self) -> None:
        if not self._ticking:
            self._ticking = True
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        """Once in each turn of the loop, as long as somebody asks or the flow is not at rest."""
        self._ticking = False
        self._turns += 1
        patient = self._turns <= PATIENCE_TURNS or self._delays > 0
        # Nothing else is ready to run: nothing will happen before something is given. (uvloop does not tell.)
        if not self._at_rest and (not patient or not getattr(self._loop, "_ready", True)):
            self._at_rest = True
        while self._asking and self._asking[0][1].done():
            heapq.heappop(self._asking)  # cancelled while it waited
        if self._at_rest and self._asking:
            while not patient and not self._is_next(self._asking[0][0]):
                self._given.discard(heapq.heappop(self._order))  # nobody asks for it: it no longer holds anybody up
            if self._is_next(self._asking[0][0]):
                heapq.heappop(self._asking)[1].set_result(None)
                self._go_on()
        elif self._at_rest and not patient:
            self._order.clear()
        while self.over and self._behind:
            future = self._behind.pop(0)
            if not future.done():
                future.set_result(None)
        if self._asking or self._behind or not self._at_rest:
            self._tick_soon()
