"""Programs, made from a seed. A program is plain JSON data. So it can be an argument, and it can be printed and shrunk.

    {"seed", "kind": "async" | "sync", "flow": the root's flow, "block": [statement, ...], "actions": [...], "certain": bool}

A statement is {"op": its name, ...}: there is one function below for each. A block is a list of statements. `certain` programs
leave nothing to chance: they have no races, no random numbers and no actions. The oracle knows their result.

Actions come from outside: {"do": "signal" | "cancel" | "pause", "at": when the run has seen so many things}.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

Block = list[dict[str, Any]]

MOST_DEPTH = 4
SIGNALS = ("red", "blue")


class Generator:
    """One program."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.seed = seed
        self.sync = self.chance.random() < 0.2
        self.certain = self.chance.random() < 0.25
        self.budget = self.chance.choice((4, 8, 12, 20, 30, 40))  # statements
        self.ids = 0
        self.levels = 0  # of child runs around

    def program(self) -> dict[str, Any]:
        chance = self.chance
        block = self.block(0, chance.randint(2, 7))
        retried = not self.certain and chance.random() < 0.15
        name = ("sync_program" if self.sync else "program") + ("_retried" if retried else "")
        if chance.random() < 0.7:  # it is parked at the end, so that everything is replayed once more
            block += [{"op": "sleep", "how": "relight", "ms": 3}]
        return {
            "seed": self.seed,
            "kind": "sync" if self.sync else "async",
            "flow": name,
            "block": block,
            "actions": [] if self.certain else self.actions(),
            "certain": self.certain,
        }

    def actions(self) -> list[dict[str, Any]]:
        chance = self.chance
        found: list[dict[str, Any]] = []
        for number in range(chance.choice((0, 0, 1, 2, 4))):
            at = chance.choice((0, 0, chance.randint(1, 15)))
            found.append({"do": "signal", "at": at, "name": chance.choice(SIGNALS), "number": 100 + number})
        if chance.random() < 0.2:
            found.append({"do": "pause", "at": chance.randint(0, 12)})
        if chance.random() < 0.2:
            found.append({"do": "cancel", "at": chance.randint(0, 15)})
        return found

    # ---- blocks

    def block(self, depth: int, most: int | None = None) -> Block:
        count = self.chance.randint(1, 3) if most is None else most
        return [self.statement(depth) for _ in range(count) if self.take()]

    def take(self) -> bool:
        self.budget -= 1
        return self.budget >= 0

    def statement(self, depth: int) -> dict[str, Any]:
        leaves = {"step": 10, "sleep": 2, "raise": 0.4, "foreach_step": 1}
        inner = {"if": 1, "loop": 1, "try": 2, "context": 2, "child": 2, "foreach": 1.5, "spawn": 0.7}
        if not self.certain:
            leaves |= {"value": 1, "signal": 1.5, "note": 3}
        if self.sync:
            inner |= {"parallel": 4}
        else:
            inner |= {"gather": 3, "group": 2, "timeout": 1.5, "wait_for": 1}
            if depth == 0 and not self.certain:
                inner["forget"] = 1
            if not self.certain:
                leaves |= {"put": 1, "get": 1, "set": 0.7, "await_event": 0.7}
                inner |= {"later": 2, "wait": 3, "as_completed": 1.5, "lock": 2, "shield": 0.7}
        names = leaves if depth >= MOST_DEPTH or self.budget < 2 else leaves | inner
        (name,) = self.chance.choices(list(names), weights=list(names.values()))
        made: dict[str, Any] = getattr(self, name.removesuffix("_") if name not in _KEYWORDS else name + "_")(depth)
        return made

    def branches(self, depth: int) -> list[Block]:
        blocks = [self.block(depth + 1) for _ in range(self.chance.randint(2, 4))]
        if self.certain:  # when one task fails, what happens to the others is a race
            blocks = [[self.guarded(block)] for block in blocks]
        return [block for block in blocks if block] or [[self.step(depth)]]

    def guarded(self, body: Block) -> dict[str, Any]:
        return {"op": "try", "body": body, "except": [], "finally": []}

    # ---- leaves

    def spec(self, fates: dict[str, float]) -> dict[str, Any]:
        self.ids += 1
        chance = self.chance
        (fate,) = chance.choices(list(fates), weights=list(fates.values()))
        milliseconds = chance.choice((0, 0, 0, 0, -1, -3, 1, 1, 2, 4))
        spec: dict[str, Any] = {"id": f"s{self.ids}", "ms": milliseconds, "fate": fate}
        if fate == "flaky":
            spec["times"] = chance.randint(1, 3)
        if milliseconds > 0 and chance.random() < 0.15:
            spec["lingers"] = 1
        return spec

    def source(self) -> str | int:
        return "last" if self.certain else self.chance.choice(("last", "count", "list", "list", 1))

    def step(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        name = chance.choice(
            ("work",) * 6 + ("sync_work",) * 2 + ("retried", "retried_at_once", "sync_retried", "limited", "fatal")
        )
        fates: dict[str, float] = {"ok": 5, "fail": 0.6}
        if "retried" in name:
            fates["flaky"] = 5
        if not self.certain:
            fates |= {"dice": 3, "moody": 0.7}
        spec = self.spec(fates)
        if name == "limited":
            if self.certain:
                spec["ms"] = 300
            elif chance.random() < 0.5:
                spec["ms"] = chance.choice((3, 4, 5, 8))
        if name == "fatal" and self.certain:
            name = "work"  # a kill makes a difference
        return {"op": "step", "step": name, "spec": spec, "x": self.source()}

    def quiet_step(self) -> dict[str, Any]:
        """A step that does not fail by itself."""
        name = self.chance.choice(("work", "work", "sync_work"))
        return {"op": "step", "step": name, "spec": self.spec({"ok": 1}), "x": self.source()}

    def sleep(self, depth: int) -> dict[str, Any]:
        how = "relight" if self.sync else self.chance.choice(("relight", "asyncio"))
        milliseconds = self.chance.choice((0, 1, 3, 5) if not self.sync else (1, 3))
        return {"op": "sleep", "how": how if milliseconds else "asyncio", "ms": milliseconds}

    def raise_(self, depth: int) -> dict[str, Any]:
        self.ids += 1
        return {"op": "raise", "text": f"raised {self.ids}"}

    def value(self, depth: int) -> dict[str, Any]:
        return {"op": "value", "of": self.chance.choice(("now", "random", "uuid"))}

    def signal(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        name, milliseconds = chance.choice(SIGNALS), chance.choice((1, 3, 6))
        return {"op": "signal", "name": name, "ms": milliseconds, "default": chance.random() < 0.5}

    def note(self, depth: int) -> dict[str, Any]:
        self.ids += 1
        return {"op": "note", "number": self.ids}

    def limit(self) -> int:
        return self.chance.choice((2, 4, 8))

    def put(self, depth: int) -> dict[str, Any]:
        return {"op": "put", "ms": self.limit()}

    def get(self, depth: int) -> dict[str, Any]:
        return {"op": "get", "ms": self.limit()}

    def set(self, depth: int) -> dict[str, Any]:
        return {"op": "set"}

    def await_event(self, depth: int) -> dict[str, Any]:
        return {"op": "await_event", "ms": self.limit()}

    # ---- statements with others inside

    def if_(self, depth: int) -> dict[str, Any]:
        on = "last" if self.certain else self.chance.choice(("last", "count", "list", "random", "now", "uuid"))
        return {"op": "if", "on": on, "then": self.block(depth + 1), "else": self.block(depth + 1)}

    def loop(self, depth: int) -> dict[str, Any]:
        return {"op": "loop", "times": self.source(), "body": self.block(depth + 1)}

    def try_(self, depth: int) -> dict[str, Any]:
        final = [self.quiet_step()] if self.chance.random() < 0.5 else []
        return {"op": "try", "body": self.block(depth + 1), "except": self.block(depth + 1), "finally": final}

    def context(self, depth: int) -> dict[str, Any]:
        enter, leave = self.quiet_step(), self.quiet_step()
        return {"op": "context", "enter": enter, "body": self.block(depth + 1), "exit": leave}

    def gather(self, depth: int) -> dict[str, Any]:
        returns = self.certain or self.chance.random() < 0.4
        cancel = self.certain or self.chance.random() < 0.5
        return {"op": "gather", "branches": self.branches(depth), "returns": returns, "cancel": cancel}

    def group(self, depth: int) -> dict[str, Any]:
        body = [] if self.certain or self.chance.random() < 0.5 else self.block(depth + 1)
        return {"op": "group", "branches": self.branches(depth), "body": body, "catch": self.chance.random() < 0.7}

    def later(self, depth: int) -> dict[str, Any]:
        between, cancel = self.block(depth + 1), self.chance.random() < 0.5
        return {"op": "later", "branches": self.branches(depth), "between": between, "cancel": cancel}

    def forget(self, depth: int) -> dict[str, Any]:
        return {"op": "forget", "branches": self.branches(depth)[:2]}

    def wait(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        when = chance.choice(
            (asyncio.FIRST_COMPLETED, asyncio.FIRST_COMPLETED, asyncio.FIRST_EXCEPTION, asyncio.ALL_COMPLETED)
        )
        return {
            "op": "wait",
            "branches": self.branches(depth),
            "when": when,
            "ms": chance.choice((None, None, 2, 4)),
            "then": self.block(depth + 1),
            "cancel": chance.random() < 0.5,
        }

    def as_completed(self, depth: int) -> dict[str, Any]:
        return {"op": "as_completed", "branches": self.branches(depth), "then": [self.block(depth + 1)]}

    def timeout(self, depth: int) -> dict[str, Any]:
        return {"op": "timeout", "ms": 60_000 if self.certain else self.limit(), "body": self.block(depth + 1)}

    def wait_for(self, depth: int) -> dict[str, Any]:
        return {"op": "wait_for", "ms": 60_000 if self.certain else self.limit(), "body": self.block(depth + 1)}

    def shield(self, depth: int) -> dict[str, Any]:
        return {"op": "shield", "ms": self.limit(), "body": self.block(depth + 1), "then": self.block(depth + 1)}

    def lock(self, depth: int) -> dict[str, Any]:
        which = self.chance.choice(("lock", "semaphore"))
        return {"op": "lock", "which": which, "ms": self.limit(), "body": self.block(depth + 1)}

    def parallel(self, depth: int) -> dict[str, Any]:
        return {"op": "parallel", "branches": self.branches(depth)}

    # ---- boxes

    def foreach(self, depth: int) -> dict[str, Any]:
        concurrency = self.chance.choice((1, 1, 2, 3))
        each = self.block(depth + 1)
        if self.certain:
            each = [self.guarded(each)]
        return {"op": "foreach", "concurrency": concurrency, "times": self.source(), "x": self.source(), "each": each}

    def foreach_step(self, depth: int) -> dict[str, Any]:
        fates: dict[str, float] = {"ok": 4} if self.certain else {"ok": 4, "dice": 4, "moody": 0.3}
        specs = [self.spec(fates) for _ in range(self.chance.randint(1, 4))]
        return {"op": "foreach_step", "concurrency": self.chance.choice((1, 2, 3)), "specs": specs, "x": self.source()}

    def child(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        if self.levels >= 3:
            return self.step(depth)
        choices = ("sync", "sync", "sync", "async") if self.sync else ("async",) * 4 + ("retried", "timed", "sync")
        flow = chance.choice(choices)
        if self.certain:  # the oracle calls them as plain functions
            flow = "sync" if self.sync else "async"
        body = self.inner(depth, flow == "sync")
        return {"op": "child", "flow": flow, "body": body, "catch": chance.random() < 0.6}

    def inner(self, depth: int, sync: bool) -> Block:
        """The body of another flow, which may be of the other kind (async or sync)."""
        before, self.sync = self.sync, sync
        self.levels += 1
        body = self.block(depth + 1)
        self.levels -= 1
        self.sync = before
        return body

    def spawn(self, depth: int) -> dict[str, Any]:
        if self.levels >= 2 or (self.certain and self.sync):
            return self.step(depth)
        between = self.block(depth + 1)
        body = self.inner(depth, sync=False)
        join = self.certain or self.chance.random() < 0.7
        if self.certain:
            body, between = [self.guarded(body)], []
        return {"op": "spawn", "body": body, "between": between, "join": join}


_KEYWORDS = ("if", "try", "raise")


def generate(seed: int) -> dict[str, Any]:
    return Generator(seed).program()
