"""Replay: the outcomes that the journal has of a tree, in the order in which its flow is told them again.

The flow is called again and asks for its operations. An operation that has an outcome here is not done again: the flow
is told the outcome in its turn, by the same code that tells it live (`LiveRun.advance`, `replaying.py`). After the last
outcome, some operations that the flow has asked for have none. They had not begun, or were in flight, when the run was
last in memory. They begin then.

Some of what is recorded is not told in its turn:

- **Boxes.** A child run or foreach item that has ended is one outcome: what happened inside it is not replayed. (If it
  was alive when the run was cancelled, it is replayed: it matters then which code had heard of the cancellation.)
- **Kept.** A flow that its `retry` calls again may do something else than before. So what its earlier attempts finished is
  told at once, whenever the flow asks for it. The same goes for a foreach whose items have changed meanwhile.
- **Values** (`now()` and the like) are returned when flow code asks for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from relight.errors import NonDeterminismError
from relight.flow.scope import Scope
from relight.model.journal import RunCreated
from relight.model.replay import Ending, Open, Outcome, TreeState
from relight.model.run import RESUME_IT
from relight.run.operation import Operation

# Marks: the places of the run's cancellation and of deadlocks in the order of outcomes. No operation has these keys.
CANCELLED, DEADLOCKED = "$cancelled", "$deadlocked"
MARKS = frozenset((CANCELLED, DEADLOCKED))
_BOXES = frozenset(("run", "item"))  # kinds of outcomes


class Replay:
    """One per run that was in memory before."""

    def __init__(self, state: TreeState) -> None:
        self.recorded: dict[str, Outcome] = {}  # still to be told, by key
        self.kept: dict[str, Outcome] = {}
        self.values: dict[str, Outcome] = {}
        self.open: dict[str, Open] = {key: begun for key, begun in state.open.items() if key}
        self.children: dict[str, RunCreated] = dict(state.children)
        self.unheard = frozenset(state.cancelled.unheard if state.cancelled is not None else ())
        self._items: dict[str, dict[str, bool]] | None = None
        self._by_path: dict[str, list[str]] | None = None
        # How far replay has come: see replaying.py.
        self.fetching = False  # the next outcome is being read from the store
        self.redone: Operation | None = None  # is being done again: its recorded outcome does not count
        self.anew: dict[Operation, None] = {}  # what a foreach that has changed does during replay
        self.foreachs: set[str] = set()  # the foreachs that the flow has come to
        self.changed: set[str] = set()  # those foreachs that have changed
        self.drawn: list[str] = []  # values that the flow has asked for and that the journal does not have
        cancelled_at = state.cancelled.sequence if state.cancelled is not None else None
        boxes = {
            key
            for key, outcome in state.outcomes.items()
            if outcome.kind in _BOXES and key and _is_box(outcome, cancelled_at)
        }
        self.boxes = boxes
        self.ended_by_itself: set[str] = set()
        order: list[tuple[int, str]] = [] if cancelled_at is None else [(cancelled_at, CANCELLED)]
        order += [(sequence, DEADLOCKED) for sequence in state.deadlocks]
        some_are_kept = bool(state.cuts or state.retried)
        recorded = self.recorded
        for key, outcome in state.outcomes.items():
            if not key or (boxes and _is_inside(key, boxes)):
                continue
            if some_are_kept and state.is_kept(key, outcome):
                self.kept[key] = outcome
            elif outcome.kind == "value":
                self.values[key] = outcome
            elif key in state.children and _ends_by_itself(outcome):
                self.ended_by_itself.add(key)
            else:
                recorded[key] = outcome
                order.append((outcome.sequence, key))
        if boxes:
            self.open = {key: begun for key, begun in self.open.items() if not _is_inside(key, boxes)}
        self.unasked = {
            key
            for key, begun in self.open.items()
            if begun.sequence > state.retried_at(key) and not any(key.startswith(one + "[") for one in state.cuts)
        }
        order.sort()
        self._order = deque(key for _, key in order)

    def next(self) -> str | None:
        """The key of the next outcome; None when all have been told."""
        order = self._order
        while order:
            key = order.popleft()
            if key in self.recorded or key in MARKS:
                return key
        return None

    def is_next_of(self, pending: Mapping[str, object]) -> bool:
        """Whether the next outcome is one of these, or a mark."""
        while self._order and self._order[0] not in self.recorded and self._order[0] not in MARKS:
            self._order.popleft()
        return bool(self._order) and (self._order[0] in pending or self._order[0] in MARKS)

    def has_more(self) -> bool:
        """Whether the journal has something that the flow did later than what it does now."""
        return bool(self.values or self.unasked) or any(key in self.recorded or key in MARKS for key in self._order)

    def unfinished(self) -> list[str]:
        """The keys of child runs that have not ended."""
        return [key for key in self.children if key not in self.boxes and key not in self.ended_by_itself]

    def has_ended(self, child: str) -> bool:
        """Whether a child run that is replayed has its end in the journal."""
        return child in self.children and (child in self.ended_by_itself or child in self.recorded)

    def put_back(self, key: str) -> None:
        """This outcome cannot be told yet: it is the next one again."""
        self._order.appendleft(key)

    def drop(self, *keys: str) -> None:
        """Do not tell these outcomes: they were told, the flow has given up on them, or they do not count any more."""
        for key in keys:
            self.recorded.pop(key, None)

    def lets_linger(self, operation: Operation) -> bool:
        """Whether an operation that the flow gives up on now ends later, when its work has ended."""
        if operation.unheard:  # its end is recorded, and the flow only waits to be told the cancellation
            return False
        recorded = self.recorded.get(operation.key)
        return (
            recorded is None
            or recorded.ending is not Ending.UNSEEN
            or (recorded.again and not operation.given_up)  # the flow gave up on it twice, and this is the first time
        )

    def digest_of(self, key: str) -> str:
        """The digest of a step's recorded arguments; empty if there are none."""
        outcome = self.recorded.get(key)
        return "" if outcome is None else outcome.digest

    def take_begun(self, key: str) -> Open | None:
        """The flow asks for this operation. Returns what the journal has of its beginning, and removes it here."""
        self.unasked.discard(key)
        return self.open.pop(key, None)

    def left(self) -> str | None:
        """The flow has ended. Returns an outcome that the flow should have been told before, if there is one."""
        for key in self._order:
            outcome = self.recorded.get(key)
            if (
                outcome is not None
                and outcome.ending not in (Ending.GIVEN_UP, Ending.UNSEEN)
                and key not in self.unheard
            ):
                return key
        return None

    def left_in(self, scope: Scope) -> str | None:
        """An operation that the journal has for the code of `scope` itself, and that the flow has not asked for."""
        if self._by_path is None:  # made only once, since thousands of child runs may end
            self._by_path = {}
            for key in self.recorded:
                self._by_path.setdefault(key.rpartition("/")[0], []).append(key)
        for key in self._by_path.get(scope.path, ()):
            outcome = self.recorded.get(key)
            if outcome is None or outcome.ending in (Ending.GIVEN_UP, Ending.UNSEEN) or outcome.kind == "item":
                continue
            if key not in self.unheard:
                return key
        return None

    # ---- foreach

    def items_of(self, foreach: str) -> dict[str, bool]:
        """The scopes of its items of which the journal has anything, and whether each has ended."""
        if self._items is None:
            self._items = {}
            for key in (*self.recorded, *self.kept, *self.open, *self.values):
                for scope in _items_around(key):
                    self._items.setdefault(scope[: scope.rindex("[")], {}).setdefault(scope, scope in self.boxes)
        return self._items.get(foreach, {})

    def items_have_ended(self, foreach: str, scopes: Iterable[str]) -> bool:
        """Whether the journal has the ends of all these items."""
        known = self.items_of(foreach)
        return all(known.get(scope) for scope in scopes)

    def stop_ordering(self, foreach: str) -> None:
        """The items or the concurrency of this foreach have changed: what is recorded of its items is kept, and no longer
        told in its turn."""
        inside = foreach + "["
        for key in [key for key in self.recorded if key.startswith(inside)]:
            self.kept[key] = self.recorded.pop(key)
        self.unasked = {key for key in self.unasked if not key.startswith(inside)}

    def forget_items(self, scopes: Iterable[str]) -> None:
        """These items have changed: nothing that was done for them is told."""
        gone = tuple(scope + "/" for scope in scopes)
        for table in (self.recorded, self.kept, self.values, self.open):
            for key in [key for key in table if (key + "/").startswith(gone)]:
                del table[key]
        self.unasked = {key for key in self.unasked if not (key + "/").startswith(gone)}

    def has_begun_again(self, flow: str, since: int) -> bool:
        """Whether anything is recorded of a flow's newest attempt: then its back-off is over, whatever the clock says."""
        prefix = flow + "/" if flow else ""
        found: list[tuple[str, Outcome | Open]] = [*self.recorded.items(), *self.open.items(), *self.values.items()]
        return any(key.startswith(prefix) and one.sequence > since for key, one in found)


WHAT_TO_DO = f"restore the old code, {RESUME_IT}, or fork it from before this point"


def expected(key: str, asked: Iterable[str]) -> NonDeterminismError:
    """The error when the journal has `key` next, and the flow has not asked for it."""
    scope = key.rpartition("/")[0]
    prefix = scope + "/" if scope else ""
    others = sorted(asked, key=lambda other: not other.startswith(prefix))
    wants = "asks for nothing"
    if others:
        inside = others[0].startswith(prefix)  # then name the child run or branch, not the operation inside it
        wants = f"asks for {prefix + others[0].removeprefix(prefix).partition('/')[0] if inside else others[0]!r}"
    return NonDeterminismError(
        f"the flow {wants} where its journal holds {key!r}; flow code must ask for the same operations "
        f"in the same order: {WHAT_TO_DO}"
    )


def expected_kind(key: str, kind: str, recorded: str) -> NonDeterminismError:
    """The error when the flow asks for an operation of another kind than the journal has under its key."""
    return NonDeterminismError(
        f"the flow asks for {key!r} as a {kind} where its journal holds a {recorded}: {WHAT_TO_DO}"
    )


def _is_box(outcome: Outcome, cancelled_at: int | None) -> bool:
    if outcome.ending not in (Ending.OK, Ending.ERROR):
        return False
    return cancelled_at is None or outcome.sequence < cancelled_at


def _is_inside(key: str, boxes: set[str]) -> bool:
    """Whether an operation belongs to a child run or an item that has ended."""
    end = key.rfind("/")
    while end > 0:
        if key[:end] in boxes:
            return True
        end = key.rfind("/", 0, end)
    return False


def _ends_by_itself(child: Outcome) -> bool:
    """Whether a child run was cancelled or given up on: on replay its code is called, and comes to the same end."""
    return child.ending not in (Ending.OK, Ending.ERROR, Ending.UNSEEN)


def _items_around(key: str) -> Iterable[str]:
    """The scopes of all items that an operation lies in (or that it is)."""
    end = key.find("]")
    while end >= 0:
        yield key[: end + 1]
        end = key.find("]", end + 1)
