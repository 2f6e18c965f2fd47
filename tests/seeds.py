"""The fixed seeds of the long tests, from `seeds.txt`, so that the result of CI never depends on luck."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_name("seeds.txt")


def known_seeds(what: str) -> list[int]:
    """The seeds of one kind, in the order of the file."""
    found: list[int] = []
    for line in FILE.read_text().splitlines():
        kind, _, rest = line.partition(" ")
        if kind == what:
            first, _, last = rest.split()[0].partition("-")
            found += range(int(first), int(last or first) + 1)
    assert found, f"{FILE.name} has no seeds for {what!r}"
    return found
