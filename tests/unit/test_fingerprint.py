"""Fingerprints: they depend on what code means, not on how it looks, and are equal in every process."""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import inspect
import itertools
import json
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.flow import fingerprint
from relight.flow.fingerprint import function_fingerprint, text_digest

_numbers = itertools.count()


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], types.ModuleType]:
    """Imports a text as a module with source, like the modules of users."""

    def load(source: str) -> types.ModuleType:
        path = tmp_path / f"module_{next(_numbers)}.py"
        source = textwrap.dedent(source)
        path.write_text(source, encoding="utf-8")
        module = types.ModuleType(path.stem)
        exec(compile(source, str(path), "exec"), module.__dict__)
        return module

    return load


def of(function: Callable[..., Any], **options: object) -> str:
    return function_fingerprint(function, options)


BASE = """
    def charge(order: dict, retries: int = 3) -> str:
        total = sum(item["price"] for item in order["items"])
        return f"charged {total:.2f}"
"""

LOOKS_DIFFERENT = [
    """
    def charge(order: dict, retries: int = 3) -> str:
        "Charges an order."
        # the sum of all items
        total = sum(
            item['price']
            for item in order['items']  # each of them
        )

        return (f'charged {total:.2f}')
    """,
    """
    import functools

    def traced(**options):
        return lambda fn: fn

    @traced(level=3)
    def charge(order: dict, retries: int=3,) -> str:
        total = sum(item[u"price"] for item in order["items"]); return f"charged {total:.2f}"
    """,
    """
    if True:
        def charge(order: dict, retries: int = 3) -> str:
            '''Charges.

            In several lines.
            '''
            total = sum(item["price"] for item in order["items"])
            return f"charged {total:.2f}"
    """,
]

IS_DIFFERENT = [
    BASE.replace("sum", "max"),
    BASE.replace("= 3", "= 4"),
    BASE.replace(".2f", ".3f"),
    BASE.replace('"price"', '"cost"'),
    BASE.replace("def", "async def"),
    BASE.replace("order: dict", "order: list"),
    BASE.replace("-> str", "-> object"),
    BASE.replace("retries: int = 3", "retries: int = 3, *, dry: bool = False"),
    BASE.replace("        return", "        print(total)\n        return"),
    BASE.replace("total", "amount"),
]


def test_looks_do_not_count(load: Any):
    expected = of(load(BASE).charge)
    assert len(expected) == 16
    int(expected, 16)
    for source in LOOKS_DIFFERENT:
        assert of(load(source).charge) == expected


def test_meaning_counts(load: Any):
    found = {of(load(source).charge) for source in [BASE, *IS_DIFFERENT]}
    assert len(found) == len(IS_DIFFERENT) + 1


def test_the_name_is_told_by_the_step_and_does_not_count(load: Any):
    assert of(load(BASE.replace("charge(", "bill(")).bill) == of(load(BASE).charge)


def test_docstrings_inside_do_not_count_but_decorators_inside_do(load: Any):
    template = """
        def outer():
            {decorator}
            def inner():
                {doc}
                return 1
            return inner
    """
    plain = of(load(template.format(decorator="", doc="")).outer)
    assert of(load(template.format(decorator="", doc="'told'")).outer) == plain
    assert of(load(template.format(decorator="@cache", doc="")).outer) != plain


def test_a_body_of_a_docstring_is_an_empty_body(load: Any):
    one = load("def f():\n    'told'\n").f
    two = load("def f():\n    pass\n").f
    three = load("def f():\n    ...\n").f
    assert of(one) == of(two) != of(three)


def test_options_count_in_any_order():
    def step() -> None: ...

    plain = of(step)
    assert of(step, retry=3, timeout=1.5) == of(step, timeout=1.5, retry=3) != plain
    assert of(step, on=(ValueError, KeyError)) == of(step, on=[ValueError, KeyError])
    assert of(step, on={ValueError, KeyError}) == of(step, on={KeyError, ValueError})
    assert of(step, on=(ValueError,)) != of(step, on=(KeyError,))
    assert of(step, on=of) == of(step, on=of) != of(step, on=test_looks_do_not_count)
    assert of(step, unknown=object()) == of(step, unknown=object())
    assert of(step, nested={"a": {1: (2, None)}}) == of(step, nested={"a": {1: [2, None]}})


def test_wrapped_functions_are_those_they_wrap(load: Any):
    module = load("def f(x):\n    return x + 1\n")

    @functools.wraps(module.f)
    def wrapper(*args: Any) -> Any:
        return module.f(*args)

    assert of(wrapper) == of(module.f)


def test_lambdas_are_found_if_they_are_alone_on_their_line(load: Any):
    one = load("f = lambda x: x + 1\n").f
    same = load("g = (lambda x:\n      x + 1)  # one more\n").g
    other = load("f = lambda x: x + 2\n").f
    assert of(one) == of(same) != of(other)
    pair = load("f, g = lambda x: x + 1, lambda x: x + 2\n")
    assert of(pair.f) != of(pair.g)


def test_the_rest_of_callables_has_fingerprints(load: Any):
    module = load("""
        class Counter:
            def __call__(self, x):
                return x + 1

        class Other:
            __slots__ = ()
            def __call__(self, x):
                return x + 2
    """)
    assert of(module.Counter()) == of(module.Counter()) != of(module.Other())
    assert of(functools.partial(pow, 2)) == of(functools.partial(pow, 2)) != of(functools.partial(pow, 3))
    assert of(len) == of(len) != of(abs)


# ---- without source


def without_source(source: str, name: str = "charge") -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(textwrap.dedent(source), namespace)
    return namespace[name]  # type: ignore[no-any-return] # from a namespace


def test_bytecode_serves_where_there_is_no_source():
    assert fingerprint._node_of(without_source(BASE)) is None  # type: ignore[arg-type] # a function it is
    expected = of(without_source(BASE))
    assert of(without_source(BASE)) == expected
    assert of(without_source("# moved\n\n" + textwrap.dedent(BASE))) == expected
    meaning = [source for source in IS_DIFFERENT if "object" not in source and "list" not in source]
    assert expected not in {of(without_source(source)) for source in meaning}
    assert len({of(without_source(source)) for source in meaning}) == len(meaning)


def test_a_docstring_does_not_count_in_bytecode_either():
    plain = without_source("def f(x):\n    return x + 1000\n", "f")
    told = without_source("def f(x):\n    'told'\n    return x + 1000\n", "f")
    retold = without_source("def f(x):\n    'told otherwise'\n    return x + 1000\n", "f")
    assert of(told) == of(retold)
    assert len({of(plain), of(told)}) <= 2


def test_a_source_that_is_another_function_is_not_trusted(tmp_path: Path):
    path = tmp_path / "moved.py"
    source = "def f():\n    return 1\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, str(path), "exec"), namespace)
    path.write_text("def g():\n    return 2\n")
    assert fingerprint._node_of(namespace["f"]) is None


PROCESS_SCRIPT = """
from relight.flow.fingerprint import function_fingerprint, text_digest
namespace = {}
exec('''
def f(x, *, y={"a": 1}):
    if x in {"alpha", "beta", "gamma", "delta", (1, frozenset())}:
        return [n for n in (1, 2.5, None, ..., b"x") if n]
    return lambda z: z in {"one", "two", "three"}
''', namespace)
print(function_fingerprint(namespace["f"], {"on": {ValueError, KeyError, TypeError}, "k": {"b": 1, "a": 2}}))
print(text_digest(b"x"))
"""


def test_fingerprints_do_not_depend_on_the_process():
    printed = set()
    for seed in ("0", "1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", PROCESS_SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        printed.add(ran.stdout)
    assert len(printed) == 1


# ---- properties


PARSED = ast.parse(Path(json.__file__).with_name("decoder.py").read_text() + Path(ast.__file__).read_text())
WRITTEN = [ast.unparse(n) for n in ast.walk(PARSED) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
FUNCTIONS = [source for source in WRITTEN if '"' * 3 not in source]  # a string of several lines has no layout


def shape_of(source: str) -> str:
    return fingerprint._shape(fingerprint._normalised(ast.parse(source).body[0]))


@given(st.sampled_from(FUNCTIONS), st.data())
def test_layout_and_comments_never_count(source: str, data: st.DataObject):
    endings = st.sampled_from(["", "  ", "  # so be it", "\n", "\n\n# or not"])
    relaid = "\n".join(line + data.draw(endings) for line in source.splitlines())
    assert shape_of(relaid) == shape_of(source)


def test_functions_of_the_standard_library_are_told_apart():
    trees: dict[str, str] = {}
    for source in WRITTEN:
        tree = ast.dump(fingerprint._normalised(ast.parse(source).body[0]))
        assert trees.setdefault(shape_of(source), tree) == tree
    assert len(trees) == len(set(trees.values())) > 100


def test_the_form_of_a_tree_is_fixed():
    """The form is written out here, because journals have digests of it. A change would look like a change of every step."""
    source = "async def f(a, /, b: int = 0x10, *c, d=None, **e):\n    x = a.b[1:2]\n    return f'{x!r:>3}' or u'y'\n"
    shape = fingerprint._shape(fingerprint._normalised(ast.parse(source).body[0]))
    assert shape == (
        "AsyncFunctionDef(name=str '',args=arguments(posonlyargs=[arg(arg=str 'a')],args=[arg(arg=str 'b',"
        "annotation=Name(id=str 'int'))],vararg=arg(arg=str 'c'),kwonlyargs=[arg(arg=str 'd')],"
        "kw_defaults=[Constant()],kwarg=arg(arg=str 'e'),defaults=[Constant(value=int 0x10)]),"
        "body=[Assign(targets=[Name(id=str 'x')],value=Subscript(value=Attribute(value=Name(id=str 'a'),"
        "attr=str 'b'),slice=Slice(lower=Constant(value=int 0x1),upper=Constant(value=int 0x2)))),"
        "Return(value=BoolOp(op=Or(),values=[JoinedStr(values=[FormattedValue(value=Name(id=str 'x'),"
        "conversion=int 0x72,format_spec=JoinedStr(values=[Constant(value=str '>3')]))]),"
        "Constant(value=str 'y')]))])"
    )


# ---- cost and digests


def test_the_source_is_read_once_and_not_kept_alive(monkeypatch: pytest.MonkeyPatch):
    def step() -> None: ...

    first = of(step)
    monkeypatch.setattr(inspect, "getsource", lambda _: pytest.fail("read again"))
    assert of(step) == first
    before = len(fingerprint._bodies)
    del step
    gc.collect()
    assert len(fingerprint._bodies) < before


@given(st.binary())
def test_a_digest_is_the_head_of_md5_wherever_it_comes_from(data: bytes):
    assert text_digest(data) == hashlib.md5(data, usedforsecurity=False).hexdigest()[:16]


def test_other_code_may_parse_while_a_fingerprint_is_made():
    """A traceback parses when it is printed for an object that the garbage collector has found. Then CPython's count of
    the depth of the tree goes wrong."""

    def order(number: int) -> list[int]:
        return [number + 1, number * 2, *(one for one in range(number) if one % 2)]

    parsed = 0

    def parse(depth: int) -> None:
        nonlocal parsed
        if depth:
            parse(depth - 1)
        else:
            ast.parse("a = 1")
            parsed += 1

    expected = function_fingerprint(order, {})
    again = types.FunctionType(order.__code__, order.__globals__, "order")  # not known yet
    threshold = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: parse(20) if phase == "start" else None)
    gc.set_threshold(1)
    try:
        assert function_fingerprint(again, {}) == expected
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.pop()
    assert parsed
