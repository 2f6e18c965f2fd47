"""What must be true of every program, however it was disturbed. `problems` compares the lines of a trial's book.

The strongest check is `_same_way`. An outcome is told only after it is durable. So flow code must see in every later incarnation
what it has seen in one, in the same order: each trace begins with the traces before it. `_bound` says what may be missing.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from typing import Any

from tests.random.book import TOLD, Line, describe, plain
from tests.random.env import PLAIN


def problems(run: str, program: dict[str, Any], lines: list[Line], kills: int) -> list[str]:
    """The problems of one program, and of the runs that it spawned."""
    runs = sorted({line.run for line in lines if line.run == run or line.run.startswith(run + ".")})
    found: list[str] = []
    bodies = {line.nonce: line for line in lines if line.what == "begin"}
    for name in runs:
        of_run = [line for line in lines if line.run == name]
        traces = _traces(of_run)
        found += [f"{name}: {text}" for text in _ends(of_run, traces, program, name == run)]
        found += [f"{name}: {text}" for text in _same_way(traces)]
        found += [f"{name}: {text}" for text in _steps(of_run, bodies, kills)]
        found += [f"{name}: {text}" for text in _phantoms(of_run, traces)]
        found += [f"{name}: {text}" for text in _left(of_run, traces)]
        found += [f"{name}: {text}" for text in _after_end(of_run)]
        found += [f"{name}: {text}" for text in _signals(traces)]
    if program["certain"] and not found:
        found += _certain(run, program, lines)
    return found


Trace = list[Line]


def _traces(lines: list[Line]) -> list[Trace]:
    """One trace for each incarnation, in the order of time."""
    found: dict[tuple[int, int], Trace] = {}
    for line in lines:
        if line.what in ("see", "ask", "enter", "leave"):
            found.setdefault((line.life, line.incarnation), []).append(line)
    return [found[key] for key in sorted(found)]


# ---- how it ended


def _ends(lines: list[Line], traces: list[Trace], program: dict[str, Any], is_root: bool) -> list[str]:
    ends = [line for line in lines if line.what == "ended"]
    if not ends:
        return ["it has no end"]
    kinds = {(end.kind, end.text) for end in ends}
    if len(kinds) > 1:
        return [f"it has several ends: {sorted(kinds)}"]
    end = ends[0]
    if end.kind in ("held", "hangs"):
        return [f"it {'is held' if end.kind == 'held' else 'hangs'}: {end.text}"]
    if end.kind == "cancelled":
        asked = any(action["do"] == "cancel" for action in program["actions"])
        return [] if asked else ["it was cancelled, and nobody asked for that"]
    leaving = [line for line in traces[-1] if line.what == "leave" and line.box.count("/") == 0] if traces else []
    if not leaving:
        return [f"it {end.kind}, but its code did not come to an end in its last incarnation"]
    expected = f"returned {end.text}" if end.kind == "completed" else f"raised {end.text}"
    if leaving[-1].text != expected:
        return [f"it {end.kind} with {end.text}, but its code {leaving[-1].text}"]
    return []


def _certain(run: str, program: dict[str, Any], lines: list[Line]) -> list[str]:
    """Compare the end with the oracle's."""
    (end,) = [line for line in lines if line.what == "ended" and line.run == run][:1]
    kind, text = oracle(program)
    same = end.text == text if kind == "completed" else end.text.split("(")[0] == text.split("(")[0]
    return [] if end.kind == kind and same else [f"{run}: it {end.kind} with {end.text}; the oracle {kind} with {text}"]


def oracle(program: dict[str, Any]) -> tuple[str, str]:
    """How the program ends when it is executed without the engine."""
    from tests.random import interpret, interpret_sync

    order = {"run": PLAIN, "path": "", "block": program["block"], "last": 0}
    try:
        if program["kind"] == "sync":
            result: Any = interpret_sync.sync_program(order)
        else:
            result = asyncio.run(interpret.program(order))
    except Exception as error:
        return "failed", describe(error)
    return "completed", plain(result)


# ---- the same way in every incarnation


def _same_way(traces: list[Trace]) -> list[str]:
    """A later incarnation need not repeat the insides of boxes (child runs, items, attempts of a retried flow) that had ended
    in an earlier one."""
    ended: set[str] = set()
    for number, later in enumerate(traces):
        closed = ended - {line.box for line in later if line.what == "enter"}
        for earlier in traces[:number]:
            was = _by_order([line for line in earlier if not _is_inside(line.box, closed)])
            then = _by_order(later)
            for name in was.keys() & then.keys():
                found = _difference(was[name], then[name], earlier)
                if found:
                    return [found]
        ended |= {line.box for line in later if line.what == "leave"}
    return []


def _by_order(trace: Trace) -> dict[str, Trace]:
    """The groups of lines that have one order each. If a child run was called again because of its retry, replay begins
    with its newest attempt. So that attempt begins earlier than it did live. No code outside notices, but its lines are
    in other places."""
    found: dict[str, Trace] = {"": []}
    for line in trace:
        again = _AGAIN.match(line.box)
        found.setdefault(again[0] if again else "", []).append(line)
    return found


_AGAIN = re.compile(r".*?/child\d+@([2-9]|\d\d+)")


def _difference(was: Trace, later: Trace, whole: Trace) -> str | None:
    """Where two incarnations went different ways. None: they did not. A shorter one was cut off earlier, and shows nothing about
    the rest."""
    for position, (one, other) in enumerate(zip(was, later, strict=False)):
        if (one.what, one.box, one.branch, one.text) == (other.what, other.box, other.branch, other.text):
            continue
        if not _bound(whole[next(at for at, line in enumerate(whole) if line is one) :]):
            return None
        return f"{_where(one)} saw {_said(one)}, {_where(other)} saw {_said(other)} instead\n{_around(was, later, position)}"
    return None


def _bound(behind: Trace) -> bool:
    """Whether the flow was told of something that it had asked for only here. Then the journal has all that the flow knew when it
    asked. If not, what the flow knew may be lost: a value that the next commit would have written, or that it gave up on an
    operation which had ended a moment before. Then no step may have acted on it: see _phantoms."""
    asked: set[str] = set()
    for line in behind:
        if line.what == "ask":
            asked.add(line.branch)
        elif line.kind == TOLD and line.branch in asked:
            return True
    return False


def _is_inside(box: str, closed: set[str]) -> bool:
    return any(box == one or box.startswith(one + "/") for one in closed)


def _where(line: Line) -> str:
    return f"life {line.life}.{line.incarnation}"


def _said(line: Line) -> str:
    return f"[{line.branch}] {line.what if line.what != 'see' else ''} {line.text}"


def _around(was: Trace, later: Trace, position: int) -> str:
    def text(trace: Trace) -> list[str]:
        return [f"      {_said(line)}" for line in trace[max(0, position - 4) : position + 3]]

    return "\n".join(["    before:", *text(was), "    then:", *text(later)])


# ---- steps


def _steps(lines: list[Line], bodies: dict[str, Line], kills: int) -> list[str]:
    found: list[str] = []
    begun: Counter[tuple[str, int, str]] = Counter()
    told: dict[str, str] = {}  # what flow code was told: nonce → the trace's line
    settled: dict[tuple[str, str], str] = {}  # key and argument → the nonce that flow code was told
    retried = any("@2" in line.box for line in lines)
    for line in lines:
        if line.what == "begin":
            begun[line.key, line.attempt, line.text] += 1
            if (line.key, line.text) in settled and not retried:
                found.append(
                    f"step {line.key!r} {line.text} began again in life {line.life}: its flow had seen its end"
                )
        elif line.what == "see" and line.kind == TOLD:
            for nonce in _nonces(line.text):
                body = bodies.get(nonce)
                if body is None:
                    found.append(f"the flow was told {line.text!r}, which no step has said")
                elif nonce not in told:
                    told[nonce] = line.text
                    if " = " in line.text and line.text.split()[1] != body.text:
                        found.append(f"the flow was told {line.text!r}, the end of {body.text}")
                    settled[body.key, body.text] = nonce
    found += _forbidden(lines)
    if not retried:
        for (key, attempt, text), count in begun.items():
            if count > 1 + kills:
                found.append(f"step {key!r} {text} attempt {attempt} began {count} times with {kills} kills")
    return found


def _forbidden(lines: list[Line]) -> list[str]:
    """A step with on_crash="fail" that a crash has interrupted does not begin again, whatever is retried around it."""
    open_in: dict[str, int] = {}
    found = []
    for line in lines:
        if re.search(r"(^|/)fatal(:\d+)?$", line.key):
            if line.what == "begin" and line.key in open_in:
                found.append(f"step {line.key!r} began again in life {line.life}, though on_crash='fail' forbids that")
            if line.what == "begin":
                open_in[line.key] = line.life
            elif line.what == "end":
                open_in.pop(line.key, None)
    return found


def _phantoms(lines: list[Line], traces: list[Trace]) -> list[str]:
    """A step that began is part of the run's history: later incarnations of the flow ask for it again until its outcome is told.
    Otherwise the step acted on something that only a lost incarnation knew."""
    if any("@2" in line.box for line in lines):
        return []  # an attempt of a retried flow may have been the only one that asked for it
    last_asked: dict[str, int] = {}
    for number, trace in enumerate(traces):
        for line in trace:
            if line.what == "ask":
                last_asked[f"{line.box} {line.text.partition(' ')[2]}"] = number
    asked = {text.partition(" ")[2] for text, number in last_asked.items() if number == len(traces) - 1}
    ended: set[str] = set()
    for trace in traces:
        ended |= {line.box for line in trace if line.what == "leave"}
    again = {line.box for line in traces[-1] if line.what == "enter"} if traces else set()
    asked |= {text.partition(" ")[2] for text in last_asked if _is_inside(text.partition(" ")[0], ended - again)}
    begun = {line.text: line for line in lines if line.what == "begin"}
    return [
        f"step {line.key!r} {text} began in life {line.life}, and the run that came to its end never asked for it"
        for text, line in begun.items()
        if text not in asked and "each_step" not in line.key
    ]


def _nonces(text: str) -> list[str]:
    """The nonces in what a step returned or raised."""
    return [word.strip('"[](),') for word in text.replace(",", " ").split() if _is_nonce(word.strip('"[](),'))]


def _is_nonce(word: str) -> bool:
    head, dot, tail = word.partition(".")
    return bool(dot) and tail.isdigit() and bool(head) and all(one in "0123456789abcdef" for one in head)


def _left(lines: list[Line], traces: list[Trace]) -> list[str]:
    """Each thing that was entered is left: once, as flow code sees it, unless leaving was itself interrupted."""
    if not any(line.what == "ended" and line.kind in ("completed", "failed", "cancelled") for line in lines):
        return []
    entered: set[str] = set()
    left: set[str] = set()
    found = []
    for trace in traces:
        count: Counter[str] = Counter()
        for line in trace:
            what, _, name = line.text.partition(" ")
            if line.text.startswith("entered ") and "/forgotten" not in line.branch:
                entered.add(name)
            elif line.text.startswith(("left ", "broke off leaving ")):
                left.add(line.text.rpartition(" ")[2])
                count[line.text.rpartition(" ")[2]] += 1
            del what
        found += [f"{name} was left {times} times in one incarnation" for name, times in count.items() if times > 1]
    return found + [f"{name} was entered and never left" for name in sorted(entered - left)]


def _after_end(lines: list[Line]) -> list[str]:
    over = False
    for line in lines:
        if line.what == "ended":
            over = True
        elif over and line.what == "begin":
            return [f"step {line.key!r} began after the run's end"]
    return []


def _signals(traces: list[Trace]) -> list[str]:
    """A signal is taken once."""
    found: list[str] = []
    if any("@2" in line.box for trace in traces for line in trace):
        return []  # an attempt of a retried flow finds what the one before it took
    for trace in traces[-1:]:
        taken: dict[str, list[str]] = defaultdict(list)
        for line in trace:
            if line.text.startswith("signal ") and " = " in line.text:
                name, _, number = line.text.partition(" = ")
                if int(number) >= 0:
                    taken[number].append(name)
        found += [f"signal {number} was taken {len(names)} times" for number, names in taken.items() if len(names) > 1]
    return found
