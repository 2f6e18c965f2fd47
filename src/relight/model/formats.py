"""Formats: how two versions of Relight share a store while one replaces the other.

What is stored has a format number. What was there first has none in its name, and is format 1. Whatever a later version adds and
an older one cannot do without (a kind of event or message, a status, a hold) carries the number of its format in its name:
`2:throttled`. A checkpoint says its format by itself (`TreeState.format`). The rules for those who add something:

- A field that an older version may ignore goes at the end of an event, with a default. The format stays.
- Anything else is a new name with the next number, and FORMAT is raised. Names that are there never change their meaning.
- The terminal statuses are three for ever: an older version would wait without end for a fourth.
- A migration adds. What an older version uses is removed only by a version that no longer shares a store with it. The first line
  of a migration says with which version of the schema a process can go on after it: `-- compatible since 0004`.

And the rule for those who meet something that they do not understand: leave it to a version that does. The run is held
(Hold.UPGRADE), nothing of it is changed or dropped, and any orchestrator that understands all of it takes it up by itself.
"""

from __future__ import annotations

import re

FORMAT = 2  # up to which this version understands what is stored

_NUMBERED = re.compile(r"(\d{1,6}):")
_COMPATIBLE = re.compile(r"\A-- compatible since (\d{4})\n")


def not_understood(what: str, name: str) -> str:
    """Why a run is left to a newer version: `what` it has (an event, a message, a status) of this name."""
    found = _NUMBERED.match(name)
    number = f" of format {found[1]}" if found else ""
    return f"{what} {name!r}{number} was written by a newer version of Relight; {_WAY_OUT}"


def state_not_understood(what: str, number: int) -> str:
    """The same for something that has a number and no name."""
    return f"{what} is of format {number} and was written by a newer version of Relight; {_WAY_OUT}"


_WAY_OUT = f"this one understands formats up to {FORMAT}: an orchestrator of that version takes the run up by itself"


def compatible_since(script: str, number: int) -> int:
    """With which version of the schema a process can go on when this migration, which leads to version `number`, has been
    applied. A migration that does not say so stops all older ones."""
    found = _COMPATIBLE.match(script)
    return number if found is None else int(found[1])
