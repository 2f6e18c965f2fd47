"""Why a value does not survive being journaled: which part of it is lost, and what to do about it.

This is slow, plain Python. The fast check whether a value survives is to encode, decode and compare it (`payloads`).
Only a value that fails that check comes here. This module explains why, or accepts it, if only a comparison of its
classes is missing.

Two searches, each returning the first `Loss`:

- `find_difference(value, back)` compares a value with what came back for it;
- `ForeignSearch` looks at a value alone, for parts that are no data. It is for values that could not be decoded, and
  for the arguments of steps, of which only a digest is kept.
"""

from __future__ import annotations

import datetime
import enum
import inspect
import math
import uuid
from collections.abc import Awaitable, Iterator
from dataclasses import fields, is_dataclass
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import msgspec

from relight.flow import jsonform
from relight.model.text import error_message, shown

_DATA = (
    bool,
    datetime.date,  # and datetime
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    Decimal,
    bytes,
    bytearray,
    memoryview,
    PurePath,
)
_MAX_INT_BITS = 14_283  # 4,299 digits: CPython does not convert longer ints to text or back
_TOO_DEEP = "it is nested too deeply; journal a flatter value"


LOST: Final = object()


class Loss(NamedTuple):
    """One part of a value that is lost: where (`.items[3].price`, "" is the value itself) and why."""

    path: str
    reason: str


def same(value: Any, back: Any) -> bool:
    """Whether the two are equal. False if they cannot be compared (a signalling NaN, an array)."""
    try:
        return bool(back == value)
    except Exception:  # noqa: BLE001 - users' __eq__ may raise anything; the parts decide then
        return False


def plain_copy(value: Any, max_bytes: int) -> Any:
    """`value` in plain JSON types if it survives without annotation, in at most `max_bytes`; else LOST."""
    try:
        data = jsonform.encode(value)
        back = msgspec.json.decode(data)
        return LOST if len(data) > max_bytes or find_difference(value, back) else back
    except BaseException:  # noqa: BLE001 - for any reason: the value does not survive
        return LOST


def find_difference(value: Any, back: Any) -> Loss | None:
    """The first part of `value` that is missing or different in `back`, which was decoded from its JSON."""
    try:
        return _difference(value, back, "")
    except RecursionError:
        return Loss("", _TOO_DEEP)


class ForeignSearch:
    """Looks for the first part of a value that is no data. Afterwards `saw_set` says whether sets were met.

    With `bare`, also sets and keys other than str are foreign, except below a class that declares its fields.
    """

    def __init__(self, *, bare: bool) -> None:
        self.bare = bare
        self.saw_set = False
        self._above: dict[int, str] = {}  # the containers around the current part: id to path

    def run(self, value: Any) -> Loss | None:
        try:
            return self._look(value, "", self.bare)
        except RecursionError:
            return Loss("", _TOO_DEEP)

    def _look(self, value: Any, path: str, bare: bool) -> Loss | None:
        if value is None or isinstance(value, _DATA):
            return None
        if isinstance(value, enum.Enum):
            return self._look(value.value, path, bare=False)
        if isinstance(value, str | int | float):
            reason = _scalar_trouble(value)
            return Loss(path, reason) if reason else None
        if id(value) in self._above:
            return Loss(path, f"it contains itself: it is ${self._above[id(value)]} again; refer to it by a key")
        self._above[id(value)] = path
        try:
            return self._look_inside(value, path, bare)
        finally:
            del self._above[id(value)]

    def _look_inside(self, value: Any, path: str, bare: bool) -> Loss | None:
        if isinstance(value, dict):
            reason = next(filter(None, (_key_trouble(key, bare) for key in value)), None)
            if reason:
                return Loss(path, reason)
        elif isinstance(value, set | frozenset):
            self.saw_set = True
            if bare:
                return Loss(path, _comes_back_otherwise(value, []))
        elif jsonform.is_model(type(value)):
            return self._look_into_model(value, path)
        elif not isinstance(value, list | tuple):
            bare = False
        parts = _parts(value)
        if parts is None:
            return Loss(path, _unknown(value))
        for name, part in parts:
            if loss := self._look(part, path + name, bare):
                return loss
        return None

    def _look_into_model(self, model: Any, path: str) -> Loss | None:
        self.saw_set = True  # the model may have sets; assuming so only costs a little time
        try:
            plain = jsonform.dump_model(model)
        except RecursionError:
            raise
        except Exception as error:  # noqa: BLE001 - a model's serializers may raise anything
            return Loss(path, f"{_a(model)} cannot be dumped as JSON ({error_message(error)})")
        return self._look(plain, path, bare=False)


def _difference(value: Any, back: Any, path: str) -> Loss | None:
    if same(value, back):
        return None
    if isinstance(value, str | int | float) and (reason := _scalar_trouble(value)):
        return Loss(path, reason)
    if isinstance(value, set | frozenset) and isinstance(back, set | frozenset):
        return _set_difference(value, back, path)
    if isinstance(value, dict) and isinstance(back, dict):
        return _dict_difference(value, back, path)
    if type(value) is not type(back):
        found = ForeignSearch(bare=False).run(value) if not isinstance(value, dict | list) else None
        return Loss(path + found.path, found.reason) if found else Loss(path, _comes_back_otherwise(value, back))
    if isinstance(value, Decimal) and value.is_nan() and back.is_nan():
        return None
    parts, parts_back = _parts(value), _parts(back)
    if parts is None or parts_back is None:
        has_own_eq = getattr(type(value), "__eq__", None) is not object.__eq__
        return Loss(path, f"it would come back as {_short(back)}") if has_own_eq else None
    pairs = list(zip(parts, parts_back, strict=False))
    for (name, part), (_, part_back) in pairs:
        if loss := _difference(part, part_back, path + name):
            return loss
    if isinstance(value, list | tuple) and not len(value) == len(back) == len(pairs):
        return Loss(path, f"it would come back with {len(back)} elements instead of {len(value)}")
    return None


def _dict_difference(value: dict[Any, Any], back: dict[Any, Any], path: str) -> Loss | None:
    for key, part in value.items():
        if key not in back:
            reason = (
                _key_trouble(key, bare=True) or f"its key {_short(key)} is not in its annotation and would be dropped"
            )
            return Loss(path, reason)
        if loss := _difference(part, back[key], path + _key_path(key)):
            return loss
    return None


def _set_difference(value: Any, back: Any, path: str) -> Loss | None:
    for part in value:
        if part not in back:
            found = ForeignSearch(bare=False).run(part)
            return Loss(path, f"of its element {_short(part)}: {found.reason}" if found else _element_lost(part))
    return Loss(path, "it would come back with other elements")


def _element_lost(part: Any) -> str:
    return f"its element {_short(part)} would not come back equal; declare the elements' type, or use a list"


def _parts(value: Any) -> Iterator[tuple[str, Any]] | None:
    """The parts of a container or object with their paths; None if `value` has no known parts."""
    kind = type(value)
    if isinstance(value, dict):
        return ((_key_path(key), part) for key, part in value.items())
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ((f".{name}", part) for name, part in zip(kind._fields, value, strict=False))
    if isinstance(value, list | tuple | set | frozenset):
        return ((f"[{index}]", part) for index, part in enumerate(value))
    names: Any
    if isinstance(value, Awaitable):  # a Call (a step that was not awaited) is a struct, too, but no data
        return None
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    elif is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value)]
    elif jsonform.is_model(kind):
        names = [*getattr(kind, "model_fields", ()), *(getattr(value, "model_extra", None) or ())]
    elif hasattr(kind, "__attrs_attrs__"):
        names = [a.name for a in kind.__attrs_attrs__]
    else:
        return None
    return ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))


def _key_path(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{_short(key)}]"


# ---- what is lost, and what to do instead


def _scalar_trouble(value: Any) -> str | None:
    if isinstance(value, float):
        if math.isfinite(value):
            return None
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return f"{name} does not survive JSON (it would come back as null); use None or a str for it"
    if isinstance(value, int):
        if value.bit_length() <= _MAX_INT_BITS:
            return None
        return f"an int of {value.bit_length()} bits is too long to be written as text; use hex() of it"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"the str has half a surrogate pair at position {error.start}, which is no text; use bytes"
    return None


def _key_trouble(key: Any, bare: bool) -> str | None:
    if isinstance(key, enum.Enum):
        key = key.value
    if isinstance(key, str | int | float) and not isinstance(key, bool) and (reason := _scalar_trouble(key)):
        return f"of its key {_short(key)}: {reason}"
    if type(key) is str or (not bare and not isinstance(key, bool | tuple) and key is not None):
        return None
    return f"its key {_short(key)} is {_a(key)}, and keys come back as str; use str, or annotate the keys"


def _comes_back_otherwise(value: Any, back: Any) -> str:
    change = f"{_a(value)} would come back as {_a(back)}"
    kind: Any = type(value)
    if kind in (list, dict, str, int, float, bool, type(None)):  # JSON has these types: the annotation is the cause
        return f"{change}, since its annotation says so; make the two agree"
    if kind in (set, frozenset):
        return f"{change}; annotate it as {kind.__name__}[...], or use a sorted list"
    if kind is tuple:
        return f"{change}; annotate it as tuple[...], or use a list"
    return f"{change}; annotate it as {kind.__name__}"


def _unknown(value: Any) -> str:
    if inspect.iscoroutine(value) or inspect.isawaitable(value):
        return f"{_a(value)} is not data; was an `await` forgotten?"
    if inspect.isgenerator(value):
        return "a generator is not data; use a list"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name} is an unknown class, not data; use a dataclass, msgspec struct, pydantic model or dict"


def _a(value: Any) -> str:
    name = "null" if value is None else type(value).__name__
    return name if value is None else f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def _short(value: Any) -> str:
    text = shown(value)
    text = text if len(text) <= 60 else f"{text[:50]}…"
    return text.encode("utf-8", "backslashreplace").decode()
