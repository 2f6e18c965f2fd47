"""Every Python block of the README and of docs/ runs, and prints what it says it prints.

The blocks of one page are one program, from top to bottom, run in a process of its own: everything that is not a block is
blanked, so that a traceback names the line of the page. A line that ends in `# → text` must have printed that text. A block
marked ```python no-run is not run; its first line is a comment that gives the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
MAX_COLUMNS = 120
MAX_NOT_RUN = 5  # in all pages together: a block that is never run becomes wrong in time

_FENCE = re.compile(r"^```(.*)$")
_PRINTS = re.compile(r"# → (.+)$", re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, int, list[str]]]:
    """The fenced blocks of a page: the text after the fence, the line at which the block begins, its lines."""
    found: list[tuple[str, int, list[str]]] = []
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence and not inside:
            found.append((fence[1].strip(), number + 1, []))
            inside = True
        elif fence:
            inside = False
        elif inside:
            found[-1][2].append(line)
    assert not inside, f"{page} ends inside a block"
    return found


def program(page: Path) -> str:
    """The page's blocks at their own line numbers. "" if it has none to run."""
    lines: list[str] = []
    for kind, first, code in blocks(page):
        if kind == "python":
            lines += [""] * (first - 1 - len(lines)) + code
    return "\n".join(lines) + "\n" if lines else ""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if program(page)], ids=name)
def test_the_page_runs_and_prints_what_it_says(page, tmp_path):
    source = program(page)
    file = tmp_path / f"{page.stem.replace('-', '_')}.py"
    file.write_text(source)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-W", "error", file],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{name(page)}:\n{done.stdout}{done.stderr}"
    printed = done.stdout.splitlines()
    missing = [text for text in _PRINTS.findall(source) if text.strip() not in printed]
    assert not missing, f"{name(page)} does not print {missing}, it prints:\n{done.stdout}"


def test_few_blocks_are_not_run_and_each_says_why():
    kinds = {(name(page), first): (kind, code) for page in PAGES for kind, first, code in blocks(page)}
    unusual = {place: kind for place, (kind, _) in kinds.items() if kind.startswith("py") and kind != "python"}
    assert set(unusual.values()) <= {"python no-run"}, unusual
    for place in unusual:
        assert kinds[place][1][0].startswith("# not run: "), f"{place}: the first line must give the reason"
    assert len(unusual) <= MAX_NOT_RUN, unusual


def test_blocks_say_what_they_are():
    nameless = [(name(page), first) for page in PAGES for kind, first, _ in blocks(page) if not kind]
    assert not nameless, "name the language of these blocks: python, console, yaml, text, …"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{name(page)} links to {target}, {name(file)} has {sorted(anchors(file))}"


def test_lines_of_text_are_short():
    """In an editor of 120 columns no line is cut off. Tables, blocks and links cannot be wrapped."""
    long = [
        f"{name(page)}:{number}"
        for page in TEXTS
        for number, line in enumerate(without_blocks(page), start=1)
        if len(without_links(line)) > MAX_COLUMNS and not line.startswith("|")
    ]
    assert not long, f"these lines have more than {MAX_COLUMNS} columns"


def without_blocks(page: Path) -> list[str]:
    """The lines of a page, those inside its blocks empty."""
    lines = page.read_text().splitlines()
    for _, first, code in blocks(page):
        lines[first - 1 : first - 1 + len(code)] = [""] * len(code)
    return lines


def without_links(line: str) -> str:
    """A line without the targets of its links and without bare URLs."""
    return re.sub(r"\]\([^)\s]+\)|https?://\S+", "]", line)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reachable_from_the_readme():
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md" or not page.is_file():
            continue
        seen.add(page)
        targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
        todo += [(page.parent / target).resolve() for target in targets if "://" not in target]
    assert not set(PAGES) - seen, "these pages are linked from nowhere"
