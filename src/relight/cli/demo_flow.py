"""The process that `relight demo` kills: a flow of visible steps, run with `python -m relight.cli.demo_flow`.

The process knows nothing of the kill. Started again with the same arguments, it opens the same file and its run goes
on.

The ledger is the evidence and is kept outside the engine's database. It has one line for every time a step takes
effect, and one for every time a step's result reaches the flow. The code goes on when the line is synced to the disk.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

import msgspec

from relight.clock import block
from relight.engine import Relight
from relight.errors import RelightError
from relight.flow.definitions import flow, step


class Line(msgspec.Struct):
    """One line of the ledger. `process` is 1 for the first process, 2 for the restarted one."""

    process: int
    event: Literal["effect", "result"]
    step: int


class Ledger:
    """An append-only file. A line that the kill has cut off is not read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def append(self, line: Line) -> None:
        with open(self.path, "ab") as file:  # noqa: PTH123 - it is flushed and closed at once
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Line]:
        try:
            with open(self.path, "rb") as file:  # noqa: PTH123 - as above
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:  # no step has begun
            return []
        return [msgspec.json.decode(line, type=Line) for line in whole.splitlines()]


def expected(number: int) -> int:
    """The result of a step. A lost result, or another step's, would not be equal to it."""
    return number * number


class Demo(msgspec.Struct):
    """The flow's input. It does not name the process, because it is journaled, and the same after the restart."""

    ledger: str
    steps: int
    step_seconds: float


REFUSED = 3  # the exit code after an error of Relight, which is one line on stderr

PROCESS = 0  # 1 before the kill, 2 after; set by main()


@step
def work(number: int, demo: Demo) -> int:
    """Take effect, then work for a moment: the kill comes during that moment."""
    Ledger(demo.ledger).append(Line(PROCESS, "effect", number))
    block(demo.step_seconds)
    return expected(number)


@flow(name="relight-demo")
async def visible_steps(demo: Demo) -> int:
    """Step after step. A flow should write nothing outside a step; this one does so to measure."""
    total = 0
    for number in range(1, demo.steps + 1):
        result = await work(number, demo)
        if result == expected(number):
            Ledger(demo.ledger).append(Line(PROCESS, "result", number))
        total += result
    return total


def main(arguments: list[str]) -> None:
    """Arguments: database, run id, process number, and the flow's input as JSON."""
    global PROCESS  # noqa: PLW0603 - a fact about this process
    database, run_id, process, demo = arguments
    PROCESS = int(process)
    try:
        with Relight(database) as rl:
            rl.start(visible_steps.with_id(run_id), msgspec.json.decode(demo, type=Demo)).result()
    except RelightError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main(sys.argv[1:])
