"""Text that every store keeps as it is.

PostgreSQL cannot store a NUL in a text, SQLite's JSON functions end a text there, and half of a surrogate pair is not
UTF-8. So an id or name with one of these is refused, on any backend. Texts for people (reasons, log lines) may quote
anything, such as an exception's message. In these the character is replaced: it must not make a whole commit fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from relight.errors import ConfigError, PayloadError
from relight.model.run import Message, Run, RunFilter

SAME_LINES = 1000  # how many of a log's last lines are compared with a new line, to recognise a repeated one
MAX_NAME = 255  # characters; a longer name does not fit into an index


def storable(text: str) -> bool:
    """Whether every store can keep this text, and find it again."""
    if text.isascii():
        return "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def check_text(text: object, what: str) -> str:
    """Check an id or a name. Raises PayloadError."""
    if not isinstance(text, str):
        raise PayloadError(f"{what} {text!r}: give a str, not {type(text).__name__}")
    if not storable(text):
        raise PayloadError(f"{what} {text!r}: no store keeps NUL or half of a surrogate pair; leave that character out")
    return text


def check_name(text: object, what: str) -> str:
    """Check a name that a user chose. Raises PayloadError."""
    name = check_text(text, what)
    if not 1 <= len(name) <= MAX_NAME:
        raise PayloadError(f"{what} {name[:40]!r}: give 1 to {MAX_NAME} characters, not {len(name)}")
    return name


def prose(text: str) -> str:
    """Text for people, with the characters replaced that some store cannot keep."""
    if storable(text):
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "backslashreplace").decode()


# ---- values and errors of users' code, in a text for people


def shown(value: object) -> str:
    """`repr(value)`, whatever its `__repr__` does. A user's exception often has a broken one, and nobody finds that out
    before it is raised: the text must not become an error in place of the one that it is about."""
    return _written(value, repr)


def error_message(error: BaseException) -> str:
    """`str(error)`, whatever its `__str__` does."""
    return _written(error, str)


def reason_of(error: BaseException) -> str:
    """What an error says; with its class, if it is a SystemExit or the like: these seldom say anything."""
    return error_message(error) if isinstance(error, Exception) else shown(error)


def _written(value: object, write: Callable[[object], str]) -> str:
    try:
        return write(value)
    except BaseException as broken:  # noqa: BLE001 - also SystemExit: only a text is at stake
        return f"<{type(broken).__name__} in {type(value).__name__}.__{write.__name__}__>"


# ---- what a store is given


def check_run(run: Run) -> None:
    """Check a row before it is inserted. Raises PayloadError."""
    check_text(run.id, "run id")
    check_text(run.flow, "flow name")
    check_text(run.owner or "", "owner")


def check_message(message: Message) -> None:
    """Check a message before it is put into an inbox. Raises PayloadError."""
    check_text(message.run_id, "run id")
    check_text(message.name, "name of a signal")
    check_text(message.dedup or "", "id of a signal")


def check_rows(created: Run | None, runs: Iterable[Run], messages: Iterable[Message]) -> None:
    """Check the rows and messages of a commit before anything of it is written. Raises PayloadError."""
    if created is not None:
        check_run(created)
    for run in runs:
        check_run(run)
    for message in messages:
        check_message(message)


def check_filter(where: RunFilter) -> RunFilter:
    """Check the filter of a listing. Raises ConfigError, or PayloadError for a text that no run can have."""
    since = where.since
    if since is not None and (isinstance(since, bool) or not isinstance(since, int | float) or math.isnan(since)):
        raise ConfigError(
            f"list(since={since!r}): give a datetime, or seconds since 1970, such as datetime.now(UTC) - timedelta(days=1)"
        )
    for name, text in (("flow", where.flow), ("parent", where.parent_id), ("cursor", where.cursor)):
        if text is not None:
            check_text(text, f"list({name}=)")
    return where
