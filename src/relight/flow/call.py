"""Call: an operation that flow code has asked for and not awaited yet.

A step, a flow or a wait called in async flow code gives a Call. It behaves as a coroutine: the flow awaits it, or gives
it to gather, create_task or a TaskGroup. The operation begins when the call is awaited, in the scope of the task that
awaits it. A call that is never awaited does nothing: the flow has forgotten an `await`. So a run knows its unawaited
calls, and where in the flow's code they were made.

A call's hash is made of its scope and its number in the scope, not of its address: asyncio.as_completed() puts calls
into a set, whose order must be the same on replay.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from types import CodeType, CoroutineType
from typing import Any, NoReturn, Protocol

import msgspec

from relight.errors import OutsideRunError, Unwind
from relight.flow import garbage


class Calls(Protocol):
    """The run, as its calls see it."""

    unawaited: dict[int, Call]  # calls that have done nothing yet
    numbers: Iterator[int]  # of calls


class Place(Protocol):
    """The scope in which a call is made."""

    path: str
    run_key: str
    calls: int


class Call(msgspec.Struct, eq=False, weakref=True):
    """A Struct, for speed: every step makes one, see `make`. Its methods make it a coroutine for Python."""

    name: str
    # Where it was made; `place` computes the line only on demand. It comes before the run among the fields because it
    # is no data: if a flow passes a forgotten call as a payload, the search stops here and refuses the payload.
    _code: CodeType
    _instruction: int
    _unawaited: dict[int, Call]
    _number: int  # its key in `_unawaited`
    _scope: Place
    _count: int  # of calls in that scope
    _args: tuple[Any, ...]  # of `_begin`
    _begin: Callable[..., Any] | None = None  # what awaiting this call does: it gives an iterator, or a coroutine
    _iterator: Any = None
    _closed: bool = False

    @property
    def run_key(self) -> str:
        """The key of the (child) run whose code made this call."""
        return self._scope.run_key

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def place(self) -> str:
        """Where this call was made: "file:line"."""
        line = next((line for start, end, line in self._code.co_lines() if start <= self._instruction < end), None)
        return f"{self._code.co_filename}:{line or self._code.co_firstlineno}"

    def __await__(self) -> Generator[Any, Any, Any]:
        if garbage.collector and garbage.runs_this():
            return garbage.for_ever()
        if self._unawaited.pop(self._number, None) is None:
            self.refuse()
        args, self._args = self._args, ()
        assert self._begin is not None
        try:
            begun = self._begin(*args)
        except Unwind as error:
            if error.stubborn:
                return garbage.for_ever()  # the code catches every Unwind: it waits here until it is abandoned
            raise
        return begun.__await__() if type(begun) is CoroutineType else begun

    def refuse(self) -> NoReturn:
        """Raise: this call is awaited a second time, or after its run has ended."""
        if self._closed:
            raise OutsideRunError(f"{self.name!r}, called in a flow, was awaited outside that flow's run")
        raise RuntimeError(f"cannot await {self.name!r} again: it was awaited already")

    def send(self, value: Any) -> Any:
        iterator = self._iterator
        if iterator is None:
            iterator = self._iterator = self.__await__()
        return iterator.send(value)

    def throw(self, *error: Any) -> Any:
        if self._iterator is None:  # its task was cancelled before it began
            self.close()
            raise error[0] if isinstance(error[0], BaseException) else error[1] or error[0]
        return self._iterator.throw(*error)

    def close(self) -> None:
        if self._unawaited.pop(self._number, None) is not None:
            self._closed = True
        if self._iterator is not None:
            self._iterator.close()

    def __hash__(self) -> int:
        return zlib.crc32(self._scope.path.encode(), self._count)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"<call of {self.name!r} at {self.place}>"


def make(run: Calls, name: str, scope: Place, depth: int, begin: Callable[..., Any], *args: Any) -> Call:
    """A call of an operation. The flow's code is `depth` frames further out. `Step.__call__` has the same lines."""
    frame = sys._getframe(depth + 1)  # noqa: SLF001 - documented, despite its underscore
    scope.calls += 1
    number = next(run.numbers)
    call = Call(
        name, frame.f_code, frame.f_lasti, run.unawaited, number, scope, scope.calls, (run, scope, *args), begin
    )
    run.unawaited[number] = call
    return call
