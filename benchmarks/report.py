"""Results as text, as Markdown between the markers of docs/benchmarks.md, and as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from benchmarks.measure import Section, Target

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
PACKAGES = ("apsw", "asyncpg", "aetcd", "msgspec", "dbos", "duroxide", "absurd-sdk")
MARK = {True: "met", False: "NOT MET", None: "not measured"}


def machine(load: float) -> dict[str, Any]:
    """What the figures were taken on. `load` is what others were doing when it began."""
    processor = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": processor,
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def as_text(section: Section) -> str:
    rows = [section.columns, *section.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(section.columns))]
    lines = [f"\n{section.title}", ""]
    lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"  note: {note}" for note in section.notes]
    return "\n".join(lines)


def targets_as_text(sections: list[Section]) -> str:
    targets = [target for section in sections for target in section.targets]
    if not targets:
        return ""
    widths = [max(len(getattr(target, name)) for target in targets) for name in ("name", "wanted", "got")]
    lines = ["\nTargets", ""]
    for target in targets:
        cells = (target.name, target.wanted, target.got)
        lines.append(
            "  "
            + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            + f"  {_mark(target)}"
        )
    return "\n".join(lines)


def as_json(sections: list[Section], about: dict[str, Any], quick: bool) -> str:
    content = {"machine": about, "quick": quick, "sections": [dataclasses.asdict(section) for section in sections]}
    return json.dumps(content, indent=1, ensure_ascii=False)


def into_docs(page: Path, sections: list[Section], about: dict[str, Any]) -> None:
    """Replace what stands between the markers; the prose around them is written by hand."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{page} has no {BEGIN} … {END}"
    page.write_text(f"{before}{BEGIN}\n\n{_markdown(sections, about)}\n{END}{after}", encoding="utf-8")


def _markdown(sections: list[Section], about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    place = f"{about['cores']} cores ({about['processor']}), {about['system']}, Python {about['python']}"
    parts = [
        f"Taken on {place}, {versions}; load before: {about['load_before']}.\n",
        "### Targets\n",
        _table(
            ["target", "wanted", "got", ""],
            [[target.name, target.wanted, target.got, _mark(target)] for s in sections for target in s.targets],
        ),
    ]
    for section in sections:
        parts += [f"### {section.title}\n", _table(section.columns, section.rows)]
        parts += [f"{note}\n" for note in section.notes]
    return "\n".join(parts)


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n"


def _mark(target: Target) -> str:
    return MARK[target.met]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
