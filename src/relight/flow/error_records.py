"""Exceptions as data: recorded when a step fails, rebuilt when its failure is replayed.

A rebuilt exception has the same class, the same message and the same attributes, as far as these are data, so that
`except PaymentDeclined as e: if e.code == 51` in a flow does the same live and replayed. Its traceback is text, in a
note. Causes and contexts are in that text only.

Nothing is imported to find a class, and no constructor has to accept arguments that it was not made for. If a class
is gone (renamed, local to a function, of a script that ran as __main__), a StepError replaces it. The StepError is
also an instance of the nearest base class that still exists, so that `except ValueError` still catches it.
"""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import msgspec

from relight.errors import StepError
from relight.flow.survival import LOST, plain_copy
from relight.model.journal import GROUP, ErrorRecord
from relight.model.text import error_message

MAX_TEXT_CHARS = 16 * 1024  # of a message or traceback; a longer one is cut in the middle
MAX_DATA_BYTES = 64 * 1024  # of the arguments, and of each attribute
MAX_NOTES = 20
MAX_GROUP = 50  # members of an exception group, on each level
MAX_GROUP_DEPTH = 10

_TRACEBACK_NOTE = "Traceback of the recorded exception:\n"

# Stored among the attributes of a record. An attribute of a user's exception with such a name is not recorded.
_BASES = "__bases__"  # the names of its bases, nearest first, for when the class is gone


def record_error(exc: BaseException) -> ErrorRecord:
    """`exc` as data. Never fails, whatever the methods of `exc` do: they may even exit."""
    return _record(exc, MAX_GROUP_DEPTH)


def rebuild_error(record: ErrorRecord) -> BaseException:
    """An exception like the recorded one. Each call makes a new one, which may be raised and chained. Never fails: the
    engine calls this on replay, and a constructor that exits would end each process that takes the run up."""
    attributes = dict(record.attributes or {})
    bases: Any = attributes.pop(_BASES, [])
    group: Any = attributes.pop(GROUP, None)
    cls = _find(record.type)
    exc = None
    if cls is not None:
        exc = _rebuild_group(cls, group) if group else _rebuild(cls, record, attributes)
    if exc is None:
        exc = _stand_in(record, bases)
    _set_attributes(exc, attributes)
    for note in record.notes or ():
        add_note(exc, note)
    if record.traceback:
        add_note(exc, _TRACEBACK_NOTE + record.traceback)
    return exc


def add_note(exc: BaseException, note: str) -> None:
    """Add a note, if the class of `exc` lets it: it may have an `add_note` or `__notes__` of its own."""
    with suppress(BaseException):
        exc.add_note(note)


# ---- recording


def _record(exc: BaseException, depth: int) -> ErrorRecord:
    args, attributes = _state(exc)
    copies = {name: plain_copy(value, MAX_DATA_BYTES) for name, value in attributes.items()}
    kept: dict[str, object] = {
        name: copy for name, copy in copies.items() if copy is not LOST and name not in (_BASES, GROUP)
    }
    kept_args = plain_copy(list(args), MAX_DATA_BYTES)
    if isinstance(exc, BaseExceptionGroup) and depth > 0:
        members = [_record(member, depth - 1) for member in exc.exceptions[:MAX_GROUP]]
        for member in members:
            member.traceback = ""  # the group's traceback has it
        kept[GROUP] = {"message": _bounded(exc.message), "members": msgspec.to_builtins(members)}
    if bases := _bases_of(type(exc)):
        kept[_BASES] = bases
    return ErrorRecord(
        type=_name(type(exc)),
        message=_message(exc),
        traceback=_traceback(exc),
        args=None if kept_args is LOST else kept_args,
        attributes=kept or None,
        notes=[_bounded(note) for note in _notes(exc) if not note.startswith(_TRACEBACK_NOTE)][:MAX_NOTES] or None,
    )


def _bases_of(cls: type[BaseException]) -> list[str]:
    if issubclass(cls, _Substitute):
        return cls.recorded_bases
    if cls.__module__ == "builtins":  # a built-in class will not be gone
        return []
    return [_name(base) for base in cls.__mro__[1:] if base not in (Exception, BaseException, object)]


def _state(exc: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and attributes. Some built-in classes have more state than their `args`: `__reduce__` gives it."""
    args: Any = exc.args
    attributes: dict[Any, Any] = {}
    try:
        attributes = dict(getattr(exc, "__dict__", {}))
        if not isinstance(type(exc).__reduce__, types.FunctionType):  # the built-in one, not a user's
            reduced: Any = exc.__reduce__()
            args, attributes = reduced[1], dict(reduced[2] or {}) if len(reduced) > 2 else {}
    except BaseException:  # noqa: BLE001 - then args and __dict__ are used
        pass
    attributes.pop("__notes__", None)
    return tuple(args), {name: value for name, value in attributes.items() if isinstance(name, str)}


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _message(exc: BaseException) -> str:
    return _bounded(error_message(exc))  # a broken __str__ must not hide the failure itself


def _notes(exc: BaseException) -> list[str]:
    try:
        notes = getattr(exc, "__notes__", ())
    except BaseException:  # noqa: BLE001 - a property of the user's class
        return []
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list | tuple) else []


def _traceback(exc: BaseException) -> str:
    """The traceback as text. If the exception was itself rebuilt, the text that was recorded first."""
    for note in _notes(exc):
        if note.startswith(_TRACEBACK_NOTE):
            return note.removeprefix(_TRACEBACK_NOTE)
    try:
        return _bounded("".join(traceback.format_exception(exc)))
    except BaseException as error:  # noqa: BLE001 - the failure itself is recorded all the same
        return f"<no traceback: {type(error).__name__}>"


def _bounded(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()  # file names may contain half surrogate pairs
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2 - 40
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


# ---- rebuilding


def _find(name: str) -> type[Exception] | None:
    """The exception class of that name, among the modules already imported; the search runs no code. Only an Exception
    is found: a record may come from outside, and a SystemExit or a CancelledError would end more than its step."""
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


class _Substitute:
    """A base of the classes made here: their instances print and are recorded as the exceptions that they replace."""

    recorded_bases: ClassVar[list[str]] = []
    recorded_message = ""

    def __str__(self) -> str:
        return self.recorded_message


def _rebuild(cls: type[BaseException], record: ErrorRecord, attributes: dict[str, Any]) -> BaseException | None:
    """An instance with the message of the recorded one; None if none can be made.

    A constructor may need other arguments than `args`: `def __init__(self, order): super().__init__("no " + order)`.
    So the `args` and message of what it makes are compared; if they differ, the instance is made without calling it.
    """
    ways: list[Callable[[], BaseException]] = []
    if record.args is not None:
        ways += [partial(cls, *record.args), partial(_unconstructed, cls, record.args)]
    ways += [
        partial(_unconstructed, cls, [record.message]),
        partial(_substitute, (cls,), record, _bases_of(cls)),
    ]
    for make in ways:
        try:
            exc = make()
            _set_attributes(exc, attributes)
            fits = make is not ways[0] or record.args is None or list(_state(exc)[0]) == record.args
            if fits and isinstance(exc, cls) and _message(exc) == record.message:
                return exc
        except BaseException:  # noqa: BLE001 - constructors raise anything; the next way is tried
            continue
    return None


def _rebuild_group(cls: type[BaseException], group: dict[str, Any]) -> BaseException | None:
    members = [rebuild_error(member) for member in msgspec.convert(group["members"], list[ErrorRecord])]
    try:
        return BaseExceptionGroup.__new__(cls, group["message"], members)  # type: ignore[type-var] # may be no group
    except BaseException:  # noqa: BLE001 - the class is no group any more: a StepError replaces it
        return None


def _unconstructed(cls: type[BaseException], args: list[Any]) -> BaseException:
    """An instance on which only the constructor of the nearest built-in class has run."""
    base = _built_in_base(cls)
    exc: BaseException = base.__new__(cls, *args)
    base.__init__(exc, *args)
    return exc


def _stand_in(record: ErrorRecord, bases: list[str]) -> BaseException:
    """A StepError for a class that is gone or makes no instances; also an instance of the nearest base that exists."""
    for base in filter(None, map(_find, bases)):
        try:
            exc = _substitute((base,) if issubclass(base, StepError) else (StepError, base), record, bases)
        except BaseException:  # noqa: BLE001 - the two cannot be bases of one class, or it refuses subclasses
            continue
        _set_attributes(exc, {"type_name": record.type})
        return exc
    return StepError(record.message, type_name=record.type)


def _substitute(parents: tuple[type, ...], record: ErrorRecord, bases: list[str]) -> BaseException:
    """An instance, with the recorded message, of a class that is made for it and named like the recorded one."""
    module, _, qualname = record.type.partition(":")
    names = {
        "__module__": module,
        "__qualname__": qualname,
        "recorded_bases": bases,
        "recorded_message": record.message,
    }
    cls: Any = type(qualname.rpartition(".")[2], (_Substitute, *parents), names)
    exc: BaseException = _built_in_base(cls).__new__(cls)
    exc.args = (record.message,) if record.args is None else tuple(record.args)
    return exc


def _built_in_base(cls: type[BaseException]) -> Any:
    return next(base for base in cls.__mro__ if base.__module__ == "builtins" and issubclass(base, BaseException))


def _set_attributes(exc: BaseException, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        with suppress(BaseException):  # a property without a setter, for example, follows from the others
            setattr(exc, name, value)
