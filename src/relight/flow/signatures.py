"""A function's parameters and result: resolved annotations, and arguments bound to parameters.

`Slots` binds like `inspect.Signature.bind`, which is the reference in the tests, in a fraction of its time: a step's
arguments are bound on every call that passes an argument by keyword or leaves one to its default.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, Final, NamedTuple, Unpack, get_args, get_origin, get_type_hints


class _Unpassed:
    """The type of `UNPASSED`."""

    def __repr__(self) -> str:
        return "<not passed>"


UNPASSED: Final = _Unpassed()


class Slot(NamedTuple):
    """One parameter. `annotation` is of the whole slot: list[int] for `*args: int`. `default` may be UNPASSED."""

    name: str
    annotation: Any
    default: Any


class Slots:
    """The parameters of `fn`, and how a call's arguments are bound to them.

    `slots` has the positional parameters first (there are `positional` of them), then `*args`, the keyword-only
    parameters, `**kwargs`.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.signature = signature_of(fn)
        order: dict[Any, int] = {
            Parameter.VAR_POSITIONAL: 1,
            Parameter.KEYWORD_ONLY: 2,
            Parameter.VAR_KEYWORD: 3,
        }
        parameters = sorted(self.signature.parameters.values(), key=lambda p: order.get(p.kind, 0))
        kinds = [parameter.kind for parameter in parameters]
        self.slots = [_slot(fn, parameter) for parameter in parameters]
        self.positional = sum(kind not in order for kind in kinds)
        self.required = sum(slot.default is UNPASSED for slot in self.slots[: self.positional])
        self.takes_only_positional = self.positional == len(kinds)
        self._takes_more = Parameter.VAR_POSITIONAL in kinds
        self._takes_any_keyword = Parameter.VAR_KEYWORD in kinds
        # For each slot: its keyword (None if it is positional-only), and whether it is required.
        expected = [
            (None if kind is Parameter.POSITIONAL_ONLY else slot.name, slot.default is UNPASSED)
            for kind, slot in zip(kinds, self.slots, strict=True)
        ]
        self._positional = expected[: self.positional]
        self._keyword_only = [e for e, kind in zip(expected, kinds, strict=True) if kind is Parameter.KEYWORD_ONLY]
        self._keywords = frozenset(keyword for keyword, _ in self._positional + self._keyword_only)

    def fill(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """One value per slot, UNPASSED where the default applies. TypeError if the call does not fit."""
        values: list[Any] = [*args[: self.positional]]
        taken = _take(self._positional[len(args) :], kwargs, values)
        if self._takes_more:
            values.append(list(args[self.positional :]))
        elif len(args) > self.positional:
            taken = _MISFIT
        if self._keyword_only:
            taken += _take(self._keyword_only, kwargs, values)
        if self._takes_any_keyword:
            rest = {keyword: value for keyword, value in kwargs.items() if keyword not in self._keywords}
            taken += len(rest)
            values.append(rest)
        if taken != len(kwargs):  # a keyword is unknown, or was given by position as well
            self.signature.bind(*args, **kwargs)  # raises with the message that Python users know
            raise TypeError("the arguments do not fit")
        return values

    def spread(self, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inverse of `fill`: arguments for a call of the function. `values` are complete, defaults included."""
        if self.takes_only_positional:
            return tuple(values), {}
        args = tuple(values[: self.positional])
        rest = values[self.positional :]
        if self._takes_more:
            args += tuple(rest.pop(0))
        kwargs: dict[str, Any] = rest.pop() if self._takes_any_keyword else {}
        names = (slot.name for slot in self.slots[self.positional + self._takes_more :])
        return args, dict(zip(names, rest, strict=False)) | kwargs


_MISFIT = -sys.maxsize


def _take(expected: list[tuple[str | None, bool]], kwargs: Mapping[str, Any], values: list[Any]) -> int:
    """Append the expected arguments from `kwargs` to `values`. Return their number, or _MISFIT if one is missing."""
    taken = 0
    for keyword, required in expected:
        value = UNPASSED if keyword is None else kwargs.get(keyword, UNPASSED)
        if value is not UNPASSED:
            taken += 1
        elif required:
            return _MISFIT
        values.append(value)
    return taken


def resolve(fn: Callable[..., Any], annotation: Any) -> Any:
    """`annotation` of `fn` with its names looked up; unchanged if one of the names cannot be found (yet)."""
    if annotation is Parameter.empty:
        return Any

    def holder() -> None: ...

    inner = inspect.unwrap(getattr(fn, "func", fn))  # of a functools.partial, of a decorated function
    names = {parameter.__name__: parameter for parameter in getattr(inner, "__type_params__", ())}
    code = getattr(inner, "__code__", None)
    for name, cell in zip(code.co_freevars if code else (), getattr(inner, "__closure__", None) or (), strict=False):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    holder.__annotations__ = {"it": annotation}
    try:
        hints = get_type_hints(holder, getattr(inner, "__globals__", {}), names, include_extras=True)
    except BaseException:  # noqa: BLE001 - annotations are arbitrary code
        return annotation
    return hints["it"]


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """As `inspect.signature`, but annotations may name what is defined later."""
    if sys.version_info >= (
        3,
        14,
    ):  # inspect.signature evaluates the annotations, and one unknown name would make it fail
        import annotationlib  # noqa: PLC0415 - new in 3.14

        return inspect.signature(fn, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(fn)


def _slot(fn: Callable[..., Any], parameter: Parameter) -> Slot:
    annotation = resolve(fn, parameter.annotation)
    default = UNPASSED if parameter.default is Parameter.empty else parameter.default
    if parameter.kind is Parameter.VAR_POSITIONAL:
        default = []
        annotation = list[annotation]  # type: ignore[valid-type] # built at run time
    elif parameter.kind is Parameter.VAR_KEYWORD:
        default = {}
        unpacked = get_args(annotation) if get_origin(annotation) is Unpack else ()
        annotation = unpacked[0] if unpacked else dict[str, annotation]  # type: ignore[valid-type] # as above
    return Slot(parameter.name, annotation, default)
