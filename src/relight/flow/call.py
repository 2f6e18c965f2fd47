"""Call: an operation that flow code has asked for and not awaited yet.

A step, a flow or a wait called in async flow code gives one of these. It is a coroutine as far as anybody can tell: it is
awaited, or handed to gather, create_task or a TaskGroup. What it stands for begins when it is awaited, in the scope of the
task that awaits it; until then it has done nothing, which is what a forgotten `await` looks like. So a run knows its calls
that nobody has awaited, and where in the flow's code they were made.

It hashes by where it was made and how many were made there before, not by address: asyncio.as_completed() puts what it is given
into a set.
"""

from __future__ import annotations

import collections.abc
import zlib
from collections.abc import Callable, Generator, Iterator
from types import CodeType, CoroutineType, FrameType
from typing import Any, Protocol

from relight.errors import OutsideRunError, Unwind


class Place(Protocol):
    """The scope it is made in."""

    path: str
    run_key: str
    calls: int


class Call(collections.abc.Coroutine[Any, Any, Any]):
    """`begin(*args)` is what awaiting it does: it gives an iterator, or a coroutine. `frame` is the flow's code that makes it."""

    __slots__ = (
        "_args",
        "_begin",
        "_closed",
        "_code",
        "_count",
        "_instruction",
        "_iterator",
        "_number",
        "_scope",
        "_unawaited",
        "name",
    )

    def __init__(
        self,
        unawaited: dict[int, Call],
        number: int,
        name: str,
        scope: Place,
        frame: FrameType,
        begin: Callable[..., Any],
        *args: Any,
    ) -> None:
        self.name = name
        self._scope = scope
        self._count = scope.calls = scope.calls + 1
        self._begin = begin
        self._args = args
        self._number = number
        self._unawaited = unawaited
        self._iterator: Iterator[Any] | None = None
        self._closed = False
        # The line is worked out only when somebody wants to know.
        self._code: CodeType = frame.f_code
        self._instruction: int = frame.f_lasti
        unawaited[number] = self

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
        if self._unawaited.pop(self._number, None) is None:
            if self._closed:
                raise OutsideRunError(f"{self.name!r}, called in a flow, was awaited outside that flow's run")
            raise RuntimeError(f"cannot await {self.name!r} again: it was awaited already")
        args, self._args = self._args, ()
        try:
            begun = self._begin(*args)
        except Unwind as error:
            if error.stubborn:
                return _for_ever()
            raise
        return begun.__await__() if type(begun) is CoroutineType else begun

    def send(self, value: Any) -> Any:
        iterator = self._iterator
        if iterator is None:
            iterator = self._iterator = self.__await__()
        return iterator.send(value)  # type: ignore[attr-defined]  # a generator, or a coroutine's iterator

    def throw(self, *error: Any) -> Any:
        if self._iterator is None:  # a task that was cancelled before it began
            self.close()
            raise error[0] if isinstance(error[0], BaseException) else error[1] or error[0]
        return self._iterator.throw(*error)  # type: ignore[attr-defined]

    def close(self) -> None:
        if self._unawaited.pop(self._number, None) is not None:
            self._closed = True
        if self._iterator is not None:
            self._iterator.close()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return zlib.crc32(self._scope.path.encode(), self._count)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"<call of {self.name!r} at {self.place}>"


def _for_ever() -> Generator[Any, Any, Any]:
    """For code that will not be taken out of memory: it is left here, and thrown away."""
    while True:
        yield
