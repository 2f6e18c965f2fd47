"""Lists and facts for people: on a terminal they fit its width without cutting anything, elsewhere nothing is wrapped or padded.

Ids and keys are there to be copied: a column is as wide as its longest cell, and no cell is cut or broken. What does not fit
goes to a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

GAP = 2
INDENT = 2
LEAST_VALUE_COLUMNS = 30
# Into a file or a pipe, one long cell does not move the columns of all other rows.
WIDEST_PIPED = 60

Row = Sequence[str]


def print_list(console: Console, headings: Row, rows: Sequence[Row]) -> None:
    """A list. Cells are rich markup. The last column is text of any length, such as a reason: it stands beside the others
    if all fit the terminal, otherwise below them. If the others do not fit either, the first stands above them."""
    table = [[Text.from_markup(cell) for cell in row] for row in rows]
    heads = [Text(heading, "bold") for heading in headings]
    widths = [max(cell.cell_len for cell in column) for column in zip(heads, *table, strict=True)]
    if not console.is_terminal:
        widths = [min(width, WIDEST_PIPED) for width in widths]
        _print_rows(console, [heads, *table], widths)
        return
    if _total(widths) <= console.width:
        _print_rows(console, [heads, *table], widths)
        return
    in_one_line = _total(widths[:-1]) <= console.width
    for number, (*cells, last) in enumerate([heads, *table]):
        if in_one_line:
            _print_rows(console, [cells], widths[:-1])
        else:
            _print_rows(console, [cells[:1]], widths[:1])
            _print_rows(console, [cells[1:]], widths[1:-1], INDENT)
        if number > 0 and last:
            _print_wrapped(console, last, 2 * INDENT)


def print_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Names and values, both as rich markup. A value that does not fit goes on below its beginning."""
    pairs = [(Text.from_markup(name, style="dim"), Text.from_markup(value)) for name, value in facts]
    indent = max((name.cell_len for name, _ in pairs), default=0) + GAP
    for name, value in pairs:
        first = Text().append_text(name).append(" " * (indent - name.cell_len))
        if not console.is_terminal or console.width - indent < LEAST_VALUE_COLUMNS:
            _print(console, first + value)
            continue
        beginning, *rest = value.wrap(console, console.width - indent) or [Text()]
        _print(console, first + beginning)
        for line in rest:
            _print(console, Text(" " * indent) + line)


def print_text(console: Console, text: str) -> None:
    """A sentence, as rich markup."""
    if console.is_terminal:
        _print_wrapped(console, Text.from_markup(text), 0)
    else:
        _print(console, Text.from_markup(text))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _print_rows(console: Console, rows: Iterable[Sequence[Text]], widths: Sequence[int], indent: int = 0) -> None:
    for row in rows:
        line = Text(" " * indent)
        for cell, width in zip(row, widths, strict=True):
            line += cell + Text(" " * (max(width - cell.cell_len, 0) + GAP))
        _print(console, line)


def _print_wrapped(console: Console, text: Text, indent: int) -> None:
    for line in text.wrap(console, max(console.width - indent, LEAST_VALUE_COLUMNS)):
        _print(console, Text(" " * indent) + line)


def _print(console: Console, line: Text) -> None:
    line.rstrip()
    console.print(line, soft_wrap=True)
