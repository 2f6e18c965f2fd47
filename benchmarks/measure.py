"""The parent's side of a measurement: fresh child processes, medians, and what became of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CHILD_SECONDS = 240.0


class NotMeasuredError(Exception):
    """A child failed: its reason belongs into the table, not onto the other measurements."""


@dataclasses.dataclass
class Target:
    """A figure that the issue asks for, and what came out."""

    name: str
    wanted: str
    got: str
    met: bool | None  # None: could not be measured


@dataclasses.dataclass
class Section:
    """What one benchmark reports: rows for the table, targets, and everything as data for the JSON and the plots."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]] = dataclasses.field(default_factory=list)
    targets: list[Target] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    data: dict[str, Any] = dataclasses.field(default_factory=dict)

    def target(self, name: str, wanted: str, value: float | None, met: Callable[[float], bool], unit: str = "") -> None:
        """Note a target; a value of None means that one side of it could not be measured."""
        got = "not measured" if value is None else f"{number(value)}{unit}"
        self.targets.append(Target(name, wanted, got, None if value is None else met(value)))


@dataclasses.dataclass
class Bench:
    """What a benchmark is given to measure with."""

    folder: Path
    quick: bool = False
    patience: float = 0.0  # seconds to wait, before each measurement, for others to leave the processor alone

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        """A folder of its own for one database, gone afterwards."""
        path = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def child(self, target: str, **arguments: Any) -> dict[str, Any]:
        """Call `module:function` in a fresh process. Raises NotMeasuredError with the reason when that fails."""
        return self.python("-m", "benchmarks.child", target, json.dumps(arguments))

    def python(self, *arguments: str) -> dict[str, Any]:
        """What a fresh interpreter prints, as JSON, on its last line."""
        wait_until_idle(self.patience)
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "PYTHONHASHSEED": "0",
            "PYTHONPYCACHEPREFIX": str(
                self.folder / "bytecode"
            ),  # compiled once per run of the benchmarks, for everybody
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=CHILD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NotMeasuredError(f"did not end within {CHILD_SECONDS:.0f} s") from None
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            trouble = (done.stderr.strip() or "no output").splitlines()[-1]
            raise NotMeasuredError(f"exit {done.returncode}: {trouble}"[:200])
        result: dict[str, Any] = json.loads(lines[-1])
        return result

    def alone(self, target: str, **arguments: Any) -> dict[str, Any]:
        """The same, in a folder that the function gets as `folder`."""
        with self.place() as place:
            return self.child(target, folder=str(place), **arguments)

    def peer(self, section: Section, label: str, target: str, **arguments: Any) -> dict[str, Any] | None:
        """A peer's measurement; when it cannot be run, a note that says why."""
        try:
            return self.alone(target, **arguments)
        except NotMeasuredError as error:
            section.notes.append(f"{label} could not be run: {error}")
            return None


def wait_until_idle(patience: float) -> None:
    """Return when the processor was nearly idle for a moment, or when the patience is used up."""
    give_up = time.monotonic() + patience
    while time.monotonic() < give_up:
        before = _cpu_ticks()
        time.sleep(0.4)
        busy, total = (now - then for now, then in zip(_cpu_ticks(), before, strict=True))
        if busy <= 0.1 * total:
            return


def _cpu_ticks() -> tuple[int, int]:
    """Busy and all ticks of all cores since boot."""
    ticks = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
    return sum(ticks) - ticks[3], sum(ticks)


def say(text: str) -> None:
    """Progress, on stderr: stdout is for the tables."""
    print(f"  {text}", file=sys.stderr, flush=True)


def median(values: list[float]) -> float:
    return statistics.median(values)


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def ratios(values: list[float], bases: list[float]) -> list[float]:
    """Turn by turn: what slows the machine down for a while slows both sides."""
    return [value / base for value, base in zip(values, bases, strict=True)]


def number(value: float | None) -> str:
    """Three digits that mean something."""
    if value is None:
        return "—"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
