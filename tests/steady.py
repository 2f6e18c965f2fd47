"""`make test-steady`: the whole of `make test`, again and again, first on the machine as it is and then beside busy processes.

    python -m tests.steady [--runs 10] [--busy-runs 5] [--busy 2] [-- PYTEST-ARGUMENTS]

Prints a line for each run, and what failed. Exits with 1 if anything failed. The output of pytest is in build/steady.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

FOLDER = Path(__file__).parents[1] / "build" / "steady"
LINE = "{:>4}  {:<6} {:>8} {:>7} {:>7} {:>8}  {}"

# Takes a core, and ends with the process that started it.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass\n"


class Result(NamedTuple):
    seconds: float
    passed: int
    skipped: int
    failed: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="on the machine as it is")
    parser.add_argument("--busy-runs", type=int, default=5, help="beside processes that take a core each")
    parser.add_argument("--busy", type=int, default=2, help="how many of these")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for what pytest writes")
    parser.add_argument("arguments", nargs="*", help="for pytest")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(LINE.format("run", "beside", "seconds", "passed", "failed", "skipped", "failed names"), flush=True)
    failed = 0
    for number in range(1, options.runs + options.busy_runs + 1):
        busy = options.busy if number > options.runs else 0
        with busy_processes(busy):
            result = run_tests(options.folder / f"run-{number:02}", options.arguments)
        failed += bool(result.failed)
        counts = f"{result.seconds:.0f}", result.passed, len(result.failed), result.skipped
        print(LINE.format(number, f"{busy} busy" if busy else "idle", *counts, " ".join(result.failed)), flush=True)
    print(f"{options.runs + options.busy_runs - failed} of {options.runs + options.busy_runs} runs were green")
    sys.exit(bool(failed))


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_tests(files: Path, arguments: list[str]) -> Result:
    """One run of pytest, in a process of its own. Its output and its report are in files with this name."""
    report = files.with_suffix(".xml")
    report.unlink(missing_ok=True)
    begun = time.monotonic()
    with files.with_suffix(".log").open("wb") as log:
        command = [sys.executable, "-m", "pytest", f"--junit-xml={report}", *arguments]
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    seconds = time.monotonic() - begun
    if not report.exists():
        return Result(seconds, 0, 0, [f"pytest ended with {code}: {log.name}"])
    return read_report(report, seconds, code)


def read_report(report: Path, seconds: float, code: int) -> Result:
    """How many tests passed, and what failed, by pytest's XML report. An exit code that no failure explains counts as a
    failure."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = {
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    if code and not failed:
        failed.add(f"pytest ended with {code}")
    names = {case.get("classname", "") + "::" + case.get("name", "") for case in cases}
    return Result(seconds, len(names - failed) - skipped, skipped, sorted(failed))


if __name__ == "__main__":
    main()
