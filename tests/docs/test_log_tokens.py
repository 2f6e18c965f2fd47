"""Tokens are an interface: the list in the code, the list in the docs and what the code logs are the same."""

from __future__ import annotations

import re
from pathlib import Path

from relight.telemetry import MEANING, Token

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "log-tokens.md"
SOURCES = [file for file in (ROOT / "src").rglob("*.py") if file.name != "telemetry.py"]

_ROW = re.compile(r"^\| `([A-Z_]+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)


def test_the_page_lists_the_tokens_with_their_meanings():
    documented = {token: meaning for token, meaning, _ in _ROW.findall(PAGE.read_text())}
    assert documented == {token.value: MEANING[token] for token in Token}


def test_the_page_lists_them_in_the_order_of_the_code():
    assert [token for token, _, _ in _ROW.findall(PAGE.read_text())] == [token.value for token in Token]


def test_every_token_is_logged_somewhere():
    code = "\n".join(file.read_text() for file in SOURCES)
    unused = [token.name for token in Token if not re.search(rf"\bToken\.{token.name}\b", code)]
    assert not unused


def test_every_log_line_has_a_token():
    strays = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in SOURCES
        # Crash tests keep a log of their own, and the command line says what a person sees.
        if not {"testing", "cli"} & set(file.parts)
        for line in file.read_text().splitlines()
        if re.search(r"\b_?log(ger)?\.(debug|info|warning|error|critical|exception|log)\(", line)
    ]
    assert not strays, "log with relight.telemetry.log and a token"


def test_tokens_are_written_as_they_are_named():
    assert all(token.value == token.name for token in Token)
