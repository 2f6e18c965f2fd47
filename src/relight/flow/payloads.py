"""Payloads: values on their way into the journal and back.

Rule 10: a payload is data. It is JSON, typed by the annotations of the function it belongs to. A value that would come
back changed is refused here, when it is journaled: at recovery it would be too late.

    ValueCodec       one value by one annotation: a step's result, a signal's payload
    ArgumentsCodec   a call's arguments by the signature: a flow's input, the digest of a step's input
    record_error, rebuild_error   exceptions (see `error_records`)

`seal` returns the value as it will come back, decoded from the bytes that are journaled. The engine gives the flow
that value, so that a flow sees the same live and replayed. "The same" is decided by `==`: a field that a class
leaves out of its comparison may be lost, and an IntEnum without an annotation comes back (live, too) as the int
that it equals. A set comes back equal, but with its elements in any order: sort it before a flow iterates over it.

The code of users' types (`__post_init__`, validators, `__eq__`) is called here by the engine, not by a flow or step. A
SystemExit in it would end each process that takes the run up, for ever: every BaseException becomes a PayloadError.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ForwardRef, Union, get_args, get_origin
from zlib import crc32

import msgspec

from relight.errors import PayloadError
from relight.flow.error_records import rebuild_error, record_error
from relight.flow.fingerprint import fast_md5, text_digest
from relight.flow.jsonform import canonical, decoder, encode, has_unordered_sets
from relight.flow.signatures import UNPASSED, Slots
from relight.flow.survival import ForeignSearch, Loss, find_difference, same
from relight.model.journal import ErrorRecord
from relight.model.text import error_message, reason_of, shown

__all__ = ["ArgumentsCodec", "ErrorRecord", "ValueCodec", "rebuild_error", "record_error"]

_NULL = b"null"
_UNLIMITED = sys.maxsize
_PLAIN = frozenset({type(None), bool, int, str, float})  # exact types that JSON has (of the floats, the finite ones)


class ValueCodec:
    """Seals and opens values of one annotation; `what` names them in messages: "result of step 'charge'".

    The annotation is read on first use, because it may name what is defined later. An annotation that msgspec cannot
    use (an unresolved name, a union of two dataclasses) counts as Any; messages then say why.
    """

    __slots__ = ("_as_is", "_decode", "_unordered", "_unusable", "annotation", "what")

    def __init__(self, annotation: Any, what: str) -> None:
        self.annotation = Any if annotation is inspect.Parameter.empty else annotation
        self.what = what
        self._as_is: frozenset[type] = frozenset()  # exact types that survive for certain, without a check
        self._decode: Callable[[bytes], Any] | None = None
        self._unusable = ""  # why the annotation counts as Any
        self._unordered = False

    def seal(self, value: Any, max_bytes: int = _UNLIMITED) -> tuple[bytes, Any]:
        """JSON of `value`, and the value that `open` makes of it; PayloadError if the two are not the same."""
        if type(value) in self._as_is:
            if value is None:
                return _NULL, None
            if type(value) is not float or value - value == 0.0:  # NaN and infinities give NaN
                try:
                    data = encode(value)
                except (UnicodeEncodeError, ValueError) as error:  # half a surrogate pair; over 4,300 digits
                    raise self._refusal(value, error) from None
                if len(data) > max_bytes:
                    raise _too_large(f"{self.name} is", len(data), max_bytes)
                return data, value
        try:
            return self._seal_by_annotation(value, max_bytes)
        except PayloadError:
            raise
        except BaseException as error:
            raise self._lost(Loss("", reason_of(error))) from error

    def open(self, data: bytes | msgspec.Raw) -> Any:
        """The value from the bytes that `seal` wrote. PayloadError if the annotation no longer fits it."""
        try:
            return (self._decode or self._prepare())(data)
        except BaseException as error:
            kind, why = self._named_annotation(), reason_of(error)
            raise PayloadError(f"{self.name} does not read back as {kind}: {why}; was it changed?") from error

    def seal_canonically(self, value: Any, max_bytes: int = _UNLIMITED) -> bytes:
        """As `seal`, in bytes that are equal for equal values: sorted keys and sets, and `1` for a float as `1.0`."""
        _, back = self.seal(value, max_bytes)
        try:
            return canonical(back, careful=self._unordered)
        except BaseException as error:
            raise self._lost(Loss("", reason_of(error))) from error

    def written(self, value: Any) -> bytes:
        """The same bytes as `outline` for most values that it accepts, at a fraction of the cost."""
        if self._decode is None:
            self._prepare()
        return canonical(value, careful=self._unordered)

    def outline(self, value: Any) -> bytes:
        """Canonical JSON of a value that is only compared and never read back: a step's argument.

        Every value that is data is accepted, whatever the annotation says; PayloadError for all others.
        """
        decode = self._decode or self._prepare()
        try:
            data = canonical(value, careful=self._unordered)
            # The value is nearly always plain JSON, and may be large (an agent's whole conversation). This comparison
            # takes a tenth of the time of same().
            if _open_anything(data) == value or same(value, decode(data)):
                return data
        except BaseException:  # noqa: BLE001 - the search below finds the cause, or accepts
            pass
        try:
            search = ForeignSearch(bare=True)
            if not (loss := search.run(value)):
                return canonical(value, careful=search.saw_set)
        except BaseException as error:
            raise self._lost(Loss("", reason_of(error))) from error
        raise self._lost(loss)

    # ---- by annotation

    def _seal_by_annotation(self, value: Any, max_bytes: int) -> tuple[bytes, Any]:
        decode = self._decode or self._prepare()
        try:
            data = encode(value)
        except Exception as error:
            raise self._refusal(value, error) from error
        if len(data) > max_bytes:
            raise _too_large(f"{self.name} is", len(data), max_bytes)
        try:
            back = decode(data)
        except Exception as error:
            raise self._refusal(value, error) from error
        if not same(value, back) and (loss := find_difference(value, back)):
            raise self._lost(loss)
        return data, back

    def _prepare(self) -> Callable[[bytes], Any]:
        annotation = self.annotation
        try:
            if isinstance(annotation, str | ForwardRef):
                raise TypeError("it names what cannot be found")
            decode = decoder(annotation)
            self._unordered = has_unordered_sets(annotation)
        except BaseException as error:  # noqa: BLE001 - msgspec and users' metaclasses raise anything; Any serves
            self._unusable = reason_of(error)
            annotation = Any
            decode = decoder(Any)
        self._decode = decode
        self._as_is = _kinds_as_is(annotation)
        return decode

    # ---- refusals

    @property
    def name(self) -> str:
        """The name of the value in messages."""
        return self.what

    def place(self, path: str) -> str:
        """The beginning of a message about the part of the value at `path`."""
        return f"{self.what} cannot be journaled: at ${path}"

    def _refusal(self, value: Any, error: Exception) -> PayloadError:
        """The error for a `value` that cannot be written or read again. It names the part that is the cause."""
        if loss := ForeignSearch(bare=False).run(value):
            return self._lost(loss)
        if isinstance(error, RecursionError):
            return self._lost(Loss("", "it is nested too deeply; journal a flatter value"))
        message = error_message(error)
        if not isinstance(error, msgspec.ValidationError):
            return self._lost(Loss("", message))
        found = re.fullmatch(r"(.*) - at `\$(.*)`", message, re.DOTALL)
        expected, path = found.groups() if found else (message, "")
        return self._lost(Loss(path, f"{expected}, so it does not match its annotation {self._named_annotation()}"))

    def _lost(self, loss: Loss) -> PayloadError:
        unusable = (
            f" (the annotation {self._named_annotation()} is of no help: {self._unusable})" if self._unusable else ""
        )
        return PayloadError(f"{self.place(loss.path)}: {loss.reason}{unusable}")

    def _named_annotation(self) -> str:
        annotation = self.annotation
        if isinstance(annotation, str | ForwardRef):
            return annotation if isinstance(annotation, str) else annotation.__forward_arg__
        return annotation.__qualname__ if isinstance(annotation, type) else shown(annotation)


def _too_large(what_is: str, size: int, max_bytes: int) -> PayloadError:
    return PayloadError(
        f"{what_is} too large to be journaled: {size:,} bytes of JSON, payload.max_bytes is {max_bytes:,}; "
        "store the data elsewhere and journal where it is, or raise payload.max_bytes"
    )


def _kinds_as_is(annotation: Any) -> frozenset[type]:
    """The exact types of which every value comes back through `annotation` as itself."""
    if annotation is Any or annotation is object:
        return _PLAIN
    if annotation is None:
        return frozenset({type(None)})
    if get_origin(annotation) is Annotated:
        inner, *extras = get_args(annotation)
        return frozenset() if any(isinstance(extra, msgspec.Meta) for extra in extras) else _kinds_as_is(inner)
    if get_origin(annotation) in (Union, types.UnionType):
        return frozenset().union(*(_kinds_as_is(arg) for arg in get_args(annotation)))
    return frozenset({annotation}) & _PLAIN if isinstance(annotation, type) else frozenset()


class _ArgumentCodec(ValueCodec):
    """The codec of one parameter of the function `what`."""

    __slots__ = ("parameter",)

    def __init__(self, annotation: Any, what: str, parameter: str) -> None:
        super().__init__(annotation, what)
        self.parameter = parameter

    @property
    def name(self) -> str:
        return f"argument {self.parameter!r} of {self.what}"

    def place(self, path: str) -> str:
        return f"argument $.{self.parameter}{path} of {self.what} cannot be journaled"


class ArgumentsCodec:
    """Seals, opens and digests the arguments of `fn`; `what` names it: "flow 'checkout'".

    The signature is read on first use, because its annotations may name what is defined later.
    """

    __slots__ = ("_codecs", "_defaults", "_fewest", "_most", "_slots", "fn", "volatile", "what")

    def __init__(self, fn: Callable[..., Any], what: str, volatile: frozenset[str] = frozenset()) -> None:
        self.fn = fn
        self.what = what
        self.volatile = volatile  # parameters that are no part of a digest
        self._slots: Slots | None = None
        self._codecs: list[_ArgumentCodec] = []
        self._defaults: tuple[Any, ...] = ()  # one per slot, as digests use it
        # A call with so many positional arguments is complete. If some slot takes no positional argument, no number is.
        self._fewest = 0
        self._most = -1

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Parameter names and values, defaults included. PayloadError if the call does not fit."""
        slots, values = self._fill(args, kwargs)
        return {
            slot.name: slot.default if value is UNPASSED else value
            for slot, value in zip(slots.slots, values, strict=True)
        }

    def seal(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], max_bytes: int = _UNLIMITED) -> bytes:
        """The arguments as a JSON object: equal bytes for equal calls, with arguments by position or by keyword.

        Strict: a value that does not match its annotation is refused. A default that is no data (a client,
        for example) and was not passed is left out: `open` gets it from the signature again.
        """
        slots, values = self._fill(args, kwargs)
        sealed = {}
        for slot, codec, value in zip(slots.slots, self._codecs, values, strict=True):
            try:
                passed = slot.default if value is UNPASSED else value
                sealed[slot.name] = msgspec.Raw(codec.seal_canonically(passed, max_bytes))
            except PayloadError:
                if value is not UNPASSED:
                    raise
        data = canonical(sealed)
        if len(data) > max_bytes:
            raise _too_large(f"the arguments of {self.what} are", len(data), max_bytes)
        return data

    def open(self, data: bytes | msgspec.Raw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for a call of the function, from the bytes of `seal`. PayloadError if they no longer fit."""
        slots = self._slots or self._prepare()
        try:
            sealed = _open_object(data)
        except msgspec.MsgspecError as error:
            raise PayloadError(f"the arguments of {self.what} do not read back: {error}") from error
        values = []
        for slot, codec in zip(slots.slots, self._codecs, strict=True):
            found = sealed.pop(slot.name, None)
            if found is None and slot.default is UNPASSED:
                raise PayloadError(f"{self._signature()}, and the recorded arguments lack {slot.name!r}")
            values.append(slot.default if found is None else codec.open(found))
        if sealed:
            raise PayloadError(f"{self._signature()}, and the recorded arguments hold {', '.join(map(repr, sealed))}")
        return slots.spread(values)

    def digest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], recorded: str = "") -> str:
        """16 hex digits of this call's arguments; the same for arguments by position and by keyword. `recorded` is the
        digest of the recorded call, which this one repeats: if it is equal, the arguments are known to be data.

        Lenient: every value that is data is accepted (a tuple for a list, a Decimal without annotation), because
        the arguments are never read back. NaN, unknown classes, and sets and int keys without an annotation are
        refused nevertheless.
        """
        return self.digests(args, kwargs, recorded)[0]

    def digests(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], recorded: str = ""
    ) -> tuple[str, tuple[int, ...]]:
        """`digest`, and the parts: a short digest of each argument, in the order of the parameters. If the digest
        differs on replay, the parts show which argument has changed. This makes the parts only where they cost little
        beside the rest: see `parts` for plain values."""
        values: Any
        if not kwargs and self._fewest <= len(args) <= self._most and not self.volatile:
            values = args + self._defaults[len(args) :]  # the same as _values() for nearly every call
        else:
            values = self._values(args, kwargs)
        if not values:
            return _NO_ARGUMENTS, ()
        for value in values:
            if type(value) not in _PLAIN or (type(value) is float and value - value != 0.0):
                break
        else:
            try:
                return fast_md5(encode(values)).hexdigest()[:16], ()  # text_digest(), inlined: every step is here
            except (UnicodeEncodeError, ValueError):
                pass  # refused below, with the argument's name
        if recorded and recorded == self._written(values):
            return recorded, ()
        written = list(map(_ArgumentCodec.outline, self._codecs, values))
        parts = tuple(map(crc32, written)) if len(written) > 1 else ()
        return text_digest(b"[" + b",".join(written) + b"]"), parts

    def parts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """The parts of two or more arguments that are all plain values. `digests` does not make them: they would cost a
        step that does nothing 4 % of its time."""
        values = self._values(args, kwargs)
        if len(values) < 2 or not all(type(value) in _PLAIN for value in values):
            return ()
        return tuple(map(crc32, map(encode, values)))

    def _values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """One value per parameter, as the digest uses it."""
        values: Any
        if not kwargs and self._fewest <= len(args) <= self._most:
            values = args + self._defaults[len(args) :]
        else:
            _, filled = self._fill(args, kwargs)
            values = [d if v is UNPASSED else v for v, d in zip(filled, self._defaults, strict=True)]
        if self.volatile:
            names = [slot.name for slot in (self._slots or self._prepare()).slots]
            values = [None if name in self.volatile else v for name, v in zip(names, values, strict=True)]
        return values  # type: ignore[no-any-return]  # a tuple or a list

    def _written(self, values: Sequence[Any]) -> str:
        """The digest of arguments that are known to be data."""
        try:
            return text_digest(b"[" + b",".join(map(_ArgumentCodec.written, self._codecs, values)) + b"]")
        except BaseException:  # noqa: BLE001 - they are no data: `digest` raises, with the name
            return ""

    def _fill(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Slots, list[Any]]:
        slots = self._slots or self._prepare()
        try:
            return slots, slots.fill(args, kwargs)
        except TypeError as error:
            raise PayloadError(f"{self._signature()}: {error}") from None

    def _prepare(self) -> Slots:
        slots = Slots(self.fn)
        self._codecs = [_ArgumentCodec(slot.annotation, self.what, slot.name) for slot in slots.slots]
        pairs = zip(self._codecs, slots.slots, strict=True)
        self._defaults = tuple(_data_or_none(codec, slot.default) for codec, slot in pairs)
        self._fewest = slots.required
        self._most = slots.positional if slots.takes_only_positional else -1
        self._slots = slots
        return slots

    def _signature(self) -> str:
        return f"{self.what} takes {(self._slots or self._prepare()).signature}"


def _data_or_none(codec: ValueCodec, default: Any) -> Any:
    """A default that is no data counts as null in a digest. It is no error, because no caller passed it."""
    try:
        codec.outline(default)
    except PayloadError:
        return None
    return default


_NO_ARGUMENTS = text_digest(b"[]")
_open_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_open_anything = msgspec.json.Decoder().decode
