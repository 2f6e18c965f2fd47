"""What `@flow` and `@step` accept: a function in a source file, so that the next process has it as well.

Every other callable is refused where it is decorated, with a sentence that says what to write instead. A function
inside another function is accepted: the next process has it as soon as the outer function has been called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from relight.errors import DefinitionError
from relight.flow.signatures import signature_of

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_INSTEAD = "write a function (def or async def) that calls it, and decorate that"


def check_function(kind: str, fn: Any, name: str | None) -> None:
    """DefinitionError unless `fn` can be a step or flow (`kind`). `name` is the decorator's argument."""
    problem = _not_a_function(kind, fn) if not inspect.isfunction(fn) else _wrong_function(kind, fn, name)
    if problem:
        raise DefinitionError(f"@{kind} {_shown(fn)}: {problem}")


def _wrong_function(kind: str, fn: Callable[..., Any], name: str | None) -> str:
    if inspect.isasyncgenfunction(fn):
        return "an async generator has no single result; return a list, or call a step for every value"
    if inspect.isgeneratorfunction(fn):
        return "a generator has no single result; return a list"
    if fn.__name__ == "<lambda>" and name is None:
        return "a lambda has no name for the journal; write a def, or give it a name with name="
    outer, _, _ = fn.__qualname__.rpartition(".")
    parameters = signature_of(fn).parameters
    first = next(iter(parameters), "")
    if outer and not outer.endswith("<locals>") and first in ("self", "cls"):
        return (
            f"a method needs its object, which no journal keeps and the next process does not have; write a function outside "
            f"the class, and pass what it needs of {first!r} as arguments"
        )
    if kind == "flow" and "id" in parameters and parameters["id"].kind in _BY_NAME:
        return (
            "its parameter 'id' could not be given by name, because start(), run() and spawn() take id= as the run's id; give "
            "it another name (order_id, say), or make it positional-only: def f(id, /)"
        )
    return ""


def _not_a_function(kind: str, fn: Any) -> str:
    found = getattr(fn, "kind", None)
    if found in ("step", "flow") and hasattr(fn, "arguments"):
        return f"it is a {found} already; decorate the function once, as one of the two"
    if inspect.ismethod(fn):
        return (
            "a bound method needs its object, which no journal keeps and the next process does not have; write a function "
            "that takes what it needs of it as arguments, and decorate that"
        )
    if isinstance(fn, staticmethod | classmethod):
        below = "a class method needs its class; write a function outside the class"
        return f"put @staticmethod above @{kind}" if isinstance(fn, staticmethod) else below
    if isinstance(fn, functools.partial):
        return f"a partial has no code of its own; {_INSTEAD}"
    if inspect.isclass(fn):
        return f"a class is no function, and its objects are no data; {_INSTEAD}, and return data"
    if inspect.isroutine(fn):
        return f"a builtin has no code that could be compared after a change; {_INSTEAD}"
    if callable(fn):
        return f"an object with __call__ does not exist in the next process; {_INSTEAD}"
    return f"it takes a function; write @{kind} or @{kind}(name=..., retry=..., timeout=...) above a def"


def _shown(fn: Any) -> str:
    """The name of `fn` for messages; its type and repr if it has no name."""
    if inspect.isfunction(fn) or inspect.ismethod(fn) or inspect.isclass(fn) or inspect.isbuiltin(fn):
        return fn.__qualname__
    return f"{type(fn).__name__} {fn!r}"
