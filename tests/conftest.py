"""For all tests: the number of crash points that were explored stands at the end of the output."""

from __future__ import annotations

from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    totals: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            totals.update({name: value for name, value in report.user_properties if name.startswith("crash ")})
    if totals:
        terminalreporter.section("crash exploration")
        terminalreporter.line(", ".join(f"{value} {name.removeprefix('crash ')}" for name, value in totals.items()))
