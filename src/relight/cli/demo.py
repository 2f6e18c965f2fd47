"""`relight demo`: kill a running flow, start it again, and count what happened.

The verdict is counted from the ledger that the steps themselves write (see demo_flow), not from what the engine
reports:

    restored     its result reached the restarted flow, and the restarted process did not execute it
    repeated     executed in both processes, and its result had not reached the flow before the kill: it was in flight
    duplicated   executed again although its result had reached the flow before the kill; must be 0
    lost         never executed, or its result never reached the restarted flow; must be 0
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relight.cli.demo_flow import REFUSED, Demo, Ledger, Line
from relight.cli.terminal import AsJson, fail, make_console
from relight.clock import SYSTEM_CLOCK, SYSTEM_ENTROPY, block

STEP_SECONDS = 0.12
LOOK_SECONDS = 0.02
LIMIT_SECONDS = 60.0  # for one process, on top of what its steps take
STEPS_PER_ROW = 20


class Verdict(msgspec.Struct):
    """What `--json` prints."""

    steps: int
    restored: int
    repeated: int
    duplicated: int
    lost: int

    @property
    def good(self) -> bool:
        """Here one step at a time is in flight, so one kill may repeat one step."""
        return self.duplicated == 0 and self.lost == 0 and self.repeated <= 1 and self.restored > 0


def judge(lines: list[Line], steps: int) -> Verdict:
    """The verdict, from the ledger alone."""

    def steps_with(process: int, event: str) -> list[int]:
        return [line.step for line in lines if line.process == process and line.event == event]

    finished = set(steps_with(1, "result"))
    executed_before, executed_after = steps_with(1, "effect"), steps_with(2, "effect")
    arrived = set(steps_with(2, "result"))
    again = set(executed_before) & set(executed_after)
    within_one_process = len(executed_before + executed_after) - len(set(executed_before)) - len(set(executed_after))
    return Verdict(
        steps=steps,
        restored=len((arrived & set(executed_before)) - set(executed_after)),
        repeated=len(again - finished),
        duplicated=len(again & finished) + within_one_process,
        lost=steps - len(arrived & {*executed_before, *executed_after}),
    )


def demo(
    steps: Annotated[int, typer.Option("--steps", min=2, max=500, help="How many steps the flow has.")] = 20,
    as_json: AsJson = False,
    db: Annotated[
        Path | None,
        typer.Option(
            "--db", metavar="PATH", help="Where to make the database (and keep it); otherwise a temporary one."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the database and the ledger, and say where.")] = False,
) -> None:
    """Start a flow, kill its process in the middle, start it again, and count what was lost or done twice."""
    if db is not None and db.exists():
        # The demo's process would take up the runs in that database, and knows none of their flows.
        fail(f"{db} exists; the demo makes a database of its own: name a new file")
    if db is not None and not db.absolute().parent.is_dir():
        fail(f"{db} cannot be made: make the folder {db.absolute().parent} first")
    if db is not None:
        _check_folder(db)
    kept = keep or db is not None
    with ExitStack() as stack:
        if db is None and keep:
            db = Path(tempfile.mkdtemp(prefix="relight-demo-")) / "demo.db"
        elif db is None:
            db = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relight-demo-"))) / "demo.db"
        scene = Scene(make_console(quiet=as_json), steps, db)
        verdict = scene.play()
        scene.conclude(verdict, kept)
    if as_json:
        print(json.dumps(msgspec.structs.asdict(verdict), separators=(", ", ":")))
    raise typer.Exit(0 if verdict.good else 1)


def _check_folder(db: Path) -> None:
    """End the command if no file can be made where the database and its ledger are to be."""
    ledger = _ledger_of(db)
    try:
        Path(ledger).open("x").close()
        Path(ledger).unlink()
    except OSError as error:
        fail(f"{db} cannot be made: {error.strerror or error}: {ledger}")


def _ledger_of(db: Path) -> str:
    return f"{db.absolute()}.ledger"


class Scene:
    """The two processes, the ledger, and their display."""

    def __init__(self, console: Console, steps: int, db: Path) -> None:
        self.console = console
        self.steps = steps
        self.db = db
        self.ledger = Ledger(_ledger_of(db))
        self.run_id = SYSTEM_ENTROPY.run_id()
        self.pids: dict[int, int] = {}
        self.killed = False

    # ---- what happens

    def play(self) -> Verdict:
        """Both processes, one after the other."""
        middle = self.steps // 2 + 1
        with Live(console=self.console, auto_refresh=False, get_renderable=self.render) as live:

            def in_the_middle() -> bool:
                live.refresh()
                return any(line.step >= middle for line in self.ledger.read())

            def never() -> bool:
                live.refresh()
                return False

            self.killed = self._process(1, kill_when=in_the_middle)
            if not self.killed:
                fail("the first process ended before it could be killed: this machine is too busy; try more --steps")
            self._process(2, kill_when=never)
            live.refresh()
        return judge(self.ledger.read(), self.steps)

    def _process(self, number: int, kill_when: Callable[[], bool]) -> bool:
        """Run the flow's process to its end, or kill it; whether it was killed."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RELIGHT_")}
        given = msgspec.json.encode(Demo(self.ledger.path, self.steps, STEP_SECONDS)).decode()
        arguments = [str(self.db), self.run_id, str(number), given]
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                # -P: a folder called relight in the current directory must not be imported as the package.
                [sys.executable, "-P", "-m", "relight.cli.demo_flow", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
            )
            self.pids[number] = child.pid
            latest = SYSTEM_CLOCK.monotonic() + LIMIT_SECONDS + 3 * self.steps * STEP_SECONDS
            try:
                while child.poll() is None:
                    if kill_when():
                        child.kill()
                        child.wait()
                        return True
                    if SYSTEM_CLOCK.monotonic() > latest:
                        fail(f"process {number} of the demo did not end in time")
                    block(LOOK_SECONDS)
            finally:
                child.kill()
                child.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")
            if child.returncode == REFUSED:
                fail(said.rstrip().rpartition("\n")[2])
            if child.returncode != 0:
                sys.stderr.write(said)
                fail(f"process {number} of the demo failed with exit code {child.returncode}; its output is above")
        return False

    # ---- what is shown

    def render(self) -> Group:
        lines = self.ledger.read()
        parts: list[Table | Text | ProgressBar] = [Text(f"one run of {self.steps} steps on {self.db}", "dim"), Text()]
        rows = range(1, self.steps + 1, STEPS_PER_ROW)
        parts += [self._grid(lines, range(first, min(first + STEPS_PER_ROW, self.steps + 1))) for first in rows]
        done = {line.step for line in lines if line.event == "result"}
        parts += [Text(), ProgressBar(self.steps, len(done), width=11 + 3 * min(self.steps, STEPS_PER_ROW)), Text()]
        parts.append(Text("✓ done   ▶ running   ✗ in flight at the kill   ↺ restored, not executed", "dim"))
        return Group(*parts)

    def _grid(self, lines: list[Line], numbers: range) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=10)
        for _ in numbers:
            grid.add_column(width=2, justify="right")
        grid.add_column()
        grid.add_row("step", *(str(number) for number in numbers), style="dim")
        for process in sorted(self.pids):
            cells = (self._cell(lines, process, number) for number in numbers)
            grid.add_row(f"process {process}", *cells, self._fate(process))
        return grid

    def _fate(self, process: int) -> Text:
        if process == 1 and self.killed:
            return Text("SIGKILL", "red")
        return Text(f"pid {self.pids[process]}", "dim")

    def _cell(self, lines: list[Line], process: int, number: int) -> Text:
        events = {line.event for line in lines if line.process == process and line.step == number}
        if events == {"result"}:
            return Text("↺", "cyan")
        if "result" in events:
            return Text("✓", "green")
        if "effect" in events:
            return Text("✗", "red") if process == 1 and self.killed else Text("▶", "yellow")
        return Text("·", "dim")

    def conclude(self, verdict: Verdict, kept: bool) -> None:
        out = self.console.print
        out()
        out(f"[cyan]{verdict.restored}[/] of {verdict.steps} steps were restored from the journal, not executed again")
        out(f'[yellow]{verdict.repeated}[/] in flight at the kill, executed again (on_crash="fail" would forbid it)')
        out(f"[bold]{verdict.duplicated}[/] finished steps ran twice, [bold]{verdict.lost}[/] lost", end="")
        out("  [green]✓[/]" if verdict.good else "  [bold red]✗ this must not happen: please report it[/]")
        out("[dim]counted from the steps' own ledger of effects, not from Relight's database[/]")
        if kept:
            out(
                f"\nkept: {self.db} and {self.ledger.path}\nlook: relight show {self.run_id} --db {self.db} --steps",
                soft_wrap=True,
            )
