"""Call: an operation that flow code has asked for and not awaited yet.

A step, a flow or a wait called in async flow code gives one of these. It is a coroutine as far as anybody can tell: it is
awaited, or handed to gather, create_task or a TaskGroup. What it stands for begins when it is awaited, in the scope of the
task that awaits it; until then it has done nothing, which is what a forgotten `await` looks like. So a run knows its calls
that nobody has awaited, and where in the flow's code they were made.

It hashes by where it was made and how many were made there before, not by address: asyncio.as_completed() puts what it is given
into a set.
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
    """The scope it is made in."""

    path: str
    run_key: str
    calls: int


class Call(msgspec.Struct, eq=False, weakref=True):
    """A Struct, since one is made for every step: see `make`. Python takes it for a coroutine by its methods."""

    name: str
    _code: CodeType  # where it was made: the line is worked out only when somebody wants to know. Early, since it is no data:
    _instruction: int  # whoever takes a forgotten call for a payload is told so before it comes to the run
    _unawaited: dict[int, Call]
    _number: int  # in there
    _scope: Place
    _count: int  # of calls in that scope
    _args: tuple[Any, ...]  # of what awaiting it does
    _begin: Callable[..., Any] | None = None  # which is this: it gives an iterator, or a coroutine
    _iterator: Any = None
    _closed: bool = False

    @property
    def run_key(self) -> str:
        """Of the (child) run whose code made it."""
        return self._scope.run_key

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def place(self) -> str:
        """Where it was made: "file:line"."""
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
                return garbage.for_ever()  # it will not be taken out of memory
            raise
        return begun.__await__() if type(begun) is CoroutineType else begun

    def refuse(self) -> NoReturn:
        """It is awaited a second time, or too late."""
        if self._closed:
            raise OutsideRunError(f"{self.name!r}, called in a flow, was awaited outside that flow's run")
        raise RuntimeError(f"cannot await {self.name!r} again: it was awaited already")

    def send(self, value: Any) -> Any:
        iterator = self._iterator
        if iterator is None:
            iterator = self._iterator = self.__await__()
        return iterator.send(value)

    def throw(self, *error: Any) -> Any:
        if self._iterator is None:  # a task that was cancelled before it began
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
    """The flow's code that asks for it is `depth` calls further out. Steps have the same in `Step.__call__`."""
    frame = sys._getframe(depth + 1)  # noqa: SLF001 - the documented way, for all its underscore
    scope.calls += 1
    number = next(run.numbers)
    call = Call(
        name, frame.f_code, frame.f_lasti, run.unawaited, number, scope, scope.calls, (run, scope, *args), begin
    )
    run.unawaited[number] = call
    return call
