"""The JSON form of values: how a payload is written, and how an annotation reads it back.

This module only converts. It does not decide whether a value survives (`survival`), nor know of steps or flows.

Besides what msgspec writes by itself, it writes pydantic models (recognised by their methods: pydantic is never
imported), paths, and subclasses of str, int and float. For all other classes `encode` raises TypeError.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, get_origin

import msgspec

_SCALARS = (str, int, float)


def canonical(value: Any, *, careful: bool = False) -> bytes:
    """The JSON of `value`, the same bytes for equal values in every process: dict keys and sets are sorted.

    msgspec sorts sets by `<`, which orders sets of sets (and of classes that contain some) only partly: their order
    would still depend on the process's hash seed. `careful` sorts by the elements' JSON instead, in Python; use it
    where `has_unordered_sets` says so. What msgspec refuses to sort (sets of enums, int keys) is sorted so anyway.
    """
    if not careful:
        try:
            return _encode_sorted(value)
        except TypeError:
            pass
    return _encode_sorted(_sort_sets(value, msgspec.json.decode(encode(value))))


def decoder(annotation: Any) -> Callable[[bytes], Any]:
    """A function that reads JSON back as `annotation`. Raises if msgspec cannot read such values (some unions)."""
    return msgspec.json.Decoder(annotation, dec_hook=_from_json).decode


def is_model(kind: type) -> bool:
    """Whether `kind` is a pydantic model, or works like one."""
    return hasattr(kind, "model_validate")


def dump_model(model: Any) -> Any:
    """A pydantic model as plain JSON types, by field names if `load_model` can read these, else by aliases."""
    kind: Any = type(model)
    return model.model_dump(mode="json", round_trip=True, by_alias=not _validates_by_name(kind), warnings=False)


def load_model(kind: Any, plain: Any) -> Any:
    """The inverse of `dump_model`. In JSON mode, because a strict model accepts a str for a datetime only there."""
    data = encode(plain)
    if _validates_by_name(kind):
        return kind.model_validate_json(data, by_alias=False, by_name=True)
    return kind.model_validate_json(data)


@functools.cache
def _validates_by_name(kind: Any) -> bool:
    return "by_name" in inspect.signature(kind.model_validate_json).parameters  # pydantic 2.11 and later


def _to_json(value: Any) -> Any:
    """msgspec calls this for values of types that it does not know."""
    if is_model(type(value)):
        return dump_model(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, str):  # by the base's method: a subclass may override it
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"{type(value).__qualname__} is not data")


def _to_sorted_json(value: Any) -> Any:
    plain = _to_json(value)
    return _sort_sets(value, plain) if is_model(type(value)) else plain


def _from_json(annotation: Any, plain: Any) -> Any:
    """msgspec calls this for every annotation that it does not know."""
    kind = get_origin(annotation) or annotation
    if isinstance(kind, type):
        if is_model(kind):
            return load_model(kind, plain)
        if issubclass(kind, PurePath) and type(plain) is str:
            return kind(plain)
        if issubclass(kind, _SCALARS) and type(plain) in _SCALARS and issubclass(kind, type(plain)):
            return kind(plain)
        if isinstance(plain, kind):  # an abstract type, such as Iterable[int]
            return plain
    raise NotImplementedError(f"`{annotation}` is nothing that JSON can be read as")


# The JSON of a value, dicts in their own order. JSON may lose something: compare with what a decoder makes of it.
encode = msgspec.json.Encoder(enc_hook=_to_json).encode
_encode_sorted = msgspec.json.Encoder(enc_hook=_to_sorted_json, order="deterministic").encode


# ---- sets in an order that does not depend on the hash seed


def _sort_sets(value: Any, plain: Any) -> Any:
    """`plain`, which is `value` in JSON types, with every list that was a set in `value` sorted by its elements'
    JSON."""
    if getattr(type(value), "__pydantic_root_model__", False):
        value = value.root
    if isinstance(plain, list):
        if isinstance(value, set | frozenset):
            return sorted((_sort_sets(v, p) for v, p in zip(value, plain, strict=False)), key=_encode_sorted)
        parts = _field_values(value) if isinstance(value, msgspec.Struct) else value
        if isinstance(parts, list | tuple):
            tag = max(0, len(plain) - len(parts))  # of an array-like struct: the tag is no field
            return plain[:tag] + [_sort_sets(v, p) for v, p in zip(parts, plain[tag:], strict=False)]
        return plain
    if isinstance(plain, dict):
        if isinstance(value, dict):  # by position: keys have become strings
            return {k: _sort_sets(v, plain[k]) for k, v in zip(plain, value.values(), strict=False)}
        return plain | {k: _sort_sets(v, plain[k]) for k, v in _named_parts(value).items() if k in plain}
    return plain


def _field_values(struct: msgspec.Struct) -> list[Any]:
    return [getattr(struct, name) for name in struct.__struct_fields__]


def _named_parts(value: Any) -> dict[str, Any]:
    """The fields of an object by their names in its JSON."""
    kind: Any = type(value)
    if isinstance(value, msgspec.Struct):
        return dict(zip(value.__struct_encode_fields__, _field_values(value), strict=True))
    if is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    if is_model(kind):
        by_name = _validates_by_name(kind)
        return {
            name if by_name else (info.serialization_alias or name): getattr(value, name)
            for name, info in getattr(kind, "model_fields", {}).items()
        }
    return {a.name: getattr(value, a.name) for a in getattr(kind, "__attrs_attrs__", ())}


_ORDERED = (
    msgspec.inspect.StrType,
    msgspec.inspect.IntType,
    msgspec.inspect.FloatType,
    msgspec.inspect.BytesType,
    msgspec.inspect.DateType,
    msgspec.inspect.UUIDType,
    msgspec.inspect.DecimalType,
)


def has_unordered_sets(annotation: Any) -> bool:
    """Whether values of `annotation` may contain sets that `<` does not sort completely."""
    seen: set[int] = set()
    kept = []  # keeps the objects alive, so that no id in `seen` is used again
    pending: list[Any] = [msgspec.inspect.type_info(annotation)]
    while pending:
        part = pending.pop()
        if isinstance(part, tuple):
            pending.extend(part)
        elif isinstance(part, msgspec.Struct) and id(part) not in seen:
            seen.add(id(part))
            kept.append(part)
            if isinstance(part, msgspec.inspect.SetType | msgspec.inspect.FrozenSetType) and not isinstance(
                part.item_type, _ORDERED
            ):
                return True
            pending.extend(_field_values(part))
    return False
