"""`python -m benchmarks`: run the measurements one after the other, print tables, write JSON and, on request, the docs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report
from benchmarks.measure import ROOT, Bench, NotMeasuredError, Section, say

BENCHMARKS = {
    "throughput": "throughput",
    "latency": "latency",
    "starting": "starting",
    "restore": "restore",
    "parked": "parked",
    "sync": "sync_code",
    "postgres": "postgres",
    "recovery": "recovery",
    "idle": "idle",
    "commit": "commits",
}
BUSY_LOAD = 0.5


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure Relight beside its peers, and beside SQLite and PostgreSQL alone. "
        "Figures compare within one run only.",
    )
    found.add_argument(
        "--only",
        action="append",
        choices=sorted(BENCHMARKS),
        metavar="NAME",
        help=f"one of {', '.join(BENCHMARKS)}; may be given again",
    )
    found.add_argument("--quick", action="store_true", help="smaller and fewer rounds: about a minute, rougher figures")
    found.add_argument("--json", type=Path, metavar="PATH", help="also write everything measured as JSON")
    found.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="where the databases go (default: the system's temporary folder); not a RAM disk",
    )
    found.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait up to so long, before each measurement, until others leave the processor alone",
    )
    found.add_argument(
        "--docs", action="store_true", help="rewrite the figures in docs/benchmarks.md and the plot beside it"
    )
    found.add_argument("--check", action="store_true", help="exit with 1 when a target is not met")
    return found


def main() -> int:
    options = parser().parse_args()
    began, load = time.perf_counter(), os.getloadavg()[0]
    if load > BUSY_LOAD:
        say(f"the machine is busy (load {load:.1f}): times will be longer, and ratios less steady")
    about = report.machine(load)
    sections = []
    with tempfile.TemporaryDirectory(prefix="relight-bench-", dir=options.folder) as folder:
        bench = Bench(Path(folder), options.quick, options.patience)
        bench.python(
            "-c", "import benchmarks.flows; print('{}')"
        )  # compiles: the first child must not be the one that does
        for name in options.only or BENCHMARKS:
            section = _measure(name, bench)
            sections.append(section)
            print(report.as_text(section), flush=True)
    print(report.targets_as_text(sections))
    print(f"\n{time.perf_counter() - began:.0f} s; ratios hold within this run, absolute times for this machine only")
    if options.json:
        options.json.write_text(report.as_json(sections, about, options.quick), encoding="utf-8")
    if options.docs:
        _write_docs(sections, about)
    missed = any(target.met is not True for section in sections for target in section.targets)
    return int(options.check and missed)


def _measure(name: str, bench: Bench) -> Section:
    """One benchmark. What cannot be measured is said; it does not take the others with it."""
    try:
        found: Section = importlib.import_module(f"benchmarks.{BENCHMARKS[name]}").run(bench)
    except NotMeasuredError as error:
        return Section(name, f"{name} could not be measured", ["why"], [[str(error)]])
    return found


def _write_docs(sections: list[Section], about: dict[str, object]) -> None:
    from benchmarks import plot

    plot.draw(sections, ROOT / "docs" / "benchmarks" / "figures.svg")
    report.into_docs(ROOT / "docs" / "benchmarks.md", sections, about)


if __name__ == "__main__":
    sys.exit(main())
