"""Env: what one branch of a program knows, and how it says what it sees. Shared by the async and the sync interpreter."""

from __future__ import annotations

import asyncio
import sys
import zlib
from typing import Any

from relight.errors import Unwind
from relight.flow.scope import CURRENT, Scope
from relight.run import execute
from tests.random.book import DERIVED, TOLD, VALUE, Trace, describe, new_trace, trace_of

Block = list[dict[str, Any]]

PLAIN = "plain"  # the run's name when a program is executed without the engine


class NoTrace(Trace):
    """For the oracle: nothing is written."""

    def __init__(self) -> None:
        super().__init__(PLAIN, 0)

    def write(self, *_: Any) -> None:
        pass


class Shared:
    """What the branches of one flow call have in common. A box (a child run, an item) has its own: what happens inside is not
    gone through again once it has ended, so nothing outside may depend on how."""

    def __init__(self) -> None:
        self.list: list[int] = []
        self.count = 0
        self.queue: asyncio.Queue[int] = asyncio.Queue(2)
        self.lock = asyncio.Lock()
        self.semaphore = asyncio.Semaphore(2)
        self.event = asyncio.Event()
        self.forgotten: list[asyncio.Task[Any]] = []  # or the garbage collector would end them


class Env:
    """`box` is the innermost flow call or item around it, `branch` the task inside that. Both tell the attempts of a retried
    flow apart; `path` does not: it goes into the arguments of child runs, which an attempt finds again by them."""

    def __init__(self, trace: Trace, box: str, branch: str, path: str, shared: Shared) -> None:
        self.trace = trace
        self.box = box
        self.branch = branch
        self.path = path
        self.shared = shared
        self.last = 0
        self.out: list[Any] = []
        self._ordinal = 0

    @property
    def is_plain(self) -> bool:
        return self.trace.run == PLAIN

    def inner(self, name: str) -> str:
        """A name for something inside this branch: the same each time the branch comes here, and never twice."""
        self._ordinal += 1
        return f"/{name}{self._ordinal}"

    def forked(self, name: str) -> Env:
        """Another branch of the same flow call."""
        env = Env(self.trace, self.box, self.branch + name, self.path + name, self.shared)
        env.last = self.last
        return env

    def told(self, text: str) -> None:
        self._write("see", TOLD, text)

    def value(self, text: str) -> None:
        self._write("see", VALUE, text)

    def derived(self, text: str) -> None:
        self._write("see", DERIVED, text)

    def ask(self, what: str) -> None:
        """Something durable is asked for. What this branch is told next is its end."""
        self._write("ask", DERIVED, what)

    def enter(self) -> None:
        self._write("enter", DERIVED, "")

    def leave(self, text: str) -> None:
        self._write("leave", DERIVED, text)

    def _write(self, what: str, kind: str, text: str) -> None:
        """Nothing that a `finally` says while the run leaves memory: it is not a part of the flow."""
        error = sys.exc_info()[1]
        while error is not None:
            if is_quiet(error):
                return
            error = error.__context__
        self.trace.write(what, self.box, self.branch, kind, text)

    def gain(self, value: int) -> None:
        """A statement has this result."""
        self.last = value
        self.out.append(value)

    def argument(self, source: str | int) -> int:
        """Where a step's number comes from: a constant, or something that depends on the order of things so far."""
        if isinstance(source, int):
            return source
        if source == "last":
            return self.last
        if source == "count":
            return self.shared.count
        return zlib.crc32(repr(self.shared.list).encode()) % 1000

    def raised(self, what: str, error: BaseException) -> None:
        """Note an exception that was told, unless it is the run leaving memory. That an item failed is not in the journal."""
        if isinstance(error, Exception) and what != "items":
            self.told(f"{what} raised {describe(error)}")
        elif not is_quiet(error):
            self.derived(f"{what} raised {describe(error)}")


def is_quiet(error: BaseException) -> bool:
    """Whether this is the run leaving memory, which flow code does not see."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_quiet(one) for one in error.exceptions)
    return isinstance(error, Unwind | GeneratorExit)


_calls: dict[tuple[str, str], execute.Call] = {}  # the engine's, by what flow code knows of them: run and path


def watch_calls() -> None:
    """Which attempt of a retried flow it is, flow code cannot know, and must not: the engine's own calls are looked at."""
    made = execute.Call.__init__

    def init(self: execute.Call, flow: Any, args: tuple[Any, ...], *rest: Any) -> None:
        made(self, flow, args, *rest)
        _calls[args[0]["run"], args[0]["path"]] = self

    execute.Call.__init__ = init  # type: ignore[method-assign, assignment]


def called(order: dict[str, Any]) -> tuple[Trace, str]:
    """A flow function begins: the trace of this incarnation, and the box that this call is."""
    run, path = order["run"], order["path"]
    if run == PLAIN:
        return NoTrace(), "plain"
    scope = CURRENT.get()
    assert isinstance(scope, Scope)
    attempt = _calls[run, path].attempt
    if path:
        trace = trace_of(run)
        return trace, f"{trace.boxes[path]}@{attempt}"
    return new_trace(run, scope.run), f"@{attempt}"
