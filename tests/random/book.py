"""The book: what really happened, written down outside the engine's database while programs run.

Two kinds of writers share one file per trial. Step bodies write when they begin and end. Flow code writes what it *sees*,
whenever it is told something. Neither asks the engine whether that is right: `check.py` compares the lines afterwards.

A line is a JSON array, written by one write() with O_APPEND, so that a SIGKILL loses no line, and the lines are in the order of
time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec


class Line(msgspec.Struct, array_like=True):
    """One line. Which fields it uses depends on `what`.

    see     flow code was told something: `run`, `incarnation`, `box`, `branch`, `kind`, `text`
    ask     flow code asks for something durable
    enter   the code of a box (a flow's call, an item) begins; leave: it has ended, `text` says how
    begin   a step's body: `run`, `key`, `attempt`, `nonce`, `text` (its id and argument); end: `kind` is ok, failed or cancelled
    sent    an action from outside has been done: `run`, `key`
    ended   a root run is terminal: `run`, `kind` (its status), `text`
    """

    what: str
    life: int
    run: str
    incarnation: int = 0
    box: str = ""
    branch: str = ""
    kind: str = ""
    text: str = ""
    key: str = ""
    attempt: int = 0
    nonce: str = ""


# Kinds of `see`: an outcome, told because its entry in the journal is durable; a value, which the next commit writes; and what
# follows from the two by itself.
TOLD, VALUE, DERIVED = "told", "value", "derived"


class Book:
    """The file, as this process writes to it. `kill_at`: when it has so many lines, the process kills itself."""

    def __init__(self, path: Path, life: int, kill_at: int = 0) -> None:
        self.life = life
        self.count = 0
        self.kill_at = kill_at
        self.on_line: Callable[[Line], None] | None = None
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        self._lock = threading.Lock()

    def write(self, line: Line) -> None:
        data = msgspec.json.encode(line) + b"\n"
        with self._lock:
            os.write(self._file, data)
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        if self.on_line is not None:
            self.on_line(line)


_book: list[
    Book
] = []  # this process's book. It is global, because steps and flows are plain functions: no other way leads to them


def open_book(path: Path, life: int, kill_at: int = 0) -> Book:
    _book[:] = [Book(path, life, kill_at)]
    return _book[0]


def book() -> Book:
    return _book[0]


def read_book(path: Path) -> list[Line]:
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(Line)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


class Trace:
    """What one incarnation of a root run sees: from the call of its code until that code leaves memory, in whatever way."""

    def __init__(self, run: str, incarnation: int, live: object = None) -> None:
        self.run = run
        self.incarnation = incarnation
        self.live = live  # the engine's object: each incarnation has its own
        self.boxes: dict[str, str] = {}  # the name of a child run here, by the path in its arguments

    def write(self, what: str, box: str, branch: str, kind: str, text: str) -> None:
        to = book()
        to.write(Line(what, to.life, self.run, self.incarnation, box, branch, kind, text))


_traces: dict[str, Trace] = {}  # by run: the newest incarnation in this process


def new_trace(run: str, live: object) -> Trace:
    """The code of a root run is called: in a new incarnation, or again because of its retry."""
    before = _traces.get(run)
    if before is None or before.live is not live:
        _traces[run] = Trace(run, 1 if before is None else before.incarnation + 1, live)
    return _traces[run]


def trace_of(run: str) -> Trace:
    return _traces[run]


def forget_traces() -> None:
    _traces.clear()


def describe(error: BaseException) -> str:
    """An exception as text for the trace: the same live and on replay."""
    if isinstance(error, BaseExceptionGroup):
        return f"{type(error).__name__}[{', '.join(describe(one) for one in error.exceptions)}]"
    return f"{type(error).__name__}({error})"


def plain(value: Any) -> str:
    return msgspec.json.encode(value).decode()
