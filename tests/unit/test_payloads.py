"""Payloads: a journaled value comes back as it was, both live and on replay, or it is refused and the error names its place."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import subprocess
import sys
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict, TypeVar, Unpack

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.errors import PayloadError
from relight.flow.payloads import ArgumentsCodec, ValueCodec

T = TypeVar("T")
NAN = float("nan")
INF = float("inf")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Shape(enum.Enum):
    POINT = (0, 0)


@dataclasses.dataclass
class Item:
    sku: str
    price: float = 0.0
    tags: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class Order:
    id: int
    items: list[Item] = dataclasses.field(default_factory=list)
    note: str | None = None


@dataclasses.dataclass
class RushOrder(Order):
    hours: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int


@dataclasses.dataclass(eq=False)
class Mute:
    """Compares by identity, so that equality cannot show whether it survives."""

    value: Any
    when: datetime | None = None


@dataclasses.dataclass
class Node:
    name: str
    children: list[Node] = dataclasses.field(default_factory=list)
    parent: Any = None


@dataclasses.dataclass
class Box(Generic[T]):
    content: T


class Money(msgspec.Struct):
    amount: Decimal
    currency: str = "EUR"


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True):
    tricks: list[str]


class Pair(NamedTuple):
    left: int
    right: str


class Options(TypedDict):
    limit: int
    label: NotRequired[str]


class Address(pydantic.BaseModel):
    street: str
    zip_code: int = pydantic.Field(alias="zipCode")
    since: datetime | None = None
    marks: set[str] = set()

    @pydantic.computed_field  # type: ignore[prop-decorator] # mypy knows no decorated property
    @property
    def label(self) -> str:
        return f"{self.street} {self.zip_code}"


class StrictEvent(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    at: datetime
    ratio: float | None = None

    @pydantic.computed_field  # type: ignore[prop-decorator] # mypy knows no decorated property
    @property
    def year(self) -> int:
        return self.at.year


@dataclasses.dataclass
class Customer:
    name: str
    address: Address
    others: list[Address] = dataclasses.field(default_factory=list)


class UserId(str):
    __slots__ = ()


Cents = NewType("Cents", int)


class Unknown:
    pass


def kind_of(parameter: Any) -> str:
    return type(parameter).__name__


def refusal(annotation: Any, value: Any, what: str = "result of step 'charge'") -> str:
    codec = ValueCodec(annotation, what)
    with pytest.raises(PayloadError) as first:
        codec.seal(value)
    with pytest.raises(PayloadError) as again:  # the annotation is known now, and plain values take a shortcut
        codec.seal(value)
    assert str(again.value) == str(first.value)
    return str(again.value)


def sealed(annotation: Any, value: Any) -> Any:
    """Seal and open a value. Live code must go on with the same value that replay finds."""
    codec = ValueCodec(annotation, "it")
    data, live = codec.seal(value)
    assert codec.seal(value)[0] == data  # the annotation is known now, and plain values take a shortcut
    replayed = ValueCodec(annotation, "it").open(data)
    assert type(live) is type(replayed)
    if "Mute" not in repr(value):  # these compare by identity
        assert live == replayed
    return replayed


# ---- values that survive


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Any, None),
        (None, None),
        (Any, True),
        (bool, False),
        (Any, 1),
        (int, 2**200),
        (Any, -(2**64) - 1),
        (int | None, None),
        (Any, "é\x00\u2028😀"),
        (Any, 1.5),
        (float, -0.0),
        (float | None, 5e-324),
        (Any, {"a": [1, {"b": None}], "": []}),
        (object, [1]),
        (Order, Order(1, [Item("a", 1.5, {"x", "y"}), Item("b")], "hi")),
        (list[Order], [Order(1)]),
        (dict[str, Order], {"k": Order(1)}),
        (Order | None, Order(1)),
        (Point, Point(1, 2)),
        (frozenset[Point], frozenset({Point(1, 2), Point(2, 1)})),
        (Node, Node("root", [Node("a"), Node("b", [Node("c")])])),
        (Box[int], Box(1)),
        (Box[set[int]], Box({1, 2})),
        (Money, Money(Decimal("1.10"))),
        (Cat | Dog, Dog(["sit"])),
        (Pair, Pair(1, "x")),
        (Options, {"limit": 1}),
        (Options, {"limit": 1, "label": "x"}),
        (datetime, datetime(2026, 11, 15, 12, tzinfo=UTC)),
        (datetime, datetime(2026, 11, 15, 12, 0, 0, 123456)),  # noqa: DTZ001 - naive ones survive as well
        (datetime, datetime(2026, 11, 15, tzinfo=timezone(timedelta(hours=-3, minutes=-30)))),
        (date, date(2026, 11, 15)),
        (time, time(1, 2, 3)),
        (timedelta, timedelta(days=-1, microseconds=1)),
        (uuid.UUID, uuid.UUID(int=7)),
        (Decimal, Decimal("-0E+5")),
        (Color, Color.BLUE),
        (dict[Color, int], {Color.RED: 1, Color.BLUE: 2}),
        (set[Color], {Color.RED, Color.BLUE}),
        (Level, Level.LOW),
        (bytes, b"\xff\x00"),
        (tuple[int, str], (1, "x")),
        (tuple[int, ...], (1, 2, 3)),
        (set[int], {3, 1}),
        (frozenset[str], frozenset({"a"})),
        (set[frozenset[int]], {frozenset({1}), frozenset({2, 3})}),
        (dict[int, str], {1: "a", -2: "b"}),
        (dict[uuid.UUID, int], {uuid.UUID(int=1): 1}),
        (dict[str, list[tuple[date, Decimal]]], {"x": [(date(2026, 1, 1), Decimal("0.1"))]}),
        (Literal["a", "b"], "a"),
        (int | str | list[int] | None, [1]),
        (Annotated[int, "cents"], 5),
        (Annotated[int, msgspec.Meta(gt=0)], 5),
        (Cents, Cents(5)),
        (Address, Address(street="Elm", zipCode=1, since=datetime(2026, 1, 1, tzinfo=UTC), marks={"a", "b"})),
        (Address | None, None),
        (StrictEvent, StrictEvent(at=datetime(2026, 1, 1, tzinfo=UTC))),
        (Customer, Customer("Ann", Address(street="Elm", zipCode=1), [Address(street="Oak", zipCode=2)])),
        (dict[str, list[Address]], {"home": [Address(street="Elm", zipCode=1)]}),
        (Path, Path("/tmp/x")),
        (UserId, UserId("u1")),
        (Iterable[int], [1, 2]),
        (Sequence[int], [1, 2]),
        (list[T], [1]),  # type: ignore[valid-type] # a type variable of a generic step
    ],
    ids=kind_of,
)
def test_values_come_back_as_the_annotated_types(annotation: Any, value: Any):
    back = sealed(annotation, value)
    assert back == value
    assert type(back) is type(value)


def test_plain_values_are_returned_as_they_are_and_still_written():
    text = "x" * 1000
    data, live = ValueCodec(str, "it").seal(text)
    codec = ValueCodec(Any, "it")
    codec.seal(0)  # the first use prepares the codec
    again, live_again = codec.seal(text)
    assert live == text
    assert live_again is text
    assert data == again == msgspec.json.encode(text)


def test_a_number_comes_back_as_the_annotated_kind_live_too():
    data, live = ValueCodec(float, "it").seal(1)
    assert type(live) is float
    assert type(ValueCodec(float, "it").open(data)) is float


@pytest.mark.parametrize("value", [defaultdict(list, a=[1]), OrderedDict(a=[1])])
def test_what_equals_plain_data_is_plain_data_live_too(value: Any):
    _, live = ValueCodec(Any, "it").seal(value)
    assert type(live) is dict
    assert live == value


def test_a_class_that_compares_by_identity_is_accepted_if_nothing_is_lost():
    back = sealed(Mute, Mute({"a": [1]}, datetime(2026, 1, 1, tzinfo=UTC)))
    assert back.value == {"a": [1]}
    assert back.when == datetime(2026, 1, 1, tzinfo=UTC)
    assert len(sealed(list[Mute], [Mute(1), Mute(2)])) == 2


def test_a_class_that_compares_by_identity_is_refused_for_what_is_lost():
    assert "at $.value: NaN" in refusal(Mute, Mute(NAN))
    assert "at $[1].value: a tuple would come back as a list" in refusal(list[Mute], [Mute(1), Mute((1, 2))])
    assert "at $.value: a Mute would come back as a dict" in refusal(Mute, Mute(Mute(1)))


def test_decimal_nan_survives_by_annotation():
    assert sealed_nan(Decimal("NaN")).is_nan()
    assert sealed_nan(Decimal("sNaN")).is_snan()


def sealed_nan(value: Decimal) -> Any:
    data, _ = ValueCodec(list[Decimal], "it").seal([value])
    return ValueCodec(list[Decimal], "it").open(data)[0]


# ---- values that do not


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (Any, NAN, "at $: NaN does not survive JSON (it would come back as null)"),
        (float, INF, "at $: Infinity does not survive"),
        (float | None, -INF, "at $: -Infinity does not survive"),
        (float | None, NAN, "at $: NaN"),
        (Any, {"items": [0, {"price": NAN}]}, "at $.items[1].price: NaN"),
        (Order, Order(1, [Item("a"), Item("b", NAN)]), "at $.items[1].price: NaN"),
        (list[float | None], [None, NAN], "at $[1]: NaN"),
        (set[float], {NAN}, "at $[0]: NaN"),
        (StrictEvent, StrictEvent(at=datetime(2026, 1, 1, tzinfo=UTC), ratio=NAN), "at $.ratio: NaN"),
        (Any, {1, 2}, "at $: a set would come back as a list; annotate it as set[...]"),
        (Any, [frozenset()], "at $[0]: a frozenset would come back as a list"),
        (Any, (1, 2), "at $: a tuple would come back as a list; annotate it as tuple[...], or use a list"),
        (list[int], (1, 2), "a tuple would come back as a list"),
        (Any, {"k": b"x"}, "at $.k: a bytes would come back as a str; annotate it as bytes"),
        (Any, Decimal("1.1"), "a Decimal would come back as a str"),
        (Any, datetime(2026, 1, 1, tzinfo=UTC), "a datetime would come back as a str"),
        (Any, [uuid.UUID(int=1)], "at $[0]: a UUID would come back as a str"),
        (Any, Color.RED, "a Color would come back as a str; annotate it as Color"),
        (Any, Order(1), "an Order would come back as a dict; annotate it as Order"),
        (Any, Address(street="Elm", zipCode=1), "an Address would come back as a dict"),
        (Order, RushOrder(1), "a RushOrder would come back as an Order; annotate it as RushOrder"),
        (Any, {1: "a"}, "at $: its key 1 is an int, and keys come back as str"),
        (Any, {"a": {None: 1}}, "at $.a: its key None is null, and keys come back as str"),
        (Any, {(1, 2): 1}, "at $: its key (1, 2) is a tuple"),
        (dict[bool, int], {True: 1}, "at $: its key True is a bool"),
        (dict[float, int], {NAN: 1}, "at $: of its key nan: NaN"),
        (Any, {1: "a", "1": "b"}, "its key 1 is an int"),
        (Any, [Unknown()], "at $[0]: tests.unit.test_payloads.Unknown is an unknown class, not data"),
        (Unknown, Unknown(), "Unknown is an unknown class"),
        (Any, {"weird key": [1j]}, "at $['weird key'][0]: complex is an unknown class"),
        (Any, (x for x in [1]), "a generator is not data; use a list"),
        (Any, "a\ud800", "at $: the str has half a surrogate pair at position 1"),
        (str, "\udfff", "half a surrogate pair"),
        (Any, {"k": ["\ud800"]}, "at $.k[0]: the str has half a surrogate pair"),
        (Any, {"\ud800": 1}, "at $: of its key '\\ud800': the str has half"),
        (int, 10**5000, "at $: an int of 16610 bits is too long"),
        (Any, [10**5000], "at $[0]: an int of 16610 bits is too long"),
        (int, "5", "at $: Expected `int`, got `str`, so it does not match its annotation int"),
        (int, True, "does not match its annotation int"),
        (None, 1, "does not match its annotation None"),
        (Order, Order("x", []), "at $.id: Expected `int`, got `str`, so it does not match its annotation Order"),  # type: ignore[arg-type] # on purpose
        (Order, {"id": 1}, "a dict would come back as an Order, since its annotation says so"),
        (Order, Order(1, [Item("a", tags=[])]), "at $.items[0].tags: a list would come back as a set"),  # type: ignore[arg-type] # on purpose
        (float, 2**53 + 1, "an int would come back as a float"),
        (Literal["a"], "b", "does not match its annotation"),
        (Annotated[int, msgspec.Meta(gt=0)], 0, "Expected `int` >= 1"),
        (Options, {"limit": 1, "extra": 2}, "its key 'extra' is not in its annotation and would be dropped"),
        (Shape, Shape.POINT, "at $: a Shape would come back as a list; annotate it as Shape"),
        (Sequence[int], range(3), "range is an unknown class"),
        (Any, msgspec.UNSET, "UnsetType is an unknown class"),
        (Any, msgspec.Raw(b"]"), "Raw is an unknown class"),
        (Any, ValueError("x"), "ValueError is an unknown class"),
        (Any, len, "builtin_function_or_method is an unknown class"),
        (Any, Order, "type is an unknown class"),
    ],
    ids=kind_of,
)
def test_what_would_be_lost_is_refused_with_its_place(annotation: Any, value: Any, expected: str):
    message = refusal(annotation, value)
    assert message.startswith("result of step 'charge' cannot be journaled: at $")
    assert expected in message


def test_a_forgotten_await_is_named():
    async def work() -> None: ...

    coroutine = work()
    assert "was an `await` forgotten?" in refusal(Any, coroutine)
    coroutine.close()


def test_an_unusable_annotation_counts_as_any_and_says_why():
    assert sealed(Order | Item, {"id": 1}) == {"id": 1}
    message = refusal(Order | Item, Order(1))
    assert "an Order would come back as a dict" in message
    assert "is of no help: Type unions may not contain more than one dataclass" in message
    assert sealed("Nowhere", [1]) == [1]
    assert "(the annotation Nowhere is of no help: it names what cannot be found)" in refusal("Nowhere", (1,))
    assert "NotThere" in refusal(list["NotThere"], (1,))  # type: ignore[name-defined] # noqa: F821 - on purpose


def test_structures_that_contain_themselves_are_refused():
    loop: list[Any] = [1]
    loop.append({"again": loop})
    assert "at $[1].again: it contains itself: it is $ again" in refusal(Any, loop)
    child = Node("child")
    root = Node("root", [child])
    child.parent = root
    assert "at $.children[0].parent: it contains itself" in refusal(Node, root)


def test_bottomless_structures_are_refused():
    value: Any = None
    for _ in range(100_000):
        value = [value]
    assert "nested too deeply" in refusal(Any, value)
    codec = ArgumentsCodec(lambda x: x, "step 'f'")
    with pytest.raises(PayloadError, match="nested too deeply"):
        codec.digest((value,), {})
    while value:  # taken apart step by step: freeing it at once is a deep recursion, too
        value = value[0]


def test_the_size_is_limited():
    codec = ValueCodec(Any, "result of step 'load'")
    assert codec.seal("x" * 98, max_bytes=100)
    for value in ("x" * 99, ["x" * 97], {"k": 12345 * 10**100}):
        with pytest.raises(PayloadError, match=r"result of step 'load' is too large .* payload\.max_bytes"):
            codec.seal(value, max_bytes=100)
    with pytest.raises(PayloadError, match=r"1,002 bytes of JSON, payload\.max_bytes is 1,000"):
        codec.seal("x" * 1000, max_bytes=1000)


def test_what_no_longer_fits_its_annotation_is_told_when_opened():
    data, _ = ValueCodec(str, "it").seal("x")
    with pytest.raises(PayloadError, match="result of step 'a' does not read back as int: Expected `int`"):
        ValueCodec(int, "result of step 'a'").open(data)
    with pytest.raises(PayloadError, match="does not read back"):
        ValueCodec(Any, "it").open(b"{")


# ---- properties

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)
hashables = st.integers() | st.text() | st.booleans() | st.floats() | st.dates() | st.uuids() | st.none()
anything = st.recursive(
    hashables
    | st.binary()
    | st.decimals()
    | st.datetimes()
    | st.timedeltas()
    | st.sampled_from([Color.RED, Unknown()]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(hashables)
        | st.dictionaries(hashables, inner)
        | st.builds(Mute, inner)
    ),
    max_leaves=10,
)


def exactly_equal(a: Any, b: Any) -> bool:
    """Equal in type and value at every depth. This is what survival means, written in another way than in the code."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(exactly_equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(exactly_equal, a, b))
    return repr(a) == repr(b)


@given(plain)
def test_plain_json_always_survives(value: Any):
    data, live = ValueCodec(Any, "it").seal(value)
    assert exactly_equal(live, value)
    assert exactly_equal(ValueCodec(Any, "it").open(data), value)


@given(anything)
def test_without_annotation_a_value_survives_or_is_refused(value: Any):
    codec = ValueCodec(Any, "it")
    try:
        data, live = codec.seal(value)
    except PayloadError:
        return
    assert exactly_equal(live, value)
    assert exactly_equal(codec.open(data), value)


LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, st.integers()),
    (str, st.text(st.characters(exclude_categories=["Cs"]))),
    (bool, st.booleans()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (bytes, st.binary()),
    (date, st.dates()),
    (datetime, st.datetimes(timezones=st.none() | st.just(UTC))),
    (timedelta, st.timedeltas()),
    (uuid.UUID, st.uuids()),
    (Decimal, st.decimals(allow_nan=False)),
    (Color, st.sampled_from(Color)),
    (Point, st.builds(Point, st.integers(), st.integers())),
]


@st.composite
def typed(draw: Any, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    """An annotation and the values that belong to it."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(LEAVES))  # type: ignore[no-any-return] # draw is untyped
    origins: Any = {"list": list, "tuple": tuple, "dict": dict, "set": set, "frozenset": frozenset, "box": Box}
    annotation, values = draw(typed(depth - 1))
    key, keys = draw(st.sampled_from([leaf for leaf in LEAVES if leaf[0] in (int, str, date, uuid.UUID, Color)]))
    leaf, leaves = draw(st.sampled_from(LEAVES))
    wrapped = [
        (origins["list"][annotation], st.lists(values)),
        (origins["tuple"][annotation, ...], st.lists(values).map(tuple)),
        (origins["tuple"][annotation, leaf], st.tuples(values, leaves)),
        (annotation | None, st.none() | values),
        (origins["dict"][key, annotation], st.dictionaries(keys, values)),
        (origins["set"][leaf], st.sets(leaves)),
        (origins["frozenset"][leaf], st.frozensets(leaves)),
        (origins["box"][annotation], st.builds(Box, values)),
    ]
    return draw(st.sampled_from(wrapped))  # type: ignore[no-any-return] # draw is untyped


@given(st.data())
def test_values_of_an_annotation_survive_by_it(data: st.DataObject):
    annotation, values = data.draw(typed())
    value = data.draw(values)
    codec = ValueCodec(annotation, "it")
    written, live = codec.seal(value)
    assert live == value
    assert codec.open(written) == value
    argument = ArgumentsCodec(lambda x: x, "f")
    argument.fn.__annotations__["x"] = annotation
    (opened,), _ = argument.open(argument.seal((value,), {}))
    assert opened == value
    assert argument.digest((value,), {}) == argument.digest((), {"x": opened})


# ---- arguments


def checkout(order: Order, copies: int = 1, *, rush: bool = False, when: date = date(2026, 1, 1)) -> None: ...


def test_a_call_is_sealed_by_name_with_its_defaults():
    codec = ArgumentsCodec(checkout, "flow 'checkout'")
    data = codec.seal((Order(1),), {})
    assert data == b'{"copies":1,"order":{"id":1,"items":[],"note":null},"rush":false,"when":"2026-01-01"}'
    assert codec.seal((), {"copies": 1, "order": Order(1)}) == data
    assert codec.open(data) == ((Order(1), 1), {"rush": False, "when": date(2026, 1, 1)})
    assert codec.bind((Order(1),), {"rush": True}) == {
        "order": Order(1),
        "copies": 1,
        "rush": True,
        "when": date(2026, 1, 1),
    }


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, "missing a required argument: 'order'"),
        ((Order(1), 2, 3), {}, "too many positional arguments"),
        ((Order(1),), {"colour": 1}, "got an unexpected keyword argument 'colour'"),
        ((Order(1),), {"order": Order(1)}, "multiple values for argument 'order'"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_the_signature(args: Any, kwargs: Any, expected: str):
    codec = ArgumentsCodec(checkout, "flow 'checkout'")
    for use in (codec.bind, codec.seal, codec.digest):
        with pytest.raises(PayloadError) as caught:
            use(args, kwargs)
        assert str(caught.value).startswith("flow 'checkout' takes (order: 'Order', copies: 'int' = 1, *, rush")
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (
            (Order(1, [Item("a", NAN)]),),
            {},
            "argument $.order.items[0].price of flow 'checkout' cannot be journaled: NaN",
        ),
        ((Order(1), "2"), {}, "argument $.copies of flow 'checkout' cannot be journaled: Expected `int`, got `str`"),
        (
            ({"id": 1},),
            {},
            "argument $.order of flow 'checkout' cannot be journaled: a dict would come back as an Order",
        ),
        ((Order(1),), {"when": "2026-01-01"}, "argument $.when of flow 'checkout' cannot be journaled: a str would"),
    ],
)
def test_flow_input_is_checked_by_annotation(args: Any, kwargs: Any, expected: str):
    with pytest.raises(PayloadError) as caught:
        ArgumentsCodec(checkout, "flow 'checkout'").seal(args, kwargs)
    assert expected in str(caught.value)


def test_flow_input_is_limited_in_size():
    codec = ArgumentsCodec(lambda a, b: None, "flow 'f'")
    assert codec.seal(("x" * 30, "y" * 30), {}, max_bytes=100)
    with pytest.raises(PayloadError, match=r"argument 'a' of flow 'f' is too large .*payload\.max_bytes is 100"):
        codec.seal(("x" * 100, ""), {}, max_bytes=100)
    with pytest.raises(PayloadError, match=r"the arguments of flow 'f' are too large .*payload\.max_bytes is 100"):
        codec.seal(("x" * 60, "y" * 60), {}, max_bytes=100)


def test_variable_arguments_are_sealed_and_opened():
    def f(a: int, /, *more: date, key: str, **rest: Decimal) -> None: ...

    codec = ArgumentsCodec(f, "flow 'f'")
    args, kwargs = (1, date(2026, 1, 1)), {"key": "k", "a": Decimal("1.1")}
    data = codec.seal(args, kwargs)
    assert data == b'{"a":1,"key":"k","more":["2026-01-01"],"rest":{"a":"1.1"}}'
    assert codec.open(data) == (args, kwargs)
    with pytest.raises(PayloadError, match=r"argument \$\.more\[1\] of flow 'f'"):
        codec.seal((1, date(2026, 1, 1), "x"), {"key": "k"})

    def g(**options: Unpack[Options]) -> None: ...

    codec = ArgumentsCodec(g, "flow 'g'")
    assert codec.open(codec.seal((), {"limit": 1})) == ((), {"limit": 1})


def test_a_default_that_is_no_data_is_taken_from_the_signature():
    client = Unknown()

    def f(x: int, client: Any = client, timeout: float = "never") -> None: ...  # type: ignore[assignment] # as people write

    codec = ArgumentsCodec(f, "flow 'f'")
    assert codec.seal((1,), {}) == b'{"x":1}'
    assert codec.open(b'{"x":1}') == ((1, client, "never"), {})
    assert codec.digest((1,), {}) == codec.digest((), {"x": 1})
    with pytest.raises(PayloadError, match=r"argument \$\.client of flow 'f' .* unknown class"):
        codec.seal((1, Unknown()), {})


def test_arguments_of_a_changed_signature_say_what_has_changed():
    def before(a: int, b: int) -> None: ...
    def after(a: int, c: int = 3) -> None: ...
    def wider(a: int, b: int, c: int) -> None: ...
    def retyped(a: str, b: int) -> None: ...

    data = ArgumentsCodec(before, "flow 'f'").seal((1, 2), {})
    with pytest.raises(PayloadError, match=r"flow 'f' takes \(.*\) -> 'None', and the recorded arguments hold 'b'"):
        ArgumentsCodec(after, "flow 'f'").open(data)
    with pytest.raises(PayloadError, match="and the recorded arguments lack 'c'"):
        ArgumentsCodec(wider, "flow 'f'").open(data)
    with pytest.raises(PayloadError, match="argument 'a' of flow 'f' does not read back as str"):
        ArgumentsCodec(retyped, "flow 'f'").open(data)
    with pytest.raises(PayloadError, match="the arguments of flow 'f' do not read back"):
        ArgumentsCodec(before, "flow 'f'").open(b"[]")
    assert ArgumentsCodec(after, "flow 'f'").open(b'{"a":1}') == ((1, 3), {})


def test_equal_inputs_are_equal_bytes():
    def f(ratio: float, by_key: dict[str, int], kinds: set[Color], ids: dict[int, str]) -> None: ...

    codec = ArgumentsCodec(f, "flow 'f'")
    one = codec.seal((1, {"a": 1, "b": 2}, {Color.RED, Color.BLUE}, {1: "x", 2: "y"}), {})
    two = codec.seal((1.0, {"b": 2, "a": 1}, {Color.BLUE, Color.RED}, {2: "y", 1: "x"}), {})
    assert one == two
    assert codec.open(one)[0] == (1.0, {"a": 1, "b": 2}, {Color.RED, Color.BLUE}, {1: "x", 2: "y"})


def test_annotations_may_name_what_is_local_or_defined_later():
    @dataclasses.dataclass
    class Local:
        x: int

    def f(local: Local, unknown: Nowhere) -> Any:  # type: ignore[name-defined] # noqa: F821 - on purpose
        return Local

    codec = ArgumentsCodec(f, "flow 'f'")
    assert codec.open(codec.seal((Local(1), [1]), {})) == ((Local(1), [1]), {})
    with pytest.raises(PayloadError, match="the annotation Nowhere is of no help"):
        codec.seal((Local(1), (1,)), {})


# ---- digests of a step's arguments


def takes_three(x, y=2, *, z=None) -> None: ...


TAKES_THREE = ArgumentsCodec(takes_three, "step 'f'")


def digest_of(*args: Any, **kwargs: Any) -> str:
    """The digests of a codec's first use, and of its later uses."""
    digest = TAKES_THREE.digest(args, kwargs)
    assert ArgumentsCodec(takes_three, "step 'f'").digest(args, kwargs) == digest
    return digest


def test_a_digest_is_the_same_whether_or_not_one_was_recorded():
    """Replay tries the recorded digest first, in a cheaper way. That must not give another digest, and must not accept
    another call."""
    values = [
        [1, {"b": [2.5, None], "a": "é"}],
        (1, [2]),
        {"s": [True]},
        Decimal("1.5"),
        Color.RED,
        Path("a/b"),
        b"bytes",
    ]
    digests = [digest_of(value) for value in values]
    for value, digest in zip(values, digests, strict=True):
        for recorded in ("", "0" * 16, *digests):
            assert TAKES_THREE.digest((value,), {}, recorded) == digest
    for foreign in (NAN, {1: 2}, {1, 2}, object()):
        with pytest.raises(PayloadError):
            TAKES_THREE.digest((foreign,), {}, digests[0])


def test_a_call_has_one_digest_however_it_is_spelled():
    assert len(digest_of(1)) == 16
    assert digest_of(1) == digest_of(x=1) == digest_of(1, 2) == digest_of(y=2, x=1) == digest_of(1, z=None)
    assert digest_of([1]) == digest_of(x=[1]) == digest_of([1], 2)
    different = [1, 2, "1", 1.5, True, None, [1], {"a": 1}, "", [], {}, Decimal(1)]
    assert len({digest_of(x) for x in different}) == len(different) - 1  # a Decimal is written as a str
    assert digest_of(1, 3) != digest_of(1, z=3)

    simple = ArgumentsCodec(lambda x, y=2: None, "step 'f'")
    assert simple.digest((1,), {}) == simple.digest((), {"x": 1}) == simple.digest((1, 2), {})
    nothing = ArgumentsCodec(lambda: None, "step 'f'")
    assert nothing.digest((), {}) == nothing.digest((), {})


def test_arguments_of_steps_need_only_be_data():
    def f(numbers: list[int], order: Order | None = None) -> None: ...

    codec = ArgumentsCodec(f, "step 'f'")
    assert codec.digest(([1, 2],), {}) == codec.digest(((1, 2),), {})
    assert codec.digest((["a"], RushOrder(1)), {})
    for value in (
        Order(1, [Item("a", tags={"x"})]),
        Decimal("1.1"),
        b"x",
        Color.RED,
        Shape.POINT,
        Mute({1}),
        Path("x"),
    ):
        assert digest_of(value) == digest_of(x=value)
    assert digest_of(PurePosixPath("a")) == digest_of("a")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (NAN, "argument $.x of step 'f' cannot be journaled: NaN"),
        ([1, INF], "argument $.x[1] of step 'f' cannot be journaled: Infinity"),
        (Order(1, [Item("a", NAN)]), "argument $.x.items[0].price of step 'f'"),
        ({1}, "a set would come back as a list"),
        ([{"a": {1}}], "argument $.x[0].a of step 'f'"),
        ({1: 2}, "its key 1 is an int"),
        (Unknown(), "unknown class"),
        ([lambda: 1], "argument $.x[0] of step 'f' cannot be journaled: function is an unknown class"),
        ("\ud800", "surrogate"),
        (10**5000, "an int of 16610 bits"),
        (Mute(NAN), "argument $.x.value of step 'f'"),
        (StrictEvent(at=datetime(2026, 1, 1, tzinfo=UTC), ratio=NAN), "argument $.x.ratio of step 'f'"),
    ],
    ids=kind_of,
)
def test_arguments_that_are_no_data_are_refused_by_name(value: Any, expected: str):
    def simple(x) -> None: ...

    codec = ArgumentsCodec(simple, "step 'f'")
    for call in (
        lambda: digest_of(value),
        lambda: digest_of(x=value),
        lambda: codec.digest((value,), {}),
        lambda: codec.digest((value,), {}),
        lambda: codec.digest((), {"x": value}),
    ):
        with pytest.raises(PayloadError) as caught:
            call()
        assert expected in str(caught.value)


def test_sets_and_keys_with_an_annotation_are_data():
    def f(s: set[str], keys: dict[int, set[Color]]) -> None: ...

    codec = ArgumentsCodec(f, "step 'f'")
    one = codec.digest(({"a", "b"}, {1: {Color.RED}, 2: set()}), {})
    assert one == codec.digest((), {"keys": {2: set(), 1: {Color.RED}}, "s": {"b", "a"}})


HASH_SEED_SCRIPT = """
import dataclasses, enum
from typing import Any
import pydantic
from relight.flow.payloads import ArgumentsCodec

class Color(enum.Enum):
    RED = "red"; BLUE = "blue"; GREEN = "green"

@dataclasses.dataclass(frozen=True)
class Group:
    names: frozenset[str]
    sets: frozenset[frozenset[str]] = frozenset()

class Model(pydantic.BaseModel):
    names: set[str]

names = frozenset("alpha beta gamma delta epsilon".split())

def f(a: set[str], b: set[Color], c: set[frozenset[str]], d: set[Group], e: Model, f: dict[Color, set[str]], g, h: Any):
    pass

args = (set(names), set(Color), {frozenset({n, "x"}) for n in names}, {Group(names), Group(frozenset("ab"))},
        Model(names=names), {c: set(names) for c in Color},
        Group(names, frozenset(frozenset({n, "x"}) for n in names)), [Model(names=names)])
codec = ArgumentsCodec(f, "step 'f'")
print(codec.digest(args, {}))
"""


def test_digests_do_not_depend_on_the_process():
    digests = set()
    for seed in ("0", "1", "2", "3"):
        ran = subprocess.run(
            [sys.executable, "-c", HASH_SEED_SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        digests.add(ran.stdout)
    assert len(digests) == 1


# ---- binding is what Python does


@st.composite
def functions(draw: Any) -> Any:
    """A function with this signature that returns how its call was bound."""
    kinds = draw(st.lists(st.sampled_from(list(inspect._ParameterKind)), max_size=5))
    kinds = [k for i, k in enumerate(sorted(kinds)) if "VAR" not in k.name or k not in sorted(kinds)[:i]]
    parameters, defaults = [], False
    for index, kind in enumerate(kinds):
        variable = kind.name.startswith("VAR")
        may = kind is inspect.Parameter.KEYWORD_ONLY or not defaults
        has_default = not variable and (draw(st.booleans()) if may else True)
        defaults = defaults or (has_default and kind is not inspect.Parameter.KEYWORD_ONLY)
        default = index if has_default else inspect.Parameter.empty
        parameters.append(inspect.Parameter("abcde"[index], kind, default=default))
    namespace: dict[str, Any] = {}
    exec(f"def f{inspect.Signature(parameters)}: return locals()", namespace)
    return namespace["f"]


@given(
    functions(),
    st.lists(st.integers(10, 20), max_size=4).map(tuple),
    st.dictionaries(st.sampled_from("abcdefg"), st.integers(20, 30), max_size=4),
)
def test_calls_bind_as_python_binds_them(f: Any, args: Any, kwargs: Any):
    codec = ArgumentsCodec(f, "it")
    try:
        expected = f(*args, **kwargs)
    except TypeError:
        for use in (codec.bind, codec.seal, codec.digest):
            with pytest.raises(PayloadError):
                use(args, kwargs)
        return
    bound = codec.bind(args, kwargs)
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in bound.items()} == expected
    again_args, again_kwargs = codec.open(codec.seal(args, kwargs))
    assert f(*again_args, **again_kwargs) == expected
    assert codec.digest(args, kwargs) == codec.digest(again_args, again_kwargs)
