"""Env: what one branch of a program knows, and how it writes down what it sees. Both interpreters use it, async and sync."""

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

PLAIN = "plain"  # the run's name in a program that is executed without the engine


class NoTrace(Trace):
    """For the oracle, which writes nothing."""

    def __init__(self) -> None:
        super().__init__(PLAIN, 0)

    def write(self, *_: Any) -> None:
        pass


class Shared:
    """What the branches of one flow call share. A box (a child run, an item) has its own: replay does not repeat the
    inside of a box that has ended, so nothing outside may depend on it."""

    def __init__(self) -> None:
        self.list: list[int] = []
        self.count = 0
        self.queue: asyncio.Queue[int] = asyncio.Queue(2)
        self.lock = asyncio.Lock()
        self.semaphore = asyncio.Semaphore(2)
        self.event = asyncio.Event()
        self.forgotten: list[asyncio.Task[Any]] = []  # otherwise the garbage collector would end them


class Env:
    """`box` is the innermost flow call or item around the branch, and `branch` is the task inside the box. Both are
    different in each attempt of a retried flow. `path` is the same: it goes into the arguments of child runs, and an
    attempt finds them by it."""

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
        """A name for something inside this branch. It is the same each time the branch comes here, and unique."""
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
        """The branch asks for a durable operation. What this branch is told next is how that ended."""
        self._write("ask", DERIVED, what)

    def enter(self) -> None:
        self._write("enter", DERIVED, "")

    def leave(self, text: str) -> None:
        self._write("leave", DERIVED, text)

    def _write(self, what: str, kind: str, text: str) -> None:
        """Lines of a `finally` that runs while the run leaves memory are left out: they are not a part of the flow."""
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
        """A step's number: a constant, or a number that depends on the order of all that was told so far."""
        if isinstance(source, int):
            return source
        if source == "last":
            return self.last
        if source == "count":
            return self.shared.count
        return zlib.crc32(repr(self.shared.list).encode()) % 1000

    def raised(self, what: str, error: BaseException) -> None:
        """Write down an exception that was told, unless it means that the run leaves memory. The journal does not have
        failures of items."""
        if isinstance(error, Exception) and what != "items":
            self.told(f"{what} raised {describe(error)}")
        elif not is_quiet(error):
            self.derived(f"{what} raised {describe(error)}")


def is_quiet(error: BaseException) -> bool:
    """Whether this exception means that the run leaves memory. Flow code does not see that."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_quiet(one) for one in error.exceptions)
    return isinstance(error, Unwind | GeneratorExit)


_calls: dict[tuple[str, str], execute.Call] = {}  # the engine's runs, by what flow code knows of them: run and path


def watch_calls() -> None:
    """Which attempt of a retried flow this is. Flow code cannot know that, and must not. So this looks at the engine's
    own calls."""
    made = execute.Call.__init__

    def init(self: execute.Call, flow: Any, args: tuple[Any, ...], *rest: Any) -> None:
        made(self, flow, args, *rest)
        _calls[args[0]["run"], args[0]["path"]] = self

    execute.Call.__init__ = init  # type: ignore[method-assign, assignment]


def called(order: dict[str, Any]) -> tuple[Trace, str]:
    """A flow function begins. Returns the trace of this incarnation, and the box of this call."""
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
