"""Make a failing program smaller: drop statements and branches, replace a statement by its inside, make the rest simpler.

Failures are races: a smaller program counts as failing if one of several executions of it does.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

Program = dict[str, Any]

BLOCKS = ("block", "body", "then", "else", "except", "finally", "each", "between")


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 120.0) -> Program:
    """The smallest failing program found within this time."""
    until = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(program):
            if time.monotonic() > until:
                return program
            if fails(smaller):
                program, changed = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs that each differ from this one in one place. The greatest changes come first."""
    for path in _blocks(program):
        size = len(_at(program, path))
        for length in sorted({size // 2, 1} - {0}, reverse=True):
            for start in range(0, size, length):
                yield _edited(
                    program, path, lambda block, start=start, length=length: block[:start] + block[start + length :]
                )
    for path in _blocks(program):
        for number, one in enumerate(_at(program, path)):
            for inner in _insides(one):
                yield _edited(program, path, lambda block, n=number, inner=inner: block[:n] + inner + block[n + 1 :])
    for path in _lists(program, "branches"):
        for number in range(len(_at(program, path))):
            if len(_at(program, path)) > 1:
                yield _edited(program, path, lambda found, n=number: found[:n] + found[n + 1 :])
    for number in range(len(program["actions"])):
        yield {**program, "actions": program["actions"][:number] + program["actions"][number + 1 :]}
    yield from _simpler(program)


def _simpler(program: Program) -> Iterator[Program]:
    for path, one in _statements(program):
        spec = one.get("spec")
        if spec is not None:
            for field, plain in (("fate", "ok"), ("ms", 0)):
                if spec[field] != plain:
                    yield _edited(program, path, lambda one, f=field, p=plain: {**one, "spec": {**one["spec"], f: p}})
            if "lingers" in spec:
                yield _edited(
                    program, path, lambda one: {**one, "spec": {k: v for k, v in one["spec"].items() if k != "lingers"}}
                )
        for field, plain in (("step", "work"), ("x", 1), ("times", 1), ("concurrency", 1), ("on", "last")):
            if field in one and one[field] != plain:
                yield _edited(program, path, lambda one, f=field, p=plain: {**one, f: p})
    if program["flow"].endswith("_retried"):
        yield {**program, "flow": program["flow"].removesuffix("_retried")}


# ---- places in a program: the keys and indices of the way to them

Path = tuple[Any, ...]


def _walk(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, node
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _walk(value, (*path, key))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _walk(value, (*path, number))


def _is_block(path: Path, node: Any) -> bool:
    return isinstance(node, list) and all(isinstance(one, dict) and "op" in one for one in node) and bool(path)


def _blocks(program: Program) -> list[Path]:
    return [path for path, node in _walk(program) if node and _is_block(path, node)]


def _lists(program: Program, name: str) -> list[Path]:
    return [path for path, node in _walk(program) if path and path[-1] == name and isinstance(node, list)]


def _statements(program: Program) -> list[tuple[Path, Any]]:
    return [(path, node) for path, node in _walk(program) if isinstance(node, dict) and "op" in node]


def _insides(one: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The blocks of a statement."""
    found = [one[name] for name in BLOCKS if isinstance(one.get(name), list) and one[name]]
    blocks = [block for block in found if all(isinstance(inner, dict) for inner in block)]
    return blocks + [branch for branch in one.get("branches", ()) if branch]


def _at(node: Any, path: Path) -> Any:
    for key in path:
        node = node[key]
    return node


def _edited(program: Program, path: Path, edit: Callable[[Any], Any]) -> Program:
    made = copy.deepcopy(program)
    holder = _at(made, path[:-1])
    holder[path[-1]] = edit(holder[path[-1]])
    return made
