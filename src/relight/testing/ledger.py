"""The effects ledger: what really happened, recorded outside the engine's database.

A step records its effect with `effect()`; the flow around it may record with `seen()` that the result has reached it:

    @step
    async def charge(order: Order) -> Receipt:
        with effect():
            ...

    receipt = await charge(order)

Each line is appended with O_APPEND and fsynced, so that a SIGKILL loses none. Outside a crash test both do nothing.
`audit` compares the lines with what is allowed to happen; it does not use the journal.

One weakness: the CrashingStore writes "committed" lines when the real store has answered. No crash point kills the
process between the two. If a kill did come there, the audit would miss one step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

from relight.errors import OutsideRunError
from relight.flow.operations import current_step
from relight.model.replay import item_index


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `run` is the root run's id and `key` the step's key in its tree; `life` numbers the processes from 1."""

    what: str  # start | end | failed | seen | accepted | told | committed | cut | retrying | claimed | posted | resumed | killed
    label: str = ""
    run: str = ""
    key: str = ""
    attempt: int = 1
    ok: bool = True  # committed: the step completed, it did not fail
    index: int = 0  # cut: from this item on
    life: int = 0

    @property
    def effect(self) -> str:
        """What is counted: one attempt of one step, by its idempotency key; with the label, if it has one."""
        return f"{self.run}/{self.key}#{self.attempt}" + (f" {self.label}" if self.label else "")


class Ledger:
    """Appends lines to a file, and reads them."""

    def __init__(self, path: Path, life: int = 0) -> None:
        self.path = path
        self.life = life
        self.begun = itertools.count(1)
        self.on_effect: Callable[[int], None] | None = None  # called with the number of each effect that begins
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)

    def write(self, line: Line) -> None:
        # One write() of one line with O_APPEND: threads need no lock, and a kill does not leave half a line.
        os.write(self._file, msgspec.json.encode(msgspec.structs.replace(line, life=self.life)) + b"\n")
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def read_ledger(path: Path) -> list[Line]:
    """All lines so far; none if there is no such file yet."""
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(Line)
    whole, _, _ = path.read_bytes().rpartition(b"\n")  # the rest is being written at this moment
    return [decoder.decode(line) for line in whole.splitlines()]


_open: Ledger | None = None  # this process's ledger


def open_ledger(path: Path, life: int) -> Ledger:
    """Make `effect` and `seen` of this process write to a file."""
    global _open  # noqa: PLW0603 - steps are plain functions, and get it in no other way
    _open = Ledger(path, life)
    return _open


def ledger() -> Ledger | None:
    """This process's ledger; None outside a crash test."""
    return _open


@contextlib.contextmanager
def effect(label: str = "") -> Iterator[None]:
    """For a step's body: around its effect. A label distinguishes several effects of one step."""
    book = _open
    if book is None:
        yield
        return
    try:
        info = current_step()
    except OutsideRunError:  # called as a plain function
        yield
        return
    root = info.idempotency_key.removesuffix("/" + info.step)
    line = Line(what="start", label=label, run=root, key=info.step, attempt=info.attempt)
    book.write(line)
    try:
        if book.on_effect is not None:
            book.on_effect(next(book.begun))
        yield
    except BaseException:
        book.write(msgspec.structs.replace(line, what="failed"))
        raise
    book.write(msgspec.structs.replace(line, what="end"))


def seen(label: str) -> None:
    """For a flow: the result of the effect with this label has reached it. Now the effect must not happen again."""
    if _open is not None:
        _open.write(Line(what="seen", label=label))


def note(what: str, label: str = "") -> None:
    """For a scenario: record a fact that later lives need, such as that a signal was accepted."""
    if _open is not None:
        _open.write(Line(what=what, label=label))


class Audit(msgspec.Struct, kw_only=True):
    """The result of an audit."""

    effects: list[str] = []  # the effects that began, in order, each once
    lost: list[str] = []  # expected, and never finished
    repeated: list[str] = []  # in flight at a kill, and begun again: allowed, once per kill
    duplicated: list[
        str
    ] = []  # begun again after they were committed, or seen by the flow, or without a kill: never allowed


def audit(lines: list[Line], expected: Collection[str] = ()) -> Audit:
    """`expected` are the effects (see `Line.effect`) that must have finished in the end."""
    found = Audit()
    begun: dict[str, int] = {}  # effect → the life it last began in
    ended: set[str] = set()
    seen_labels: set[str] = set()
    committed: dict[tuple[str, str, int], bool] = {}  # (run, key, attempt) → it completed
    for line in lines:
        step = (line.run, line.key, line.attempt)
        if line.what == "start":
            if line.effect not in begun:
                found.effects.append(line.effect)
            elif step in committed or line.label in seen_labels or begun[line.effect] == line.life:
                found.duplicated.append(line.effect)
            else:
                found.repeated.append(line.effect)
            begun[line.effect] = line.life
        elif line.what in ("end", "failed"):
            ended.add(line.effect)
        elif line.what == "seen":
            seen_labels.add(line.label)
        elif line.what == "committed":
            committed[step] = line.ok
        elif line.what == "cut":
            _forget(line, committed, begun)
        elif line.what == "retrying":
            prefix = f"{line.key}/" if line.key else ""
            for known in [k for k, ok in committed.items() if not ok and k[0] == line.run and k[1].startswith(prefix)]:
                del committed[known]
                begun = {name: life for name, life in begun.items() if not name.startswith(f"{known[0]}/{known[1]}#")}
    found.lost = [name for name in expected if name not in ended]
    return found


def _forget(line: Line, committed: dict[tuple[str, str, int], bool], begun: dict[str, int]) -> None:
    """A foreach was cut: what came after a changed item no longer counts as done."""

    def dropped(run: str, key: str) -> bool:
        index = item_index(line.key, key)
        return run == line.run and index is not None and index >= line.index

    for known in [known for known in committed if dropped(known[0], known[1])]:
        del committed[known]
    prefix = f"{line.run}/"
    for name in [name for name in begun if name.startswith(prefix) and dropped(line.run, name.removeprefix(prefix))]:
        del begun[name]
