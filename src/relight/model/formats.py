"""Formats: how two versions of Relight share a store while one replaces the other.

What is stored has a format number. Names without a number are format 1, the first. If a later version adds something
that an older one must not ignore (a kind of event or message, a status, a hold), its name begins with the number of its
format: `2:throttled`. A checkpoint has its format in a field (`TreeState.format`). The rules for adding something:

- A field that an older version may ignore goes at the end of an event, with a default. The format stays.
- Anything else is a new name with the next number, and FORMAT is raised. Existing names never change their meaning.
- There will never be a fourth terminal status: an older version would wait for ever for the end of such a run.
- A migration only adds. What an older version uses is removed only by a version that no longer shares a store with it.
  The first line of a migration names the oldest schema version whose processes can go on: `-- compatible since 0004`.

The rule for a process that meets something it does not understand: leave it to a version that does. The run is held
(Hold.UPGRADE), and nothing of it is changed or dropped. An orchestrator that understands all of it takes it up.
"""

from __future__ import annotations

import re

FORMAT = 2  # the newest format that this version understands

_NUMBERED = re.compile(r"(\d{1,6}):")
_COMPATIBLE = re.compile(r"\A-- compatible since (\d{4})\n")


def not_understood(what: str, name: str) -> str:
    """Why a run is left to a newer version: `what` it has (an event, a message, a status) of this name."""
    found = _NUMBERED.match(name)
    number = f" of format {found[1]}" if found else ""
    return f"{what} {name!r}{number} was written by a newer version of Relight; {_WAY_OUT}"


def state_not_understood(what: str, number: int) -> str:
    """Why a run is left to a newer version: `what` it has is of this format."""
    return f"{what} is of format {number} and was written by a newer version of Relight; {_WAY_OUT}"


_WAY_OUT = f"this one understands formats up to {FORMAT}: an orchestrator of that version takes the run up by itself"


def compatible_since(script: str, number: int) -> int:
    """The oldest version of the schema whose processes can go on after this migration, which leads to version `number`.
    If the migration does not say so, no older process can."""
    found = _COMPATIBLE.match(script)
    return number if found is None else int(found[1])
