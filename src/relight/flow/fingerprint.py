"""Fingerprints: whether a function, or a value, is still the one that was recorded in the journal.

A function's fingerprint is made of the meaning of its source, not of its layout: its syntax tree without positions,
comments, docstrings, its own name and its decorators (their options are passed separately). Parameters, defaults and
annotations count, because annotations decide how payloads are read. The functions that it calls do not count, nor the
values in its closure.

The tree is not written by `ast.dump`, whose output changes between versions of Python: an upgrade of Python would
look like a change of every step.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import textwrap
import types
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec

try:  # OpenSSL's setup in hashlib.md5 takes twice as long as a short text's digest itself
    from _md5 import md5  # type: ignore[import-not-found] # in CPython, not in typeshed

    fast_md5: Callable[[bytes], Any] = md5
except ImportError:  # a build of Python without _md5, such as some for FIPS: the same digest, slower
    fast_md5 = partial(hashlib.md5, usedforsecurity=False)

_bodies: weakref.WeakKeyDictionary[Callable[..., Any], str] = weakref.WeakKeyDictionary()


def text_digest(data: bytes) -> str:
    """16 hex digits (64 bits) of `data`, the same in every process, by the fastest hash of the standard library.

    It is for comparing inputs, not for security. For 50 bytes MD5 takes 0.3 µs, BLAKE2b 0.45 µs, SHA-256 0.6 µs.
    """
    return fast_md5(data).hexdigest()[:16]  # type: ignore[no-any-return] # see the import


def function_fingerprint(fn: Callable[..., Any], options: Mapping[str, object]) -> str:
    """16 hex digits of the normalised source of `fn`, which is read once, and of its options.

    If there is no source (exec, some shells; several lambdas on a line), the bytecode is used: it is the same in all
    processes, but not in all versions of Python. The source is read on first use: if the file has changed since it was
    imported, the fingerprint is that of the file.
    """
    try:
        body = _bodies.get(fn)
        if body is None:
            body = _bodies[fn] = _body_of(fn)
    except TypeError:  # a callable object that cannot be hashed or referred to weakly
        body = _body_of(fn)
    return blake2b(f"{body}\n{_describe(options)}".encode(), digest_size=8).hexdigest()


def _body_of(fn: Callable[..., Any]) -> str:
    if isinstance(fn, partial):
        return f"partial {_body_of(fn.func)} {_describe([fn.args, fn.keywords])}"
    inner = inspect.unwrap(fn)
    if not isinstance(inner, types.FunctionType):
        called = getattr(type(inner), "__call__", None)  # noqa: B004 - its code is wanted
        inner = called if isinstance(called, types.FunctionType) else inner
    if not isinstance(inner, types.FunctionType):
        return f"name {_name_of(inner)}"
    node = _node_of(inner)
    text = _describe_code(inner) if node is None else f"source {_shape(_normalised(node))}"
    return blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


# ---- from source


def _node_of(fn: types.FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
    """The syntax tree of `fn`; None if there is no source, or it may be another function's."""
    try:
        tree = _parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError, ValueError):  # a lambda's line may be half a statement
        return None
    name = fn.__code__.co_name
    if name == "<lambda>":
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        return lambdas[0] if len(lambdas) == 1 else None
    node = tree.body[0] if tree.body else None
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
        return node
    return None


def _parse(source: str) -> ast.Module:
    """`ast.parse`, with a second try. CPython (3.11 to 3.13) has one counter of the tree's depth for all threads. It
    fails if a thread, or a traceback printed during a garbage collection, has parsed something meanwhile."""
    try:
        return ast.parse(source)
    except SystemError:
        collecting = gc.isenabled()
        gc.disable()  # only a garbage collection lets other code run during the parse
        try:
            return ast.parse(source)
        finally:
            if collecting:
                gc.enable()


def _normalised(function: ast.AST) -> ast.AST:
    for node in ast.walk(function):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        function.decorator_list = []
        function.name = ""
    return function


def _shape(part: Any) -> str:
    """One text for a syntax tree in all versions of Python: fields by name, and none that are empty."""
    if isinstance(part, ast.AST):
        fields = ((name, getattr(part, name, None)) for name in part._fields if name not in _NO_MEANING)
        inner = ",".join(f"{name}={_shape(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(part).__name__}({inner})"
    if isinstance(part, list):
        return f"[{','.join(map(_shape, part))}]"
    return _constant(part)


_NO_MEANING = frozenset({"ctx", "kind", "type_comment"})  # `ctx` follows from the position; u"" is ""; a comment


# ---- from bytecode


def _describe_code(fn: types.FunctionType) -> str:
    code = fn.__code__
    consts = code.co_consts[1:] if code.co_consts and code.co_consts[0] == fn.__doc__ is not None else code.co_consts
    return f"bytecode {_code(code, consts)} {_describe([fn.__defaults__, fn.__kwdefaults__])}"


def _code(code: types.CodeType, consts: tuple[Any, ...]) -> str:
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return f"{counts} {names} {code.co_code.hex()} ({','.join(map(_constant, consts))})"


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return f"code({_code(value, value.co_consts)})"
    if isinstance(value, tuple):
        return f"({','.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(_constant, value)))}}}"
    return f"{type(value).__name__} {hex(value) if isinstance(value, int) else repr(value)}"


# ---- options and defaults


def _describe(value: Any) -> str:
    """Data as it is; classes and functions by name; other objects by their class, because they have no stable text."""
    return msgspec.json.encode(_plain(value), order="deterministic").decode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(part) for part in value), key=_describe)
    try:
        return msgspec.to_builtins(value)
    except (TypeError, ValueError):
        return _name_of(value)


def _name_of(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}:{named.__qualname__}"
